"""The plans found, for people as a table and in words, for programs as JSON, and for a run as its DeepSpeed JSON."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from errno import EACCES, EISDIR, ENOENT
from itertools import zip_longest
from math import lcm
from pathlib import Path
from typing import Any

from modeling.layout import ParallelLayout
from recipe.plan.flags import OUTPUT_DIR
from recipe.plan.job import Job
from recipe.plan.memory import explain_memory
from recipe.plan.memory_lines import LETTERS, Letters
from recipe.plan.search import RESERVE_BYTES, Found, Plan, Rejected, layout_rules, num_groups
from recipe.plan.step_time import mfu
from recipe.plan.traffic import planned_traffic
from recipe.plan.transfer_time import describe_overlap
from recipe.plan.zero3 import zero_number
from recipe.settings.parallel import ACCUMULATION_KEY, FAST_ATTENTION, MICRO_KEY, TOTAL_KEY
from recipe.settings.resolve import BUCKET_KEY, zero_block
from recipe.shared.flops import count_parameters, model_flops_per_token
from recipe.shared.units import aligned, duration, size

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
        for tp in sorted({row.tp for row in found.rejected}):
            yield f"  {nearest_to_fit(row for row in found.rejected if row.tp == tp)}"
        if held is not None:
            yield held
        return
    shown = found.plans[:top]
    rows = [[str(rank), *(cell(plan, found) for cell in _COLUMNS.values())] for rank, plan in enumerate(shown, 1)]
    yield from aligned([["", *_COLUMNS], *rows], left=(1, 2))
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
        yield from (f"  {row}" for row in found.rejected[:MANY_REJECTED])
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
    job, memory, layout = plan.job, plan.memory, plan.job.layout
    return {
        "layout": {"dp": layout.dp, "tp": layout.tp, "ep": layout.ep, "etp": layout.etp},
        "strategy": job.execution.strategy,
        "zero_stage": job.zero_stage,
        "zero_optimization": dict(job.zero),
        "micro_batch": job.num_sequences,
        "accumulation": job.accumulation,
        "recompute": job.recompute,
        "regather": job.execution.regather,
        "overlap": job.execution.overlap,
        "experts_backend": job.execution.experts_backend,
        "attention": job.attention,
        "idle_gpus": found.idle(plan),
        "step_s": plan.time.step_s,
        "step_s_interval": list(plan.time.interval(found.request.hardware)),
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s / found.request.gpus,
        "mfu": _mfu(plan, found),
        "time": plan.time._asdict(),
        "memory_bytes": memory.total_bytes,
        "memory": memory._asdict(),
    }


def _asked(found: Found, *, notes: Sequence[str]) -> Iterator[str]:
    request = found.request
    counts = count_parameters(request.sizes)
    flops = model_flops_per_token(request.sizes, attention_length=request.block_size)
    hardware, reserve = request.hardware, RESERVE_BYTES[request.hardware.device]
    basis = "measured by a probe" if hardware.measured else "data sheets, and what others published"
    tokens = request.sequences_per_step * request.block_size
    yield (
        f"model    {counts.total / 1e9:.2f} B parameters, {counts.active / 1e9:.2f} B of them for a token, "
        f"{flops / 1e9:.3g} GFLOP per token (causal attention counted once)"
    )
    yield (
        f"devices  {request.gpus} x {hardware.name}, {request.ranks_per_node} per node, {size(found.room_bytes)} each "
        f"({size(reserve)} set aside for what is no tensor), {request.precision}, speeds: {basis}"
    )
    if request.gpus > request.ranks_per_node:
        yield f"network  between nodes: {hardware.sources.get('inter.bytes_per_s') or hardware.sources['inter']}"
    yield f"step     {request.sequences_per_step} sequences of {request.block_size} = {tokens:,} tokens"
    if request.skew > 1:
        yield f"skew     the busiest rank has {request.skew:g} times the mean rows where ranks hold whole experts"
    kernel = found.plans[0].job.attention if found.plans else request.attention
    if request.attention == "auto" and kernel in FAST_ATTENTION:
        yield (
            f"kernel   {kernel}, which a run takes by itself where {FAST_ATTENTION[kernel].package} is installed; "
            "without it plan with --attn_implementation varlen"
        )
    for note in notes:
        yield f"note     {note}"


_COLUMNS: Mapping[str, Callable[[Plan, Found], str]] = {
    "layout": lambda plan, _: str(plan.job.layout),
    "strategy": lambda plan, _: plan.job.execution.strategy if plan.job.layout.tp > 1 else "-",
    "ZeRO": lambda plan, _: str(plan.job.zero_stage),
    "micro x acc": lambda plan, _: f"{plan.job.num_sequences} x {plan.job.accumulation}",
    "recompute": lambda plan, _: "yes" if plan.job.recompute else "no",
    "regather": lambda plan, _: "yes" if plan.job.execution.regather else "no",
    "overlap": lambda plan, _: "yes" if plan.job.execution.overlap else "no",
    "memory": lambda plan, _: size(plan.memory.total_bytes),
    "step": lambda plan, _: duration(plan.time.step_s),
    "±": lambda plan, found: f"{plan.time.interval(found.request.hardware).high_s / plan.time.step_s - 1:.0%}",
    "tokens/s": lambda plan, _: f"{plan.tokens_per_s:,.0f}",
    "per GPU": lambda plan, found: f"{plan.tokens_per_s / found.request.gpus:,.0f}",
    "MFU": lambda plan, found: f"{_mfu(plan, found):.1%}",
    "idle": lambda plan, found: str(found.idle(plan) or "-"),
}


def _mfu(plan: Plan, found: Found) -> float:
    """Return the MFU over all devices that were asked for."""
    at_work = plan.job.layout.world_size / found.request.gpus
    return mfu(plan.job, plan.time.step_s, found.request.hardware) * at_work


def _by_kind(plan: Plan, found: Found) -> Iterator[str]:
    """Show memory and time of a plan side by side, each with its share."""
    seconds = seconds_by_kind(plan)
    left = [
        *(
            (name, size(value), f"{value / plan.memory.total_bytes:.0%}")
            for name, value in plan.memory.by_kind().items()
        ),
        ("together", size(plan.memory.total_bytes), f"{plan.memory.total_bytes / found.room_bytes:.0%} of the room"),
    ]
    right = [
        *((name, duration(value), f"{value / plan.time.step_s:.0%}") for name, value in seconds.items() if value),
        ("together", duration(plan.time.step_s), ""),
        ("hidden transfers", duration(plan.time.hidden_s), ""),
    ]
    yield f"{'memory of a rank, the best plan':<52}time of a step on the slowest rank"
    for (name, value, share), other in zip_longest(left, right, fillvalue=("", "", "")):
        yield f"  {name:<14}{value:>10}  {share:<22}    {other[0]:<18}{other[1]:>9}  {other[2]}".rstrip()


def seconds_by_kind(plan: Plan) -> dict[str, float]:
    """Return the parts of a step by what they are spent on; they add up to it."""
    parts = plan.time._asdict()
    return {name.removesuffix("_s").replace("_", " "): value for name, value in parts.items() if name != "hidden_s"}


def why_first(found: Found) -> str:
    """Say in two sentences what the best plan spends its time on, and what the next one loses by."""
    best, *others = found.plans
    kinds = seconds_by_kind(best)
    spent = sorted(kinds, key=lambda name: -kinds[name])[:2]
    shares = " and ".join(f"{name} {kinds[name] / best.time.step_s:.0%}" for name in spent)
    first = (
        f"{best.arrangement} trains most, {best.tokens_per_s:,.0f} tokens/s in steps of {duration(best.time.step_s)}, "
        f"of which {shares}."
    )
    if not others:
        return f"{first} No other layout fits."
    return f"{first} The next, {others[0].arrangement}, {loses_by(others[0], best=best)}."


def loses_by(plan: Plan, *, best: Plan) -> str:
    """Say how far a plan is behind in tokens per second, and what of its step is longer by the most."""
    ours, theirs = seconds_by_kind(best), seconds_by_kind(plan)
    behind = 1 - plan.tokens_per_s / best.tokens_per_s
    longer_s = plan.time.step_s - best.time.step_s
    kind = max(theirs, key=lambda name: theirs[name] - ours[name])
    if behind < 0.0005:
        return "is as fast"
    return (
        f"is {behind:.1%} behind: its step takes {duration(longer_s)} longer, {kind} alone "
        f"{duration(theirs[kind] - ours[kind])}"
    )


def why_not(found: Found) -> dict[int, str]:
    """Say for every other size of group what its best plan loses by, or why it has none."""
    best = found.plans[0]
    reasons: dict[int, str] = {}
    for plan in found.plans:
        if plan.job.layout.tp != best.job.layout.tp:
            reasons.setdefault(plan.job.layout.tp, f"{plan.arrangement} {loses_by(plan, best=best)}")
    for tp in {row.tp for row in found.rejected} - {best.job.layout.tp}:
        reasons.setdefault(tp, str(nearest_to_fit(row for row in found.rejected if row.tp == tp)))
    return dict(sorted(reasons.items()))


def nearest_to_fit(rows: Iterable[Rejected]) -> Rejected:
    """Return the layout that lacks least memory; one that breaks a rule only where all of them do."""
    return min(rows, key=lambda row: (not row.lacking_bytes, row.lacking_bytes))


def idle_notes(found: Found) -> Iterator[str]:
    """Yield a note where devices are idle only because groups get equal shares of a step's sequences."""
    request = found.request
    fewer: dict[int, str] = {}
    for plan in found.plans:
        layout, possible = plan.job.layout, request.gpus // plan.job.layout.tp
        if layout.dp < possible:
            fewer.setdefault(layout.tp, f"{layout.dp} of {possible} groups of {layout.tp}")
    if not fewer:
        return
    shared = lcm(*(request.gpus // plan.job.layout.tp for plan in found.plans))
    sequences = -(-request.sequences_per_step // shared) * shared
    yield (
        f"{request.sequences_per_step} sequences of a step in equal parts keep only {', '.join(fewer.values())} at "
        f"work; --tokens_per_batch {sequences * request.block_size} leaves no group idle"
    )


def against(found: Found, wanted: Mapping[str, Any]) -> str:
    """Say how far a layout is behind the best plan, or ahead of the next one; or why it cannot be.

    `wanted` has "tp" and, where it matters, "ep" and "strategy". ValueError where there are not so many devices.
    """
    words = " ".join(f"{key}={value}" for key, value in wanted.items())
    if wanted["tp"] > found.request.gpus:
        raise ValueError(f"--against {words} is a group of more than the {found.request.gpus} devices of --gpus")
    ranked = [(rank, plan) for rank, plan in enumerate(found.plans, 1) if _is(plan, wanted)]
    if not ranked:
        return f"{words} cannot be: {_why_impossible(found, wanted)}"
    rank, plan = ranked[0]
    place = f"{plan.arrangement} comes {ordinal(rank)} of {len(found.plans)}"
    if rank > 1:
        return f"{place} and {loses_by(plan, best=found.plans[0])}."
    if len(found.plans) == 1:
        return f"{place}."
    ahead = plan.tokens_per_s / found.plans[1].tokens_per_s - 1
    return f"{place}, {ahead:.1%} ahead of {found.plans[1].arrangement}."


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, 4th and so on."""
    teens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def _is(plan: Plan, wanted: Mapping[str, Any]) -> bool:
    """Tell whether a plan is the wanted one; a rank alone exchanges nothing, whatever its strategy is called."""
    layout = plan.job.layout
    strategy = plan.job.execution.strategy if layout.tp > 1 else wanted.get("strategy")
    found = {"tp": layout.tp, "ep": layout.ep, "strategy": strategy}
    return all(found[key] == value for key, value in wanted.items())


def _why_impossible(found: Found, wanted: Mapping[str, Any]) -> str:
    """Say which rule the layout breaks, or else what the search found of it or of the nearest of its kind."""
    request, tp, strategy = found.request, wanted["tp"], wanted.get("strategy")
    ep = wanted.get("ep", {"gather_weights": 1, "all_to_all": tp}.get(str(strategy)))
    layout = ParallelLayout(dp=num_groups(request, tp=tp), tp=tp, ep=ep or 1)
    broken = "; ".join(layout_rules(request, layout, strategy=strategy or "gather_tokens"))
    allowed_eps, allowed = (None, ep), (None, strategy)
    tried = [
        row
        for row in found.rejected
        if row.tp == tp and (not ep or row.ep in allowed_eps) and (not strategy or row.strategy in allowed)
    ]
    if not tried or (ep is not None and broken):
        assert broken, "what breaks no rule is planned or lacks memory"
        return broken
    return str(nearest_to_fit(tried))


def describe_basis(plan: Plan, found: Found) -> Iterator[str]:
    """Say what a plan's numbers are made of: each line of its memory with its formula, each collective, each source."""
    yield ""
    yield f"memory at the fullest moment, {plan.memory.moment}; of one rank"
    rows = sorted(explain_memory(plan.job), key=lambda row: -row.num_bytes)
    for basis in dict.fromkeys(row.basis for row in rows):
        yield f"  {basis}"
        for row in rows:
            if row.basis == basis:
                yield f"  {size(row.num_bytes):>9}  {row.kind:<12}{row.what}: {row.formula}"
    for letter, value in Letters(plan.job).values.items():
        if value:
            yield f"  {letter} = {value:,} {LETTERS[letter].meaning}"
    yield f"  M = {zero_number(plan.job.zero, BUCKET_KEY):,} numbers of a bucket of gradients"
    yield ""
    yield "sent by a rank in a step"
    sent = planned_traffic(plan.job)
    for axis, op, purpose, num_calls, sent_bytes in sorted(sent, key=lambda row: -row.sent_bytes):
        yield f"  {size(sent_bytes):>9}  {axis:<6}{op:<15}{purpose} in {num_calls:,} calls"
    if assumed := describe_overlap(plan.job):
        yield f"  {assumed}"
    yield ""
    yield f"numbers of {found.request.hardware.name}"
    for name, source in found.request.hardware.sources.items():
        yield f"  {name}: {source}"


def run_config(job: Job, *, model: Mapping[str, Any], attention: str = "auto") -> dict[str, Any]:
    """Return the JSON of a run that does this job's steps. `model` has the flags that name it, "config_name" and so on.

    attention  the kernel, as it was asked for

    What is likely to be tried otherwise stands in the "arguments" block, over which the command line wins.
    """
    run = job.execution
    derived = zero_block({}, stage=job.zero_stage, sizes=job.sizes, tp=job.layout.tp, precision=job.precision).block
    return {
        "arguments": {
            **model,
            "output_dir": OUTPUT_DIR,
            "expect_world_size": job.layout.world_size,
            "block_size": job.block_size,
            "per_device_train_batch_size": job.num_sequences,
            "gradient_accumulation_steps": job.accumulation,
            "bf16": job.precision == "bf16",
            "gradient_checkpointing": job.recompute,
            **({} if attention == "auto" else {"attn_implementation": attention}),
        },
        "parallel": {
            "tp": job.layout.tp,
            "ep": job.layout.ep,
            "strategy": run.strategy,
            "overlap": run.overlap,
            "overlap_chunks": "auto" if run.overlap_chunks is None else run.overlap_chunks,
            "regather": run.regather,
            "token_dtype": run.token_dtype,
            "combine_dtype": run.combine_dtype,
            "experts_backend": run.experts_backend,
            "cuda_graph": "auto",
        },
        MICRO_KEY: "auto",
        ACCUMULATION_KEY: "auto",
        TOTAL_KEY: "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": job.zero_stage,
            **{key: value for key, value in job.zero.items() if derived.get(key) != value},
        },
    }


def how_to_start(path: Path, *, num_ranks: int, ranks_per_node: int) -> str:
    """Return a line with the command that starts this many ranks on nodes of that size."""
    if num_ranks <= ranks_per_node:
        command = f"deepspeed --num_accelerators {num_ranks} run_pretrain.py --ds_config {path} --train_file TEXT"
        return f"wrote {path}; start it: {command}"
    nodes = ((num_ranks // ranks_per_node, ranks_per_node), (1, num_ranks % ranks_per_node))
    lines = " and ".join(f"{number} like `worker slots={slots}`" for number, slots in nodes if slots)
    return (
        f"wrote {path}; start it on {num_ranks} ranks, HOSTS being a file of lines, {lines}: "
        f"deepspeed --hostfile HOSTS run_pretrain.py --ds_config {path} --train_file TEXT"
    )


def check_writable(path: Path) -> None:
    """Raise ValueError where no file could be written there, as far as can be seen without writing one."""
    is_closed = not os.access(path if path.exists() else path.parent, os.W_OK)
    for is_so, error in ((path.is_dir(), EISDIR), (not path.parent.is_dir(), ENOENT), (is_closed, EACCES)):
        if is_so:
            raise ValueError(f"{path} cannot be written: {os.strerror(error)}")


def write_config(path: Path, *, config: Mapping[str, Any]) -> None:
    """Replace the file; ValueError where it cannot be written."""
    try:
        path.write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
