"""Settles how a step is executed: the "parallel" keys besides the sizes, each "auto" decided and noted.

Last whether the blocks are replayed as CUDA graphs, and why not. A graph repeats the same kernels on the same
addresses: nothing in it may wait for the host to read a number, and weights must stay where they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from modeling.execution import BY_MASK, CHOICES, PER_DOCUMENT, Execution, dtype_faults, resident_faults
from modeling.layout import ParallelLayout
from modeling.spec import ModelSizes
from recipe.settings.deepspeed_keys import look_up
from recipe.settings.flags import convert
from recipe.settings.sources import Sources

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
    """

    world_size: int
    local_world_size: int
    device: str = "cpu"  # or "cuda"
    compute_capability: tuple[int, int] | None = None


def settle_choice(sources: Sources, *, block: Mapping[str, Any], key: str) -> str:
    """The value of a key that names one of several, its default where it is absent or unknown."""
    default = getattr(Execution(), key)
    value = block.get(key, default)
    if value not in CHOICES[key]:
        sources.faults.append(f'"parallel.{key}": {value!r} is not one of {", ".join(CHOICES[key])}')
        return str(default)
    return str(value)


def settle_backend(sources: Sources, *, block: Mapping[str, Any], ranks: WorldInfo, precision: str) -> str:
    """The backend of the experts' products, "auto" decided."""
    backend = settle_choice(sources, block=block, key="experts_backend")
    return default_experts_backend(ranks, precision=precision) if backend == "auto" else backend


def default_experts_backend(ranks: WorldInfo, *, precision: str) -> str:
    """What "auto" takes: on a GPU what leaves the host alone."""
    on_gpu = "triton" if grouped_product_waits(ranks, precision=precision) else "grouped"
    return on_gpu if ranks.device == "cuda" else "loop"


def grouped_product_waits(ranks: WorldInfo, *, precision: str) -> bool:
    """Whether torch's grouped product reads its offsets on the host; modeling/experts_grouped.py has the same rule."""
    capability = ranks.compute_capability
    return precision != "bf16" or capability is None or capability[0] not in SYNC_FREE_CAPABILITIES


def settle_execution(
    sources: Sources,
    *,
    block: Mapping[str, Any],
    sizes: ModelSizes,
    layout: ParallelLayout,
    strategy: str,
    experts_backend: str,
) -> Execution:
    """Every option but `cuda_graph`, which `settle_graphs` settles last; every value that cannot hold is a fault."""
    shares, gathers_again = layout.tp > 1, layout.ep > 1
    why = "transfers travel while others are worked on" if shares else "there is one rank in a group"
    overlap = _switch(sources, block=block, key="overlap", auto=shares, why=why)
    kept = f"gathered tokens are {'gathered again in the backward' if gathers_again else 'kept'}, ep={layout.ep}"
    execution = Execution(
        strategy=strategy,
        experts_backend=experts_backend,
        overlap=overlap,
        overlap_chunks=_chunks(sources, block=block),
        regather=_switch(sources, block=block, key="regather", auto=gathers_again, why=kept),
        token_dtype=_dtype(sources, block=block, key="token_dtype", layout=layout, strategy=strategy),
        combine_dtype=_dtype(sources, block=block, key="combine_dtype", layout=layout, strategy=strategy),
        resident_experts=_copies(sources, block=block),
    )
    faults = resident_faults(execution, num_experts=sizes.num_experts, num_ranks=layout.ep)
    sources.faults += [f'"parallel": {fault}' for fault in faults]
    return execution


def _switch(sources: Sources, *, block: Mapping[str, Any], key: str, auto: bool, why: str) -> bool:
    value = block.get(key, "auto")
    if value == "auto":
        sources.notes.append(f'"parallel.{key}": "auto" became {str(auto).lower()}: {why}')
        return auto
    if not isinstance(value, bool):
        sources.faults.append(f'"parallel.{key}": {value!r} is not one of "auto", true, false')
    return value is True


def read_number(sources: Sources, *, block: Mapping[str, Any], key: str) -> int | None:
    """Read a whole number of the "parallel" block; None for "auto", an absent key, and what is a fault."""
    value = block.get(key, "auto")
    if value == "auto":
        return None
    try:
        return int(convert(value, kind=int))
    except ValueError as error:
        sources.faults.append(f'"parallel.{key}" in {sources.file}: {error}; give one or "auto"')
        return None


def _chunks(sources: Sources, *, block: Mapping[str, Any]) -> int | None:
    number = read_number(sources, block=block, key="overlap_chunks")
    if number is not None and number < 1:
        sources.faults.append(f'"parallel.overlap_chunks": {number} must be at least 1; "auto" takes what pays')
        return None
    return number


def _copies(sources: Sources, *, block: Mapping[str, Any]) -> int:
    try:
        number = int(convert(block.get("resident_experts", 0), kind=int))
    except ValueError as error:
        sources.faults.append(f'"parallel.resident_experts" in {sources.file}: {error}; give a number of copies or 0')
        return 0
    if number < 0:
        sources.faults.append(f'"parallel": resident_experts={number} must be at least 0, which makes no copies')
    return max(number, 0)


def _dtype(sources: Sources, *, block: Mapping[str, Any], key: str, layout: ParallelLayout, strategy: str) -> str:
    value = settle_choice(sources, block=block, key=key)
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
    """What decides whether a block can be a graph. `execution.cuda_graph` is not read: it is what is settled."""

    ranks: WorldInfo
    sizes: ModelSizes
    layout: ParallelLayout
    execution: Execution
    precision: str
    zero_stage: int
    attention_dropout: float


def settle_graphs(sources: Sources, *, facts: GraphFacts) -> bool:
    """ "auto" takes graphs where they are possible and notes what stands in the way; `true` there is a fault."""
    block = look_up(sources.json, "parallel")
    wish = block.get("cuda_graph", "auto") if isinstance(block, Mapping) else "auto"
    reasons = "; ".join(_eager_reasons(facts, attention=sources.arguments.attn_implementation))
    if wish == "auto":
        became = f"false: {reasons}" if reasons else "true: each block is recorded, and computed again in the backward"
        sources.notes.append(f'"parallel.cuda_graph": "auto" became {became}')
        return not reasons
    if not isinstance(wish, bool):
        sources.faults.append(f'"parallel.cuda_graph": {wish!r} is not one of "auto", true, false')
    elif wish and reasons:
        sources.faults.append(f'"parallel.cuda_graph": true cannot be used: {reasons}; use "auto" or false')
    return wish is True and not reasons


def can_be_graphed(facts: GraphFacts, *, attention: str) -> bool:
    """What "auto" becomes; `attention` is the implementation's name."""
    return not any(_eager_reasons(facts, attention=attention))


def _eager_reasons(facts: GraphFacts, *, attention: str) -> Iterator[str]:
    """Everything that keeps the blocks from being graphs; on a CPU just that."""
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
    if attention in ATTENTION_BY_HOST:
        yield f"attn_implementation {attention} {ATTENTION_BY_HOST[attention]}; flash_attention_2 does without"
    if facts.attention_dropout > 0:
        yield f"attention_dropout={facts.attention_dropout} would drop other values when a block is computed again"


def _strategy_reasons(facts: GraphFacts) -> Iterator[str]:
    """Only ranks that share whole experts exchange rows; elsewhere "auto" takes what leaves the host alone."""
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
