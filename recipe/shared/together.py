"""Work that one rank does for all of them, with its errors raised on every rank alike."""

import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from recipe.shared.ranks import Ranks

Result = TypeVar("Result")

HEARTBEAT_S = 5.0


class _Fault(NamedTuple):
    """An error in a form that travels between processes."""

    users: bool  # a ValueError: the user can mend it
    text: str


class _Outcome(NamedTuple):
    result: Any
    error: Exception | None


def on_first_rank(work: Callable[[], Result], *, ranks: Ranks) -> Result:
    """Run `work` on rank 0 and give its result (which must pickle) to every rank; collective."""
    outcome = _attempt(work) if ranks.rank == 0 else _Outcome(None, None)
    raise_alike(outcome.error, ranks=ranks)
    result: Result = ranks.first(outcome.result)
    return result


def on_every_rank(work: Callable[[], Result], *, ranks: Ranks) -> Result:
    """Run `work` on every rank; where it fails on one, all raise; collective."""
    outcome = _attempt(work)
    raise_alike(outcome.error, ranks=ranks)
    result: Result = outcome.result
    return result


def run_in_steps(work: Generator[None, None, None] | None, *, ranks: Ranks, heartbeat_s: float = HEARTBEAT_S) -> None:
    """Exhaust the iterators of the ranks that have one while the others wait; collective.

    The ranks meet every `heartbeat_s`, so that however long the work takes, no rank waits in one collective
    longer than that plus one step of the work, and an error reaches all of them at once.
    """
    outcome = _Outcome(work is not None, None)
    try:
        while True:
            if work is not None and outcome.result:
                until_s = time.monotonic() + heartbeat_s
                outcome = _attempt(partial(_advance, work, until_s=until_s))
            raise_alike(outcome.error, ranks=ranks)
            if not any(ranks.gather(outcome.result)):
                return
    finally:
        if work is not None:
            work.close()  # where another rank failed, this one's work ends here too


def raise_alike(error: Exception | None, *, ranks: Ranks) -> None:
    """Raise on all ranks if any of them has an error; collective.

    A ValueError stays one, with the same text everywhere. Anything else is a RuntimeError that names the rank, and
    keeps the original as its cause on the rank where it happened.
    """
    fault = None if error is None else _Fault(isinstance(error, ValueError), _describe(error))
    for rank, found in enumerate(ranks.gather(fault)):
        if found is not None and found.users:
            raise ValueError(found.text) from error
        if found is not None:
            raise RuntimeError(f"rank {rank} failed: {found.text}") from error


def _attempt(work: Callable[[], object]) -> _Outcome:
    try:
        return _Outcome(work(), None)
    except Exception as error:
        return _Outcome(None, error)


def _advance(work: Iterator[None], *, until_s: float) -> bool:
    """Run `work` until it ends or the time is up; whether there is more of it."""
    return any(time.monotonic() >= until_s for _ in work)


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
