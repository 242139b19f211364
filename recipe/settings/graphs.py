"""Settles whether the blocks are replayed as CUDA graphs, and says in one line why not.

A graph repeats the same kernels on the same addresses: nothing in it may wait for the host to read a number, and
weights must stay where they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from modeling.layout import ModelSizes
from recipe.settings.deepspeed_keys import look_up
from recipe.settings.layout import ParallelOptions, WorldInfo, grouped_product_waits
from recipe.settings.sources import Sources

# Attention that takes each batch's documents apart on the host; the others read them from a tensor.
ATTENTION_BY_HOST: Mapping[str, str] = {
    "sdpa": "works document by document, and where they begin the host reads from every batch",
    "eager": "works document by document, and where they begin the host reads from every batch",
    "flex_attention": "gets a mask that the host builds for every batch",
}


@dataclass(frozen=True)
class GraphFacts:
    """What decides whether a block can be a graph. `options.cuda_graph` is not read: it is what is settled."""

    ranks: WorldInfo
    sizes: ModelSizes
    options: ParallelOptions
    precision: str
    zero_stage: int
    attention_dropout: float


def settle_graphs(sources: Sources, *, facts: GraphFacts) -> bool:
    """ "auto" takes graphs where they are possible and notes what stands in the way; `true` there is a fault."""
    block = look_up(sources.ds_config, "parallel")
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
        yield from _strategy_reasons(facts.options)
        yield from _backend_reasons(facts)
    if facts.options.wire.resident_experts:
        yield "with resident_experts what the ranks send each other changes from step to step"
    if attention in ATTENTION_BY_HOST:
        yield f"attn_implementation {attention} {ATTENTION_BY_HOST[attention]}; flash_attention_2 does without"
    if facts.attention_dropout > 0:
        yield f"attention_dropout={facts.attention_dropout} would drop other values when a block is computed again"


def _strategy_reasons(options: ParallelOptions) -> Iterator[str]:
    """Only ranks that share whole experts exchange rows; elsewhere "auto" takes what leaves the host alone."""
    if options.tp == 1 or options.ep != options.tp:
        return
    if options.strategy == "all_to_all":
        yield 'strategy "all_to_all" reads counts of rows on the host; "gather_tokens" does not'
    elif options.strategy == "auto":
        yield 'strategy "auto" may take all_to_all, which reads counts of rows on the host; "gather_tokens" does not'


def _backend_reasons(facts: GraphFacts) -> Iterator[str]:
    backend, capability = facts.options.experts_backend, facts.ranks.compute_capability
    if backend == "loop":
        yield 'experts_backend "loop" reads counts of rows on the host; "grouped" does not'
    elif backend == "grouped" and grouped_product_waits(facts.ranks, precision=facts.precision):
        version = "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
        yield (
            "torch's grouped product reads its offsets on the host, except in bf16 on compute capability 9.x and 10.x "
            f'(here {facts.precision} on {version}); experts_backend "triton" does not'
        )
