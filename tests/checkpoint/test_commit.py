"""A checkpoint is saved by all ranks or by none, under its final name only when whole, and rotation goes by step."""

import errno
import hashlib
import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from recipe.checkpoint.commit import Save, Saver, Writer
from recipe.checkpoint.files import Files
from recipe.checkpoint.find import verify_checkpoint
from recipe.checkpoint.folders import list_checkpoints
from recipe.checkpoint.manifest import share_of_files
from recipe.shared.errors import CheckpointWriteError
from recipe.shared.ranks import OneRank, Ranks, RanksMissingError, TorchRanks
from tests.ranks import run_ranks
from tests.saves import entries, fail, save, write_file
from tests.thread_ranks import on_threads


def steps(root: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(root)]


def test_a_checkpoint_lists_its_files_with_size_and_checksum(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoints", 7)
    assert folder == tmp_path / "checkpoints" / "step-7"
    assert entries(folder) == ["hf", "manifest.json", "state.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    sha256 = hashlib.sha256(bytes([7]) * 10_000).hexdigest()
    assert manifest["files"]["hf/model.bin"] == {"size_bytes": 10_000, "sha256": sha256}
    assert (manifest["step"], manifest["format_version"], manifest["details"]) == (7, 1, {"step": 7})
    assert sorted(manifest["files"]) == ["hf/model.bin", "state.json"]


def test_latest_is_a_relative_link_to_the_last_one_saved(tmp_path: Path) -> None:
    for step in (3, 5):
        save(tmp_path / "old", step)
    assert os.readlink(tmp_path / "old" / "latest") == "step-5"
    (tmp_path / "old").rename(tmp_path / "moved")
    assert json.loads((tmp_path / "moved" / "latest" / "state.json").read_text()) == {"step": 5}
    assert entries(tmp_path / "moved") == ["latest", "step-3", "step-5"]


@pytest.mark.parametrize("latest", ["empty file", "dangling link"])
@pytest.mark.requirement("R-CKPT-01")
def test_what_a_dead_run_left_and_a_bad_latest_are_put_right_by_the_next_save(latest: str, tmp_path: Path) -> None:
    for name in (".staging-step-4", ".discarded-step-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_bytes(b"x")
    (tmp_path / ".next-latest").symlink_to("step-4")
    if latest == "empty file":
        (tmp_path / "latest").touch()
    else:
        (tmp_path / "latest").symlink_to("step-99")
    save(tmp_path, 5)
    assert entries(tmp_path) == ["latest", "step-5"]
    assert os.readlink(tmp_path / "latest") == "step-5"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "step-2" / "manifest.json").unlink()
    save(tmp_path, 2, write=write_file("only"))
    assert entries(tmp_path) == ["latest", "step-2"]
    assert entries(tmp_path / "step-2") == ["manifest.json", "only"]


def touch_the_oldest(root: Path) -> None:
    os.utime(root / "step-900", (4e9, 4e9))


def break_two(root: Path) -> None:
    (root / "step-2" / "state.json").unlink()
    (root / "step-4" / "manifest.json").write_text("{")
    (root / "step-0").mkdir()  # without a manifest: somebody else's


@pytest.mark.parametrize(
    ("before", "change", "last", "keep", "want"),
    [
        pytest.param((900, 1000, 9900), Path.exists, 10000, 2, [9900, 10000], id="by step number, not by name"),
        pytest.param((900, 1000, 9900), touch_the_oldest, 10000, 2, [9900, 10000], id="whatever the times"),
        pytest.param((100, 2000, 3000), Path.exists, 1000, 1, [1000, 2000, 3000], id="not what was just written"),
        pytest.param((1, 2, 3, 4), break_two, 5, 2, [0, 3, 5], id="a broken one does not take a good one's place"),
    ],
)
@pytest.mark.requirement("R-CKPT-04")
def test_rotation_keeps_the_newest_complete_ones(
    before: tuple[int, ...], change: Callable[[Path], Any], last: int, keep: int, want: list[int], tmp_path: Path
) -> None:
    for step in before:
        save(tmp_path, step)
    change(tmp_path)
    save(tmp_path, last, keep=keep)
    assert steps(tmp_path) == want


@pytest.mark.parametrize("keep", [0, -1])
@pytest.mark.requirement("R-CKPT-04")
def test_keeping_none_is_refused(keep: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"keep={keep} would delete .* keep at least 1, or None to keep all"):
        save(tmp_path, 1, keep=keep)


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.requirement("R-CKPT-10")
def test_a_full_disk_on_one_rank_fails_all_alike_and_leaves_the_previous_checkpoint(
    failing: int, tmp_path: Path
) -> None:
    def save_with_a_failing_rank(ranks: Ranks) -> None:
        def write(folder: Path, files: Files) -> None:
            (folder / f"rank{ranks.rank}.bin").write_bytes(b"x" * 1000)
            if ranks.rank == failing:
                with open("/dev/full", "wb", buffering=0) as file:
                    file.write(b"x")

        save(tmp_path, 20, keep=1, expected_bytes=123_456, ranks=ranks, write=write)

    save(tmp_path, 10)
    errors = on_threads(3, save_with_a_failing_rank)
    assert [type(error) for error in errors] == [CheckpointWriteError] * 3
    assert len({str(error) for error in errors}) == 1
    message = str(errors[0])
    assert f"step-20 could not be saved in {tmp_path}: rank {failing}: OSError: [Errno {errno.ENOSPC}]" in message
    assert "3,000 bytes of about 123,456 needed were written when " in message
    assert "were still free; they have been removed. The other checkpoints are untouched: step-10" in message
    assert entries(tmp_path) == ["latest", "step-10"]
    assert os.readlink(tmp_path / "latest") == "step-10"
    verify_checkpoint(tmp_path / "step-10", ranks=OneRank())


@contextmanager
def small_files_only() -> Iterator[None]:
    """The kernel cuts every file off at 4096 bytes, as a quota does. The limit is for this whole process, its log
    included, so it holds no longer than it takes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.requirement("R-CKPT-10")
def test_a_save_cut_off_by_the_system_removes_its_partial_files(tmp_path: Path) -> None:
    with small_files_only():
        save(tmp_path, 10, write=write_file("small"))
    message = r"File too large.* 4,096 bytes were written .* untouched: step-10"
    with pytest.raises(CheckpointWriteError, match=message), small_files_only():
        save(tmp_path, 20)
    assert entries(tmp_path) == ["latest", "step-10"]


def nothing(folder: Path, files: Files) -> None:
    return None


def link(folder: Path, files: Files) -> None:
    (folder / "link").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (fail, r"RuntimeError: no\. .*\. There is no other checkpoint"),
        (nothing, "no rank wrote a file"),
        (write_file("manifest.json"), "manifest.json was written into the checkpoint, but that name"),
        (link, "link is neither a plain file nor a folder"),
    ],
)
def test_a_save_that_cannot_be_is_refused_and_leaves_nothing(write: Writer, match: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointWriteError, match=match):
        save(tmp_path / "new", 1, write=write)
    assert entries(tmp_path / "new") == []


def test_a_folder_called_latest_is_not_deleted_and_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointWriteError, match=r"latest is a folder, but it must be free for a link"):
        save(tmp_path, 1)
    assert entries(tmp_path) == ["latest"]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError, match=r"could not be saved in .*file/checkpoints: rank 0: NotADirectory"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_partial_files_that_stay_are_admitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EBUSY, "busy", str(path))

    def write(folder: Path, files: Files) -> None:
        monkeypatch.setattr("recipe.checkpoint.folders.shutil.rmtree", refuse)
        fail(folder, files)

    with pytest.raises(CheckpointWriteError, match=r"RuntimeError: no\. .* they could not all be removed .*busy"):
        save(tmp_path, 1, write=write)


def test_a_failure_after_the_rename_says_that_the_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "input/output error", str(target))

    monkeypatch.setattr("recipe.checkpoint.folders.os.replace", refuse)
    with pytest.raises(CheckpointWriteError, match=r"step-1 is complete, but the folder around it was not updated"):
        save(tmp_path, 1)
    verify_checkpoint(tmp_path / "step-1", ranks=OneRank())


def test_a_file_that_the_first_rank_does_not_see_is_named(tmp_path: Path) -> None:
    """As on a node whose file system is its own below the folder of the checkpoint."""

    def save_together(ranks: Ranks) -> None:
        def write(folder: Path, files: Files) -> None:
            elsewhere = tmp_path / "local" if ranks.rank else folder
            files.write(folder / f"rank{ranks.rank}", lambda path: (elsewhere / path.name).write_bytes(b"x"))

        save(tmp_path / "root", 1, ranks=ranks, write=write)

    (tmp_path / "local").mkdir()
    for error in on_threads(2, save_together):
        assert isinstance(error, CheckpointWriteError)
        path = tmp_path / "root" / ".staging-step-1" / "rank1"
        assert f"{path}, written by rank 1, is not there on host " in str(error)
        assert "the output folder must be on a file system that all ranks share" in str(error)
    assert entries(tmp_path / "root") == []


def test_a_folder_that_not_all_ranks_share_is_refused(tmp_path: Path) -> None:
    """Each rank gets a root of its own, as on nodes with local disks."""
    for error in on_threads(2, lambda ranks: save(tmp_path / f"disk{ranks.rank}", 1, ranks=ranks, write=fail)):
        assert isinstance(error, CheckpointWriteError)
        assert "rank 1: FileNotFoundError" in str(error)
        assert "the output folder must be on a file system that all ranks share" in str(error)


def test_ranks_at_different_steps_are_told_so(tmp_path: Path) -> None:
    for error in on_threads(2, lambda ranks: save(tmp_path, ranks.rank + 4, ranks=ranks, write=fail)):
        assert type(error) is ValueError
        assert str(error) == "the ranks disagree on the step they are saving: {0: 4, 1: 5}"
    assert entries(tmp_path) == []


def test_files_are_shared_out_evenly_and_every_one_has_one_reader() -> None:
    sizes = {f"big{i}": 1_000_000 for i in range(4)} | {f"small{i}": 0 for i in range(8)} | {"odd": 300_000}
    shares = [share_of_files(sizes, rank=rank, world_size=4) for rank in range(4)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    assert max(sum(sizes[name] for name in share) for share in shares) == 1_300_000
    assert max(len(share) for share in shares) <= 4


def test_ranks_hash_in_parallel_and_write_one_manifest(tmp_path: Path) -> None:
    met = threading.Barrier(3)

    def save_together(ranks: Ranks) -> Path:
        def write(folder: Path, files: Files) -> None:
            met.wait(5)  # a collective of the writer's own
            (folder / f"rank{ranks.rank}.bin").write_bytes(bytes([ranks.rank]) * 5000)

        return save(tmp_path, 1, ranks=ranks, write=write)

    assert on_threads(3, save_together) == [tmp_path / "step-1"] * 3
    results = on_threads(3, lambda ranks: verify_checkpoint(tmp_path / "step-1", ranks=ranks))
    assert [sorted(manifest.files) for manifest in results] == [["rank0.bin", "rank1.bin", "rank2.bin"]] * 3


def _save_one_sided(rank: int, world_size: int, caller: int, root: Path, released: Path) -> str | None:
    import torch.distributed as dist

    message, start_s = None, time.monotonic()
    if rank == caller:
        what = Save(root=root, step=3, keep=None, details={})
        timeout = patch("recipe.checkpoint.commit.MEET_TIMEOUT_S", 0.3)
        with timeout, pytest.raises(RanksMissingError) as caught:
            Saver(TorchRanks()).save(what, write=fail)
        assert 0.3 <= time.monotonic() - start_s < 2.0
        released.touch()
        message = str(caught.value)
    else:
        while not released.exists():
            threading.Event().wait(0.01)
        TorchRanks().meet("catching up", timeout_s=5.0)  # so that the next test starts with an equal count
    dist.barrier()  # the group still works
    return message


@pytest.mark.parametrize("caller", [0, 1])
@pytest.mark.requirement("R-CKPT-12")
def test_saving_from_one_rank_names_the_missing_one_in_time(caller: int, tmp_path: Path) -> None:
    root, released = tmp_path / "checkpoints", tmp_path / "released"
    messages = run_ranks(_save_one_sided, 2, caller, root, released, timeout_s=10.0)
    assert f"saving step-3: rank {caller} waited 0.3 s, but ranks [{1 - caller}] of 2 did not come" in messages[caller]
    assert not root.exists()
