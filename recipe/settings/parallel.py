"""Settles the "parallel" block and the batch sizes: how ranks are arranged, and how a step is executed on them.

Layout and batch are settled together, since "auto" sizes must leave whole tokens per rank. DeepSpeed's "world" is dp:
the tp ranks of a group share one micro-batch, so train_batch_size = micro x accumulation x dp.

Last comes whether the blocks are replayed as CUDA graphs, and why not. A graph repeats the same kernels on the same
addresses: nothing in it may wait for the host to read a number, and weights must stay where they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import gcd
from typing import NamedTuple

from modeling.cost import MoeTraffic, choose_strategy, tokens_where_weights_pay
from modeling.execution import BY_MASK, CHOICES, PER_DOCUMENT, VARLEN, Execution, dtype_faults, resident_faults
from modeling.layout import BatchSizes, LayoutRequest, ParallelLayout, allowed_ep, fitting_layouts, layout_faults
from modeling.spec import ModelSizes
from recipe.settings.deepspeed_keys import look_up
from recipe.settings.sources import Sources

MICRO_KEY = "train_micro_batch_size_per_gpu"
ACCUMULATION_KEY = "gradient_accumulation_steps"
TOTAL_KEY = "train_batch_size"

ROW_ALIGNMENT = {"bf16": 8, "fp32": 4}  # elements that the widths of torch's grouped product must be a multiple of
# The major versions whose grouped product in bf16 leaves its offsets on the device.
SYNC_FREE_CAPABILITIES = (9, 10)
# Attention that takes each batch's documents apart on the host; the others read them from a tensor.
ATTENTION_BY_HOST: Mapping[str, str] = {
    **dict.fromkeys(PER_DOCUMENT, "works document by document, and where they begin the host reads from every batch"),
    **dict.fromkeys(BY_MASK, "gets a mask that the host builds for every batch"),
}


@dataclass(frozen=True, kw_only=True)
class WorldInfo:
    """The ranks that have started: how many, how many on each node, and what they compute on.

    compute_capability  of the GPUs, (major, minor); None on a CPU
    attention_kernels   what is installed of `FAST_ATTENTION`
    """

    world_size: int
    local_world_size: int
    device: str = "cpu"  # or "cuda"
    compute_capability: tuple[int, int] | None = None
    attention_kernels: tuple[str, ...] = ()


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


def settle_layout(
    sources: Sources, *, ranks: WorldInfo, sizes: ModelSizes, precision: str
) -> tuple[ParallelLayout, Batch, Execution]:
    """Settle layout, batch and execution, but for its `cuda_graph`; what does not fit is a fault of `sources`."""
    backend = settle_choice(sources, key="experts_backend")
    if backend == "auto":
        backend = default_experts_backend(ranks, precision=precision)
    search = _Search(
        sizes=sizes,
        ranks=ranks,
        wish=_batch_wish(sources),
        block_size=sources.arguments.block_size,
        row_alignment=ROW_ALIGNMENT[precision] if backend == "grouped" else 1,
        strategy=settle_choice(sources, key="strategy"),
    )
    layout = _choose_layout(sources, search=search)
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
    execution = settle_execution(sources, sizes=sizes, layout=layout, strategy=search.strategy, experts_backend=backend)
    if search.strategy == "auto" and layout.tp > 1:
        sources.notes += _strategy_notes(search, layout, regather=execution.regather)
    return layout, batch, execution


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
    total, origin = look_up(sources.json, TOTAL_KEY), f'"{TOTAL_KEY}" in {sources.file}'
    total = None if total in (None, "auto") else sources.convert(total, kind=int, origin=origin)
    if total is not None and total < 1:
        sources.faults.append(f"{origin}: {total} is too small; the least is 1")
        total = None
    return BatchWish(
        micro=micro.value if micro.origin else None,
        accumulation=accumulation.value if accumulation.origin else None,
        total=total,
        default_micro=sources.arguments.per_device_train_batch_size,
        evaluated=sources.arguments.per_device_eval_batch_size,
    )


def _choose_layout(sources: Sources, *, search: _Search) -> ParallelLayout:
    """Take the layout asked for; for each "auto", the widest group, then the most whole experts per rank that fit."""
    world_size = search.ranks.world_size
    tp, ep = (read_number(sources, key=key) for key in ("tp", "ep"))
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


def settle_choice(sources: Sources, *, key: str) -> str:
    """Return the value of a key that names one of several; its default where it is absent or unknown."""
    default = getattr(Execution(), key)
    value = sources.parallel.get(key, default)
    if value not in CHOICES[key]:
        sources.faults.append(f'"parallel.{key}": {value!r} is not one of {", ".join(CHOICES[key])}')
        return str(default)
    return str(value)


def default_experts_backend(ranks: WorldInfo, *, precision: str) -> str:
    """Return the backend that "auto" takes: on a GPU what leaves the host alone."""
    on_gpu = "triton" if grouped_product_waits(ranks, precision=precision) else "grouped"
    return on_gpu if ranks.device == "cuda" else "loop"


def grouped_product_waits(ranks: WorldInfo, *, precision: str) -> bool:
    """Return whether torch's grouped product reads its offsets on the host, as modeling/experts_grouped.py decides."""
    capability = ranks.compute_capability
    return precision != "bf16" or capability is None or capability[0] not in SYNC_FREE_CAPABILITIES


def settle_execution(
    sources: Sources, *, sizes: ModelSizes, layout: ParallelLayout, strategy: str, experts_backend: str
) -> Execution:
    """Settle every option but `cuda_graph`, which `settle_graphs` does last; each value that cannot hold is a fault."""
    # A graph's backward computes its block again, too.
    recomputes = sources.arguments.gradient_checkpointing or sources.parallel.get("cuda_graph") is True
    shares = layout.tp > 1
    gathers_again = layout.ep > 1 and not recomputes
    why = "transfers travel while others are worked on" if shares else "there is one rank in a group"
    overlap = _switch(sources, key="overlap", auto=shares, why=why)
    kept = f"gathered tokens are {'gathered again in the backward' if gathers_again else 'kept'}, ep={layout.ep}"
    kept += " and every block is recomputed" if recomputes else ""
    execution = Execution(
        strategy=strategy,
        experts_backend=experts_backend,
        overlap=overlap,
        overlap_chunks=_chunks(sources),
        regather=_switch(sources, key="regather", auto=gathers_again, why=kept),
        token_dtype=_dtype(sources, key="token_dtype", layout=layout, strategy=strategy),
        combine_dtype=_dtype(sources, key="combine_dtype", layout=layout, strategy=strategy),
        resident_experts=_copies(sources),
    )
    faults = resident_faults(execution, num_experts=sizes.num_experts, num_ranks=layout.ep)
    sources.faults += [f'"parallel": {fault}' for fault in faults]
    return execution


def _switch(sources: Sources, *, key: str, auto: bool, why: str) -> bool:
    value = sources.parallel.get(key, "auto")
    if value == "auto":
        sources.notes.append(f'"parallel.{key}": "auto" became {str(auto).lower()}: {why}')
        return auto
    if not isinstance(value, bool):
        sources.faults.append(f'"parallel.{key}": {value!r} is not one of "auto", true, false')
    return value is True


def read_number(sources: Sources, *, key: str) -> int | None:
    """Read a whole number of the "parallel" block; None for "auto", an absent key, and what is a fault."""
    value = sources.parallel.get(key, "auto")
    if value == "auto":
        return None
    origin = f'"parallel.{key}" in {sources.file}'
    number: int | None = sources.convert(value, kind=int, origin=origin, advice='; give one or "auto"')
    return number


def _chunks(sources: Sources) -> int | None:
    number = read_number(sources, key="overlap_chunks")
    if number is not None and number < 1:
        sources.faults.append(f'"parallel.overlap_chunks": {number} must be at least 1; "auto" takes what pays')
        return None
    return number


def _copies(sources: Sources) -> int:
    value, origin = sources.parallel.get("resident_experts", 0), f'"parallel.resident_experts" in {sources.file}'
    number: int = sources.convert(value, kind=int, origin=origin, advice="; give a number of copies or 0") or 0
    if number < 0:
        sources.faults.append(f'"parallel": resident_experts={number} must be at least 0, which makes no copies')
    return max(number, 0)


def _dtype(sources: Sources, *, key: str, layout: ParallelLayout, strategy: str) -> str:
    value = settle_choice(sources, key=key)
    if value != "auto" and layout.tp == 1:
        sources.faults.append(
            f'"parallel.{key}": "{value}" has no effect with tp=1, where nothing travels; use "auto" or a larger tp'
        )
        return "auto"
    faults = [f'"parallel.{key}": {fault}' for fault in dtype_faults(value, strategy=strategy)]
    sources.faults += faults
    return "auto" if faults else value


@dataclass(frozen=True, kw_only=True)
class GraphFacts:
    """What decides whether a block can be a graph, and by which kernel it attends.

    `execution.cuda_graph` is not read: it is what is settled. `attention` may be "auto" only where that is settled.
    """

    ranks: WorldInfo
    sizes: ModelSizes
    layout: ParallelLayout
    execution: Execution
    precision: str
    zero_stage: int
    recomputes: bool
    attention: str
    attention_dropout: float


class FastAttention(NamedTuple):
    """A kernel made for one generation of GPUs, and the package that it needs.

    head_dims  sizes of heads that every release has a backward for; None: those of torch's "varlen"
    """

    capability: tuple[int, int]
    package: str
    head_dims: tuple[int, ...] | None = None


# About twice as fast as FlashAttention-2, which torch's "varlen" is (recipe/plan/hardware.py has the rates).
FAST_ATTENTION = {
    "flash_attention_3": FastAttention((9, 0), "flash-attn-3"),
    "flash_attention_4": FastAttention((10, 0), "flash-attn-4", head_dims=(128,)),
}


def installed_attention() -> tuple[str, ...]:
    """Return the names of `FAST_ATTENTION` whose package is installed here."""

    def is_installed(package: str) -> bool:
        try:
            return bool(version(package))
        except PackageNotFoundError:
            return False

    return tuple(name for name, fast in FAST_ATTENTION.items() if is_installed(fast.package))


def fast_attention(facts: GraphFacts) -> str | None:
    """Return the name in `FAST_ATTENTION` of what is made for such a GPU and model."""
    fitting = (name for name in FAST_ATTENTION if not any(attention_reasons(facts, kernel=name)))
    return next(fitting, None)


def settle_attention(sources: Sources, *, facts: GraphFacts) -> str:
    """Return the attention kernel: "auto" takes the fastest that there is; torch's "varlen" may be a fault."""
    asked = facts.attention
    reasons = "; ".join(attention_reasons(facts, kernel="varlen" if asked == "auto" else asked))
    if asked == "varlen" and reasons:
        sources.faults.append(f'--attn_implementation varlen cannot be used: {reasons}; use "auto" or "sdpa"')
    if asked != "auto":
        return asked
    taken, fast = default_attention(facts), fast_attention(facts)
    why = reasons or "all documents in one call"
    if taken == "varlen" and fast is not None:
        why += f"; about twice as fast on this GPU: {fast}, if {FAST_ATTENTION[fast].package} were installed"
    sources.notes.append(f"--attn_implementation auto became {taken}: {why}")
    return taken


def default_attention(facts: GraphFacts) -> str:
    """Return what "auto" of `attn_implementation` is on such devices."""
    if any(attention_reasons(facts, kernel="varlen")):
        return "sdpa"
    fast = fast_attention(facts)
    return fast if fast is not None and fast in facts.ranks.attention_kernels else "varlen"


def attention_reasons(facts: GraphFacts, *, kernel: str) -> Iterator[str]:
    """Yield what keeps a kernel of `VARLEN` from being used; torch's "varlen" is FlashAttention-2."""
    if kernel not in VARLEN:
        return
    if facts.ranks.device != "cuda":
        yield "its kernels are for GPUs"
        return
    if fast := FAST_ATTENTION.get(kernel):
        if facts.ranks.compute_capability != fast.capability:
            yield f"its kernels are for compute capability {'.'.join(map(str, fast.capability))}"
        if fast.head_dims is not None and facts.sizes.head_dim not in fast.head_dims:
            yield f"it is not known to train heads of head_dim={facts.sizes.head_dim}"
    if (facts.ranks.compute_capability or (0, 0)) < (8, 0):
        yield "its kernels need compute capability 8.0"
    if facts.precision != "bf16":
        yield f"its kernels are for bf16, not {facts.precision}"
    if facts.sizes.head_dim > 256 or facts.sizes.head_dim % 8:
        yield f"heads have to be a multiple of 8 wide and at most 256, not head_dim={facts.sizes.head_dim}"
    if facts.attention_dropout > 0:
        yield f"it knows no dropout, and attention_dropout={facts.attention_dropout}"


def settle_graphs(sources: Sources, *, facts: GraphFacts) -> bool:
    """Settle `cuda_graph`: "auto" takes graphs where they can be and cost nothing; `true` is a fault where they cannot.

    A graph's backward computes its block again, which is free where blocks are recomputed anyway.
    """
    reasons = "; ".join(_eager_reasons(facts))
    free = (
        ""
        if facts.recomputes
        else "a graph's backward computes its block again, and --gradient_checkpointing is not on"
    )
    why = reasons or free or "each block is recorded, and computed again in the backward"
    graphs = _switch(sources, key="cuda_graph", auto=not reasons and facts.recomputes, why=why)
    if graphs and reasons:
        sources.faults.append(f'"parallel.cuda_graph": true cannot be used: {reasons}; use "auto" or false')
    return graphs and not reasons


def can_be_graphed(facts: GraphFacts) -> bool:
    """Return what "auto" becomes."""
    return facts.recomputes and not any(_eager_reasons(facts))


def _eager_reasons(facts: GraphFacts) -> Iterator[str]:
    """Yield everything that keeps the blocks from being graphs; on a CPU just that."""
    if facts.ranks.device != "cuda":
        yield "there are no CUDA graphs on a CPU"
        return
    if facts.zero_stage == 3:
        yield "ZeRO-3 moves the weights in every step"
    if len(facts.sizes.dense_layers) < facts.sizes.num_hidden_layers:
        yield from _strategy_reasons(facts)
        yield from _backend_reasons(facts)
    if facts.execution.resident_experts:
        yield "with resident_experts what the ranks send each other changes from step to step"
    if facts.attention in ATTENTION_BY_HOST:
        yield f"attn_implementation {facts.attention} {ATTENTION_BY_HOST[facts.attention]}; varlen does without"
    if facts.attention_dropout > 0:
        yield f"attention_dropout={facts.attention_dropout} would drop other values when a block is computed again"


def _strategy_reasons(facts: GraphFacts) -> Iterator[str]:
    """Yield a reason where ranks share whole experts and exchange rows; elsewhere "auto" leaves the host alone."""
    layout, strategy = facts.layout, facts.execution.strategy
    if layout.tp == 1 or layout.ep != layout.tp:
        return
    if strategy == "all_to_all":
        yield 'strategy "all_to_all" reads counts of rows on the host; "gather_tokens" does not'
    elif strategy == "auto":
        yield 'strategy "auto" may take all_to_all, which reads counts of rows on the host; "gather_tokens" does not'


def _backend_reasons(facts: GraphFacts) -> Iterator[str]:
    backend, capability = facts.execution.experts_backend, facts.ranks.compute_capability
    if backend == "loop":
        yield 'experts_backend "loop" reads counts of rows on the host; "grouped" does not'
    elif backend == "grouped" and grouped_product_waits(facts.ranks, precision=facts.precision):
        version = "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
        yield (
            "torch's grouped product reads its offsets on the host, except in bf16 on compute capability 9.x and 10.x "
            f'(here {facts.precision} on {version}); experts_backend "triton" does not'
        )
