"""What a dry run counted, alone or beside the plan, as lines for people and as one JSON object.

The only file here that asks the planner for numbers: they are printed beside those counted, and nothing else.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from recipe.dry_run.dry_run import DryRun
from recipe.dry_run.fake_world import even_parts
from recipe.dry_run.ledger import Sent, add_up
from recipe.dry_run.live_memory import BLOCK_KINDS, HEAD, block_phase
from recipe.plan.job import Job
from recipe.plan.memory import Moment, moments, predict_memory
from recipe.plan.traffic import planned_traffic
from recipe.shared.units import size

WORTH_A_LINE = 2**10  # bytes; losses themselves are a few
MEMORY_KINDS = ("weights", "gradients", "activations", "gathered", "logits")


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


class Comparison(NamedTuple):
    """What was counted beside the plan of it."""

    rows: tuple[Compared, ...]
    memory: tuple[ComparedMemory, ...]

    @property
    def is_equal(self) -> bool:
        """Whether all bytes sent are."""
        return all(row.is_equal for row in self.rows)


def compare(found: DryRun, job: Job, *, rank: int = 0) -> Comparison:
    """Pair counted with planned rows, and memory at the fullest moment in the part that was counted.

    A dense layer's products are counted with attention's, so planned too. Calls are those of tensors on a CPU, where
    the head takes fewer tokens at a time. Rows of an exchange are planned for the rank that was run: where they do not
    divide, it sends a few more or less than the mean. Memory is that of one micro-batch of a rank without ZeRO.
    """
    run = job.execution
    as_run = replace(job, execution=replace(run, overlap_chunks=job.num_chunks) if run.overlap else run, device="cpu")
    planned = [Sent(*row) for row in planned_traffic(replace(as_run, rho=even_share(job, rank=rank)))]
    as_counted = [row._replace(purpose="attention") if row.purpose == "dense" else row for row in planned]
    ours, theirs = _by_key(found.rows), _by_key(add_up(as_counted))
    rows = [Compared(*key, ours.get(key), theirs.get(key)) for key in sorted(ours.keys() | theirs.keys())]
    without_zero = replace(as_run, layout=replace(job.layout, dp=1), zero={"stage": 0}, accumulation=1)
    sums = max(
        map(_by_kind, _in_part(found.moment, moments(without_zero), job=job)), key=lambda kinds: sum(kinds.values())
    )
    memory = [ComparedMemory(kind, found.memory_bytes.get(kind, 0), round(sums[kind])) for kind in MEMORY_KINDS]
    return Comparison(tuple(rows), tuple(memory))


def even_share(job: Job, *, rank: int) -> float:
    """Return the rows that `rank` sends in an exchange, over the mean of all ranks: 1 where they divide."""
    tp = job.layout.tp
    if job.moe_strategy != "all_to_all" or tp == 1:
        return 1.0
    total = job.num_tokens * job.sizes.num_experts_per_tok // tp
    return (total - even_parts(total, size=tp)[rank % tp]) / (total * (tp - 1) / tp)


def describe(found: DryRun, job: Job, *, rank: int, comparison: Comparison | None) -> Iterator[str]:
    """Write lines for a terminal, with the plan's numbers where they are given."""
    yield f"rank {rank} of {job.layout.world_size}, {job.layout}, ZeRO-{job.zero_stage}, {job.precision}, one step:"
    head, columns = ("axis", "op", "purpose", "calls", "bytes sent"), ("calls planned", "bytes planned", "")
    if comparison is None:
        yield from _aligned([head, *([*row[:3], *_numbers(row)] for row in found.rows)], num_left=3)
    else:
        cells = [(*row[:3], *_numbers(row.counted), *_numbers(row.planned), _verdict(row)) for row in comparison.rows]
        yield from _aligned([(*head, *columns), *cells], num_left=3)
    yield f"in all {size(found.sent_bytes)}"
    total = sum(found.memory_bytes.values())
    yield f"memory of a micro-batch at its fullest, {found.moment}: {size(total)}, states as without ZeRO"
    if comparison is None:
        kinds = sorted(found.memory_bytes.items(), key=lambda entry: -entry[1])
        yield from (f"  {size(num_bytes):>9}  {kind}" for kind, num_bytes in kinds if num_bytes >= WORTH_A_LINE)
    else:
        shown = [row for row in comparison.memory if max(row.counted_bytes, row.planned_bytes) >= WORTH_A_LINE]
        memory = [(row.kind, size(row.counted_bytes), size(row.planned_bytes)) for row in shown]
        yield from _aligned([("kind", "counted", "planned"), *memory], num_left=1)
    yield from (f"note: {note}" for note in found.notes)
    if comparison is not None:
        rows = comparison.rows
        unequal = sum(not row.is_equal for row in rows)
        yield f"{unequal} of {len(rows)} rows differ from the plan" if unequal else "the plan is equal to the byte"
        other = sum(row.is_equal and not row.has_equal_calls for row in rows)
        if other:
            yield f"{other} rows of equal bytes are sent in other numbers of calls than planned"


def as_json(found: DryRun, job: Job, *, rank: int, comparison: Comparison | None) -> dict[str, Any]:
    """Return the same for programs."""
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
    if comparison is not None:
        step = predict_memory(job)
        facts["compare"] = {
            "collective_bytes_equal": comparison.is_equal,
            "collective_calls_equal": all(row.has_equal_calls for row in comparison.rows),
            "collectives": [_compared_json(row) for row in comparison.rows],
            "memory": [row._asdict() for row in comparison.memory],
            "planned_step_memory_bytes": {"peak": step.peak_bytes, "with_margin": step.total_bytes},
        }
    return facts


def _by_key(rows: Iterable[Sent]) -> dict[tuple[str, str, str], Sent]:
    return {(row.axis, row.op, row.purpose): row for row in rows}


def _in_part(part: str, all_moments: Sequence[Moment], *, job: Job) -> list[Moment]:
    """Return the plan's moments of a part of a micro-batch; those of all parts where none is named so."""
    of_micro_batch = [m for m in all_moments if m.name == "loss" or m.name.startswith("backward of layer ")]
    starts = ["loss"] if part == HEAD else []
    for kind, is_dense in BLOCK_KINDS.items():
        layers = [i + 1 for i in range(job.sizes.num_hidden_layers) if (i in job.sizes.dense_layers) is is_dense]
        ends = {"first": layers[0], "last": layers[-1]} if layers else {}
        starts += [f"backward of layer {n}," for end, n in ends.items() if part == block_phase(end, kind)]
    return [m for m in of_micro_batch if m.name.startswith(tuple(starts))] or of_micro_batch


def _by_kind(moment: Moment) -> dict[str, float]:
    return {kind: sum(row.num_bytes for row in moment.rows if row.kind == kind) for kind in MEMORY_KINDS}


def _numbers(row: Sent | None) -> tuple[str, str]:
    return ("-", "-") if row is None else (f"{row.num_calls:,}", f"{row.sent_bytes:,.0f}")


def _verdict(row: Compared) -> str:
    if not row.is_equal:
        return "differs"
    return "" if row.has_equal_calls else "other calls"


def _aligned(lines: Sequence[Sequence[str]], *, num_left: int) -> Iterator[str]:
    """Align columns two spaces apart, the first ones to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.ljust(w) if i < num_left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _compared_json(row: Compared) -> dict[str, Any]:
    sides = {"counted": row.counted, "planned": row.planned}
    calls = {f"{name}_calls": 0 if sent is None else sent.num_calls for name, sent in sides.items()}
    sent_bytes = {f"{name}_bytes": 0.0 if sent is None else sent.sent_bytes for name, sent in sides.items()}
    place = {"axis": row.axis, "op": row.op, "purpose": row.purpose}
    return {**place, **calls, **sent_bytes, "equal": row.is_equal, "calls_equal": row.has_equal_calls}
