"""What a dry run finds, alone and beside the plan."""

from collections.abc import Mapping
from typing import NamedTuple

from recipe.plan.traffic import Sent


class DryRun(NamedTuple):
    """rows: of a whole step of the rank. notes: what was assumed, in words.

    memory_bytes  alive at the fullest moment of a micro-batch, by what they are: weights and gradients as without ZeRO
    moment        when that is
    """

    rows: tuple[Sent, ...]
    memory_bytes: Mapping[str, int]
    moment: str
    notes: tuple[str, ...]

    @property
    def sent_bytes(self) -> float:
        return sum(row.sent_bytes for row in self.rows)


class Compared(NamedTuple):
    """A row that was counted, planned, or both; None where there is none."""

    axis: str
    op: str
    purpose: str
    counted: Sent | None
    planned: Sent | None

    @property
    def is_equal(self) -> bool:
        """To the byte; numbers of calls apart."""
        counted, planned = (0.0 if row is None else row.sent_bytes for row in (self.counted, self.planned))
        return abs(counted - planned) < 0.5

    @property
    def has_equal_calls(self) -> bool:
        counted, planned = (0 if row is None else row.num_calls for row in (self.counted, self.planned))
        return counted == planned


class ComparedMemory(NamedTuple):
    """Bytes of one kind at the moment that was counted; the plan is of the same kind of moment, not of its bytes."""

    kind: str
    counted_bytes: int
    planned_bytes: int
