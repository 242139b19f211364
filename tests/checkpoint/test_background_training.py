"""Training that saves in the background writes the same checkpoints as training that waits for them."""

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from recipe.checkpoint.find import verify_checkpoint
from recipe.checkpoint.manifest import file_sizes
from recipe.shared.ranks import OneRank
from tests.engine_runs import slow
from tests.ranks import run_ranks
from tests.saves import entries
from tests.states import same_content
from tests.training import Flags, read_metrics, train_on_ranks, untimed, write_ds_config, write_inputs

TIMED_FILES = ("manifest.json",)  # the rank files hold the seconds of an unfinished log line, it their checksums
WAIT_S = 30.0


def train_ahead_of_the_files(rank: int, world_size: int, flags: Flags, *, steps: int) -> Any:
    """Files of a save wait until training is `steps` steps further, or over; how many saves had been waited for."""
    from recipe.checkpoint.files import WriteLater
    from recipe.engine.engine import Engine

    update, finish, hold = Engine.update, WriteLater.finish, WriteLater.hold
    taken = threading.Condition()
    num_steps = 0

    def updating(self: Engine, **kwargs: Any) -> float:
        nonlocal num_steps
        norm = update(self, **kwargs)
        with taken:
            num_steps += 1
            taken.notify_all()
        return norm

    def holding(self: WriteLater) -> None:
        self.goal = min(num_steps + steps, flags["max_steps"])  # type: ignore[attr-defined]
        hold(self)

    def finishing(self: WriteLater) -> None:
        with taken:
            assert taken.wait_for(lambda: num_steps >= self.goal, WAIT_S)  # type: ignore[attr-defined]
        finish(self)

    with (
        patch.object(Engine, "update", updating),
        patch.object(WriteLater, "hold", holding),
        patch.object(WriteLater, "finish", finishing),
    ):
        return train_on_ranks(rank, world_size, flags)


def check_same_checkpoints(folder: Path, *, world_size: int, **changes: Any) -> Flags:
    flags = write_inputs(folder) | write_ds_config(folder, **changes) | {"save_steps": 2, "save_total_limit": 2}
    run_ranks(train_on_ranks, world_size, flags | {"output_dir": folder / "foreground" / "run"})
    run_ranks(train_ahead_of_the_files, world_size, flags | {"async_save": True}, steps=2)
    for step in (4, 6):
        want, got = (path / "run" / "checkpoints" / f"step-{step}" for path in (folder / "foreground", folder))
        verify_checkpoint(got, ranks=OneRank())
        names = file_sizes(want).keys() - set(TIMED_FILES)
        assert names == file_sizes(got).keys() - set(TIMED_FILES)
        assert len(names) > 8
        for name in sorted(names):
            assert same_content(want / name, got / name), name
    names = entries(folder / "run" / "checkpoints")
    assert names == ["latest", "step-4", "step-6"], "the last save was waited for, and the first one rotated away"
    return flags


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
    flags = check_same_checkpoints(tmp_path, world_size=world_size, **changes)
    if world_size == 1:
        return
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    _, said = run_ranks(train_on_ranks, world_size, flags | {"resume_from_checkpoint": "auto"})[0]
    assert any("step-4" in line and line.startswith("resuming from") for line in said)
    want, got = read_metrics(tmp_path / "foreground" / "run"), read_metrics(tmp_path / "run")
    assert [untimed(line) for line in got.values()] == [untimed(line) for line in want.values()]


def train_until_told_in_a_save(rank: int, world_size: int, flags: Flags) -> tuple[Any, list[str]]:
    """Rank 0 gets the signal in step 3, while the files of step 2 wait until training waits for them."""
    from recipe.checkpoint.background import BackgroundSaver
    from recipe.checkpoint.files import WriteLater
    from recipe.engine.engine import Engine

    update, finish, wait = Engine.update, WriteLater.finish, BackgroundSaver.wait
    waited_for, num_steps = threading.Event(), 0

    def updating(self: Engine, **kwargs: Any) -> float:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3 and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, **kwargs)

    def finishing(self: WriteLater) -> None:
        assert waited_for.wait(WAIT_S)
        finish(self)

    def waiting(self: BackgroundSaver) -> None:
        if num_steps > 2:
            waited_for.set()
        wait(self)

    with (
        patch.object(Engine, "update", updating),
        patch.object(WriteLater, "finish", finishing),
        patch.object(BackgroundSaver, "wait", waiting),
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
