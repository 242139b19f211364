"""What a rank sends, as rows by axis, operation and purpose: planned, counted in a dry run, or in a real step."""

from collections.abc import Iterable
from typing import NamedTuple


class Sent(NamedTuple):
    """Collectives of one kind, for one purpose, along one axis of the mesh.

    axis        "group" (its tp ranks), "kv" (those of them with the same key-value heads), "dp"
    op          "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"
    purpose     the part of the step that sends; "zero" is DeepSpeed
    sent_bytes  by one rank, as a ring sends them
    """

    axis: str
    op: str
    purpose: str
    num_calls: int
    sent_bytes: float

    def times(self, number: int) -> "Sent":
        return self._replace(num_calls=number * self.num_calls, sent_bytes=number * self.sent_bytes)


def add_up(rows: Iterable[Sent]) -> tuple[Sent, ...]:
    """Join rows of the same axis, op and purpose, sorted."""
    sums: dict[tuple[str, str, str], tuple[int, float]] = {}
    for axis, op, purpose, num_calls, sent_bytes in rows:
        calls, total = sums.get((axis, op, purpose), (0, 0.0))
        sums[axis, op, purpose] = (calls + num_calls, total + sent_bytes)
    return tuple(Sent(*key, *value) for key, value in sorted(sums.items()))
