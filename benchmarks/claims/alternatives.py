"""Ways for tokens to meet their experts: bytes and FLOPs of each in the articles' case, and where weights send less."""

from typing import Any

from claims import case
from claims.claim import MB, TFLOP
from claims.exchange import dispatch_bytes, once_per_rank_bytes
from claims.table import Column, Row, Table
from modeling.cost import tokens_where_weights_pay

GROUP_TOKENS = (16_384, 65_536, 131_072, 262_144)
# Passes over the wire of tokens and of weights, forward and backward, and the threshold's factor that follows.
PASSES = (("as above", 4, 3), ("tokens gathered again", 5, 3), ("weights' gradients in float32", 4, 4))


def expert_bytes() -> float:
    """W: the weights of one expert."""
    return case.expert_parameters() * case.ELEMENT_BYTES


def even_flops() -> float:
    """phi: what each rank multiplies, forward, where the work is even."""
    return case.layer_flops().experts * case.LENGTH / case.RANKS


def weights_bytes(num_passes: int) -> float:
    """Every rank sends its share of all experts so many times."""
    three_passes = case.moe_traffic().wire_bytes("gather_weights").payload * case.matrices_share()
    return three_passes * num_passes / 3


def threshold_tokens(*, token_passes: int = 4, weight_passes: int = 3) -> float:
    """T*, in a group's micro-batch: more tokens than this, and weights send less."""
    four_and_three = tokens_where_weights_pay(case.LAYER) * case.matrices_share()
    return four_and_three * (weight_passes / token_passes) / (3 / 4)


def scheme(name: str, *, formula: str, sent: float, busiest: str, static: str, rows: float, copy: float) -> Row:
    """`rows` are those that a rank's experts work on, on average, `copy` what is gathered for a while, in bytes."""
    texts = {"scheme": name, "formula": formula, "busiest": busiest, "static": static}
    return {**texts, "sent": sent, "flops": even_flops(), "rows": rows, "copy": copy}


def alternative_rows() -> tuple[Row, ...]:
    sizes = {"ranks": case.RANKS, "active": case.ACTIVE, "experts": case.LAYER.num_experts}
    gathered, exchanged = (dispatch_bytes(name, **sizes) for name in ("gather_tokens", "all_to_all"))
    tokens, all_rows = case.tokens_bytes(), case.ACTIVE * case.tokens_bytes()
    mean_rows = all_rows / case.RANKS
    waits: dict[str, Any] = {"busiest": "rho", "static": "no, the host waits", "rows": mean_rows, "copy": 0.0}
    whole: dict[str, Any] = {
        "sent": gathered,
        "static": "wire yes; rows only as min(k, E/N)·T",
        "rows": mean_rows,
        "copy": tokens,
    }
    return (
        scheme(
            "dense, F = k·4096, sliced",
            formula="2·q·T·H·b",
            sent=gathered,
            busiest="1, any routing",
            static="yes",
            rows=0.0,
            copy=tokens,
        ),
        scheme("exchanged rows, whole experts", formula="rho·2·k·q·T/N·H·b", sent=exchanged, **waits),
        scheme(
            "exchanged once per rank, whole experts",
            formula="rho·2·q·N·P·T/N·H·b",
            sent=once_per_rank_bytes(**sizes),
            **waits,
        ),
        scheme("tokens gathered, whole experts", formula="2·q·T·H·b", busiest="rho", **whole),
        scheme("tokens on every rank already, sums all-reduced", formula="2·q·T·H·b", busiest="rho", **whole),
        scheme(
            "tokens gathered, a copied expert on each rank",
            formula="2·q·T·H·b + W",
            busiest="1 where copies suffice",
            **{**whole, "sent": gathered + expert_bytes(), "copy": tokens + expert_bytes()},
        ),
        scheme("tokens gathered, experts in halves (ep=2, etp=2)", formula="2·q·T·H·b", busiest="1 to rho", **whole),
        scheme(
            "tokens gathered, sliced experts",
            formula="2·q·T·H·b",
            sent=gathered,
            busiest="1, any routing",
            static="yes, k·T rows",
            rows=all_rows,
            copy=tokens,
        ),
        scheme(
            "weights gathered, sliced experts",
            formula="q·E·W",
            sent=weights_bytes(1),
            busiest="1, any routing",
            static="yes, k·T/N rows",
            rows=mean_rows,
            copy=case.LAYER.num_experts * expert_bytes(),
        ),
    )


def crossover_rows() -> tuple[Row, ...]:
    rows = []
    for num_tokens in GROUP_TOKENS:
        traffic = case.moe_traffic(num_tokens)
        tokens, exchanged = (traffic.wire_bytes(name).payload for name in ("gather_tokens", "all_to_all"))
        weights = weights_bytes(3)
        sent = {"tokens": tokens, "exchanged": exchanged, "weights": weights}
        rows.append({"num_tokens": num_tokens, **sent, "ratio": tokens / weights})
    return tuple(rows)


def threshold_rows() -> tuple[Row, ...]:
    sizes = case.LAYER
    unit = sizes.num_experts * case.EXPERT_MATRICES * sizes.moe_intermediate_size
    rows: list[Row] = []
    for name, tokens, weights in PASSES:
        threshold = threshold_tokens(token_passes=tokens, weight_passes=weights)
        passes = {"token_passes": tokens, "weight_passes": weights}
        rows.append({"variant": name, **passes, "factor": threshold / unit, "threshold": threshold})
    return tuple(rows)


ALTERNATIVES = Table(
    key="alternatives",
    title="Ways for tokens to meet their experts",
    intro=(
        "Forward, per rank, T=16,384, N=4, E=8, k=2, F=4096, m=2, bf16. W = m·H·F·b are the bytes of an expert, "
        "phi = 2·m·k·T·H·F/N the FLOPs of a rank where the work is even. Everyone stores E·W/N. Bytes are for rho = 1."
    ),
    columns=(
        Column("scheme", "scheme"),
        Column("formula", "sent"),
        Column("sent", "here", MB, 1),
        Column("flops", "phi", TFLOP, 3),
        Column("busiest", "busiest rank's FLOPs / phi"),
        Column("static", "shapes fixed"),
        Column("rows", "rows of a rank, mean", MB, 1),
        Column("copy", "gathered copy", MB, 1),
    ),
    rows=alternative_rows,
    notes=(
        "The experts in slices hold rows of all tokens, N times the mean of whole experts, and their products are N "
        "times narrower; whole experts pay with rho.",
    ),
)
CROSSOVER = Table(
    key="crossover",
    title="Tokens against weights",
    intro=(
        "Forward and backward, per rank: tokens travel four times, weights three times (gathered twice, gradients "
        "scattered). All-to-all is for even routing."
    ),
    columns=(
        Column("num_tokens", "tokens in the group"),
        Column("tokens", "tokens gathered", MB, 1),
        Column("exchanged", "all-to-all", MB, 1),
        Column("weights", "weights gathered", MB, 1),
        Column("ratio", "tokens / weights", None, 2),
    ),
    rows=crossover_rows,
)
THRESHOLD = Table(
    key="threshold",
    title="From how many tokens on weights send less",
    intro="T* = c·E·m·F: hidden width, bytes per number, ranks and rates cancel.",
    columns=(
        Column("variant", "variant"),
        Column("token_passes", "passes of tokens"),
        Column("weight_passes", "passes of weights"),
        Column("factor", "c", None, 2),
        Column("threshold", "T*", None, 0),
    ),
    rows=threshold_rows,
    notes=("The project's layer switches at c = 0.75 (`modeling/cost.py`).",),
)
