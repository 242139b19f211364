"""Claims 17 to 26: the first article on throughput, its experts, its code and its way to search."""

from claims import case
from claims.claim import COUNT, IN_RANGE, NUMBERS, PERCENT, TIMES, Claim, Value, Values, Verdict, from_sources
from claims.throughput import REPLICA_TOKENS, STATED_RATE, STEP_S, rate_of_all_gpus, throughput_values
from modeling.layout import ParallelLayout

GRAPHED_MS, EAGER_MS = 484, 623  # an iteration of Qwen3-30B-A3B with and without graphs


def _rates() -> Values:
    products = [
        Value(f"stated rate x step at TP={size}", COUNT, round(STATED_RATE[size] * STEP_S[size])) for size in STEP_S
    ]
    return (*throughput_values(), *products)


def _gpus() -> Values:
    return tuple(
        Value(f"GPUs of TP={size}, DP=4", COUNT, ParallelLayout(dp=case.REPLICAS, tp=size).world_size, stated=16)
        for size in STEP_S
    )


def _best_size() -> Values:
    rates = {size: rate_of_all_gpus(size) for size in STEP_S}
    best = max(rates, key=lambda size: rates[size])
    return (
        Value("TP of most tokens/s on 16 GPUs", COUNT, best, stated=4),
        Value("faster than TP=4 by", TIMES, rates[best] / rates[4]),
    )


def _ranks_per_token() -> Values:
    sizes = case.LAYER
    hit = case.ranks_hit(experts=sizes.num_experts, active=sizes.num_experts_per_tok, ranks=case.RANKS)
    return (
        Value("ranks that compute for a token, whole experts", COUNT, hit, stated=4),
        Value("the same, every expert sliced", COUNT, case.RANKS),
    )


def _slices() -> Values:
    layout = ParallelLayout(tp=case.RANKS, ep=case.RANKS)
    return (Value("slices of each expert with EP=4 on 4 ranks", COUNT, layout.etp, stated=4),)


def _no_values() -> Values:
    return ()


def _all_heads() -> Values:
    own = case.layer_flops().attention * case.LENGTH / case.RANKS
    every = case.layer_flops().attention * case.LENGTH
    return (Value("a rank's attention FLOPs with all heads gathered", TIMES, every / own, stated=1),)


def _graphs() -> Values:
    saved = 1 - GRAPHED_MS / EAGER_MS
    return tuple(
        Value("of a step's time, saved elsewhere", PERCENT, 0.0, upto=saved, stated=share) for share in (0.10, 0.15)
    )


def _replicas() -> Values:
    rows = []
    for tensor, experts in ((4, 4), (2, 8)):
        num_groups = case.GPUS // experts
        replicas = ParallelLayout(dp=case.GPUS // tensor, tp=tensor).dp
        rows.append(
            Value(
                f"DP of 16 GPUs with TP={tensor}, EP={experts}",
                COUNT,
                replicas,
                stated=case.GPUS / (tensor * num_groups),
            )
        )
    return tuple(rows)


TUNING_EXPERTS = (
    Claim(
        number=17,
        article=1,
        says="102.4K, 113.0K and 105.8K tokens/s per GPU at TP = 2, 4, 8, from steps of 320, 290 and 310 ms",
        formula="DP·32,768 / step / (TP·DP)",
        compute=_rates,
        rule=NUMBERS,
        why=f"Rate times step is two sequences, {REPLICA_TOKENS:,} tokens, in every row: the arithmetic holds per "
        "replica. Per GPU it is TP times less.",
    ),
    Claim(
        number=18,
        article=1,
        says="DP=4 with TP = 2, 4 and 8, all on 16 cards",
        formula="TP·DP",
        compute=_gpus,
        rule=NUMBERS,
        why="The three rows are three clusters of different size.",
    ),
    Claim(
        number=19,
        article=1,
        says="TP=4 is the best size",
        formula="argmax over TP of 16/TP·32,768 / step",
        compute=_best_size,
        rule=NUMBERS,
        why="By the article's own steps, TP=2 with twice the replicas is ahead on the same GPUs.",
    ),
    Claim(
        number=20,
        article=1,
        says="Gathering tokens cures all-to-all's uneven load: all 4 cards take part in every token's computation",
        formula="N·(1 - C(E-E/N, k)/C(E, k))",
        compute=_ranks_per_token,
        rule=NUMBERS,
        why="Every rank has the token, but only those that hold its experts compute for it: the load is as uneven as "
        "with all-to-all. Slicing every expert is what makes it even.",
    ),
    Claim(
        number=21,
        article=1,
        says="With EP = TP = 4 the experts are also tensor-parallel within the group",
        formula="ETP = N / EP",
        compute=_slices,
        rule=NUMBERS,
        why="The group has N ranks, so EP·ETP = N. Whole experts on all of them leave none to slice over.",
    ),
    Claim(
        number=22,
        article=1,
        says="The listing shows a working layer with gathered tokens",
        formula="",
        compute=_no_values,
        rule=from_sources(Verdict.WRONG),
        why="all_gather fills a list and returns nothing to use as a tensor, and has no gradient; router choices are "
        "not gathered though gathered tokens are masked with them; weights are compared with expert numbers and "
        "never multiply the outputs; two experts share one network.",
        sources=("PyTorch documentation, torch.distributed.all_gather",),
    ),
    Claim(
        number=23,
        article=1,
        says="The overlapped listing gathers q along heads while k is projected, at no other cost",
        formula="N·(attention FLOPs of own heads)",
        compute=_all_heads,
        rule=NUMBERS,
        why="With all heads on every rank, every rank computes all of attention. The wait also returns no tensor.",
        sources=("PyTorch documentation, torch.distributed.Work",),
    ),
    Claim(
        number=24,
        article=1,
        says="CUDA graphs and streams cut the share of communication by 10 to 15 %",
        formula="1 - 484 ms / 623 ms",
        compute=_graphs,
        rule=IN_RANGE,
        why="Published gains of whole steps are of that size. Expert shapes that depend on the routing stay outside "
        "a graph.",
        sources=("Megatron Bridge, CUDA graphs: Qwen3-30B-A3B with graphs of attention and router",),
    ),
    Claim(
        number=25,
        article=1,
        says="DP = cards / (TP x number of EP groups)",
        formula="DP = world / (TP·CP·PP); of experts world / (EP·ETP·PP)",
        compute=_replicas,
        rule=NUMBERS,
        why="EP groups do not multiply: with EP = TP they are the same ranks, and DP is 4 for both here.",
        sources=("Megatron Core documentation, parallel folding of attention and experts",),
    ),
    Claim(
        number=26,
        article=1,
        says="Bound the memory first, then model the cost, sweep, trace and validate",
        formula="",
        compute=_no_values,
        rule=from_sources(Verdict.RIGHT),
        why="The order of Megatron Core's own guide to tuning, and of this project's commands.",
        sources=("Megatron Core, MoE README, performance best practices",),
    ),
)
