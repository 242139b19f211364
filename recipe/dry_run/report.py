"""What a dry run counted, alone or beside the plan, as lines for people and as one JSON object.

The only file here that asks the planner for numbers: they are printed beside those counted, and nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from recipe.dry_run.dry_run import DryRun
from recipe.dry_run.fake_world import even_parts
from recipe.dry_run.kernels import LAYER_PARTS, KernelReport, Kernels
from recipe.dry_run.live_memory import BLOCK_KINDS, HEAD, block_phase
from recipe.plan.job import Job
from recipe.plan.memory import Moment, moments, predict_memory
from recipe.plan.traffic import planned_traffic
from recipe.shared.sent import Sent, add_up
from recipe.shared.units import aligned, size

WORTH_A_LINE = 2**10  # bytes; losses themselves are a few
PHASES = ("forward", "backward")
MEMORY_KINDS = ("weights", "gradients", "activations", "gathered", "logits")


class Compared(NamedTuple):
    """Rows of one axis, op and purpose that were counted and planned; one of no calls where there is none."""

    counted: Sent
    planned: Sent

    @property
    def is_equal(self) -> bool:
        """To the byte; numbers of calls apart."""
        return abs(self.counted.sent_bytes - self.planned.sent_bytes) < 0.5

    @property
    def has_equal_calls(self) -> bool:
        return self.counted.num_calls == self.planned.num_calls

    @property
    def verdict(self) -> str:
        """What differs, in words."""
        return "differs" if not self.is_equal else "" if self.has_equal_calls else "other calls"


class Comparison(NamedTuple):
    """What was counted beside the plan of it.

    memory  by kind the bytes counted at the fullest moment and those planned at the same kind of moment
    """

    rows: tuple[Compared, ...]
    memory: Mapping[str, tuple[int, int]]

    @property
    def is_equal(self) -> bool:
        """Whether all bytes sent are."""
        return all(row.is_equal for row in self.rows)


def compare(found: DryRun, job: Job, *, rank: int = 0) -> Comparison:
    """Pair counted with planned rows, and memory at the fullest moment in the part that was counted.

    A dense layer's products are counted with attention's, so planned too. Rows of an exchange are planned for the rank
    that was run: where they do not divide, it sends a few more or less than the mean. Memory is that of one micro-batch
    of a rank without ZeRO.
    """
    planned = planned_traffic(replace(job, rho=even_share(job, rank=rank)))
    as_counted = [row._replace(purpose="attention") if row.purpose == "dense" else row for row in planned]
    ours, theirs = ({row[:3]: row for row in rows} for rows in (found.rows, add_up(as_counted)))
    rows = [
        Compared(ours.get(key, Sent(*key, 0, 0.0)), theirs.get(key, Sent(*key, 0, 0.0)))
        for key in sorted(ours | theirs)
    ]
    without_zero = replace(job, layout=replace(job.layout, dp=1), zero={"stage": 0}, accumulation=1)
    in_part = [moment.by_kind() for moment in _in_part(found.moment, moments(without_zero), job=job)]
    planned_bytes = max(in_part, key=lambda sums: sum(sums[kind] for kind in MEMORY_KINDS))
    memory = {kind: (found.memory_bytes.get(kind, 0), round(planned_bytes[kind])) for kind in MEMORY_KINDS}
    return Comparison(tuple(rows), memory)


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
    table: list[tuple[str, ...]] = [("axis", "op", "purpose", "calls", "bytes sent")]
    if comparison is None:
        table += [(*row[:3], *_numbers(row)) for row in found.rows]
    else:
        table = [(*table[0], "calls planned", "bytes planned", "")]
        table += [
            (*row.counted[:3], *_numbers(row.counted), *_numbers(row.planned), row.verdict) for row in comparison.rows
        ]
    yield from (f"  {line}" for line in aligned(table, left=(0, 1, 2)))
    yield f"in all {size(found.sent_bytes)}"
    total = sum(found.memory_bytes.values())
    yield f"memory of a micro-batch at its fullest, {found.moment}: {size(total)}, states as without ZeRO"
    if comparison is None:
        kinds = sorted(found.memory_bytes.items(), key=lambda entry: -entry[1])
        yield from (f"  {size(num_bytes):>9}  {kind}" for kind, num_bytes in kinds if num_bytes >= WORTH_A_LINE)
    else:
        memory = [(kind, *map(size, both)) for kind, both in comparison.memory.items() if max(both) >= WORTH_A_LINE]
        yield from (f"  {line}" for line in aligned([("kind", "counted", "planned"), *memory], left=(0,)))
    if found.kernels is not None:
        yield from _describe_kernels(found.kernels, accumulation=job.accumulation)
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
    if found.kernels is not None:
        facts["kernels"] = _kernels_as_json(found.kernels, accumulation=job.accumulation)
    if comparison is not None:
        step = predict_memory(job)
        facts["compare"] = {
            "collective_bytes_equal": comparison.is_equal,
            "collective_calls_equal": all(row.has_equal_calls for row in comparison.rows),
            "collectives": [
                {
                    **dict(zip(("axis", "op", "purpose"), row.counted, strict=False)),
                    "counted_calls": row.counted.num_calls,
                    "planned_calls": row.planned.num_calls,
                    "counted_bytes": row.counted.sent_bytes,
                    "planned_bytes": row.planned.sent_bytes,
                    "equal": row.is_equal,
                    "calls_equal": row.has_equal_calls,
                }
                for row in comparison.rows
            ],
            "memory": [
                {"kind": kind, "counted_bytes": counted, "planned_bytes": planned}
                for kind, (counted, planned) in comparison.memory.items()
            ],
            "planned_step_memory_bytes": {"peak": step.peak_bytes, "with_margin": step.total_bytes},
        }
    return facts


def _describe_kernels(found: KernelReport, *, accumulation: int) -> Iterator[str]:
    yield "a layer's operators, by what they belong to:"
    table: list[tuple[str, ...]] = [("part", "", "launches", "read", "written", "TFLOP")]
    for part in (*LAYER_PARTS, None):
        for phase in PHASES:
            row = found.total(phase, part=part)
            if row.launches:
                table.append((part or "all", phase, *_work(row)))
    yield from (f"  {line}" for line in aligned(table, left=(0, 1)))
    step = [found.total(phase, rows=found.micro_batch).times(accumulation) for phase in PHASES]
    yield "a step's, without ZeRO and the optimizer:"
    table = [("", "launches", "read", "written", "TFLOP"), *((row.phase, *_work(row)) for row in step)]
    yield from (f"  {line}" for line in aligned(table, left=(0,)))
    yield f"the largest tensor of experts' rows: {size(found.largest_rows_bytes)}"
    waits = ", ".join(f"{number * accumulation} x {name}" for name, number in found.host_waits.items())
    yield f"the host waits for the device: {waits or 'never'}"


def _work(row: Kernels) -> tuple[str, ...]:
    return f"{row.launches:,.0f}", size(row.read_bytes), size(row.written_bytes), f"{row.flops / 1e12:.3f}"


def _kernels_as_json(found: KernelReport, *, accumulation: int) -> dict[str, Any]:
    def numbers(row: Kernels) -> dict[str, float]:
        return {"launches": row.launches, "bytes": row.bytes, "flops": row.flops}

    layer, step = {}, {}
    for phase in PHASES:
        experts_bytes = found.total(phase, part="experts").bytes
        parts = {part: numbers(found.total(phase, part=part)) for part in LAYER_PARTS}
        layer[phase] = {**numbers(found.total(phase)), "experts_bytes": experts_bytes, "parts": parts}
        step[phase] = numbers(found.total(phase, rows=found.micro_batch).times(accumulation))
    return {
        "layer": layer,
        "step": step,
        "host_syncs": accumulation * sum(found.host_waits.values()),
        "largest_transient_bytes": found.largest_rows_bytes,
    }


def _in_part(part: str, all_moments: Sequence[Moment], *, job: Job) -> list[Moment]:
    """Return the plan's moments of a part of a micro-batch; those of all parts where none is named so."""
    of_micro_batch = [m for m in all_moments if m.name == "loss" or m.name.startswith("backward of layer ")]
    starts = ["loss"] if part == HEAD else []
    for kind, is_dense in BLOCK_KINDS.items():
        layers = [i + 1 for i in range(job.sizes.num_hidden_layers) if (i in job.sizes.dense_layers) is is_dense]
        ends = {"first": layers[0], "last": layers[-1]} if layers else {}
        starts += [f"backward of layer {n}," for end, n in ends.items() if part == block_phase(end, kind)]
    return [m for m in of_micro_batch if m.name.startswith(tuple(starts))] or of_micro_batch


def _numbers(row: Sent) -> tuple[str, str]:
    return (f"{row.num_calls:,}", f"{row.sent_bytes:,.0f}") if row.num_calls else ("-", "-")
