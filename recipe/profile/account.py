"""Accounts for every moment of a rank's step once: work, a transfer that nothing hides, waiting, a copy, or nothing.

A moment with work counts as work, whatever else happens in it; transfers in it are hidden. Without work, a transfer is
exposed, unless it is in the part of it for which this rank only waits for slower ones. So the sums are of unions of
intervals, never of durations that overlap, and they add up to the step.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from recipe.profile.spans import Copy, Part, Transfer, Window, Work

LANES = WORK, TRANSFER, WAITING, COPY = range(4)  # the first that is busy is what a moment counts as


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
    work: defaultdict[Part, float] = defaultdict(float)
    exposed, waiting, hidden = (defaultdict[int, float](float) for _ in range(3))
    copied = idle = idle_before = 0.0
    active: tuple[dict[int, None], ...] = tuple({} for _ in LANES)
    time_s, any_yet = window.start_s, False
    for edge in _edges(window, works=works, transfers=transfers, waits_s=waits_s, copies=copies):
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
                work[works[first].part] += passed_s
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
    return Account(work, exposed, waiting, hidden, copied, idle, idle_before)


class _Edge(NamedTuple):
    """Where a span begins or ends; at one moment ends come first."""

    time_s: float
    begins: bool
    lane: int
    number: int


def _edges(
    window: Window,
    *,
    works: Sequence[Work],
    transfers: Sequence[Transfer],
    waits_s: Sequence[float],
    copies: Sequence[Copy],
) -> list[_Edge]:
    spans = [(WORK, i, work.start_s, work.end_s) for i, work in enumerate(works)]
    spans += [(COPY, i, copy.start_s, copy.end_s) for i, copy in enumerate(copies)]
    for i, (transfer, wait_s) in enumerate(zip(transfers, waits_s, strict=True)):
        moves_s = min(transfer.start_s + wait_s, transfer.end_s)
        spans += [(WAITING, i, transfer.start_s, moves_s), (TRANSFER, i, moves_s, transfer.end_s)]
    edges = []
    for lane, number, start_s, end_s in spans:
        start_s, end_s = max(start_s, window.start_s), min(end_s, window.end_s)
        if start_s < end_s:
            edges += [_Edge(start_s, True, lane, number), _Edge(end_s, False, lane, number)]
    return [*sorted(edges), _Edge(window.end_s, False, WORK, -1)]
