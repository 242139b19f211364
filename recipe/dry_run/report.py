"""What a dry run found, as lines for people and as one JSON object."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recipe.dry_run.found import Compared, ComparedMemory, DryRun
from recipe.plan.job import Job
from recipe.plan.memory import predict_memory
from recipe.plan.traffic import Sent
from recipe.shared.units import size

WORTH_A_LINE = 2**10  # bytes; losses themselves are a few


def describe(
    found: DryRun,
    job: Job,
    *,
    rank: int,
    compared: Sequence[Compared] | None,
    memory: Sequence[ComparedMemory] = (),
) -> Iterator[str]:
    """`compared` None: the plan is not asked for."""
    yield f"rank {rank} of {job.layout.world_size}, {job.layout}, ZeRO-{job.zero_stage}, {job.precision}, one step:"
    yield from _table(found.rows) if compared is None else _compared_table(compared)
    yield f"in all {size(found.sent_bytes)}"
    total = sum(found.memory_bytes.values())
    yield f"memory of a micro-batch at its fullest, {found.moment}: {size(total)}, states as without ZeRO"
    if compared is None:
        kinds = sorted(found.memory_bytes.items(), key=lambda entry: -entry[1])
        yield from (f"  {size(num_bytes):>9}  {kind}" for kind, num_bytes in kinds if num_bytes >= WORTH_A_LINE)
    else:
        yield from _memory_table(memory)
    for note in found.notes:
        yield f"note: {note}"
    if compared is not None:
        unequal = sum(not row.is_equal for row in compared)
        yield f"{unequal} of {len(compared)} rows differ from the plan" if unequal else "the plan is equal to the byte"
        other = sum(row.is_equal and not row.has_equal_calls for row in compared)
        if other:
            yield f"{other} rows of equal bytes are sent in other numbers of calls than planned"


def as_json(
    found: DryRun,
    job: Job,
    *,
    rank: int,
    compared: Sequence[Compared] | None,
    memory: Sequence[ComparedMemory] = (),
) -> dict[str, Any]:
    layout = job.layout
    facts = {
        "rank": rank,
        "layout": {"dp": layout.dp, "tp": layout.tp, "ep": layout.ep, "etp": layout.etp},
        "zero_stage": job.zero_stage,
        "precision": job.precision,
        "strategy": job.moe_strategy,
        "accumulation": job.accumulation,
        "collectives": [row._asdict() for row in found.rows],
        "sent_bytes": found.sent_bytes,
        "memory_bytes": {**found.memory_bytes},
        "memory_moment": found.moment,
        "notes": list(found.notes),
    }
    if compared is not None:
        step = predict_memory(job)
        facts["compare"] = {
            "collective_bytes_equal": all(row.is_equal for row in compared),
            "collective_calls_equal": all(row.has_equal_calls for row in compared),
            "collectives": [_compared_json(row) for row in compared],
            "memory": [row._asdict() for row in memory],
            "planned_step_memory_bytes": {"peak": step.peak_bytes, "with_margin": step.total_bytes},
        }
    return facts


def _table(rows: Sequence[Sent]) -> Iterator[str]:
    cells = [(row.axis, row.op, row.purpose, f"{row.num_calls:,}", f"{row.sent_bytes:,.0f}") for row in rows]
    yield from _aligned([("axis", "op", "purpose", "calls", "bytes sent"), *cells], num_left=3)


def _compared_table(rows: Sequence[Compared]) -> Iterator[str]:
    cells = [(*row[:3], *_numbers(row.counted), *_numbers(row.planned), _verdict(row)) for row in rows]
    head = ("axis", "op", "purpose", "calls", "bytes sent", "calls planned", "bytes planned", "")
    yield from _aligned([head, *cells], num_left=3)


def _verdict(row: Compared) -> str:
    if not row.is_equal:
        return "differs"
    return "" if row.has_equal_calls else "other calls"


def _memory_table(rows: Sequence[ComparedMemory]) -> Iterator[str]:
    shown = [row for row in rows if max(row.counted_bytes, row.planned_bytes) >= WORTH_A_LINE]
    cells = [(row.kind, size(row.counted_bytes), size(row.planned_bytes)) for row in shown]
    yield from _aligned([("kind", "counted", "planned"), *cells], num_left=1)


def _numbers(row: Sent | None) -> tuple[str, str]:
    return ("-", "-") if row is None else (f"{row.num_calls:,}", f"{row.sent_bytes:,.0f}")


def _aligned(lines: Sequence[Sequence[str]], *, num_left: int) -> Iterator[str]:
    """Columns two spaces apart, the first ones to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            f"{cell:<{width}}" if i < num_left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  " + "  ".join(cells).rstrip()


def _compared_json(row: Compared) -> Mapping[str, Any]:
    def fields(sent: Sent | None, kind: str) -> dict[str, Any]:
        calls, sent_bytes = (0, 0.0) if sent is None else (sent.num_calls, sent.sent_bytes)
        return {f"{kind}_calls": calls, f"{kind}_bytes": sent_bytes}

    place = {"axis": row.axis, "op": row.op, "purpose": row.purpose}
    numbers = {**fields(row.counted, "counted"), **fields(row.planned, "planned")}
    return {**place, **numbers, "equal": row.is_equal, "calls_equal": row.has_equal_calls}
