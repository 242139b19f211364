"""Times small pieces of work fairly, and says at which sizes: all ranks at once, in turns, the median of each piece.

How far readings of the same work are apart says how busy the machine was with something else. Between the sizes that
are measured the planner interpolates.
"""

import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, quantiles
from typing import Any, NamedTuple, TypeVar

import torch

from recipe.shared.ranks import Ranks

Key = TypeVar("Key", bound=Hashable)
Work = Callable[[], object]
ENOUGH_S = 2e-3  # of one reading: shorter work is repeated, for clocks have ticks
MUCH = 0.2  # between the quartiles of a work's readings, of their median

# What all passes hold per element of their largest size, smaller sizes included, in float32: all cases' tensors are
# there at once, so that they can be measured in turns. Counted on a CPU: 245 bytes, and a third more for smaller sizes.
PASS_BYTES = 320
# The same of products per number of the largest weight: eight of it and 22 thousand rows, smaller widths included.
WEIGHT_BYTES = 110
SHARE = 0.5  # of a rank's memory that either may take, one after the other


class Quartiles(NamedTuple):
    """Seconds that a quarter of the readings, half of them, and three quarters stayed below."""

    first: float
    median: float
    third: float

    @property
    def spread(self) -> float:
        return (self.third - self.first) / self.median


def by_case(quartiles: Mapping[Any, Quartiles]) -> dict[str, list[float]]:
    """Return quartiles with keys that a file can have."""
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
        """Return seconds of one run of each case, the mean over the ranks, which all measure the same at the same time.

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
        """Return the mean over the ranks of each value."""
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
        """Return seconds per run."""
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
    """Return how often to repeat a work. Its first run pays for memory and kernels, but the second may be disturbed."""
    return max(1, min(1000, round(ENOUGH_S / max(min(first_s, second_s), 1e-9))))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """rows x widths of products up to max_flops, lengths x head_dims of attention, elements of passes, bytes sent."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    max_flops: float
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    elements: tuple[int, ...]
    sent_bytes: tuple[int, ...]


CPU_SIZES = Sizes(
    rows=(4, 16, 64, 256, 1024, 4096),
    widths=(16, 64, 256, 512, 1024, 2048),
    max_flops=2**33,
    lengths=(64, 256, 1024, 4096),
    head_dims=(32, 64, 128),
    elements=(2**10, 2**13, 2**16, 2**19, 2**22, 2**24),
    sent_bytes=(2**10, 2**13, 2**16, 2**18, 2**20, 2**22, 2**24),
)
GPU_SIZES = Sizes(
    rows=(16, 64, 256, 1024, 4096, 16384),
    widths=(64, 256, 1024, 2048, 4096, 8192),
    max_flops=2**43,
    lengths=(512, 2048, 8192, 32768),
    head_dims=(64, 128),
    elements=(2**12, 2**16, 2**20, 2**24, 2**26, 2**28),
    sent_bytes=(2**12, 2**16, 2**20, 2**22, 2**24, 2**26, 2**28),
)


def sizes_for(device: str, *, quick: bool, memory_bytes: float) -> Sizes:
    """Return what to measure; `quick` leaves out the large and every second size: for a first look, and for tests.

    What does not fit in a rank's memory is left out, too.
    """
    sizes, room_bytes = GPU_SIZES if device == "cuda" else CPU_SIZES, SHARE * memory_bytes
    full = replace(
        sizes,
        widths=_below(sizes.widths, (room_bytes / WEIGHT_BYTES) ** 0.5),
        elements=_below(sizes.elements, room_bytes / PASS_BYTES),
        # Five collectives, each with what is sent and what arrives.
        sent_bytes=_below(sizes.sent_bytes, room_bytes / 16),
    )
    if not quick:
        return full
    return Sizes(
        rows=full.rows[:-1:2],
        widths=full.widths[:-1:2],
        max_flops=full.max_flops / 64,
        lengths=full.lengths[:2],
        head_dims=full.head_dims[:1],
        elements=full.elements[:-1:2],
        sent_bytes=full.sent_bytes[::3],
    )


def _below(numbers: tuple[int, ...], most: float) -> tuple[int, ...]:
    """Keep numbers up to `most`, and the first three in any case."""
    return tuple(number for i, number in enumerate(numbers) if i < 3 or number <= most)
