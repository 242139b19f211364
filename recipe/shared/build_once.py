"""A folder that all ranks read, built once per file system, out of sight, and visible when it is whole."""

import fcntl
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO
from uuid import uuid4

from recipe.shared.errors import RanksFailedError
from recipe.shared.json_files import flush
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_every, run_in_steps

LOCK_POLL_S = 0.1


def build_once(folder: Path, build: Callable[[Path], Iterator[None]], *, ranks: Ranks, host: str | None = None) -> None:
    """Make `folder` exist for every rank; `build` fills the empty folder it is given, in steps; collective.

    The lowest rank that does not see the folder builds it; where hosts share no file system, the lowest rank of each
    host that still misses it builds another, so `build` must give the same files everywhere. Other programs that want
    the same folder wait for this one, or this one for them. `host` is this machine's name.
    """
    once_per_file_system(
        lambda: _build(folder, build), is_present=folder.is_dir, what=str(folder), ranks=ranks, host=host
    )


def once_per_file_system(
    work: Callable[[], Generator[None, None, None]],
    *,
    is_present: Callable[[], bool],
    what: str,
    ranks: Ranks,
    host: str | None = None,
) -> None:
    """Let every rank see what `work` makes, in steps, on as few ranks as that takes; collective.

    The lowest rank that does not see it makes it, then the lowest of each host that still does not. RanksFailedError on
    all ranks, which says `what` it is, where one does not see it even then; an error of `is_present` is raised on all.
    """
    host = socket.gethostname() if host is None else host

    def unseen() -> dict[int, str]:
        """Return the hosts of the ranks that do not see it, by rank."""
        views = ranks.gather((host, on_every(is_present, ranks=ranks)))
        return {rank: its_host for rank, (its_host, is_seen) in enumerate(views) if not is_seen}

    if missing := unseen():
        run_in_steps(work() if ranks.rank == min(missing) else None, ranks=ranks)
        missing = unseen()
    if missing:
        first_of_host = {its_host: rank for rank, its_host in reversed(missing.items())}
        run_in_steps(work() if ranks.rank in first_of_host.values() else None, ranks=ranks)
        missing = unseen()
    if missing:
        text = f"does not see {what} although a rank of its host made it"
        raise RanksFailedError(dict.fromkeys(missing, text))


def discard(folder: Path, *, ranks: Ranks) -> None:
    """Remove `folder` on every file system; programs that have its files open keep them; collective."""
    on_every(lambda: _remove(folder), ranks=ranks)


def _build(folder: Path, build: Callable[[Path], Iterator[None]]) -> Generator[None, None, None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The lock ends with its holder, however that dies, so whoever has it may clear what a dead builder left.
    with open(folder.with_name(f"{folder.name}.lock"), "a") as lock:
        while not _locked(lock):
            yield
            time.sleep(LOCK_POLL_S)
        if folder.is_dir():
            return
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            yield from build(unfinished)
            # Or a rename might reach the disk before the bytes it names.
            for path in (*unfinished.iterdir(), unfinished):
                flush(path)
            unfinished.rename(folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(folder: Path) -> None:
    aside = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside)
