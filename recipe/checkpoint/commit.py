"""Save a checkpoint so that it exists on all ranks or on none, and never half, whatever dies at whatever moment.

The ranks write into a hidden staging folder, check in, take sizes and checksums together, and only when all of them
succeeded does rank 0 rename it to step-N. Until that rename the earlier checkpoints and `latest` are untouched. A save
has two parts: training waits for the first, `stage`; the second, `seal`, follows at once or, from a copy in host
memory, in a thread while training goes on.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from recipe.checkpoint.files import Files, WriteLater, complete
from recipe.checkpoint.folders import (
    LATEST,
    free_bytes,
    list_checkpoints,
    point_latest,
    publish,
    rotate,
    staging_folder,
    step_folder,
    tidy,
)
from recipe.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    file_sizes,
    record_file,
    share_of_files,
    write_manifest,
)
from recipe.shared.errors import CheckpointWriteError, NotEnoughSpaceError, RunError
from recipe.shared.ranks import Ranks, TorchRanks
from recipe.shared.together import check_all_see, on_every, on_first

MEET_TIMEOUT_S = 300.0
# How long a thread waits for its peers: a rank's files may take that long, and training does not wait.
BACKGROUND_TIMEOUT = timedelta(hours=12)


@dataclass(frozen=True, kw_only=True)
class Save:
    """The wish to save root/step-N. All ranks give the same.

    `keep` checkpoints stay, the newest ones (None: all). `details` (JSON) go into the manifest, where find_checkpoint
    returns them. `expected_bytes`, the size of the whole checkpoint, must be free before anything is written.
    """

    root: Path
    step: int
    keep: int | None
    details: dict[str, Any]
    expected_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(
                f"keep={self.keep} would delete the checkpoint just written; keep at least 1, or None to keep all"
            )


Writer = Callable[[Path, Files], None]


def stage(save: Save, *, ranks: Ranks, write: Writer, files: Files) -> None:
    """Do the part of a save that training waits for: meet, make the staging folder, give the files. Collective.

    Every rank must call it, with the same step: never under `if rank == 0`. Ranks that do not come within
    MEET_TIMEOUT_S are named in a RanksMissingError. `write(folder, files)` is called on every rank, may use
    collectives of its own and puts this rank's files anywhere below `folder`, which all ranks share, by `files` or
    directly. A rank whose write fails must still take part in those collectives before it raises, or the others wait
    for it there. Afterwards training may go on, whatever `files` does with what it was given.

    Raises CheckpointWriteError, the same on every rank, after removing what was written.
    """
    ranks.meet(f"saving step-{save.step}", timeout_s=MEET_TIMEOUT_S)
    steps = ranks.gather(save.step)
    if len(set(steps)) > 1:
        raise ValueError(f"the ranks disagree on the step they are saving: {dict(enumerate(steps))}")
    staging = staging_folder(save.root, save.step)
    with _cleaned_up_after_errors(save, ranks=ranks):
        on_first(lambda: _open_staging(save), ranks=ranks)
        check_all_see(staging, ranks=ranks)
        on_every(lambda: write(staging, files), ranks=ranks)
        files.hold()


def seal(save: Save, *, ranks: Ranks, files: Files) -> None:
    """Do the rest of a save, at any later time, also in another thread with `ranks` of its own. Collective.

    Writes what waits in `files`, takes sizes and checksums, renames, updates `latest` and deletes the oldest.

    Raises CheckpointWriteError, the same on every rank, after removing what was written.
    """
    with _cleaned_up_after_errors(save, ranks=ranks):
        complete(files, ranks=ranks)
        _write_manifest(save, ranks=ranks)
        on_first(lambda: publish(save.root, save.step), ranks=ranks)
    try:
        on_first(lambda: _settle(save), ranks=ranks)
    except (RunError, ValueError) as error:
        saved = step_folder(save.root, save.step)
        raise CheckpointWriteError(f"{saved} is complete, but the folder around it was not updated: {error}") from error


class Saver:
    """Saves while training waits or, given ranks for the `background`, while it goes on. Every method is collective.

    In the foreground a checkpoint is complete when `save` returns. In the background everything has been copied by
    then, which takes as much host memory as the rank's files have bytes, and a thread does the rest, one save at a
    time. `ranks` and `background` are the same ranks in two groups: the thread agrees with its peers in the second one
    while training uses the first. A save that failed in the background, by whatever error, raises a
    CheckpointWriteError on all ranks alike in the next `save`, `wait` or `check`.
    """

    def __init__(self, ranks: Ranks, *, background: Ranks | None = None) -> None:
        self._ranks, self._background = ranks, background
        self._thread: threading.Thread | None = None
        self._save: Save | None = None  # the last one in the background
        self._files: WriteLater | None = None
        self._error: Exception | None = None
        self._answer: Callable[[], bool] | None = None  # to a question that is under way

    def save(self, save: Save, *, write: Writer) -> None:
        """Save root/step-N with the files that `write` gives, point root/latest at it, and delete all but the newest.

        What `write` and this rank must and must not do stands at `stage`. Afterwards training may go on.
        """
        if self._background is None:
            at_once = Files()
            stage(save, ranks=self._ranks, write=write, files=at_once)
            seal(save, ranks=self._ranks, files=at_once)
            return
        self.wait()
        files = WriteLater()
        stage(save, ranks=self._ranks, write=write, files=files)
        self._save, self._files = save, files
        arguments = (save, files, self._background)
        self._thread = threading.Thread(target=self._seal, args=arguments, name=f"saving step-{save.step}")
        self._thread.start()

    def watch(self) -> None:
        """Begin to ask whether a save has failed on any rank, without waiting; `check` has the answer."""
        if self._background is not None:
            self._answer = self._ranks.any_later(self._error is not None)

    def check(self) -> None:
        """Raise the error of a save that had failed when all ranks last called `watch`."""
        answer, self._answer = self._answer, None
        if answer is not None and answer():
            self.wait()

    def wait(self) -> None:
        """Return when every save is complete; raise the error of one that failed."""
        if self._background is None:
            return
        error = self.join()
        # A rank that is alone here finds out, instead of waiting in a collective.
        self._ranks.meet("waiting for the save in the background", timeout_s=MEET_TIMEOUT_S)

        def report() -> None:
            if error is not None:
                raise error

        if self._save is not None:
            # A thread whose own group broke down could not clean up.
            with _cleaned_up_after_errors(self._save, ranks=self._ranks):
                on_every(report, ranks=self._ranks)

    def join(self) -> Exception | None:
        """Wait for this rank's thread alone and return the error it ended with. Not collective."""
        if self._thread is not None:
            self._thread.join()
        error = self._error
        self._thread = self._files = self._error = None
        return error

    def _seal(self, save: Save, files: WriteLater, background: Ranks) -> None:
        try:
            seal(save, ranks=background, files=files)
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
    saver = Saver(ranks, background=TorchRanks(group))
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


def _open_staging(save: Save) -> None:
    latest = save.root / LATEST
    if latest.is_dir() and not latest.is_symlink():
        raise ValueError(f"{latest} is a folder, but it must be free for a link to the newest checkpoint; rename it")
    tidy(save.root)
    free = free_bytes(save.root)
    if save.expected_bytes is not None and free < save.expected_bytes:
        raise NotEnoughSpaceError(f"it needs about {save.expected_bytes:,} bytes, but only {free:,} are free")
    staging_folder(save.root, save.step).mkdir(parents=True)


def _write_manifest(save: Save, *, ranks: Ranks) -> None:
    staging = staging_folder(save.root, save.step)
    sizes_bytes = on_first(lambda: _written_sizes(staging), ranks=ranks)
    mine = share_of_files(sizes_bytes, rank=ranks.rank, world_size=ranks.world_size)
    shares = ranks.gather(on_every(lambda: {name: record_file(staging / name) for name in mine}, ranks=ranks))
    records: dict[str, FileRecord] = {name: record for share in shares for name, record in share.items()}
    manifest = Manifest(step=save.step, files=dict(sorted(records.items())), details=save.details)
    on_first(lambda: write_manifest(staging, manifest), ranks=ranks)


def _written_sizes(staging: Path) -> dict[str, int]:
    sizes_bytes = file_sizes(staging)
    if not sizes_bytes:
        raise ValueError("no rank wrote a file")
    if MANIFEST_NAME in sizes_bytes:
        raise ValueError(f"{MANIFEST_NAME} was written into the checkpoint, but that name belongs to its manifest")
    return sizes_bytes


def _settle(save: Save) -> None:
    """Bring the folder up to date with the checkpoint that was just published."""
    point_latest(save.root, save.step)
    tidy(save.root)
    if save.keep is not None:
        rotate(save.root, keep=save.keep, written=save.step)


@contextmanager
def _cleaned_up_after_errors(save: Save, *, ranks: Ranks) -> Iterator[None]:
    """Turn an error that all ranks alike meet in a save into a CheckpointWriteError, after removing its files.

    Collective, like the body of the `with`. A CheckpointWriteError passes through, since it was raised here before.
    """
    try:
        yield
    except CheckpointWriteError:
        raise
    except (RunError, ValueError) as error:
        aftermath = on_first(lambda: _clean_up(save), ranks=ranks)
        raise CheckpointWriteError(
            f"step-{save.step} could not be saved in {save.root}: {error}. {aftermath}"
        ) from error


def _clean_up(save: Save) -> str:
    """Remove what a failed save left; return a sentence on what was removed and what is still there."""
    staging = staging_folder(save.root, save.step)
    written_bytes = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
    free = free_bytes(save.root)
    try:
        tidy(save.root)
        removed = "they have been removed"
    except OSError as error:
        removed = f"they could not all be removed ({error})"
    expected = "" if save.expected_bytes is None else f" of about {save.expected_bytes:,} needed"
    others = ", ".join(path.name for _, path in list_checkpoints(save.root))
    untouched = f"The other checkpoints are untouched: {others}" if others else "There is no other checkpoint"
    return f"{written_bytes:,} bytes{expected} were written when {free:,} were still free; {removed}. {untouched}"
