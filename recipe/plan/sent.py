"""The rows that planned and counted collectives are compared by."""

from collections.abc import Iterable
from typing import NamedTuple


class Sent(NamedTuple):
    """Collectives of one kind, for one purpose, along one axis of the mesh.

    axis        "group" (its tp ranks), "kv" (those of them with the same key-value heads), "dp"
    op          "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"
    sent_bytes  by one rank, as a ring sends them
    """

    axis: str
    op: str
    purpose: str
    num_calls: int
    sent_bytes: float


def ring_bytes(op: str, num_bytes: float, *, size: int) -> float:
    """What each of `size` ranks sends of a whole of `num_bytes`, a gather's being the result."""
    share = num_bytes * (size - 1) / size
    return 2 * share if op == "all_reduce" else share


def add_up(rows: Iterable[Sent]) -> tuple[Sent, ...]:
    """Rows of the same axis, op and purpose as one, sorted."""
    sums: dict[tuple[str, str, str], tuple[int, float]] = {}
    for axis, op, purpose, num_calls, sent_bytes in rows:
        calls, total = sums.get((axis, op, purpose), (0, 0.0))
        sums[axis, op, purpose] = (calls + num_calls, total + sent_bytes)
    return tuple(Sent(*key, *value) for key, value in sorted(sums.items()))
