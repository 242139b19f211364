"""The plans as a table and as JSON: what was asked, the best layouts, the best one by kind, and what was rejected."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modeling.layout import ParallelLayout
from recipe.plan.explain import against, seconds_by_kind, why_first, why_not, why_not_fits
from recipe.plan.search import RESERVE_BYTES, Found, Plan
from recipe.plan.space import PlanRequest
from recipe.plan.step_time import mfu
from recipe.shared.flops import count_parameters, model_flops_per_token
from recipe.shared.units import duration, size

MANY_REJECTED = 12


def describe(found: Found, *, notes: Sequence[str], top: int, wanted: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield the lines that people read. `wanted` is a layout that the best one is held against.

    ValueError before the first line where it is more than there are devices for.
    """
    request = found.request
    held = None if wanted is None else against(found, wanted)
    yield from _asked(found, notes=notes)
    yield ""
    if not found.plans:
        yield f"no layout of {request.gpus} devices fits; the nearest of each size of group:"
        for rejected in why_not_fits(found):
            yield f"  {rejected.layout}: {rejected.reason}"
        if held is not None:
            yield held
        return
    shown = found.plans[:top]
    yield from _table([_HEAD, *(_row(rank, plan, found) for rank, plan in enumerate(shown, 1))])
    if any(found.idle(plan) for plan in shown):
        yield f"per GPU and MFU: of all {request.gpus} devices, those with nothing to do included"
    yield ""
    yield why_first(found)
    # A size that is only ruled out is said further down.
    judged = {plan.job.layout.tp for plan in found.plans} | {row.tp for row in found.rejected if row.lacking_bytes}
    for tp, reason in why_not(found).items():
        if tp in judged:
            yield f"why not tp={tp}: {reason}"
    if held is not None:
        yield held
    yield ""
    yield from _by_kind(found.plans[0], found)
    if found.rejected:
        yield ""
        yield f"rejected layouts: {len(found.rejected)}"
        for row in found.rejected[:MANY_REJECTED]:
            yield f"  {row.layout}: {row.reason}"
        if len(found.rejected) > MANY_REJECTED:
            yield f"  and {len(found.rejected) - MANY_REJECTED} more, which --json lists"


def as_json(
    found: Found,
    *,
    model: Mapping[str, Any],
    notes: Sequence[str],
    top: int,
    wanted: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the same for programs, in bytes and seconds."""
    request = found.request
    return {
        "model": {**model, "parameters": count_parameters(request.sizes)._asdict()},
        "request": {
            "gpus": request.gpus,
            "gpus_per_node": request.ranks_per_node,
            "hardware": request.hardware.name,
            "seq_len": request.block_size,
            "tokens_per_batch": request.sequences_per_step * request.block_size,
            "precision": request.precision,
            "skew": request.skew,
            "room_bytes": found.room_bytes,
            "reserve_bytes": RESERVE_BYTES[request.hardware.device],
        },
        "notes": list(notes),
        "why": why_first(found) if found.plans else None,
        "why_not": why_not(found) if found.plans else {},
        "against": against(found, wanted) if wanted else None,
        "plans": [plan_as_json(plan, found) for plan in found.plans[:top]],
        "rejected": [{"layout": row.layout, "reason": row.reason} for row in found.rejected],
        "sources": dict(request.hardware.sources),
    }


def plan_as_json(plan: Plan, found: Found) -> dict[str, Any]:
    """Return one plan; numbers per GPU and MFU are of all devices, idle ones included."""
    job, memory = plan.job, plan.memory
    return {
        "layout": layout_as_json(job.layout),
        "strategy": job.strategy,
        "zero_stage": job.zero_stage,
        "zero_optimization": dict(job.zero),
        "micro_batch": job.num_sequences,
        "accumulation": job.accumulation,
        "recompute": job.recompute,
        "regather": job.wire.regather,
        "overlap": job.wire.overlap,
        "experts_backend": job.experts_backend,
        "idle_gpus": found.idle(plan),
        "step_s": plan.time.step_s,
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s / found.request.gpus,
        "mfu": _mfu(plan, found),
        "time": plan.time._asdict(),
        "memory_bytes": memory.total_bytes,
        "memory": memory._asdict(),
    }


def layout_as_json(layout: ParallelLayout) -> dict[str, int]:
    return {"dp": layout.dp, "tp": layout.tp, "ep": layout.ep, "etp": layout.etp}


def _asked(found: Found, *, notes: Sequence[str]) -> Iterator[str]:
    request = found.request
    counts = count_parameters(request.sizes)
    flops = model_flops_per_token(request.sizes, attention_length=request.block_size)
    hardware, reserve = request.hardware, RESERVE_BYTES[request.hardware.device]
    tokens = request.sequences_per_step * request.block_size
    yield (
        f"model    {counts.total / 1e9:.2f} B parameters, {counts.active / 1e9:.2f} B of them for a token, "
        f"{flops / 1e9:.3g} GFLOP per token (causal attention counted once)"
    )
    yield (
        f"devices  {request.gpus} x {hardware.name}, {request.ranks_per_node} per node, {size(found.room_bytes)} each "
        f"({size(reserve)} set aside for what is no tensor), {request.precision}, {_basis(request)}"
    )
    yield f"step     {request.sequences_per_step} sequences of {request.block_size} = {tokens:,} tokens"
    if request.skew > 1:
        yield f"skew     the busiest rank has {request.skew:g} times the mean rows where ranks hold whole experts"
    for note in notes:
        yield f"note     {note}"


def _basis(request: PlanRequest) -> str:
    measured = "measured by a probe" if request.hardware.measured else "data sheets and assumed efficiencies"
    return f"speeds: {measured}"


_HEAD = (
    *("", "layout", "strategy", "ZeRO", "micro x acc", "recompute", "regather", "overlap"),
    *("memory", "step", "tokens/s", "per GPU", "MFU", "idle"),
)


def _row(rank: int, plan: Plan, found: Found) -> tuple[str, ...]:
    job = plan.job
    return (
        str(rank),
        str(job.layout),
        job.strategy if job.layout.tp > 1 else "-",
        str(job.zero_stage),
        f"{job.num_sequences} x {job.accumulation}",
        "yes" if job.recompute else "no",
        "yes" if job.wire.regather else "no",
        "yes" if job.wire.overlap else "no",
        size(plan.memory.total_bytes),
        duration(plan.time.step_s),
        f"{plan.tokens_per_s:,.0f}",
        f"{plan.tokens_per_s / found.request.gpus:,.0f}",
        f"{_mfu(plan, found):.1%}",
        str(found.idle(plan) or "-"),
    )


def _mfu(plan: Plan, found: Found) -> float:
    """Return the MFU over all devices that were asked for."""
    at_work = plan.job.layout.world_size / found.request.gpus
    return mfu(plan.job, plan.time.step_s, found.request.hardware) * at_work


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align columns to their widest entry; all but the second and third to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if column in (1, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _by_kind(plan: Plan, found: Found) -> Iterator[str]:
    """Show memory and time of a plan side by side, each with its share."""
    memory = {name: value for name, value in plan.memory._asdict().items() if isinstance(value, int)}
    seconds = seconds_by_kind(plan)
    left = [
        *((name, size(value), f"{value / plan.memory.total_bytes:.0%}") for name, value in memory.items()),
        ("together", size(plan.memory.total_bytes), f"{plan.memory.total_bytes / found.room_bytes:.0%} of the room"),
    ]
    right = [
        *((name, duration(value), f"{value / plan.time.step_s:.0%}") for name, value in seconds.items() if value),
        ("together", duration(plan.time.step_s), ""),
        ("hidden transfers", duration(plan.time.hidden_s), ""),
    ]
    yield f"{'memory of a rank, the best plan':<52}time of a step on the slowest rank"
    for row in range(max(len(left), len(right))):
        name, value, share = left[row] if row < len(left) else ("", "", "")
        other = right[row] if row < len(right) else ("", "", "")
        yield f"  {name:<14}{value:>10}  {share:<22}    {other[0]:<18}{other[1]:>9}  {other[2]}".rstrip()
