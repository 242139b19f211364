"""The output folder of a run: one run at a time, and none by accident over another."""

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

from recipe.checkpoint.agreement import check_all_see, on_first
from recipe.checkpoint.errors import CheckpointError, FolderInUseError
from recipe.checkpoint.find import AUTO
from recipe.checkpoint.folders import CHECKPOINTS_NAME, tidy
from recipe.ranks import Ranks

LOCK_NAME = ".lock"
# What a run leaves in its folder besides checkpoints/, whose presence means that the folder is taken.
RUN_ENTRIES = ("run.json", "metrics.jsonl", "train_results.json", "tensorboard")


class RunFolder:
    """An output folder that this run owns until `release` or, if it is killed, until its processes are gone."""

    def __init__(self, path: Path, *, lock: IO[str] | None) -> None:  # only rank 0 has the lock
        self.path = path
        self._lock = lock

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS_NAME

    def release(self) -> None:
        """Let other runs have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim_run_folder(
    path: Path, *, ranks: Ranks, resume: str | None, overwrite: bool, say: Callable[[str], None]
) -> RunFolder:
    """Create or take over an output folder. Collective; `say` is called on rank 0.

    A folder that holds a run is accepted when `resume` continues it ("auto", or a path inside it), and emptied of that
    run when `overwrite` is set. What a dead run left half written is removed.

    Raises FolderInUseError on every rank when another live run holds the folder or it would be overwritten unasked,
    ValueError when `resume` and `overwrite` contradict each other.
    """
    continues = resume is not None and (resume == AUTO or Path(resume).resolve().is_relative_to(path.resolve()))
    if continues and overwrite:
        raise ValueError(
            f"overwriting {path} would delete what resume_from_checkpoint={resume} continues; give only one of them"
        )
    lock: IO[str] | None = None

    def take() -> None:
        nonlocal lock
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        _make_way(path, continues=continues, overwrite=overwrite, say=say)

    try:
        on_first(take, ranks=ranks)
        check_all_see(path, ranks=ranks)
    except BaseException:
        RunFolder(path, lock=lock).release()
        raise
    return RunFolder(path, lock=lock)


def _lock(path: Path) -> IO[str]:
    # Opened without truncating: until the lock is ours, the text belongs to the run that holds it.
    lock = os.fdopen(os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        with lock:
            raise FolderInUseError(f"{path} is the output folder of a live run: {lock.read().strip()}") from error
    except OSError as error:
        with lock:
            raise CheckpointError(
                f"{path} cannot be locked against a second run ({error}); choose an output folder on a file system "
                "that has locks"
            ) from error
    lock.truncate(0)
    since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n")
    lock.flush()
    return lock


def _make_way(path: Path, *, continues: bool, overwrite: bool, say: Callable[[str], None]) -> None:
    checkpoints = path / CHECKPOINTS_NAME
    tidy(checkpoints)
    taken = [path / name for name in RUN_ENTRIES if (path / name).exists()]
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        taken.append(checkpoints)
    if not taken or continues:
        return
    names = ", ".join(entry.name for entry in taken)
    if not overwrite:
        raise FolderInUseError(
            f"{path} already holds a run ({names}); continue it with --resume_from_checkpoint auto, "
            "discard it with --overwrite_output_dir, or choose another --output_dir"
        )
    say(f"overwriting {path}: deleting {names}")
    for entry in taken:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
