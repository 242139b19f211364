"""How much memory a rank holds over the recorded steps: as few points as a page needs, and no peak left out."""

from collections.abc import Iterator
from typing import NamedTuple

from recipe.profile.spans import RankSpans

NUM_BUCKETS = 600


class MemoryPoint(NamedTuple):
    """`time_s` is since the rank's first step began."""

    time_s: float
    num_bytes: int


class MemoryLine(NamedTuple):
    """
    whole   counted from nothing; otherwise from what was there when the recording began, which the trace does not say
    points  the most that was held in each of some hundred equal times; also what the first step began with
    """

    rank: int
    on_gpu: bool
    whole: bool
    peak_bytes: int
    points: list[MemoryPoint]


def memory_line(spans: RankSpans) -> MemoryLine | None:
    """Of the GPU where there is one; None where the profiler did not watch memory (profile_memory=True).

    A GPU's allocator says its total. The CPU's counts from the recording's start on and misses what was there before,
    and its releases; our recorder says how much that was.
    """
    on_gpu = any(event.on_gpu for event in spans.trace.memory)
    before = None if on_gpu else spans.trace.facts.get("memory_bytes_before")
    first, last = spans.windows[0], spans.windows[-1]
    levels = [
        MemoryPoint(point.time_s - first.start_s, point.num_bytes + int(before or 0))
        for point in _levels(spans, on_gpu=on_gpu)
        if point.time_s <= last.end_s
    ]
    if not levels:
        return None
    earlier = [point.num_bytes for point in levels if point.time_s <= 0]
    end_s = last.end_s - first.start_s
    within = [MemoryPoint(0.0, earlier[-1]), *(point for point in levels if point.time_s > 0)]
    within.append(MemoryPoint(end_s, within[-1].num_bytes))
    return MemoryLine(
        rank=spans.trace.rank,
        on_gpu=on_gpu,
        whole=on_gpu or before is not None,
        peak_bytes=max(point.num_bytes for point in within),
        points=_thinned(within, end_s=end_s),
    )


def _levels(spans: RankSpans, *, on_gpu: bool) -> Iterator[MemoryPoint]:
    """First what there was when the recording began, as far as it is known."""
    level: int | None = None
    for event in spans.trace.memory:
        if event.on_gpu == on_gpu:
            if level is None:
                level = 0 if event.total_bytes is None else event.total_bytes - event.num_bytes
                yield MemoryPoint(min(event.time_s, spans.windows[0].start_s), level)
            level = event.total_bytes if event.total_bytes is not None else level + event.num_bytes
            yield MemoryPoint(event.time_s, level)


def _thinned(points: list[MemoryPoint], *, end_s: float) -> list[MemoryPoint]:
    """The highest point of each bucket that has any."""
    highest: dict[int, MemoryPoint] = {}
    for point in points:
        bucket = int(point.time_s / max(end_s, 1e-9) * NUM_BUCKETS)
        if bucket not in highest or point.num_bytes > highest[bucket].num_bytes:
            highest[bucket] = point
    return list(highest.values())
