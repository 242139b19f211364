"""The output folder of a run: one run at a time, and none by accident over another."""

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from recipe.checkpoint.find import AUTO
from recipe.checkpoint.folders import CHECKPOINTS_NAME, tidy
from recipe.shared.errors import CheckpointError, FolderInUseError
from recipe.shared.ranks import Ranks
from recipe.shared.scopes import FOLDER as PROFILE_NAME
from recipe.shared.together import check_all_see, on_first

LOCK_NAME = ".lock"
# What a run leaves in its folder besides checkpoints/, whose presence means that the folder is taken.
RUN_ENTRIES = ("run.json", "metrics.jsonl", "train_results.json", "tensorboard", PROFILE_NAME)


class RunFolder:
    """An output folder that this run owns until `release` or, if it is killed, until its processes are gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None  # only rank 0 has it
        self._old: list[Path] = []

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS_NAME

    def old_bytes(self, *, ranks: Ranks) -> int:
        """Return the bytes that `discard_old_run` will free, 0 where nothing is overwritten. Collective."""

        def count() -> int:
            files = (path for entry in self._old for path in (entry, *entry.rglob("*")))
            return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())

        return on_first(count, ranks=ranks)

    def discard_old_run(self, *, ranks: Ranks, say: Callable[[str], None]) -> None:
        """Delete what an overwritten run left. Collective; to be called once the new run is known to start."""

        def discard() -> None:
            if self._old:
                say(f"overwriting {self.path}: deleting {', '.join(entry.name for entry in self._old)}")
            for entry in self._old:
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()

        on_first(discard, ranks=ranks)
        self._old = []

    def release(self) -> None:
        """Let other runs have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim_run_folder(path: Path, *, ranks: Ranks, resume: str | None, overwrite: bool) -> RunFolder:
    """Create or take over an output folder. Collective.

    A folder that holds a run is accepted when `resume` continues it ("auto", or a path inside it), or when `overwrite`
    is set; `discard_old_run` then deletes that run. What a dead run left half written is removed.

    Raises FolderInUseError on every rank when another live run holds the folder or it would be overwritten unasked.
    """
    continues = resume is not None and (resume == AUTO or Path(resume).resolve().is_relative_to(path.resolve()))
    folder = RunFolder(path)

    def take() -> None:
        path.mkdir(parents=True, exist_ok=True)
        folder._lock = _lock(path)
        folder._old = _old_run(path, continues=continues, overwrite=overwrite)

    try:
        on_first(take, ranks=ranks)
        check_all_see(path, ranks=ranks)
    except BaseException:
        folder.release()
        raise
    return folder


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


def _old_run(path: Path, *, continues: bool, overwrite: bool) -> list[Path]:
    """Return what has to be deleted before the new run may start; FolderInUseError where that was not asked for."""
    checkpoints = path / CHECKPOINTS_NAME
    tidy(checkpoints)
    taken = [path / name for name in RUN_ENTRIES if (path / name).exists()]
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        taken.append(checkpoints)
    if taken and not continues and not overwrite:
        raise FolderInUseError(
            f"{path} already holds a run ({', '.join(entry.name for entry in taken)}); continue it with "
            "--resume_from_checkpoint auto, discard it with --overwrite_output_dir, or choose another --output_dir"
        )
    return [] if continues else taken
