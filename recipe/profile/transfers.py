"""Transfers of all ranks beside each other: who waited for whom, what was sent, and how fast against the link.

A collective among all of a group begins to move when its last rank has come, and ends for all at about the same time.
So the rank with the shortest duration came last, and what the others' durations have more is waiting. No clock is
compared with another's. In a broadcast, say, ranks come and go at different times, so nothing is said of waiting there.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from recipe.plan.hardware import find_hardware
from recipe.profile.host import AMONG_ALL
from recipe.profile.spans import RankSpans, Transfer
from recipe.profile.trace_file import Trace

Layout = tuple[int, int]  # (dp, tp)


class Links(NamedTuple):
    """Bytes per second that a rank can send, within a node and between nodes; None: not known."""

    within: float | None = None
    between: float | None = None
    ranks_per_node: int | None = None

    def is_between(self, transfer: Transfer) -> bool:
        """Whether it leaves a node; ranks that are not known are taken for a node's if they fit there."""
        if self.ranks_per_node is None:
            return False
        if transfer.ranks is not None:
            return len({rank // self.ranks_per_node for rank in transfer.ranks}) > 1
        return transfer.num_ranks is not None and transfer.num_ranks > self.ranks_per_node

    def of(self, route: "Route") -> float | None:
        return self.between if route.between else self.within


class Sent(NamedTuple):
    """One collective of one rank in one step. `moves_s` is its duration without the waiting, its fastest rank's."""

    rank: int
    step: int
    transfer: Transfer
    wait_s: float
    moves_s: float


class Unpaired(NamedTuple):
    """Collectives of one operation and group whose ranks have different numbers of them in their traces.

    By rank; of one rank alone where its trace does not say among whom they were.
    """

    op: str
    num_calls: dict[int, int]


class Matched(NamedTuple):
    sent: list[Sent]
    unpaired: list[Unpaired]


class Route(NamedTuple):
    """Collectives that are counted together. `between`: nodes, as far as they are known."""

    op: str
    purpose: str
    among: str
    between: bool = False


class BandwidthPoint(NamedTuple):
    """Collectives of one route and size: the median and the range of what a rank sent in a second."""

    route: Route
    sent_bytes: float
    num_calls: int
    bytes_per_s: float
    lowest: float
    highest: float
    link_bytes_per_s: float | None


def match(ranks: Sequence[RankSpans]) -> Matched:
    """Every collective of every step, with how long its rank waited in it.

    The n-th collective of a group in one rank's trace is the n-th of that group in the others': in the whole trace,
    since the same one may run in one step of one rank's clock and in the next of another's. Where ranks have different
    numbers of them, or a trace does not say which group it was, nobody is held to have waited.
    """
    found: dict[tuple[str, object], dict[int, list[Transfer]]] = {}
    for spans in ranks:
        for transfer in spans.transfers:
            key = (transfer.op, _group_key(transfer, trace=spans.trace))
            found.setdefault(key, {}).setdefault(spans.trace.rank, []).append(transfer)
    windows = {spans.trace.rank: spans.windows for spans in ranks}
    matched = Matched([], [])
    for (op, _), by_rank in found.items():
        unpaired = _unpaired(op, by_rank, traced=windows.keys())
        in_pairs = op in AMONG_ALL and unpaired is None
        sent = []
        for rank, calls in by_rank.items():
            for number, transfer in enumerate(calls):
                window = next((w for w in windows[rank] if w.start_s <= transfer.start_s < w.end_s), None)
                if window is not None:
                    at_once = [other[number] for other in by_rank.values()] if in_pairs else [transfer]
                    moves_s = min(call.end_s - call.start_s for call in at_once)
                    wait_s = transfer.end_s - transfer.start_s - moves_s
                    sent.append(Sent(rank, window.step, transfer, wait_s, moves_s))
        matched.sent.extend(sent)
        if sent and op in AMONG_ALL and unpaired is not None:
            matched.unpaired.append(unpaired)
    return matched


def _unpaired(op: str, by_rank: Mapping[int, list[Transfer]], *, traced: Collection[int]) -> Unpaired | None:
    """None where the n-th of one rank are the n-th of the others."""
    first = next(iter(by_rank.values()))[0]
    members = by_rank.keys() if first.ranks is None else set(first.ranks) & set(traced)
    num_calls = {rank: len(by_rank.get(rank, ())) for rank in sorted(members)}
    nameless = first.ranks is None and first.num_ranks != 1 and len(num_calls) == 1 < len(traced)
    return Unpaired(op, num_calls) if nameless or len(set(num_calls.values())) > 1 else None


def _group_key(transfer: Transfer, *, trace: Trace) -> object:
    if transfer.ranks is not None:
        return transfer.ranks
    if transfer.group:
        return transfer.group
    if transfer.num_ranks is not None and transfer.num_ranks == trace.world_size:
        return "all"
    return f"rank {trace.rank}"  # one cannot tell with whom


def route_of(transfer: Transfer, *, links: Links, layout: Layout | None) -> Route:
    between = links.is_between(transfer)
    among = _among(transfer, layout=layout) + (" between nodes" if between else "")
    return Route(transfer.op, transfer.part.kind, among, between)


def _among(transfer: Transfer, *, layout: Layout | None) -> str:
    num_ranks, ranks = transfer.num_ranks, transfer.ranks
    if num_ranks is None:
        return "unknown ranks"
    of_zero = transfer.part.kind in ("gradients", "optimizer")
    if layout is not None and ranks is None and num_ranks == layout[0] and of_zero:
        return f"dp, {num_ranks} ranks"  # DeepSpeed keeps functions of its own, which nobody can name anew
    if layout is not None and ranks is not None and num_ranks < layout[0] * layout[1]:
        if len({rank % layout[1] for rank in ranks}) == 1:
            return f"dp, {num_ranks} ranks"
        if len({rank // layout[1] for rank in ranks}) == 1:
            return f"group, {num_ranks} ranks"
    return f"{num_ranks} ranks"


def bandwidth_points(sent: Sequence[Sent], *, links: Links, layout: Layout | None) -> list[BandwidthPoint]:
    """In the order of their size; without collectives that send nothing or do not say how much."""
    speeds: dict[tuple[Route, float], list[Sent]] = {}
    for one in sent:
        num_bytes = one.transfer.sent_bytes
        if num_bytes and one.moves_s > 0:
            speeds.setdefault((route_of(one.transfer, links=links, layout=layout), num_bytes), []).append(one)
    points = []
    for (route, num_bytes), calls in speeds.items():
        rates = sorted(num_bytes / call.moves_s for call in calls)
        points.append(
            BandwidthPoint(
                route=route,
                sent_bytes=num_bytes,
                num_calls=len(calls),
                bytes_per_s=statistics.median(rates),
                lowest=rates[0],
                highest=rates[-1],
                link_bytes_per_s=links.of(route),
            )
        )
    return sorted(points, key=lambda point: point.sent_bytes)


def read_links(hardware: str | None, *, bytes_per_s: float | None) -> Links:
    """`bytes_per_s` wins. Nothing is known where neither is given.

    Raises ValueError for hardware that is not known, a rate that is none, and both at once.
    """
    if hardware is not None and bytes_per_s is not None:
        raise ValueError(f"--hardware {hardware} and --link_bytes_per_s {bytes_per_s:g} both name a link; keep one")
    if bytes_per_s is not None:
        if not 0 < bytes_per_s < float("inf"):
            raise ValueError(f"--link_bytes_per_s {bytes_per_s:g} must be above 0, like 300e9 for 300 GB/s")
        return Links(within=bytes_per_s, between=bytes_per_s)
    if hardware is None:
        return Links()
    found = find_hardware(hardware)
    return Links(
        within=None if found.intra is None else found.intra.bytes_per_s,
        between=None if found.inter is None else found.inter.bytes_per_s,
        ranks_per_node=found.ranks_per_node,
    )
