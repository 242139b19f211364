"""What a plan's numbers are made of: every line of its memory with its formula, every collective, every source."""

from collections.abc import Iterator

from recipe.plan.memory import explain_memory
from recipe.plan.search import Found, Plan
from recipe.plan.traffic import planned_traffic
from recipe.plan.zero_overlap import describe_overlap
from recipe.shared.units import size


def describe_basis(plan: Plan, found: Found) -> Iterator[str]:
    """Lines for people, of one plan."""
    yield ""
    yield f"memory at the fullest moment, {plan.memory.moment}; T tokens of a group, t of a rank, b bytes of a number"
    rows = sorted(explain_memory(plan.job), key=lambda row: -row.num_bytes)
    for basis in dict.fromkeys(row.basis for row in rows):
        yield f"  {basis}"
        for row in rows:
            if row.basis == basis:
                yield f"  {size(row.num_bytes):>9}  {row.kind:<12}{row.what}: {row.formula}"
    yield ""
    yield "sent by a rank in a step"
    sent = planned_traffic(plan.job)
    for axis, op, purpose, num_calls, sent_bytes in sorted(sent, key=lambda row: -row.sent_bytes):
        yield f"  {size(sent_bytes):>9}  {axis:<6}{op:<15}{purpose} in {num_calls:,} calls"
    for assumed in describe_overlap(plan.job):
        yield f"  {assumed}"
    yield ""
    yield f"numbers of {found.request.hardware.name}"
    for name, source in found.request.hardware.sources.items():
        yield f"  {name}: {source}"
