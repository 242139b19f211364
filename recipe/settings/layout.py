"""The group layout and the batch sizes, settled together, since "auto" sizes must leave whole tokens per rank.

DeepSpeed's "world" is dp: the tp ranks of a group share one micro-batch, so
train_batch_size = micro x accumulation x dp.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

from modeling.cost import MoeTraffic, choose_strategy, tokens_where_weights_pay
from modeling.execution import Execution
from modeling.layout import BatchSizes, LayoutRequest, ParallelLayout, allowed_ep, fitting_layouts, layout_faults
from modeling.spec import ModelSizes
from recipe.settings.deepspeed_keys import look_up
from recipe.settings.execution import WorldInfo, read_number, settle_backend, settle_choice, settle_execution
from recipe.settings.flags import convert
from recipe.settings.sources import Sources

MICRO_KEY = "train_micro_batch_size_per_gpu"
ACCUMULATION_KEY = "gradient_accumulation_steps"
TOTAL_KEY = "train_batch_size"

ROW_ALIGNMENT = {"bf16": 8, "fp32": 4}  # elements that the widths of torch's grouped product must be a multiple of


@dataclass(frozen=True, kw_only=True)
class BatchWish:
    """The batch sizes that were asked for; None where one may be derived from the others."""

    micro: int | None
    accumulation: int | None
    total: int | None
    default_micro: int
    evaluated: int | None  # sequences a group evaluates at once; None where they are those of training


class Batch(NamedTuple):
    """micro sequences per group and micro-batch, micro-batches per step, sequences per step over all groups."""

    micro: int
    accumulation: int
    total: int


@dataclass(frozen=True, kw_only=True)
class _Search:
    """What a layout has to fit: the model, the ranks, and the batches of training and evaluation."""

    sizes: ModelSizes
    ranks: WorldInfo
    wish: BatchWish
    block_size: int
    row_alignment: int
    strategy: str

    def faults_of(self, layout: ParallelLayout) -> list[str]:
        """List every rule that `layout` breaks with the batch that it would get."""
        batch = BatchSizes(num_sequences=solve_batch(self.wish, dp=layout.dp).micro, block_size=self.block_size)
        request = LayoutRequest(
            sizes=self.sizes,
            layout=layout,
            world_size=self.ranks.world_size,
            batch=batch,
            strategy=self.strategy,
            row_alignment=self.row_alignment,
        )
        faults, evaluated = layout_faults(request), self.wish.evaluated
        if layout.tp >= 1 and evaluated is not None and evaluated * self.block_size % layout.tp:
            faults.append(
                f"per_device_eval_batch_size={evaluated} x block_size={self.block_size} tokens cannot be shared by "
                f"tp={layout.tp} ranks; use a multiple of {layout.tp // gcd(layout.tp, self.block_size)}"
            )
        return faults

    def widest(self, *, ep: int | None = None) -> ParallelLayout | None:
        """Find the largest group, at most a node's ranks, that breaks no rule and leaves the batch sizes whole."""
        candidates = fitting_layouts(
            self.sizes,
            world_size=self.ranks.world_size,
            max_tp=self.ranks.local_world_size,
            ep=ep,
            row_alignment=self.row_alignment,
        )
        for layout in candidates:
            if not self.faults_of(layout) and not list(batch_faults(self.wish, layout=layout)):
                return layout
        return None


class Settled(NamedTuple):
    """The "parallel" block and the batch sizes with nothing left open but `execution.cuda_graph`."""

    layout: ParallelLayout
    batch: Batch
    execution: Execution


def settle_layout(sources: Sources, *, ranks: WorldInfo, sizes: ModelSizes, precision: str) -> Settled:
    """Settle layout, batch and execution; what does not fit is added to the faults of `sources`."""
    block = look_up(sources.json, "parallel")
    block = block if isinstance(block, Mapping) else {}
    backend = settle_backend(sources, block=block, ranks=ranks, precision=precision)
    search = _Search(
        sizes=sizes,
        ranks=ranks,
        wish=_batch_wish(sources),
        block_size=sources.arguments.block_size,
        row_alignment=ROW_ALIGNMENT[precision] if backend == "grouped" else 1,
        strategy=settle_choice(sources, block=block, key="strategy"),
    )
    layout = _choose_layout(sources, block=block, search=search)
    batch = solve_batch(search.wish, dp=layout.dp)
    sources.faults += batch_faults(search.wish, layout=layout)
    faults = search.faults_of(layout)
    sources.faults += faults
    if faults and (widest := search.widest()):
        sources.faults.append(
            f'the largest layout that fits is {widest}: "parallel": {{"tp": {widest.tp}, "ep": {widest.ep}}}'
        )
    sources.notes.append(
        f"{TOTAL_KEY} {batch.total} = micro {batch.micro} x accum {batch.accumulation} x dp {layout.dp}"
    )
    execution = settle_execution(
        sources, block=block, sizes=sizes, layout=layout, strategy=search.strategy, experts_backend=backend
    )
    if search.strategy == "auto" and layout.tp > 1:
        sources.notes += _strategy_notes(search, layout, regather=execution.regather)
    return Settled(layout, batch, execution)


def solve_batch(wish: BatchWish, *, dp: int) -> Batch:
    """Derive what is missing; where it does not come out even, `batch_faults` says so and this rounds down to >= 1."""
    micro, accumulation, total = wish.micro, wish.accumulation, wish.total
    if total is None:
        micro, accumulation = micro or wish.default_micro, accumulation or 1
    elif micro is None:
        accumulation = accumulation or 1
        micro = max(1, total // (accumulation * dp))
    elif accumulation is None:
        accumulation = max(1, total // (micro * dp))
    assert accumulation is not None, "each branch settles both"
    return Batch(micro, accumulation, micro * accumulation * dp)


def batch_faults(wish: BatchWish, *, layout: ParallelLayout) -> Iterator[str]:
    """Yield a fault where the three sizes do not multiply out."""
    micro, accumulation, total = solve_batch(wish, dp=layout.dp)
    if wish.total is None or wish.total == total:
        return
    ranks = f"tp={layout.tp}, dp={layout.dp}, world={layout.world_size}: the tp ranks of a group share a micro-batch"
    if wish.micro is not None and wish.accumulation is not None:
        yield (
            f"{TOTAL_KEY}={wish.total}, but micro {micro} x accum {accumulation} x dp {layout.dp} = {total} ({ranks}); "
            f'use {TOTAL_KEY}={total}, or "auto"'
        )
    else:
        fixed = micro if wish.micro is not None else accumulation if wish.accumulation is not None else 1
        name = "micro" if wish.micro is not None else "accum"
        yield (
            f"{TOTAL_KEY}={wish.total} is not a multiple of {name} {fixed} x dp {layout.dp} = {fixed * layout.dp} "
            f"({ranks}); the nearest that is: {max(1, round(wish.total / (fixed * layout.dp))) * fixed * layout.dp}"
        )


def _batch_wish(sources: Sources) -> BatchWish:
    """Read the batch sizes of the flags and the JSON."""
    micro = sources.read("per_device_train_batch_size", paths=(MICRO_KEY,))
    accumulation = sources.read("gradient_accumulation_steps", paths=(ACCUMULATION_KEY,))
    total = look_up(sources.json, TOTAL_KEY)
    if total not in (None, "auto"):
        try:
            total = convert(total, kind=int)
        except ValueError as error:
            sources.faults.append(f'"{TOTAL_KEY}" in {sources.file}: {error}')
            total = None
    if isinstance(total, int) and total < 1:
        sources.faults.append(f'"{TOTAL_KEY}" in {sources.file}: {total} is too small; the least is 1')
        total = None
    return BatchWish(
        micro=micro.value if micro.origin else None,
        accumulation=accumulation.value if accumulation.origin else None,
        total=None if total == "auto" else total,
        default_micro=sources.arguments.per_device_train_batch_size,
        evaluated=sources.arguments.per_device_eval_batch_size,
    )


def _choose_layout(sources: Sources, *, block: Mapping[str, Any], search: _Search) -> ParallelLayout:
    """Take the layout asked for; for each "auto", the widest group, then the most whole experts per rank that fit."""
    world_size = search.ranks.world_size
    tp, ep = (read_number(sources, block=block, key=key) for key in ("tp", "ep"))
    if tp is not None:
        shares = allowed_ep(search.sizes, tp) if tp >= 1 and search.strategy != "gather_weights" else []
        layout = ParallelLayout(
            dp=max(1, world_size // max(1, tp)), tp=tp, ep=ep if ep is not None else max(shares, default=1)
        )
    else:
        # Where nothing fits, the rules that a single rank breaks are those to report.
        layout = search.widest(ep=ep) or ParallelLayout(dp=world_size, tp=1, ep=1 if ep is None else ep)
        sources.notes.append(f'"parallel.tp": "auto" became {layout.tp} (world {world_size})')
    if ep is None:
        sources.notes.append(f'"parallel.ep": "auto" became {layout.ep} ({layout})')
    return layout


def _strategy_notes(search: _Search, layout: ParallelLayout, *, regather: bool) -> Iterator[str]:
    """Say what "auto" takes for the shapes of training and evaluation; a layer decides again for every micro-batch."""
    micro = solve_batch(search.wish, dp=layout.dp).micro
    shapes = dict.fromkeys((micro, search.wish.evaluated or micro))
    for num_tokens in (sequences * search.block_size for sequences in shapes):
        traffic = MoeTraffic(
            sizes=search.sizes, layout=layout, num_tokens=num_tokens, element_bytes=2, regather=regather
        )
        threshold = tokens_where_weights_pay(search.sizes)
        yield (
            f'"parallel.strategy": "auto" takes {choose_strategy(traffic)} for {num_tokens} tokens '
            f"(weights travel less from {threshold:,.0f} on, where ep=1)"
        )
