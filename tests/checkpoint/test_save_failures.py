"""A save in which one rank cannot write ends the same way on every rank, and costs nothing that was saved before."""

import errno
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.ranks import RankError, run_ranks
from tests.training import Flags, read_metrics, train_on_ranks, write_ds_config, write_inputs


def train_with_a_full_disk(rank: int, world_size: int, flags: Flags, *, where: str) -> tuple[str, str]:
    """From the second save on, rank 1 cannot write files whose path holds `where`; the error every rank ends with."""
    from recipe.shared.errors import CheckpointWriteError

    write, num_writes = torch.save, 0

    def fail_later(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal num_writes
        if where in str(file):
            num_writes += 1
            if num_writes > 1 and rank == 1:
                raise OSError(errno.ENOSPC, "No space left on device", str(file))
        write(value, file, *args, **kwargs)

    with patch.object(torch, "save", fail_later):
        try:
            train_on_ranks(rank, world_size, flags)
        except CheckpointWriteError as error:
            return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["/ranks/rank-", "optim_states"])
def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_alike(tmp_path: Path, where: str) -> None:
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": 1}) | {"save_steps": 2}
    answers = run_ranks(train_with_a_full_disk, 2, flags, where=where)
    assert answers[0] == answers[1]
    kind, text = answers[0]
    assert kind == "CheckpointWriteError"
    assert "step-4 could not be saved" in text
    assert "No space left on device" in text
    assert "The other checkpoints are untouched: step-2" in text
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["latest", "step-2"]


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
def test_r_ckpt_01_a_training_run_killed_in_a_save_goes_on_from_the_checkpoint_before(
    whom: str, tmp_path: Path
) -> None:
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": 1}) | {"save_steps": 2}
    with pytest.raises(RankError, match=r"rank \d of 2:\n(the process died with exit code -9|Traceback)"):
        run_ranks(train_and_die_in_the_second_save, 2, flags, whom=whom)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [".staging-step-4", "latest", "step-2"]
    _, said = run_ranks(train_on_ranks, 2, flags | {"resume_from_checkpoint": "auto"})[0]
    assert f"resuming from {checkpoints / 'step-2'}" in said
    run_ranks(train_on_ranks, 2, flags | {"output_dir": tmp_path / "straight"})
    want, got = (read_metrics(folder) for folder in (tmp_path / "straight", tmp_path / "run"))
    assert [line["loss"] for line in got.values()] == [line["loss"] for line in want.values()]
