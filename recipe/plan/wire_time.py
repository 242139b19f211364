"""Seconds of a step's collectives: alpha times their steps plus bytes over bandwidth, by where ranks are.

Rings, and between a GPU's nodes for sums the cheaper of a ring and a tree, as NCCL chooses (src/graph/tuning.cc, whose
counts of steps these are). gloo sums in a ring whatever the size is.
"""

from collections.abc import Callable, Iterable, Mapping
from math import gcd, log2
from typing import NamedTuple

from recipe.plan.hardware_values import Hardware, Link
from recipe.plan.job import Job
from recipe.plan.traffic import Sent

# How often a rank sends in one collective of a ring of n ranks.
STEPS: Mapping[str, Callable[[int], int]] = {
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_reduce": lambda n: 2 * (n - 1),
    "all_to_all": lambda n: n - 1,
    "broadcast": lambda n: n - 1,
}


class Ring(NamedTuple):
    """Ranks that send to each other: how many there are, and how many of them share a node."""

    num_ranks: int
    per_node: int


class WireTime(NamedTuple):
    """Seconds of all calls of one row together, each as if alone."""

    sent: Sent
    seconds: float


def ring_of(axis: str, job: Job, *, ranks_per_node: int) -> Ring:
    """Return the ranks of one axis: a group's are neighbours, those of the others are a group apart."""
    tp = job.layout.tp
    if axis == "dp":
        return Ring(job.layout.dp, min(job.layout.dp, max(1, ranks_per_node // tp)))
    size = max(1, tp // job.sizes.num_key_value_heads) if axis == "kv" else tp
    # Where groups do not fill nodes, some are cut; no piece is smaller than this.
    per_node = size if job.layout.world_size <= ranks_per_node else gcd(size, ranks_per_node)
    return Ring(size, per_node)


def wire_times(rows: Iterable[Sent], job: Job, *, hardware: Hardware, ranks_per_node: int) -> list[WireTime]:
    """Return each row's seconds; ValueError where ranks are on several nodes without a link between them."""
    rings = {axis: ring_of(axis, job, ranks_per_node=ranks_per_node) for axis in ("group", "kv", "dp")}
    times = []
    for row in rows:
        if not row.num_calls:
            continue
        seconds = row.num_calls * call_seconds(
            row.op, row.sent_bytes / row.num_calls, ring=rings[row.axis], hardware=hardware
        )
        times.append(WireTime(row, seconds))
    return times


def call_seconds(op: str, sent_bytes: float, *, ring: Ring, hardware: Hardware) -> float:
    """Return the seconds of one collective in which every rank sends this much, counted as in a ring.

    An exchange sends each part by its own way, inside and between nodes at the same time.
    ValueError where the hardware has no such link.
    """
    size, here = ring
    if size == 1:
        return 0.0
    if size <= here:
        return _within_node(hardware).seconds(op, num_steps=STEPS[op](size), sent_bytes=sent_bytes)
    if op == "all_to_all":
        outside = (size - here) / (size - 1)
        inter = _between_nodes(hardware)
        outside_s = inter.seconds(op, num_steps=STEPS[op](size), sent_bytes=outside * sent_bytes)
        if here == 1:
            return outside_s
        inside_bytes = (1 - outside) * sent_bytes
        return max(outside_s, _within_node(hardware).seconds(op, num_steps=here - 1, sent_bytes=inside_bytes))
    if op == "all_reduce" and hardware.device == "cuda":
        tree_bytes = sent_bytes * size / (size - 1)  # a ring spares every rank its own part
        return min(
            _crossing(op, sent_bytes, steps=_ring_steps(op, ring), ring=ring, hardware=hardware),
            _crossing(op, tree_bytes, steps=_tree_steps(ring), ring=ring, hardware=hardware),
        )
    return _crossing(op, sent_bytes, steps=_ring_steps(op, ring), ring=ring, hardware=hardware)


def busy_share(ring: Ring, *, hardware: Hardware) -> float:
    """Return the share of a transfer's time for which it keeps a rank of the ring from computing."""
    if ring.num_ranks == 1:
        return 0.0
    return (_between_nodes if ring.num_ranks > ring.per_node else _within_node)(hardware).busy


def fewest_steps(op: str, size: int, *, device: str) -> int:
    """Return the steps among nodes of one rank each, by which a fit of measured times divides its constant."""
    if op == "all_reduce" and device == "cuda":
        return min(STEPS[op](size), round(_tree_steps(Ring(size, 1)).outside))
    return STEPS[op](size)


class Steps(NamedTuple):
    """Sends that follow each other, inside nodes and between them."""

    inside: float
    outside: float


def _ring_steps(op: str, ring: Ring) -> Steps:
    """Return the steps of a ring, which leaves each node once in a turn."""
    total = STEPS[op](ring.num_ranks)
    outside = total * (_num_nodes(ring) - 1) / (ring.num_ranks - 1)
    return Steps(total - outside, outside)


def _tree_steps(ring: Ring) -> Steps:
    """Return the steps up and down a chain in each node and a binary tree over the nodes."""
    return Steps(2.0 * (ring.per_node - 1), 2 * log2(_num_nodes(ring)))


def _num_nodes(ring: Ring) -> float:
    return ring.num_ranks / ring.per_node


def _crossing(op: str, sent_bytes: float, *, steps: Steps, ring: Ring, hardware: Hardware) -> float:
    """Return the seconds at the pace of the slowest part: links inside, or the network of a node's ranks together."""
    inter = _between_nodes(hardware)
    outside_s = inter.seconds(op, num_steps=0, sent_bytes=sent_bytes / ring.per_node)
    wait_s = inter.seconds(op, num_steps=steps.outside, sent_bytes=0)
    if ring.per_node == 1:
        return wait_s + outside_s
    intra = _within_node(hardware)
    wait_s += intra.seconds(op, num_steps=steps.inside, sent_bytes=0)
    return wait_s + max(outside_s, intra.seconds(op, num_steps=0, sent_bytes=sent_bytes))


def _within_node(hardware: Hardware) -> Link:
    if hardware.intra is None:
        raise ValueError(
            f"hardware {hardware.name} has no link between the ranks of a node, for it was measured with one on each; "
            "plan for one, or run `gather-moe probe --ranks N`"
        )
    return hardware.intra


def _between_nodes(hardware: Hardware) -> Link:
    if hardware.inter is None:
        raise ValueError(
            f"hardware {hardware.name} has no link between nodes, for it was measured on one; plan for at most "
            f"{hardware.ranks_per_node} ranks, or run `gather-moe probe` on ranks of several nodes"
        )
    return hardware.inter
