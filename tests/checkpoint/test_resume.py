"""Whole runs and their saves: resumed bitwise, in the background, cut short by faults, and the last one of all."""

import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch

from recipe.checkpoint.expert_counts import NAME as COUNTS_NAME
from recipe.checkpoint.expert_counts import ExpertCounter, ExpertCounts
from recipe.checkpoint.find import verify_checkpoint
from recipe.checkpoint.manifest import file_sizes, read_manifest
from recipe.shared.ranks import OneRank
from tests.engine_runs import Case, make_micro_batches, slow, start_engine
from tests.ranks import RankError, run_ranks
from tests.referee import full_state, tiny_config
from tests.saves import entries
from tests.states import same_content
from tests.training import Flags, check_resume, read_metrics, train_on_ranks, untimed, write_ds_config, write_inputs


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "parallel": {"tp": 2}}


FOUR = {"gradient_accumulation_steps": 2, "router_z_loss_coef": 0.001}
TIED = {"config_overrides": "tie_word_embeddings=true"}


@pytest.mark.parametrize(
    ("world_size", "ds_config", "changes"),
    [
        (1, {}, {"lr_scheduler_type": "cosine", "warmup_steps": 2}),
        slow(2, {"parallel": {"tp": 2, "ep": 2, "resident_experts": 1}}, {"router_aux_loss_coef": 0.0}),
        slow(4, zero(1), {**FOUR, "bf16": True}),
        slow(4, zero(2), {**FOUR, **TIED}),
        slow(4, zero(3), {**FOUR, **TIED, "bf16": True}),
    ],
)
@pytest.mark.requirement("R-CKPT-03", "R-CKPT-13")
def test_ranks_resume_bitwise(
    tmp_path: Path, world_size: int, ds_config: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Every number logged, the learning rate among them; the checkpoint of step 3 lies in the middle of a line."""
    check_resume(tmp_path, world_size=world_size, ds_config=ds_config, logging_steps=2, **changes)


@pytest.mark.slow
@pytest.mark.requirement("R-DATA-02")
def test_a_second_resume_goes_on_from_the_first_and_saving_changes_no_number(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"max_steps": 5, "hf_save": "never"}
    run_ranks(train_on_ranks, 2, flags | {"output_dir": tmp_path / "straight", "save_strategy": "no"})
    flags |= {"output_dir": tmp_path / "stopped", "save_steps": 2}
    run_ranks(train_on_ranks, 2, flags)
    for lost in ([4, 5], [5]):
        for step in lost:
            shutil.rmtree(tmp_path / "stopped" / "checkpoints" / f"step-{step}")
        run_ranks(train_on_ranks, 2, flags | {"resume_from_checkpoint": "auto"})
    want, got = read_metrics(tmp_path / "straight"), read_metrics(tmp_path / "stopped")
    assert {step: untimed(line) for step, line in got.items()} == {step: untimed(line) for step, line in want.items()}


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand(1).item()]


def save_and_load(rank: int, world_size: int, folder: Path, stage: int) -> tuple[Any, ...]:
    """Save, build a new engine with other settings, load; draws after both, and what the optimizer then works with."""
    from recipe.checkpoint.native import load_native, save_native

    config, case = tiny_config(), Case(dp=2, stage=stage)
    engine = start_engine(config, full_state(config), case)
    batches = make_micro_batches(config, case, step=0, dp_rank=engine.mesh.dp_rank)
    engine.accumulate(batches, counts=engine.count(batches))
    engine.update(learning_rate=1e-3)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    save_native(engine, folder, rank_state={"mark": rank})
    before = draw()
    other = start_engine(config, full_state(config), case, max_grad_norm=0.01)
    for group in other.ds.optimizer.param_groups:
        group.update(betas=(0.5, 0.6), weight_decay=0.7)
    draw()
    assert load_native(other, folder) == {"mark": rank}
    after = draw()
    groups = [(g["betas"], g["weight_decay"]) for g in other.ds.optimizer.param_groups]
    other.accumulate(batches, counts=other.count(batches))
    return before, after, groups, other.update(learning_rate=1.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.requirement("R-CKPT-09")
def test_random_states_are_restored_per_rank_and_the_settings_of_the_resumed_run_hold(
    tmp_path: Path, stage: int
) -> None:
    by_rank = run_ranks(save_and_load, 2, tmp_path, stage)
    for before, after, groups, norm in by_rank:
        assert before == after
        assert groups == [((0.5, 0.6), 0.7)] * 2
        assert norm > 0.01, "the norm before clipping"
    assert by_rank[0][0] != by_rank[1][0]


WAIT_S = 30.0


@contextmanager
def before_every_update(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with the number of each step of this process, counted from 1, before its weights change."""
    from recipe.engine.engine import Engine

    update, numbers = Engine.update, itertools.count(1)

    def updating(self: Engine, **kwargs: Any) -> float:
        act(next(numbers))
        return update(self, **kwargs)

    with patch.object(Engine, "update", updating):
        yield


def train_ahead_of_the_files(rank: int, world_size: int, flags: Flags) -> Any:
    """Files of a save wait until training has taken a step more and begun another, or begun its last one."""
    from recipe.checkpoint.files import WriteLater

    finish, hold = WriteLater.finish, WriteLater.hold
    begun = threading.Condition()
    num_begun = 0

    def begin(number: int) -> None:
        nonlocal num_begun
        with begun:
            num_begun = number
            begun.notify_all()

    def holding(self: WriteLater) -> None:
        self.goal = min(num_begun + 2, flags["max_steps"])  # type: ignore[attr-defined]
        hold(self)

    def finishing(self: WriteLater) -> None:
        with begun:
            assert begun.wait_for(lambda: num_begun >= self.goal, WAIT_S)  # type: ignore[attr-defined]
        finish(self)

    with (
        before_every_update(begin),
        patch.object(WriteLater, "hold", holding),
        patch.object(WriteLater, "finish", finishing),
    ):
        return train_on_ranks(rank, world_size, flags)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, {}),
        slow(2, {"parallel": {"tp": 2}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
        slow(2, {"parallel": {"tp": 1}, "zero_optimization": {"stage": 3}}),
        slow(2, {"parallel": {"tp": 1}, "zero_optimization": {"stage": 0}}),
    ],
    ids=["one rank", "bf16", "ZeRO-3", "ZeRO-0"],
)
def test_steps_taken_before_the_files_are_written_do_not_reach_them(
    world_size: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, **changes) | {"max_steps": 4, "save_steps": 2}
    run_ranks(train_on_ranks, world_size, flags | {"output_dir": tmp_path / "foreground" / "run"})
    run_ranks(train_ahead_of_the_files, world_size, flags | {"async_save": True})
    assert entries(tmp_path / "run" / "checkpoints") == ["latest", "step-2", "step-4"], "the last save was waited for"
    for step in (2, 4):
        want, got = (path / "run" / "checkpoints" / f"step-{step}" for path in (tmp_path / "foreground", tmp_path))
        verify_checkpoint(got, ranks=OneRank())
        # Rank files hold the seconds of an unfinished log line, and the manifest their checksums.
        names = file_sizes(want).keys() - {"manifest.json"}
        assert names == file_sizes(got).keys() - {"manifest.json"}
        assert len(names) > (8 if step == 4 else 4)
        for name in sorted(names):
            assert same_content(want / name, got / name), name


def train_until_told_in_a_save(rank: int, world_size: int, flags: Flags) -> tuple[Any, list[str]]:
    """Rank 0 gets the signal in step 3, while the files of step 2 wait until training waits for them."""
    from recipe.checkpoint.commit import Saver
    from recipe.checkpoint.files import WriteLater

    finish, wait = WriteLater.finish, Saver.wait
    told, waited_for = threading.Event(), threading.Event()

    def begin(number: int) -> None:
        if number == 3:
            told.set()
            if rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    def finishing(self: WriteLater) -> None:
        assert waited_for.wait(WAIT_S)
        finish(self)

    def waiting(self: Saver) -> None:
        if told.is_set():
            waited_for.set()
        wait(self)

    with (
        before_every_update(begin),
        patch.object(WriteLater, "finish", finishing),
        patch.object(Saver, "wait", waiting),
    ):
        return train_on_ranks(rank, world_size, flags)


@pytest.mark.parametrize("world_size", [1, slow(2)])
@pytest.mark.requirement("R-CKPT-11")
def test_a_stop_completes_the_save_in_flight_and_saves_its_own_step(world_size: int, tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": 1}) | {"hf_save": "never"}
    flags |= {"save_steps": 2, "max_steps": 9, "async_save": True}
    results, said = run_ranks(train_until_told_in_a_save, world_size, flags)[0]
    assert (results["steps"], results["stopped"]) == (4, True)
    assert "told to stop: saving step 4, then leaving" in said
    root = tmp_path / "run" / "checkpoints"
    assert entries(root) == ["latest", "step-2", "step-4"]
    assert os.readlink(root / "latest") == "step-4"
    for step in (2, 4):
        verify_checkpoint(root / f"step-{step}", ranks=OneRank())


class Failed(NamedTuple):
    """The error that a rank's training ended with, the threads that wrote files, and what was said."""

    error: str
    writers: list[str]
    said: list[str]


def train_with_a_full_disk(
    rank: int, world_size: int, flags: Flags, *, where: str = "optim_states", again: bool = True
) -> Failed:
    """In the second save, or `again` and again, the last rank cannot write a file whose path holds `where`.

    Step 7 waits for a save of step 6 in the background.
    """
    from recipe.shared.errors import CheckpointWriteError
    from recipe.train.log import ProgressBar

    write, num_writes = torch.save, 0
    writers: set[str] = set()
    said: list[str] = []

    def begin(number: int) -> None:
        for thread in threading.enumerate() if number == 7 else []:
            if thread.name == "saving step-6":
                thread.join(WAIT_S)

    def fail_later(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal num_writes
        writers.add(threading.current_thread().name)
        if where in str(file):
            num_writes += 1
            if (num_writes > 1 if again else num_writes == 2) and rank == world_size - 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), Path(str(file)).name)
        write(value, file, *args, **kwargs)

    with (
        patch.object(torch, "save", fail_later),
        before_every_update(begin),
        patch.object(ProgressBar, "say", lambda bar, text: said.append(text)),
        pytest.raises(CheckpointWriteError) as caught,
    ):
        train_on_ranks(rank, world_size, flags)
    return Failed(str(caught.value), sorted(writers), said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "background"), [("/ranks/rank-", False), ("optim_states", False), ("optim_states", True)]
)
@pytest.mark.requirement("R-CKPT-10")
def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_alike(
    tmp_path: Path, where: str, background: bool
) -> None:
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": 1}) | {"save_steps": 3, "max_steps": 12}
    answers = run_ranks(train_with_a_full_disk, 2, flags | {"async_save": background}, where=where)
    assert answers[0][:2] == answers[1][:2]
    assert answers[0].writers == (["saving step-3", "saving step-6"] if background else ["MainThread"])
    root = tmp_path / "run" / "checkpoints"
    assert f"step-6 could not be saved in {root}: rank 1: OSError: [Errno 28] No space" in answers[0].error
    assert "The other checkpoints are untouched: step-3" in answers[0].error
    assert entries(root) == ["latest", "step-3"]
    # In the background the ranks ask in every step and hear at its end.
    assert max(read_metrics(tmp_path / "run")) in ((7, 8) if background else (6,))


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_steps_after_a_save_that_failed_in_the_background_are_saved_at_the_end(again: bool, tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"save_steps": 3, "max_steps": 7, "async_save": True, "hf_save": "never"}
    (failed,) = run_ranks(train_with_a_full_disk, 1, flags, again=again)
    assert failed.writers == ["saving step-3", "saving step-6", "saving step-7"]
    assert failed.error.startswith("step-6 could not be saved in "), "the first error"
    assert "a save in the background has failed; trying step 7 before leaving with its error" in failed.said
    assert entries(tmp_path / "run" / "checkpoints") == ["latest", "step-3", *([] if again else ["step-7"])]


def train_and_die_in_the_second_save(rank: int, world_size: int, flags: Flags, *, whom: str) -> None:
    """SIGKILL while DeepSpeed writes this rank's optimizer state: half a file is on the disk."""
    write, num_writes = torch.save, 0

    def die_later(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal num_writes
        num_writes += "optim_states" in str(file)
        write(value, file, *args, **kwargs)
        if num_writes == 2 and (whom == "all ranks" or rank == 1):
            os.truncate(str(file), os.path.getsize(str(file)) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(torch, "save", die_later):
        train_on_ranks(rank, world_size, flags)


@pytest.mark.slow
@pytest.mark.requirement("R-CKPT-01")
def test_a_training_run_killed_in_a_save_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": 1}) | {"save_steps": 2, "max_steps": 4}
    run_ranks(train_on_ranks, 2, flags | {"output_dir": tmp_path / "straight"})
    want = read_metrics(tmp_path / "straight")
    for whom in ("one rank", "all ranks"):
        killed = flags | {"output_dir": tmp_path / whom}
        with pytest.raises(RankError, match=r"rank \d of 2:\n(the process died with exit code -9|Traceback)"):
            run_ranks(train_and_die_in_the_second_save, 2, killed, whom=whom)
        checkpoints = tmp_path / whom / "checkpoints"
        assert entries(checkpoints) == [".staging-step-4", "latest", "step-2"]
        _, said = run_ranks(train_on_ranks, 2, killed | {"resume_from_checkpoint": "auto"})[0]
        assert f"resuming from {checkpoints / 'step-2'}" in said
        got = read_metrics(tmp_path / whom)
        assert [line["loss"] for line in got.values()] == [line["loss"] for line in want.values()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Flags:
    """The flags of a run that saved the steps 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    flags = write_inputs(folder, num_hidden_layers=1) | {"max_steps": 4, "save_steps": 2, "hf_save": "never"}
    run_ranks(train_on_ranks, 1, flags)
    return flags


@pytest.fixture
def flags(finished: Flags, tmp_path: Path) -> Flags:
    """The same with a copy of the run that is a test's own, from step 2 on without saves in between."""
    shutil.copytree(finished["output_dir"], tmp_path / "run", symlinks=True)
    return finished | {"output_dir": tmp_path / "run", "save_steps": 0, "resume_from_checkpoint": "auto"}


def test_another_set_up_is_refused_with_everything_that_differs(flags: Flags) -> None:
    changed = {
        "train_vocab_size": 304,
        "block_size": 8,
        "seed": 7,
        "config_overrides": "num_experts_per_tok=1,rms_norm_eps=1e-5",
    }
    with pytest.raises(RankError, match="saved by another set-up") as caught:
        run_ranks(train_on_ranks, 1, flags | changed)
    for line in (
        "block_size: 16 then, 8 now",
        "seed: 42 then, 7 now",
        "model.num_experts_per_tok: 2 then, 1 now",
        "model.rms_norm_eps: 1e-06 then, 1e-05 now",
    ):
        assert f"  - {line}" in str(caught.value)
    assert re.search(r"  - data: \['tokens-.*'\] then, \['tokens-.*'\] now", str(caught.value))


def folder_of(flags: Flags, step: int) -> Path:
    return Path(flags["output_dir"]) / "checkpoints" / f"step-{step}"


@pytest.mark.requirement("R-CKPT-01")
def test_a_broken_checkpoint_of_the_last_step_is_replaced_and_one_that_is_complete_named(
    flags: Flags,
) -> None:
    (path,) = folder_of(flags, 4).glob("deepspeed/*optim_states.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    results, _ = run_ranks(train_on_ranks, 1, flags | {"max_steps": 2})[0]
    assert results["checkpoint"] == str(folder_of(flags, 2)), "where it is, not the latest"
    results, said = run_ranks(train_on_ranks, 1, flags)[0]
    assert f"resuming from {folder_of(flags, 2)}" in said
    assert results["steps"] == 4
    verify_checkpoint(folder_of(flags, 4), ranks=OneRank())


def train_and_be_told(rank: int, world_size: int, flags: Flags, *, told: bool) -> tuple[Any, list[str]]:
    """SIGTERM in the first step."""

    def begin(number: int) -> None:
        if told:
            os.kill(os.getpid(), signal.SIGTERM)

    with before_every_update(begin):
        return train_on_ranks(rank, world_size, flags)


@pytest.mark.parametrize("told", [False, True], ids=["at the end", "told to stop"])
def test_another_way_from_an_older_step_replaces_what_an_earlier_one_came_to(told: bool, flags: Flags) -> None:
    before = read_manifest(folder_of(flags, 4))
    other = {"resume_from_checkpoint": folder_of(flags, 2), "learning_rate": 1e-3, "max_steps": 9 if told else 4}
    results, said = run_ranks(train_and_be_told, 1, flags | other, told=told)[0]
    assert (results["steps"], results["stopped"]) == (4, told)
    assert ("told to stop: saving step 4, then leaving" in said) == told
    after = verify_checkpoint(folder_of(flags, 4), ranks=OneRank())
    assert after.details["optimizer"]["learning_rate"] == 1e-3 != before.details["optimizer"]["learning_rate"]


@pytest.mark.parametrize("told", [False, True], ids=["at the end", "told to stop"])
def test_a_run_that_is_not_to_be_saved_says_that_it_has_no_checkpoint(told: bool, flags: Flags) -> None:
    other = {"max_steps": 9, "save_strategy": "no", "resume_from_checkpoint": "auto", "save_steps": 5}
    results, said = run_ranks(train_and_be_told, 1, flags | other, told=told)[0]
    assert (results["steps"], results["checkpoint"], results["hf_folder"]) == (6 if told else 9, None, None)
    assert ("told to stop: not saving step 6, then leaving" in said) == told
    assert not any(folder_of(flags, step).exists() for step in (5, 6, 9))


def test_what_is_complete_is_saved_again_for_hf_alone_and_keeps_its_counts_of_experts(flags: Flags) -> None:
    step = folder_of(flags, 4)
    counts, inode = (step / COUNTS_NAME).read_text(), step.stat().st_ino
    assert (json.loads(counts)["first_step"], json.loads(counts)["last_step"]) == (3, 4)
    run_ranks(train_on_ranks, 1, flags)
    assert step.stat().st_ino == inode, "nothing was lacking"
    results, _ = run_ranks(train_on_ranks, 1, flags | {"hf_save": "last"})[0]
    assert step.stat().st_ino != inode
    assert results["hf_folder"] == str(step.parent / "latest" / "hf")
    assert (step / COUNTS_NAME).read_text() == counts


def test_counts_are_those_since_the_last_save_or_where_nothing_was_counted_those_it_had() -> None:
    saved = ExpertCounts(first_step=3, last_step=4, counts=((5.0, 6.0, 7.0),))
    counter = ExpertCounter(step=4, saved=saved)
    counter.renumber([[2, 0, 1]])
    moved = ExpertCounts(first_step=3, last_step=4, counts=((6.0, 7.0, 5.0),))
    assert counter.save(4, ranks=OneRank(), tp=1) == moved
    for _ in range(2):
        counter.add(torch.tensor([[1, 0, 2]]))
    trained = ExpertCounts(first_step=5, last_step=6, counts=((2.0, 0.0, 4.0),))
    assert [counter.save(6, ranks=OneRank(), tp=1) for _ in range(2)] == [trained] * 2
    without_experts = ExpertCounter(step=0, saved=None)
    assert without_experts.save(0, ranks=OneRank(), tp=1) is None
    without_experts.add(torch.zeros(0, 4))
    assert without_experts.save(1, ranks=OneRank(), tp=1) is None


def train_where_rank_1_sees_no_weights(rank: int, world_size: int, flags: Flags) -> tuple[Any, list[str]]:
    """As on a network file system that is late on some nodes."""
    is_dir = Path.is_dir

    def looking(path: Path) -> bool:
        return is_dir(path) and not (rank == 1 and path.name == "hf" and path.parent.name == "latest")

    with patch.object(Path, "is_dir", looking):
        return train_on_ranks(rank, world_size, flags)


@pytest.mark.slow
def test_all_ranks_have_the_same_results(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path, num_hidden_layers=1) | {"max_steps": 1}
    folders = [results["hf_folder"] for results, _ in run_ranks(train_where_rank_1_sees_no_weights, 2, flags)]
    assert folders == [str(tmp_path / "run" / "checkpoints" / "latest" / "hf")] * 2
