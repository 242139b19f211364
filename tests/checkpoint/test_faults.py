"""Ranks that die while they save together, and folders that cannot be written: nothing complete is ever lost."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.checkpoint.commit import Save, write_checkpoint
from recipe.checkpoint.files import Files
from recipe.checkpoint.find import find_checkpoint
from recipe.checkpoint.run_folder import claim_run_folder
from recipe.shared.errors import CheckpointError
from recipe.shared.ranks import OneRank
from tests.dying_ranks import content
from tests.engine_runs import slow

PROJECT = Path(__file__).parents[2]
WORLD_SIZE = 3
NUM_MOMENTS = 20


def run_until_killed(root: Path, *, whom: str, moments: random.Random) -> tuple[int, int]:
    """Let the ranks save for a while and kill one or all of them; where they began and what they said was committed."""
    command = [sys.executable, "-m", "tests.dying_ranks", str(root), str(WORLD_SIZE)]
    with subprocess.Popen(
        command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as saver:
        assert saver.stdout is not None
        said = [saver.stdout.readline() for _ in range(2)]  # where it goes on from, and a first step
        time.sleep(moments.uniform(0.0, 0.04))
        if whom == "all ranks":
            os.killpg(saver.pid, signal.SIGKILL)
        else:
            os.kill(moments.choice(ranks_of(saver)), signal.SIGKILL)
        # The others must notice by themselves: this reads until the last of them has gone.
        said += saver.stdout
        saver.wait(20)
    return int(said[0].removeprefix("from ")), int(said[-1])


def ranks_of(saver: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{saver.pid}/task/{saver.pid}/children").read_text().split()]


@pytest.mark.parametrize("whom", ["one rank", slow("all ranks")])
def test_r_ckpt_01_ranks_killed_at_twenty_random_moments_of_their_saves(whom: str, tmp_path: Path) -> None:
    moments = random.Random(5)
    committed = num_interrupted = 0
    for _ in range(NUM_MOMENTS):
        first, last = run_until_killed(tmp_path, whom=whom, moments=moments)
        # What was said to be committed was found again; a step may have been committed and not said.
        assert committed <= first <= committed + 1
        committed = last
        num_interrupted += any(tmp_path.glob(".staging-step-*"))
    assert num_interrupted > 0, "every kill fell between two saves"
    found = find_checkpoint(tmp_path, resume="auto", ranks=OneRank(), say=lambda line: None)
    assert found is not None
    assert committed <= found.step <= committed + 1
    for rank in range(WORLD_SIZE):
        assert (found.folder / f"{rank}.bin").read_bytes() == content(rank, found.step)


@pytest.fixture
def read_only_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a checkpoint, mounted read-only, since root may write wherever a mode forbids it."""
    folder = tmp_path / "mount"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"this process may not mount file systems: {mount.stderr.strip()}")
    try:
        save(folder / "checkpoints", 1)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def save(root: Path, step: int) -> None:
    def write(folder: Path, files: Files) -> None:
        (folder / "a").write_text(str(step))

    write_checkpoint(Save(root=root, step=step, keep=None, details={}), ranks=OneRank(), write=write)


def test_a_read_only_folder_is_named_and_what_it_holds_stays_readable(read_only_folder: Path) -> None:
    with pytest.raises(CheckpointError, match="Read-only file system"):
        claim_run_folder(read_only_folder, ranks=OneRank(), resume="auto", overwrite=False)
    root = read_only_folder / "checkpoints"
    with pytest.raises(CheckpointError, match=r"step-2 could not be saved in .*Read-only file system"):
        save(root, 2)
    found = find_checkpoint(root, resume="auto", ranks=OneRank(), say=lambda line: None)
    assert found is not None
    assert (found.step, (found.folder / "a").read_text()) == (1, "1")
