"""Saving while training waits, or while it goes on: from a copy in host memory that a thread writes and publishes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from recipe.checkpoint.commit import (
    MEET_TIMEOUT_S,
    Save,
    Writer,
    cleaned_up_after_errors,
    seal,
    stage,
    write_checkpoint,
)
from recipe.checkpoint.files import WriteLater
from recipe.shared.ranks import Ranks, TorchRanks
from recipe.shared.together import on_every

# How long a thread waits for its peers: a rank's files may take that long, and training does not wait.
BACKGROUND_TIMEOUT = timedelta(hours=12)


class Saver:
    """Saves while training waits: a checkpoint is complete when `save` returns. Every method is collective."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def save(self, save: Save, *, write: Writer) -> None:
        """Save with the files that `write` gives, as `write_checkpoint` does; afterwards training may go on."""
        write_checkpoint(save, ranks=self._ranks, write=write)

    def watch(self) -> None:
        """Begin to ask whether a save has failed on any rank, without waiting; `check` has the answer."""

    def check(self) -> None:
        """Raise the error of a save that had failed when all ranks last called `watch`."""

    def wait(self) -> None:
        """Return when every save is complete; raise the error of one that failed."""


class BackgroundSaver(Saver):
    """Has copied everything when `save` returns; a thread does the rest, one save at a time.

    `ranks` and `background` are the same ranks in two groups: the thread agrees with its peers in the second one while
    training uses the first. A save that failed in the background, by whatever error, raises a CheckpointWriteError on
    all ranks alike in the next `save`, `wait` or `check`. The copy takes as much host memory as the rank's files have
    bytes.
    """

    def __init__(self, ranks: Ranks, *, background: Ranks) -> None:
        super().__init__(ranks)
        self._background = background
        self._thread: threading.Thread | None = None
        self._save: Save | None = None  # the last one
        self._files: WriteLater | None = None
        self._error: Exception | None = None
        self._answer: Callable[[], bool] | None = None  # to a question that is under way

    def save(self, save: Save, *, write: Writer) -> None:
        self.wait()
        files = WriteLater()
        stage(save, ranks=self._ranks, write=write, files=files)
        self._save, self._files = save, files
        self._thread = threading.Thread(target=self._seal, args=(save, files), name=f"saving step-{save.step}")
        self._thread.start()

    def watch(self) -> None:
        self._answer = self._ranks.any_later(self._error is not None)

    def check(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and answer():
            self.wait()

    def wait(self) -> None:
        error = self.join()
        # A rank that is alone here finds out, instead of waiting in a collective.
        self._ranks.meet("waiting for the save in the background", timeout_s=MEET_TIMEOUT_S)

        def report() -> None:
            if error is not None:
                raise error

        if self._save is not None:
            # A thread whose own group broke down could not clean up.
            with cleaned_up_after_errors(self._save, ranks=self._ranks):
                on_every(report, ranks=self._ranks)

    def join(self) -> Exception | None:
        """Wait for this rank's thread alone and return the error it ended with. Not collective."""
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
    """Open a saver, in the background or not, whose saves are complete when the context ends. Collective.

    Where the context ends by an error, this rank waits for its own thread only; if the save failed, too, a note on the
    error says so.
    """
    if not background:
        yield Saver(ranks)
        return
    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=BACKGROUND_TIMEOUT)
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
