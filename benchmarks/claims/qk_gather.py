"""When tensor-parallel attention has to gather queries and keys at all, and what the least is."""

from claims import case
from claims.claim import MB
from claims.table import Column, Row, Table

KEY_VALUE_HEADS = 2
HEAD_SIZE = 128
FLOAT32 = 4


def statistics_bytes() -> float:
    """One float32 sum of squares per token for queries and one for keys, all-reduced."""
    return case.all_reduce_bytes(2 * FLOAT32 * case.LENGTH)


def gathered_bytes() -> float:
    """All of queries and keys on every rank."""
    return 2 * case.gather_bytes(case.tokens_bytes())


def resharded_bytes() -> float:
    """Queries and keys from heads to positions and back: an all-to-all each way for each."""
    return 4 * case.gather_bytes(case.tokens_bytes() / case.RANKS)


def pair_bytes() -> float:
    """Keys and values within the ranks that share a head, where a group has more ranks than heads."""
    sharers = case.RANKS // KEY_VALUE_HEADS
    return 2 * case.gather_bytes(case.tokens_bytes(width=HEAD_SIZE), ranks=sharers)


def mixed_bytes() -> float:
    """The whole projection of queries, keys and values over the group."""
    return case.gather_bytes(case.tokens_bytes(width=case.WIDTH + 2 * KEY_VALUE_HEADS * HEAD_SIZE))


def need_rows() -> tuple[Row, ...]:
    full, few = "norm over the full width of q and k", f"{KEY_VALUE_HEADS} key-value heads for {case.RANKS} ranks"
    all_reduce = "all-reduce of 2 float32 per token"

    def row(when: str, how: str, sent: float, least: float) -> Row:
        return {"when": when, "how": how, "sent": sent, "factor": sent / least if least else None}

    return (
        row("heads divide over the ranks", "nothing", 0.0, 0.0),
        row(full, all_reduce, statistics_bytes(), statistics_bytes()),
        row(full, "heads to positions and back", resharded_bytes(), statistics_bytes()),
        row(full, "q and k gathered", gathered_bytes(), statistics_bytes()),
        row(few, "replicated weights, gradients summed over those that share a head", 0.0, 0.0),
        row(few, "k and v gathered among those that share a head", pair_bytes(), pair_bytes()),
        row(few, "q, k and v gathered by all, then sliced", mixed_bytes(), pair_bytes()),
    )


QK_GATHER = Table(
    key="qk_gather",
    title="When queries and keys must be gathered",
    intro=(
        "Forward, per rank, T=16,384, H=1024, N=4, bf16. With heads split over the group attention needs nothing from "
        f"other ranks but its input. (Key-value heads of size {HEAD_SIZE} in the last three rows.)"
    ),
    columns=(
        Column("when", "case"),
        Column("how", "what is sent"),
        Column("sent", "sent", MB, 3),
        Column("factor", "times the least", None, 0),
    ),
    rows=need_rows,
    sources=(
        "Megatron-LM, megatron/core/transformer/attention.py: gathers the mixed projection where a group has more "
        "ranks than key-value heads",
        "OLMo-core, nn/attention: moves q and k from heads to positions for its full-width norms",
        "vLLM, SGLang, exllamav3 and mlx-lm all-reduce the sum of squares",
    ),
)
