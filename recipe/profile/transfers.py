"""Transfers of all ranks beside each other: who waited for whom, what was sent, and how fast against the link.

A collective among all of a group begins to move when its last rank has come, and ends for all at about the same time.
So the rank with the shortest duration came last, and what the others' durations have more is waiting. No clock is
compared with another's. In a broadcast, say, ranks come and go at different times, so nothing is said of waiting there.
"""

from collections.abc import Mapping, Sequence
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
        """Return whether it leaves a node; ranks that are not known are taken for a node's if they fit there."""
        if self.ranks_per_node is None:
            return False
        if transfer.ranks is not None:
            return len({rank // self.ranks_per_node for rank in transfer.ranks}) > 1
        return transfer.num_ranks is not None and transfer.num_ranks > self.ranks_per_node

    def of(self, route: "Route") -> float | None:
        return self.between if route.between else self.within


class Unpaired(NamedTuple):
    """Collectives of one operation and group whose ranks have different numbers of them in their traces.

    By rank; of one rank alone where its trace does not say among whom they were.
    """

    op: str
    num_calls: dict[int, int]


class Route(NamedTuple):
    """Collectives that are counted together. `between`: nodes, as far as they are known."""

    op: str
    purpose: str
    among: str
    between: bool = False


def match(ranks: Sequence[RankSpans]) -> list[Unpaired]:
    """Set how long its rank waited in every collective; return the groups in which nobody can be held to have waited.

    The n-th collective of a group in one rank's trace is the n-th of that group in the others': in the whole trace,
    since the same one may run in one step of one rank's clock and in the next of another's. Where ranks have different
    numbers of them, or a trace does not say which group it was, nobody is held to have waited.
    """
    groups: dict[tuple[str, object], dict[int, list[Transfer]]] = {}
    for spans in ranks:
        for transfer in spans.transfers:
            key = (transfer.op, _group_key(transfer, trace=spans.trace))
            groups.setdefault(key, {}).setdefault(spans.trace.rank, []).append(transfer)
    in_steps = {id(transfer) for spans in ranks for step in spans.steps for transfer in step.transfers}
    traced = {spans.trace.rank for spans in ranks}
    found: list[Unpaired] = []
    for (op, _), by_rank in groups.items():
        if op not in AMONG_ALL:
            continue
        unpaired = _unpaired(op, by_rank, traced=traced)
        if unpaired is None:
            for calls in zip(*by_rank.values(), strict=True):
                moves_s = min(call.end_s - call.start_s for call in calls)
                for call in calls:
                    call.wait_s = call.end_s - call.start_s - moves_s
        elif any(id(call) in in_steps for calls in by_rank.values() for call in calls):
            found.append(unpaired)
    return found


def _unpaired(op: str, by_rank: Mapping[int, list[Transfer]], *, traced: set[int]) -> Unpaired | None:
    """Return None where the n-th of one rank are the n-th of the others."""
    first = next(iter(by_rank.values()))[0]
    members = by_rank.keys() | (set(first.ranks or ()) & traced)
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


def read_links(hardware: str | None, *, bytes_per_s: float | None) -> Links:
    """Return the links of a hardware, or of one rate; nothing is known of them where neither is given.

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
