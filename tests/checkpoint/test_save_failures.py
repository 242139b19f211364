"""A save in which a rank cannot write, or dies, ends alike on every rank and costs nothing that was saved before."""

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from tests.ranks import RankError, run_ranks
from tests.saves import entries
from tests.training import Flags, read_metrics, train_on_ranks, write_ds_config, write_inputs

WAIT_S = 30.0


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
    from recipe.engine.engine import Engine
    from recipe.shared.errors import CheckpointWriteError
    from recipe.train.log import ProgressBar

    write, update, num_writes, num_steps = torch.save, Engine.update, 0, 0
    writers: set[str] = set()
    said: list[str] = []

    def updating(self: Engine, **kwargs: Any) -> float:
        nonlocal num_steps
        num_steps += 1
        for thread in threading.enumerate() if num_steps == 7 else []:
            if thread.name == "saving step-6":
                thread.join(WAIT_S)
        return update(self, **kwargs)

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
        patch.object(Engine, "update", updating),
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
@pytest.mark.parametrize("whom", ["one rank", "all ranks"])
@pytest.mark.requirement("R-CKPT-01")
def test_a_training_run_killed_in_a_save_goes_on_from_the_checkpoint_before(whom: str, tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": 1}) | {"save_steps": 2}
    with pytest.raises(RankError, match=r"rank \d of 2:\n(the process died with exit code -9|Traceback)"):
        run_ranks(train_and_die_in_the_second_save, 2, flags, whom=whom)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert entries(checkpoints) == [".staging-step-4", "latest", "step-2"]
    _, said = run_ranks(train_on_ranks, 2, flags | {"resume_from_checkpoint": "auto"})[0]
    assert f"resuming from {checkpoints / 'step-2'}" in said
    run_ranks(train_on_ranks, 2, flags | {"output_dir": tmp_path / "straight"})
    want, got = (read_metrics(folder) for folder in (tmp_path / "straight", tmp_path / "run"))
    assert [line["loss"] for line in got.values()] == [line["loss"] for line in want.values()]
