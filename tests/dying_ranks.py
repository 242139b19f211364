"""Several ranks that save checkpoints together until they are killed, as plain processes that never load torch.

`python -m tests.dying_ranks ROOT WORLD_SIZE` goes on from the newest complete checkpoint, says which that is, then
saves step after step and prints each once it is committed.
"""

import itertools
import os
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from recipe.checkpoint.commit import Save, write_checkpoint
from recipe.checkpoint.files import Files
from recipe.checkpoint.find import find_checkpoint
from recipe.checkpoint.folders import tidy
from recipe.shared.together import on_first
from tests.thread_ranks import AsksByGathering

KEEP = 2
FILE_BYTES = 40_000


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

    on_first(lambda: tidy(root), ranks=ranks)
    found = find_checkpoint(root, resume="auto", ranks=ranks, say=lambda line: None)
    first = 0 if found is None else found.step
    if ranks.rank == 0:
        print(f"from {first}", flush=True)
    for step in itertools.count(first + 1):
        write_checkpoint(Save(root=root, step=step, keep=KEEP, details={}), ranks=ranks, write=write)
        if ranks.rank == 0:
            print(step, flush=True)


def main(root: Path, world_size: int) -> None:
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
    main(Path(sys.argv[1]), int(sys.argv[2]))
