"""Steps that succeed on all ranks or raise the same error on all of them, so that no rank goes on alone."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from recipe.shared.errors import CheckpointError, RanksFailedError
from recipe.shared.ranks import Ranks

T = TypeVar("T")


class _Outcome(NamedTuple):
    value: object = None
    error: CheckpointError | None = None  # one of ours: every rank raises it as it is
    failure: str | None = None  # any other exception, as text, because not every exception can be pickled


def on_every(action: Callable[[], T], *, ranks: Ranks) -> list[T]:
    """Run `action` on every rank and return the results by rank, or raise RanksFailedError on every rank.

    All results are in the memory of every rank, each as large as the largest: let them be small.
    """
    mine, cause = _attempt(action)
    return [cast("T", value) for value in _values(ranks.gather(mine), cause=cause)]


def on_first(action: Callable[[], T], *, ranks: Ranks) -> T:
    """Run `action` on rank 0 alone and give its result, or its error, to every rank."""
    mine, cause = _attempt(action) if ranks.rank == 0 else (None, None)
    (value,) = _values([ranks.first(mine)], cause=cause)
    return cast("T", value)


def _attempt(action: Callable[[], object]) -> tuple[_Outcome, Exception | None]:
    """What to tell the other ranks, and the error itself for this one."""
    try:
        return _Outcome(value=action()), None
    except CheckpointError as error:
        return _Outcome(error=error), error
    except Exception as error:
        return _Outcome(failure=f"{type(error).__name__}: {error}"), error


def _values(outcomes: list[_Outcome], *, cause: Exception | None) -> list[object]:
    """The results of ranks 0, 1, …, or their error; `cause` is this rank's own."""
    for outcome in outcomes:
        if outcome.error is not None and outcome.error is cause:
            raise outcome.error
        if outcome.error is not None:
            raise outcome.error from cause
    failures = {rank: outcome.failure for rank, outcome in enumerate(outcomes) if outcome.failure is not None}
    if failures:
        raise RanksFailedError(failures) from cause
    return [outcome.value for outcome in outcomes]


def check_all_see(folder: Path, *, ranks: Ranks) -> None:
    """Raise on every rank unless a folder that rank 0 made is there for all of them."""

    def look() -> None:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder}, made by rank 0, is not there on host {socket.gethostname()}; "
                "the output folder must be on a file system that all ranks share"
            )

    on_every(look, ranks=ranks)
