"""Several ranks as threads of one process, for code that only ever asks `Ranks`; a rank costs microseconds."""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from recipe.shared.ranks import Ranks

WAIT_S = 10.0


class AsksByGathering(Ranks):
    """Whether something is true on any rank, for ranks that can gather."""

    def any_later(self, value: bool) -> Callable[[], bool]:
        answer = any(self.gather(value))
        return lambda: answer


class ThreadRanks(AsksByGathering):
    """One rank of a world of threads. A rank that waits longer than WAIT_S raises BrokenBarrierError."""

    def __init__(self, rank: int, *, barrier: threading.Barrier, table: list[Any]) -> None:
        self.rank = rank
        self.world_size = barrier.parties
        self._barrier = barrier
        self._table = table

    def gather(self, value: object) -> list[Any]:
        return self._read(value, rows=slice(None))

    def first(self, value: object) -> Any:
        return self._read(value, rows=slice(1))[0]

    def barrier(self) -> None:
        self._barrier.wait(WAIT_S)

    def meet(self, purpose: str, *, timeout_s: float) -> None:
        self._barrier.wait(WAIT_S)

    def _read(self, value: object, *, rows: slice) -> list[Any]:
        self._table[self.rank] = pickle.dumps(value)
        self._barrier.wait(WAIT_S)
        values = [pickle.loads(text) for text in self._table[rows]]
        self._barrier.wait(WAIT_S)
        return values


def on_threads(world_size: int, function: Callable[[Ranks], Any]) -> list[Any]:
    """Run `function(ranks)` on every rank and return its results by rank, or the exception of a rank that raised."""
    barrier, table = threading.Barrier(world_size), [None] * world_size

    def outcome(rank: int) -> Any:
        try:
            return function(ThreadRanks(rank, barrier=barrier, table=table))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(outcome, range(world_size)))
