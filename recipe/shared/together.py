"""Steps that succeed on all ranks or raise the same error on all of them, so that no rank goes on alone.

One rule says what is raised. A RunError, and a ValueError, which the user can mend, are raised on every rank with the
text they have on the lowest rank that failed so. Any other exception becomes a RanksFailedError, which names every
rank that failed; where it happened it is the cause of what is raised.
"""

import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from recipe.shared.errors import RanksFailedError, RunError
from recipe.shared.ranks import Ranks

T = TypeVar("T")

HEARTBEAT_S = 5.0


class _Failure(NamedTuple):
    """An exception in a form that travels between processes, since not every exception can be pickled."""

    own: RunError | None  # raised as it is
    is_users: bool  # a ValueError
    text: str


def on_every(work: Callable[[], T], *, ranks: Ranks) -> T:
    """Run `work` on every rank and return this rank's result, or raise on every rank. Collective."""
    result, error = _attempt(work)
    _raise_alike(error, failures=ranks.gather(_failure(error)))
    return cast("T", result)


def on_first(work: Callable[[], T], *, ranks: Ranks) -> T:
    """Run `work` on rank 0 alone and give its result (which must pickle), or its error, to every rank. Collective."""
    result, error = _attempt(work) if ranks.rank == 0 else (None, None)
    result, failure = ranks.first((result, _failure(error)))
    _raise_alike(error, failures=[failure])
    return cast("T", result)


def run_in_steps(work: Generator[None, None, None] | None, *, ranks: Ranks, heartbeat_s: float = HEARTBEAT_S) -> None:
    """Exhaust the generators of the ranks that have one while the others wait. Collective.

    The ranks meet every `heartbeat_s`, so that however long the work takes, no rank waits in one collective
    longer than that plus one step of the work, and an error reaches all of them at once.
    """

    def advance() -> bool:
        """Run `work` until it ends or the time is up; whether there is more of it."""
        until_s = time.monotonic() + heartbeat_s
        return work is not None and any(time.monotonic() >= until_s for _ in work)

    try:
        while any(ranks.gather(on_every(advance, ranks=ranks))):
            pass
    finally:
        if work is not None:
            work.close()  # where another rank failed, this one's work ends here too


def check_all_see(folder: Path, *, ranks: Ranks) -> None:
    """Raise on every rank unless all of them see a folder that rank 0 made. Collective."""

    def look() -> None:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder}, made by rank 0, is not there on host {socket.gethostname()}; "
                "the output folder must be on a file system that all ranks share"
            )

    on_every(look, ranks=ranks)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _failure(error: Exception | None) -> _Failure | None:
    if error is None:
        return None
    own, is_users = error if isinstance(error, RunError) else None, isinstance(error, ValueError)
    return _Failure(own, is_users, str(error) if own or is_users else f"{type(error).__name__}: {error}")


def _raise_alike(cause: Exception | None, *, failures: list[_Failure | None]) -> None:
    """Raise what the failures of ranks 0, 1, … amount to; `cause` is this rank's own exception."""
    for failure in failures:
        if failure is not None and failure.own is not None:
            if failure.own is cause:
                raise cause
            raise failure.own from cause
        if failure is not None and failure.is_users:
            raise ValueError(failure.text) from cause
    others = {rank: failure.text for rank, failure in enumerate(failures) if failure is not None}
    if others:
        raise RanksFailedError(others) from cause
