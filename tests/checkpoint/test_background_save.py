"""A save in the background keeps what a save in step with training keeps, and is as safe."""

import errno
import io
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from recipe.checkpoint.commit import Save, Saver, open_saver
from recipe.checkpoint.files import Files, WriteLater
from recipe.checkpoint.find import verify_checkpoint
from recipe.checkpoint.snapshot import Snapshot, restore_snapshot, take_snapshot
from recipe.shared.errors import CheckpointWriteError
from recipe.shared.ranks import OneRank, Ranks, RanksMissingError
from tests.ranks import run_ranks
from tests.saves import entries
from tests.thread_ranks import ThreadRanks, on_threads

WAIT_S = 10.0


def save_of(root: Path, step: int, **options: Any) -> Save:
    return Save(root=root, step=step, **{"keep": None, "details": {"step": step}} | options)


def one_rank_saver() -> Saver:
    return Saver(OneRank(), background=OneRank())


def on_saving_threads(world_size: int, function: Callable[[Ranks, Saver], Any]) -> list[Any]:
    """Like on_threads, each rank with a saver whose thread has ranks of its own."""
    barrier, table = threading.Barrier(world_size), [None] * world_size

    def with_saver(ranks: Ranks) -> Any:
        background = ThreadRanks(ranks.rank, barrier=barrier, table=table)
        return function(ranks, Saver(ranks, background=background))

    return on_threads(world_size, with_saver)


def test_training_goes_on_while_a_snapshot_is_written_and_the_next_save_waits_until_it_is_complete(
    tmp_path: Path,
) -> None:
    weight, may_write = torch.ones(3), threading.Event()
    seen: list[list[str]] = []

    def write_held(state: torch.Tensor, path: Path) -> None:
        assert may_write.wait(WAIT_S)
        torch.save(state, path)

    def write(folder: Path, files: Files) -> None:
        seen.append(entries(tmp_path))
        files.write_state(folder / "weight.pt", weight, write_held)

    saver = one_rank_saver()
    saver.save(save_of(tmp_path, 1), write=write)
    weight.fill_(2)
    assert entries(tmp_path) == [".staging-step-1"]
    threading.Timer(0.05, may_write.set).start()
    saver.save(save_of(tmp_path, 2), write=write)
    assert seen == [[".staging-step-1"], [".staging-step-2", "latest", "step-1"]]
    verify_checkpoint(tmp_path / "step-1", ranks=OneRank())
    assert torch.load(tmp_path / "step-1" / "weight.pt").tolist() == [1, 1, 1]
    saver.save(save_of(tmp_path, 3, keep=1), write=write)
    saver.wait()
    assert entries(tmp_path) == ["latest", "step-3"]


def _fail_on_rank_1(rank: int) -> Callable[[Path, Files], None]:
    def write_file(path: Path) -> None:
        path.write_bytes(b"x" * 100)
        if rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path.name)

    return lambda folder, files: files.write(folder / f"rank{rank}", write_file)


def _notice(saver: Saver, how: str) -> None:
    if how == "between two saves":
        assert saver._thread is not None
        saver._thread.join(WAIT_S)
        saver.watch()
        saver.check()
    elif how == "at the next save":
        saver.save(replace(saver._save, step=30), write=_fail_on_rank_1(0))
    else:
        saver.wait()


@pytest.mark.parametrize("how", ["at the end", "at the next save", "between two saves"])
@pytest.mark.requirement("R-CKPT-10")
def test_an_error_is_raised_once_on_all_ranks_alike_as_a_save_in_the_foreground_raises_it(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipe.checkpoint.commit.free_bytes", lambda path: 12_345)
    what = save_of(tmp_path, 20, expected_bytes=1_000)

    def in_background(ranks: Ranks, saver: Saver) -> str:
        saver.check()
        saver.save(save_of(tmp_path, 10), write=lambda folder, files: (folder / str(ranks.rank)).touch())
        saver.wait()
        saver.watch()
        saver.check()
        saver.save(what, write=_fail_on_rank_1(ranks.rank))
        with pytest.raises(CheckpointWriteError) as caught:
            _notice(saver, how)
        saver.wait()
        return str(caught.value)

    errors = on_saving_threads(3, in_background)
    assert entries(tmp_path) == ["latest", "step-10"]
    assert os.readlink(tmp_path / "latest") == "step-10"
    want = on_threads(3, lambda ranks: Saver(ranks).save(what, write=_fail_on_rank_1(ranks.rank)))
    assert errors == [str(error) for error in want]
    assert "rank 1: OSError: [Errno 28] No space left on device: 'rank1'. 300 bytes of about 1,000" in errors[0]
    assert "The other checkpoints are untouched: step-10" in errors[0]


def test_a_group_that_breaks_down_in_the_background_is_a_failed_save(tmp_path: Path) -> None:
    class Broken(OneRank):
        def gather(self, value: object) -> list[Any]:
            raise RuntimeError("connection closed by peer")

        def first(self, value: object) -> Any:
            raise RuntimeError("connection closed by peer")

    saver = Saver(OneRank(), background=Broken())
    saver.save(save_of(tmp_path, 3), write=lambda folder, files: files.write(folder / "a", Path.touch))
    why = rf"step-3 could not be saved in {tmp_path}: rank 0: RuntimeError: connection closed by peer\. .* removed\."
    with pytest.raises(CheckpointWriteError, match=why):
        saver.wait()
    assert entries(tmp_path) == []


def test_copies_in_pinned_memory_are_waited_for_once_and_kept_for_the_thread_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_waits, dropped = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: num_waits.append(1))
    monkeypatch.setattr(Snapshot, "is_pinned", True)
    files = WriteLater()
    for name in ("a", "b"):
        files.write_state(tmp_path / name, torch.ones(3), torch.save)
        (host,) = files._pinned[-1].storages
        weakref.finalize(host, dropped.append, name)
        del host
    files.hold()
    thread = threading.Thread(target=files.finish)
    thread.start()
    thread.join()
    assert entries(tmp_path) == ["a", "b"]
    assert (len(num_waits), dropped) == (1, [])
    del thread, files
    assert sorted(dropped) == ["a", "b"]


@pytest.mark.requirement("R-CKPT-12")
def test_a_rank_that_waits_alone_is_told_who_is_missing(tmp_path: Path) -> None:
    told: list[str] = []

    class Alone(OneRank):
        def meet(self, purpose: str, *, timeout_s: float) -> None:
            told.append(f"{purpose}, {timeout_s:g} s")
            raise RanksMissingError(purpose)

    with pytest.raises(RanksMissingError):
        Saver(Alone(), background=OneRank()).wait()
    assert told == ["waiting for the save in the background, 300 s"]


def test_what_cannot_be_copied_fails_the_save_and_leaves_no_rank_behind(tmp_path: Path) -> None:
    def save(ranks: Ranks, saver: Saver) -> None:
        def write(folder: Path, files: Files) -> None:
            files.write_state(folder / str(ranks.rank), open if ranks.rank else threading.Lock(), torch.save)
            ranks.barrier()  # a collective of the writer's own

        saver.save(save_of(tmp_path, 1), write=write)
        saver.wait()

    for error in on_saving_threads(2, save):
        assert isinstance(error, CheckpointWriteError)
        assert "rank 0: TypeError: cannot pickle '_thread.lock' object" in str(error)
    assert entries(tmp_path) == []


def _open_savers(rank: int, world_size: int, root: Path) -> list[Any]:
    import torch.distributed as dist

    from recipe.shared.ranks import TorchRanks

    def write(folder: Path, files: Files) -> None:
        files.write(folder / f"rank{rank}", lambda path: path.write_bytes(b"x"))

    told: list[Any] = []
    for background in (False, True):
        with open_saver(TorchRanks(), background=background) as saver:
            saver.save(save_of(root / str(background), 1), write=write)
        told.append(entries(root / str(background)))  # complete as soon as the context is left

    def fail_in_training() -> None:
        with open_saver(TorchRanks(), background=True) as saver:
            saver.save(save_of(root / "both", 1), write=write)
            saver.save(save_of(root / "both", 2), write=_fail_on_rank_1(rank))
            raise ValueError("in training")

    with (
        pytest.raises(ValueError, match="in training") as caught,
        patch.object(dist, "new_group", side_effect=dist.new_group) as new_group,
    ):
        fail_in_training()
    new_group.assert_called_once_with(backend="gloo", timeout=timedelta(hours=12))  # gloo's own would be 30 minutes
    return [*told, entries(root / "both"), caught.value.__notes__]


def test_leaving_waits_for_the_save_and_an_error_of_training_is_not_hidden_by_one_of_saving(tmp_path: Path) -> None:
    for (*complete, left), notes in ((answer[:3], answer[3]) for answer in run_ranks(_open_savers, 2, tmp_path)):
        assert complete == [["latest", "step-1"]] * 2
        assert left == ["latest", "step-1"]
        assert len(notes) == 1
        assert notes[0].startswith(f"a save in the background had failed, too: step-2 could not be saved in {tmp_path}")


def test_a_snapshot_equals_what_torch_save_writes_at_that_moment_and_copies_a_shared_storage_once() -> None:
    flat = torch.arange(12, dtype=torch.float32)
    module = OrderedDict(a=flat[:6].view(2, 3), b=flat[6:].view(3, 2).t())
    module._metadata = {"version": 1}  # type: ignore[attr-defined]
    state: dict[str, Any] = {
        "module": module,
        "tied": nn.Parameter(flat[:6].view(2, 3)),
        "frozen": nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False),
        "empty": torch.empty(0),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "groups": [{"lr": 0.1, "params": [0, 1], "betas": (0.9, 0.99)}],
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    file = io.BytesIO()
    torch.save(state, file)
    snapshot = take_snapshot(state)
    assert sum(storage.numel() for storage in snapshot.storages) == 12 * 4 + 2 * 2 + 0 + 8 + 5
    state["module"]["a"].fill_(-1)
    state["frozen"].fill_(-1)
    state["groups"][0]["params"].append(2)
    state["groups"][0]["lr"] = 0.0
    file.seek(0)
    got, want = restore_snapshot(snapshot), torch.load(file, weights_only=False)
    assert repr(got) == repr(want) != repr(state)
    for name in ("tied", "frozen", "empty", "scalar", "bytes"):
        assert type(got[name]) is type(want[name])
        assert (got[name].dtype, got[name].requires_grad) == (want[name].dtype, want[name].requires_grad)
    assert got["module"]["b"].stride() == (1, 2)
    assert got["module"]._metadata == {"version": 1}
    got["module"]["a"][0, 0] = 7
    assert got["tied"][0, 0] == 7
