"""Accounts for every moment of a rank's step once: work, a transfer that nothing hides, waiting, a copy, or nothing.

A moment with work counts as work, whatever else happens in it; transfers in it are hidden. Without work, a transfer is
exposed, unless it is in the part of it for which this rank only waits for slower ones. So the sums are of unions of
intervals, never of durations that overlap, and they add up to the step.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from recipe.profile.spans import Copy, Part, RankSpans, Transfer, Window, Work

LANES = WORK, TRANSFER, WAITING, COPY = range(4)  # the first that is busy is what a moment counts as
NUM_BUCKETS = 600  # of a line of memory: as few points as a page needs, and no peak left out


class Account(NamedTuple):
    """Seconds of one step on one rank. By the number of the transfer: what counts for each of several at once.

    work      by the part it belongs to
    exposed   of transfers, with neither work nor waiting
    waiting   of transfers that have not begun to move anything, without work
    hidden    of transfers, behind work
    copies    with nothing of the above
    idle      with nothing at all; `idle_before` of it lies before the step's first span
    """

    work: Mapping[Part, float]
    exposed: Mapping[int, float]
    waiting: Mapping[int, float]
    hidden: Mapping[int, float]
    copies: float
    idle: float
    idle_before: float


def account_for(
    window: Window,
    *,
    works: Sequence[Work],
    transfers: Sequence[Transfer],
    waits_s: Sequence[float],
    copies: Sequence[Copy],
) -> Account:
    """`waits_s`: for how long of each transfer, from its start, this rank only waits for slower ones."""
    spans = [(WORK, i, work.start_s, work.end_s) for i, work in enumerate(works)]
    spans += [(COPY, i, copy.start_s, copy.end_s) for i, copy in enumerate(copies)]
    for i, (transfer, wait_s) in enumerate(zip(transfers, waits_s, strict=True)):
        moves_s = min(transfer.start_s + wait_s, transfer.end_s)
        spans += [(WAITING, i, transfer.start_s, moves_s), (TRANSFER, i, moves_s, transfer.end_s)]
    work_s: defaultdict[Part, float] = defaultdict(float)
    exposed, waiting, hidden = (defaultdict[int, float](float) for _ in range(3))
    copied = idle = idle_before = 0.0
    active: tuple[dict[int, None], ...] = tuple({} for _ in LANES)
    time_s, any_yet = window.start_s, False
    for edge in _edges(window, spans):
        passed_s = edge.time_s - time_s
        lane = next((lane for lane in LANES if active[lane]), None)
        if lane is None:
            idle += passed_s
            idle_before += 0.0 if any_yet else passed_s
        elif lane == COPY:
            copied += passed_s
        else:
            first = next(iter(active[lane]))
            if lane == WORK:
                work_s[works[first].part] += passed_s
                moving = next(iter(active[TRANSFER] or active[WAITING]), None)
                if moving is not None:
                    hidden[moving] += passed_s
            else:
                (exposed if lane == TRANSFER else waiting)[first] += passed_s
        time_s = edge.time_s
        if edge.begins:
            active[edge.lane][edge.number] = None
            any_yet = True
        else:
            active[edge.lane].pop(edge.number, None)
    return Account(work_s, exposed, waiting, hidden, copied, idle, idle_before)


class _Edge(NamedTuple):
    """Where a span begins or ends; at one moment ends come first."""

    time_s: float
    begins: bool
    lane: int
    number: int


def _edges(window: Window, spans: Iterable[tuple[int, int, float, float]]) -> list[_Edge]:
    edges = []
    for lane, number, start_s, end_s in spans:
        start_s, end_s = max(start_s, window.start_s), min(end_s, window.end_s)
        if start_s < end_s:
            edges += [_Edge(start_s, True, lane, number), _Edge(end_s, False, lane, number)]
    return [*sorted(edges), _Edge(window.end_s, False, WORK, -1)]


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
    """Trace memory, the GPU's where there is one; None where the profiler did not watch memory (profile_memory=True).

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
