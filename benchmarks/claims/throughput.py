"""The first article's table of tensor-parallel sizes, read again: what its step times mean per GPU."""

from claims import case
from claims.claim import MS, NUMBERS, TOKENS_PER_S, Value
from claims.table import Column, Row, Table

STEP_S = {2: 0.320, 4: 0.290, 8: 0.310}
STATED_RATE = {2: 102_400.0, 4: 113_000.0, 8: 105_800.0}
# Rate times step is the same for every size: the tokens of one replica's step.
REPLICA_TOKENS = 2 * case.LENGTH


def cluster_rate(tensor: int, *, replicas: int = case.REPLICAS) -> float:
    """Tokens per second of all GPUs."""
    return replicas * REPLICA_TOKENS / STEP_S[tensor]


def gpu_rate(tensor: int) -> float:
    return cluster_rate(tensor) / (tensor * case.REPLICAS)


def rate_of_all_gpus(tensor: int) -> float:
    """Tokens per second of the 16 GPUs, with as many replicas as they make: a step's time does not depend on them."""
    return cluster_rate(tensor, replicas=case.GPUS // tensor)


def throughput_values() -> tuple[Value, ...]:
    return tuple(
        Value(f"tokens/s per GPU at TP={size}", TOKENS_PER_S, gpu_rate(size), stated=STATED_RATE[size])
        for size in STEP_S
    )


def throughput_rows() -> tuple[Row, ...]:
    return tuple(
        {
            "tensor": size,
            "gpus": size * case.REPLICAS,
            "step": STEP_S[size],
            "tokens": case.REPLICAS * REPLICA_TOKENS,
            "cluster": cluster_rate(size),
            "gpu": gpu_rate(size),
            "stated": STATED_RATE[size],
            "verdict": str(NUMBERS.judge((value,))),
            "all_gpus": rate_of_all_gpus(size),
        }
        for size, value in zip(STEP_S, throughput_values(), strict=True)
    )


THROUGHPUT = Table(
    key="throughput",
    title="The table of tensor-parallel sizes, read again",
    intro=(
        "DP=4 in every row, as stated. Stated rate times step is 32,768 tokens throughout, a replica's two "
        "sequences, so the rates are those of a replica, whatever its number of GPUs. The last column gives all 16 "
        "GPUs to each size, with 8, 4 and 2 replicas."
    ),
    columns=(
        Column("tensor", "TP"),
        Column("gpus", "GPUs"),
        Column("step", "step", MS),
        Column("tokens", "tokens of a step"),
        Column("cluster", "together", TOKENS_PER_S, 1),
        Column("gpu", "per GPU", TOKENS_PER_S, 1),
        Column("stated", "per GPU, stated", TOKENS_PER_S, 1),
        Column("verdict", "verdict"),
        Column("all_gpus", "16 GPUs together", TOKENS_PER_S, 1),
    ),
    rows=throughput_rows,
    notes=(
        "If the rates were per GPU, a group at TP=4 would work on eight sequences in a step and one at TP=8 on "
        "sixteen, in less time than a group at TP=2 needs for four.",
    ),
)
