"""Where a save puts its files: on the disk at once, or into memory first and from there on the disk."""

import os
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from recipe.shared.ranks import Ranks
from recipe.shared.together import on_every, on_first

if TYPE_CHECKING:
    from recipe.checkpoint.snapshot import Snapshot

T = TypeVar("T")


class Files:
    """The files of one rank for one save, each written when it is given.

    They are given between collectives that every rank has to reach. So nothing here raises before `finish` does: after
    an error the files that follow are left out.
    """

    def __init__(self) -> None:
        self.written: list[Path] = []  # so far, in order
        self.steps: list[Callable[[Ranks], object]] = []  # what `then` was given, in order
        self._error: Exception | None = None

    def write(self, path: Path, action: Callable[[Path], object]) -> None:
        """Have `action(path)` write a file whose content nobody changes."""
        self._attempt(partial(self._write, path, action))

    def write_state(self, path: Path, state: T, action: Callable[[T, Path], object]) -> None:
        """Have `action(state, path)` write `state` as it is now; its tensors may have moved from a GPU to the CPU."""
        self.write(path, partial(action, state))

    def then(self, step: Callable[[Ranks], object]) -> None:
        """Have `step(ranks)` called on every rank once all files of all ranks are written: it may be collective."""
        self.steps.append(step)

    def hold(self) -> None:
        """Take note that all files have been given: training may change what `write_state` was given from now on."""

    def finish(self) -> None:
        """Write what is not written yet, and raise the first error there was."""
        if self._error is not None:
            raise self._error

    def _write(self, path: Path, action: Callable[[Path], object]) -> None:
        action(path)
        self.written.append(path)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._error is not None:
            return
        try:
            action()
        except Exception as error:
            self._error = error


class WriteLater(Files):
    """Keeps everything in host memory until `finish`, which may run in another thread and never uses the GPU.

    That takes as many bytes as this rank's files have. States from a GPU are copied into pinned memory, which is freed
    with this object and not before: freeing it involves the GPU, so drop the last reference in the training thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[Callable[[], object]] = deque()
        self._pinned: list[Snapshot] = []

    def write(self, path: Path, action: Callable[[Path], object]) -> None:
        self._waiting.append(partial(self._write, path, action))

    def write_state(self, path: Path, state: T, action: Callable[[T, Path], object]) -> None:
        from recipe.checkpoint.snapshot import restore_snapshot, take_snapshot

        def copy() -> None:
            snapshot = take_snapshot(state)
            if snapshot.is_pinned:
                self._pinned.append(snapshot)
            self.write(path, lambda path: action(restore_snapshot(snapshot), path))

        self._attempt(copy)

    def hold(self) -> None:
        if self._pinned:
            import torch

            self._attempt(torch.cuda.synchronize)

    def finish(self) -> None:
        while self._waiting:
            # Off the queue first, so that a file's memory is free as soon as it is written.
            self._attempt(self._waiting.popleft())
        super().finish()


def complete(files: Files, *, ranks: Ranks) -> None:
    """Write all files, check that rank 0 sees them, and take the further steps. Collective; all ranks fail alike."""

    def finish() -> list[str]:
        files.finish()
        return list(map(str, files.written))

    by_rank = ranks.gather(on_every(finish, ranks=ranks))
    on_first(lambda: _check_visible(by_rank), ranks=ranks)
    for step in files.steps:
        step(ranks)


def _check_visible(by_rank: list[list[str]]) -> None:
    """Raise unless this rank sees every file that any rank wrote: the manifest lists the files it finds."""
    paths = {Path(path): rank for rank, written in enumerate(by_rank) for path in written}
    there = {folder: set(os.listdir(folder)) for folder in {path.parent for path in paths}}
    for path, rank in paths.items():
        if path.name not in there[path.parent]:
            raise FileNotFoundError(
                f"{path}, written by rank {rank}, is not there on host {socket.gethostname()}, where rank 0 runs; "
                "the output folder must be on a file system that all ranks share"
            )
