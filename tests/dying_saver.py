"""Programs that save checkpoints until they are killed, for the tests that kill them; they never load torch.

`everywhere ROOT WHAT` forks one child for every file-system call that a save makes, kills it with SIGKILL just before
that call, checks that every checkpoint still visible is complete, and prints what each death left. `ranks ROOT
WORLD_SIZE` has as many processes go on together from the newest complete checkpoint, says which that is, then saves
step after step and prints each once it is committed.
"""

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from recipe.checkpoint.commit import Save, Saver
from recipe.checkpoint.files import Files
from recipe.checkpoint.find import Checkpoint, find_checkpoint, verify_checkpoint
from recipe.checkpoint.folders import list_checkpoints, tidy
from recipe.shared.ranks import OneRank, Ranks
from recipe.shared.together import on_first
from tests import saves
from tests.thread_ranks import AsksByGathering

CHANGES = {"open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "shutil.rmtree"}
FILE_BYTES = 40_000


def save(root: Path, step: int, *, version: str, keep: int | None, background: bool = False) -> None:
    """A complete save; in the background with a file written ahead of it, one queued, and one that is renamed."""

    def write(folder: Path, files: Files) -> None:
        (folder / "a").write_text(f"{step} {version} a " * 200)
        files.write(folder / "part", lambda path: path.write_text(f"{step} {version} b " * 200))
        files.then(lambda ranks: (folder / "part").rename(folder / "b"))

    saver = Saver(OneRank(), background=OneRank() if background else None)
    saver.save(Save(root=root, step=step, keep=keep, details={"version": version}), write=write)
    saver.wait()


def restart(root: Path, ranks: Ranks) -> Checkpoint | None:
    """What a restarted run does."""
    on_first(lambda: tidy(root), ranks=ranks)
    return find_checkpoint(root, resume="auto", ranks=ranks, say=lambda line: None)


def recover(root: Path) -> Checkpoint:
    """Restart; the checkpoint's files must be those of the step and version it claims."""
    found = restart(root, OneRank())
    assert found is not None, f"no checkpoint left in {root}"
    for name in ("a", "b"):
        text = (found.folder / name).read_text()
        assert text == f"{found.step} {found.details['version']} {name} " * 200, text[:80]
    return found


def everywhere(root: Path, what: str) -> list[dict[str, Any]]:
    step = {"a new step": 3, "the same step": 2, "in the background": 3}[what]
    left = []
    for moment in itertools.count(1):
        folder = root / str(moment)
        save(folder, 1, version="old", keep=None)
        save(folder, 2, version="old", keep=None)
        died = _dies_before_call(moment, partial(save, folder, step, version="new", keep=1, background="back" in what))
        found = recover(folder)
        for _, visible in list_checkpoints(folder):
            verify_checkpoint(visible, ranks=OneRank())
        names = saves.entries(folder)
        left.append({"version": found.details["version"], "names": names, "latest": (folder / "latest").exists()})
        if not died:
            return left
    raise AssertionError("unreachable")


def _dies_before_call(moment: int, action: Callable[[], None]) -> bool:
    """Run `action` in a child that is killed before its moment-th file-system call; whether it came to that."""
    child = os.fork()
    if child == 0:
        calls = itertools.count(1)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in CHANGES and next(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        action()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


class PipeRanks(AsksByGathering):
    """A rank of forked processes; all they know of each other goes through rank 0. A dead rank is an EOFError."""

    def __init__(self, rank: int, *, pipes: list[Connection], world_size: int) -> None:
        self.rank, self.world_size, self._pipes = rank, world_size, pipes

    def gather(self, value: object) -> list[Any]:
        if self.rank:
            self._pipes[0].send(value)
            values: list[Any] = self._pipes[0].recv()
            return values
        values = [value, *(pipe.recv() for pipe in self._pipes)]
        for pipe in self._pipes:
            pipe.send(values)
        return values

    def first(self, value: object) -> Any:
        return self.gather(value if self.rank == 0 else None)[0]

    def barrier(self) -> None:
        self.gather(None)

    def meet(self, purpose: str, *, timeout_s: float) -> None:
        self.gather(purpose)


def content(rank: int, step: int) -> bytes:
    """What a rank's file of a step holds."""
    return f"rank {rank} step {step} ".encode() * (FILE_BYTES // 16)


def serve(root: Path, ranks: PipeRanks) -> None:
    def write(folder: Path, files: Files) -> None:
        (folder / f"{ranks.rank}.bin").write_bytes(content(ranks.rank, step))

    found = restart(root, ranks)
    first = 0 if found is None else found.step
    if ranks.rank == 0:
        print(f"from {first}", flush=True)
    # A rank alone saves the step it found once more.
    for step in itertools.count(first + 1 if ranks.world_size > 1 else max(first, 1)):
        saves.save(root, step, keep=2, ranks=ranks, write=write)
        if ranks.rank == 0:
            print(step, flush=True)


def serve_all(root: Path, world_size: int) -> None:
    pairs = [Pipe() for _ in range(world_size - 1)]
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child:
            children.append(child)
            continue
        mine = [ours for ours, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
        for connection in itertools.chain(*pairs):
            if connection not in mine:
                connection.close()  # or nobody would see the end of a dead rank's pipe
        serve(root, PipeRanks(rank, pipes=mine, world_size=world_size))
    for connection in itertools.chain(*pairs):
        connection.close()
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        serve_all(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        print(json.dumps(everywhere(Path(sys.argv[2]), sys.argv[3])))
