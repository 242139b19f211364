"""Whenever a save is killed, a complete checkpoint with the right content is found afterwards."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipe.checkpoint.background import open_saver
from recipe.checkpoint.commit import Save
from recipe.checkpoint.files import Files
from recipe.checkpoint.find import find_checkpoint
from recipe.shared.ranks import TorchRanks
from tests.dying_saver import recover, save
from tests.ranks import RankError, run_ranks

PROGRAM = [sys.executable, "-m", "tests.dying_saver"]
PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "what", ["a new step", "the same step", pytest.param("in the background", marks=pytest.mark.slow)]
)
def test_r_ckpt_01_killed_before_any_file_system_call_of_a_save(what: str, tmp_path: Path) -> None:
    answer = subprocess.run([*PROGRAM, "everywhere", tmp_path, what], cwd=PROJECT, capture_output=True, check=True)
    left = json.loads(answer.stdout)
    versions = [state["version"] for state in left]
    # The old checkpoint up to one moment, the new one from there on, and both were seen.
    assert versions == sorted(versions, reverse=True)
    assert set(versions) == {"old", "new"}
    assert len(versions) > 20
    assert all(state["latest"] for state in left), "`latest` led nowhere after a death"
    hidden = [name for state in left for name in state["names"] if name.startswith(".")]
    assert hidden == [], "a dead run's leftovers stayed"
    assert left[-1]["names"] == ["latest", "step-2" if what == "the same step" else "step-3"]


@pytest.mark.slow
def test_r_ckpt_01_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    moments = random.Random(4)
    committed = num_interrupted = 0
    for _ in range(20):
        with subprocess.Popen([*PROGRAM, "loop", tmp_path], cwd=PROJECT, stdout=subprocess.PIPE, text=True) as saver:
            assert saver.stdout is not None
            first = saver.stdout.readline()
            time.sleep(moments.uniform(0.0, 0.05))
            saver.send_signal(signal.SIGKILL)
            printed = [first, *saver.stdout]
        committed = max([committed, *map(int, printed)])
        num_interrupted += any(tmp_path.glob(".staging-step-*"))
        found = recover(tmp_path)
        assert committed <= found.step <= committed + 1
        committed = found.step
    assert num_interrupted > 0, "every kill fell between two saves"


def _die_while_saving(rank: int, world_size: int, root: str, moment: str) -> None:
    import torch.distributed as dist

    def write(folder: Path, files: Files) -> None:
        if moment == "half a file":
            (folder / f"{rank}.bin").write_bytes(b"x" * 50)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / f"{rank}.bin").write_bytes(b"x" * 100)
        if moment == "one rank after its files":
            dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # rank 0 goes on and waits for it in the agreement

    def write_later(folder: Path, files: Files) -> None:
        files.write(folder / "later", lambda path: write(folder, files))

    with open_saver(TorchRanks(), background=moment == "in the background") as saver:
        what = Save(root=Path(root), step=3, keep=1, details={})
        saver.save(what, write=write_later if moment == "in the background" else write)


def _find(rank: int, world_size: int, root: str) -> tuple[int, list[str]]:
    said: list[str] = []
    found = find_checkpoint(Path(root), resume="auto", ranks=TorchRanks(), say=said.append)
    assert found is not None
    return found.step, said


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["half a file", "one rank after its files", "in the background"])
def test_r_ckpt_01_ranks_killed_in_a_save_leave_the_previous_checkpoint(moment: str, tmp_path: Path) -> None:
    save(tmp_path, 2, version="old", keep=None)
    with pytest.raises(RankError, match=r"rank . of 2"):
        run_ranks(_die_while_saving, 2, str(tmp_path), moment)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".staging-step-3", "latest", "step-2"]
    answers = run_ranks(_find, 2, str(tmp_path))
    assert answers == [(2, [f"resuming from {tmp_path / 'step-2'}"]), (2, [])]
    assert recover(tmp_path).details == {"version": "old"}
