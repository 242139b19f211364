"""Times small pieces of work fairly: all ranks at once, in turns, the median of what each piece took.

How far readings of the same work are apart says how busy the machine was with something else.
"""

import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import Any, NamedTuple, TypeVar

import torch

from recipe.shared.ranks import Ranks

Key = TypeVar("Key", bound=Hashable)
Work = Callable[[], object]
ENOUGH_S = 2e-3  # of one reading: shorter work is repeated, for clocks have ticks
MUCH = 0.2  # between the quartiles of a work's readings, of their median


class Quartiles(NamedTuple):
    """Seconds that a quarter of the readings, half of them, and three quarters stayed below."""

    first: float
    median: float
    third: float

    @property
    def spread(self) -> float:
        return (self.third - self.first) / self.median


def by_case(quartiles: Mapping[Any, Quartiles]) -> dict[str, list[float]]:
    """With keys that a file can have."""
    return {" ".join(map(str, key)) if isinstance(key, tuple) else str(key): list(q) for key, q in quartiles.items()}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """`rounds` readings are taken of every case, one of each in every round; what disturbs one rarely disturbs all.

    quartiles  of all that was measured, by name and case; the mean over the ranks
    """

    device: str
    ranks: Ranks
    rounds: int
    quartiles: dict[str, dict[Any, Quartiles]] = field(default_factory=dict)

    def measure(self, cases: Mapping[Key, Work], *, name: str) -> dict[Key, float]:
        """Seconds of one run of each case, the mean over the ranks, which all measure the same at the same time.

        On a GPU by events, in the order of its stream; never run on one so far.
        """
        # Rank 0's: ranks that talk to each other in what is measured must do so equally often.
        repeats = self.ranks.first({key: _repeats(self._read(w, 1), self._read(w, 1)) for key, w in cases.items()})
        readings: dict[Key, list[float]] = {key: [] for key in cases}
        for turn in range(self.rounds):
            self.say(f"{name}: round {turn + 1} of {self.rounds}, {len(cases)} cases")
            for key, work in cases.items():
                self.ranks.barrier()
                readings[key].append(self._read(work, repeats[key]))
        quartiles = self._quartiles(readings)
        self.quartiles[name] = dict(quartiles)
        self._warn(quartiles, name=name)
        return {key: found.median for key, found in quartiles.items()}

    def over_ranks(self, values: dict[Key, float]) -> dict[Key, float]:
        """The mean over the ranks of each value."""
        everyone = self.ranks.gather(values)
        return {key: fmean(one[key] for one in everyone) for key in values}

    def _quartiles(self, readings: Mapping[Key, list[float]]) -> dict[Key, Quartiles]:
        own = {
            key: quantiles(found * 2 if len(found) == 1 else found, n=4, method="inclusive")
            for key, found in readings.items()
        }
        thirds = [self.over_ranks({key: found[i] for key, found in own.items()}) for i in range(3)]
        return {key: Quartiles(*(part[key] for part in thirds)) for key in own}

    def _warn(self, quartiles: Mapping[Key, Quartiles], *, name: str) -> None:
        wide = {key: found.spread for key, found in quartiles.items() if found.spread > MUCH}
        if wide:
            worst = max(wide, key=lambda key: wide[key])
            self.say(
                f"{name}: {len(wide)} of {len(quartiles)} cases differed by more than {MUCH:.0%} between rounds, the "
                f"most by {wide[worst]:.0%} ({worst}): the machine was busy; measure again when it is idle"
            )

    def say(self, line: str) -> None:
        if self.ranks.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def _read(self, work: Work, repeats: int) -> float:
        """Seconds per run."""
        if self.device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(repeats):
                work()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / repeats
        begin_s = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - begin_s) / repeats


def _repeats(first_s: float, second_s: float) -> int:
    """The first run pays for memory and kernels, so the second one counts, unless it was the disturbed one."""
    return max(1, min(1000, round(ENOUGH_S / max(min(first_s, second_s), 1e-9))))
