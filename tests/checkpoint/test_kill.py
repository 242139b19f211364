"""Whenever a save is killed or cannot write, a complete checkpoint with the right content is found afterwards."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.checkpoint.commit import Save, open_saver
from recipe.checkpoint.files import Files
from recipe.checkpoint.find import find_checkpoint
from recipe.checkpoint.run_folder import claim_run_folder
from recipe.shared.errors import CheckpointWriteError, RanksFailedError
from recipe.shared.ranks import OneRank, TorchRanks
from tests import dying_saver, saves
from tests.dying_saver import content, recover
from tests.engine_runs import slow
from tests.ranks import RankError, run_ranks

PROGRAM = [sys.executable, "-m", "tests.dying_saver"]
PROJECT = Path(__file__).parents[2]
NUM_MOMENTS = 20


@pytest.mark.parametrize("what", ["a new step", "the same step", slow("in the background")])
@pytest.mark.requirement("R-CKPT-01")
def test_killed_before_any_file_system_call_of_a_save(what: str, tmp_path: Path) -> None:
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


def run_until_killed(root: Path, *, world_size: int, whom: str, moments: random.Random) -> tuple[int, int]:
    """Let ranks save for a while and kill one or all of them; where they began and what they said was committed."""
    with subprocess.Popen(
        [*PROGRAM, "ranks", str(root), str(world_size)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as saver:
        assert saver.stdout is not None
        said = [saver.stdout.readline() for _ in range(2)]  # where it goes on from, and a first step
        time.sleep(moments.uniform(0.0, 0.04))
        if whom == "all ranks":
            os.killpg(saver.pid, signal.SIGKILL)
        else:
            ranks = Path(f"/proc/{saver.pid}/task/{saver.pid}/children").read_text().split()
            os.kill(int(moments.choice(ranks)), signal.SIGKILL)
        # The others must notice by themselves: this reads until the last of them has gone.
        said += saver.stdout
        saver.wait(20)
    return int(said[0].removeprefix("from ")), int(said[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "whom"), [(3, "one rank"), (3, "all ranks"), (1, "all ranks")])
@pytest.mark.requirement("R-CKPT-01")
def test_killed_at_twenty_random_moments_of_their_saves(world_size: int, whom: str, tmp_path: Path) -> None:
    moments = random.Random(5)
    committed = num_interrupted = 0
    for _ in range(NUM_MOMENTS):
        first, last = run_until_killed(tmp_path, world_size=world_size, whom=whom, moments=moments)
        # What was said to be committed was found again; a step may have been committed and not said.
        assert committed <= first <= committed + 1
        committed = last
        num_interrupted += any(tmp_path.glob(".staging-step-*"))
    assert num_interrupted > 0, "every kill fell between two saves"
    found = find_checkpoint(tmp_path, resume="auto", ranks=OneRank(), say=lambda line: None)
    assert found is not None
    assert committed <= found.step <= committed + 1
    for rank in range(world_size):
        assert (found.folder / f"{rank}.bin").read_bytes() == content(rank, found.step)


def _die_while_saving(rank: int, world_size: int, root: Path, moment: str) -> None:
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
        what = Save(root=root, step=3, keep=1, details={})
        saver.save(what, write=write_later if moment == "in the background" else write)


def _find(rank: int, world_size: int, root: Path) -> tuple[int, list[str]]:
    said: list[str] = []
    found = find_checkpoint(root, resume="auto", ranks=TorchRanks(), say=said.append)
    assert found is not None
    return found.step, said


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["half a file", "one rank after its files", "in the background"])
@pytest.mark.requirement("R-CKPT-01")
def test_ranks_killed_in_a_save_leave_the_previous_checkpoint(moment: str, tmp_path: Path) -> None:
    dying_saver.save(tmp_path, 2, version="old", keep=None)
    with pytest.raises(RankError, match=r"rank . of 2"):
        run_ranks(_die_while_saving, 2, tmp_path, moment)
    assert saves.entries(tmp_path) == [".staging-step-3", "latest", "step-2"]
    answers = run_ranks(_find, 2, tmp_path)
    assert answers == [(2, [f"resuming from {tmp_path / 'step-2'}"]), (2, [])]
    assert recover(tmp_path).details == {"version": "old"}


@pytest.fixture
def read_only_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a checkpoint, mounted read-only, since root may write wherever a mode forbids it."""
    folder = tmp_path / "mount"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"this process may not mount file systems: {mount.stderr.strip()}")
    try:
        saves.save(folder / "checkpoints", 1)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_read_only_folder_is_named_and_what_it_holds_stays_readable(read_only_folder: Path) -> None:
    with pytest.raises(RanksFailedError, match="Read-only file system"):
        claim_run_folder(read_only_folder, ranks=OneRank(), resume="auto", overwrite=False)
    root = read_only_folder / "checkpoints"
    with pytest.raises(CheckpointWriteError, match=r"step-2 could not be saved in .*Read-only file system"):
        saves.save(root, 2)
    found = find_checkpoint(root, resume="auto", ranks=OneRank(), say=lambda line: None)
    assert found is not None
    assert json.loads((found.folder / "state.json").read_text()) == {"step": 1} == {"step": found.step}
