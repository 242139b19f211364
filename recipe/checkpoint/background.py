"""Saving while training goes on: a copy in host memory, which a thread of every rank writes and publishes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from recipe.checkpoint.agreement import on_every
from recipe.checkpoint.commit import MEET_TIMEOUT_S, Save, Writer, seal, stage, write_checkpoint
from recipe.checkpoint.files import WriteLater
from recipe.ranks import Ranks, TorchRanks


class Saver(Protocol):
    """How a run saves. Every method is collective."""

    def save(self, save: Save, *, write: Writer) -> None:
        """Save, as recipe/checkpoint/commit.py has it; afterwards training may go on."""
        ...

    def wait(self) -> None:
        """Return when every save is complete."""
        ...


class ForegroundSaver:
    """Has saved when `save` returns."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def save(self, save: Save, *, write: Writer) -> None:
        write_checkpoint(save, ranks=self._ranks, write=write)

    def wait(self) -> None:
        return None


class BackgroundSaver:
    """Has copied everything when `save` returns; a thread does the rest, one save at a time.

    `ranks` and `background` are the same ranks in two groups: the thread agrees with its peers in the second one while
    training uses the first. A save that failed in the background raises its CheckpointWriteError on all ranks alike in
    the next `save` or `wait`. The copy takes as much host memory as the rank's files have bytes.
    """

    def __init__(self, ranks: Ranks, *, background: Ranks) -> None:
        self._ranks, self._background = ranks, background
        self._thread: threading.Thread | None = None
        self._files: WriteLater | None = None
        self._error: Exception | None = None

    def save(self, save: Save, *, write: Writer) -> None:
        self.wait()
        files = WriteLater()
        stage(save, ranks=self._ranks, write=write, files=files)
        self._files = files
        self._thread = threading.Thread(target=self._seal, args=(save, files), name=f"saving step-{save.step}")
        self._thread.start()

    def wait(self) -> None:
        error = self.join()
        # A rank that is alone here finds out, instead of waiting in a collective.
        self._ranks.meet("waiting for the save in the background", timeout_s=MEET_TIMEOUT_S)

        def report() -> None:
            if error is not None:
                raise error

        on_every(report, ranks=self._ranks)

    def join(self) -> Exception | None:
        """Wait for this rank's thread alone; what it failed with. Not collective."""
        if self._thread is not None:
            self._thread.join()
        error = self._error
        self._thread = self._files = self._error = None
        return error

    def _seal(self, save: Save, files: WriteLater) -> None:
        try:
            seal(save, ranks=self._background, files=files)
        except Exception as error:
            self._error = error


@contextmanager
def open_saver(ranks: Ranks, *, background: bool) -> Iterator[Saver]:
    """A saver, in the background or not, whose saves are complete when the context ends. Collective over the world.

    Where the context ends by an error, this rank waits for its own thread only; if the save failed, too, a note on the
    error says so.
    """
    if not background:
        yield ForegroundSaver(ranks)
        return
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    saver = BackgroundSaver(ranks, background=TorchRanks(group))
    try:
        yield saver
    except BaseException as error:
        failure = saver.join()
        if failure is not None:
            error.add_note(f"a save in the background had failed, too: {failure}")
        raise
    try:
        saver.wait()
    finally:
        dist.destroy_process_group(group)
