"""Says in words why a plan is the best one, and why not another size of group."""

from collections.abc import Iterable, Iterator, Mapping
from math import lcm
from typing import Any

from modeling.layout import ParallelLayout
from recipe.plan.memory import explain_memory
from recipe.plan.memory_lines import LEGEND, letters_of
from recipe.plan.overlap import describe_overlap
from recipe.plan.search import Found, Plan
from recipe.plan.space import Rejected, layout_rules, num_groups
from recipe.plan.traffic import planned_traffic
from recipe.plan.zero3 import zero_number
from recipe.shared.units import duration, size


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
        nearest = nearest_to_fit(row for row in found.rejected if row.tp == tp)
        reasons.setdefault(tp, f"{nearest.layout}: {nearest.reason}")
    return dict(sorted(reasons.items()))


def nearest_to_fit(rows: Iterable[Rejected]) -> Rejected:
    """Return the layout that lacks least memory; one that breaks a rule only where all of them do."""
    return min(rows, key=lambda row: (not row.lacking_bytes, row.lacking_bytes))


def why_not_fits(found: Found) -> list[Rejected]:
    """Return the layout of each size of group that comes nearest to fitting."""
    sizes = sorted({row.tp for row in found.rejected})
    return [nearest_to_fit(row for row in found.rejected if row.tp == tp) for tp in sizes]


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
    strategy = plan.job.strategy if layout.tp > 1 else wanted.get("strategy")
    found = {"tp": layout.tp, "ep": layout.ep, "strategy": strategy}
    return all(found[key] == value for key, value in wanted.items())


def _why_impossible(found: Found, wanted: Mapping[str, Any]) -> str:
    """Say which rule the layout breaks, or else what the search found of it or of the nearest of its kind."""
    request, tp, strategy = found.request, wanted["tp"], wanted.get("strategy")
    ep = wanted.get("ep", {"gather_weights": 1, "all_to_all": tp}.get(str(strategy)))
    layout = ParallelLayout(dp=num_groups(request, tp=tp), tp=tp, ep=ep or 1)
    broken = "; ".join(layout_rules(request, layout, strategy=strategy or "gather_tokens"))
    tried = [
        row
        for row in found.rejected
        if row.tp == tp
        and (ep is None or row.ep in (None, ep))
        and (strategy is None or row.strategy in (None, strategy))
    ]
    if not tried or (ep is not None and broken):
        assert broken, "what breaks no rule is planned or lacks memory"
        return broken
    nearest = nearest_to_fit(tried)
    return f"{nearest.layout}: {nearest.reason}"


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
    values = letters_of(plan.job)._asdict() | {"M": zero_number(plan.job.zero, "reduce_bucket_size")}
    for letter, meaning in LEGEND.items():
        if values[letter]:
            yield f"  {letter} = {values[letter]:,} {meaning}"
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
