"""What the model sends in one micro-batch: forward, backward, and forward again where blocks are recomputed."""

from collections.abc import Iterator
from itertools import pairwise

from modeling import cost
from modeling.cost import HEAD_CHUNK_BYTES, MATRICES, MoeTraffic
from recipe.plan.job import Job
from recipe.plan.sent import Sent, ring_bytes

WIDE_BYTES = 4  # of float32: statistics, losses, sums of replicated parameters' gradients


def micro_batch_traffic(job: Job) -> list[Sent]:
    """Along the axes "group" and "kv"; with groups of one rank only what the balance loss asks the others for."""
    rows = list(_balance_over_groups(job))
    if job.layout.tp == 1:
        return rows
    sizes = job.sizes
    moe, dense = sizes.num_moe_layers, len(sizes.dense_layers)
    rows += [
        *_embedding(job),
        *_products(job, purpose="attention", num_layers=moe + dense),
        *_products(job, purpose="dense", num_layers=dense),
        *_qk_norm(job),
        *_key_value_twins(job),
        *_replicated(job),
        *_head(job),
    ]
    return [*rows, *_experts(job), *_statistics(job)] if moe else rows


def num_chunks(job: Job) -> int:
    """In how many pieces a rank's tokens are gathered, and their sums scattered, as modeling/comm.py cuts them."""
    if job.layout.tp == 1:
        return 1
    tokens = job.tokens_per_rank
    return cost.settle_num_chunks(
        tokens,
        sent_bytes=(job.layout.tp - 1) * tokens * job.sizes.hidden_size * job.element_bytes,
        device=job.device,
        overlap=job.wire.overlap,
        wanted=job.wire.overlap_chunks,
    )


def head_rows(job: Job) -> int:
    """Tokens whose logits are made at a time."""
    width = -(-job.sizes.vocab_size // job.layout.tp)
    return cost.head_rows(width, chunk_bytes=HEAD_CHUNK_BYTES[job.device])


def moe_traffic(job: Job) -> MoeTraffic:
    """One layer's formulas for this job."""
    return MoeTraffic(
        sizes=job.sizes,
        layout=job.layout,
        num_tokens=job.num_tokens,
        element_bytes=job.element_bytes,
        rho=job.rho,
        regather=job.wire.regather,
        fp8_tokens=job.wire.token_dtype != "auto",
        sum_bytes=WIDE_BYTES if job.wire.combine_dtype == "float32" else None,
    )


def copy_bytes(job: Job) -> float:
    """Of all layers' resident copies of experts: their weights, or the gradients of these."""
    sizes, layout = job.sizes, job.layout
    expert = MATRICES * sizes.hidden_size * sizes.moe_intermediate_size // layout.etp
    return float(sizes.num_moe_layers * job.wire.resident_experts * expert * job.element_bytes)


def _sent(job: Job, op: str, purpose: str, *, num_bytes: float, num_calls: int = 1, times: int = 1) -> Sent:
    """`times` whole tensors of `num_bytes` over the group, each in `num_calls`."""
    return Sent("group", op, purpose, times * num_calls, times * ring_bytes(op, num_bytes, size=job.layout.tp))


def _tokens_bytes(job: Job) -> int:
    """T*D numbers."""
    return job.num_tokens * job.sizes.hidden_size * job.element_bytes


def _forwards(job: Job) -> int:
    """How often a block's forward is computed."""
    return 2 if job.recompute else 1


def _embedding(job: Job) -> Iterator[Sent]:
    """Every rank has the rows of its part of the vocabulary, zeros for others: summed, each keeps its tokens."""
    yield _sent(job, "reduce_scatter", "embedding", num_bytes=_tokens_bytes(job))
    yield _sent(job, "all_gather", "embedding", num_bytes=_tokens_bytes(job))


def _products(job: Job, *, purpose: str, num_layers: int) -> Iterator[Sent]:
    """Tokens gathered before the first products, sums scattered after the last; backward the other way round."""
    if not num_layers:
        return
    chunks, forwards = num_chunks(job), _forwards(job)
    gathers = forwards + 1 + (1 if job.wire.regather else 0)
    for op, times in (("all_gather", gathers), ("reduce_scatter", forwards + 1)):
        yield _sent(job, op, purpose, num_bytes=_tokens_bytes(job), num_calls=chunks, times=num_layers * times)


def _qk_norm(job: Job) -> Iterator[Sent]:
    """A norm over the full width of q and of k: two sums of squares per token, forward, and their gradients."""
    if job.sizes.qk_norm == "full":
        times = job.sizes.num_hidden_layers * (_forwards(job) + 1)
        yield _sent(job, "all_reduce", "qk_norm", num_bytes=2 * job.num_tokens * WIDE_BYTES, times=times)


def _key_value_twins(job: Job) -> Iterator[Sent]:
    """Ranks with the same key-value head sum the gradients of its weights."""
    sizes, twins = job.sizes, job.layout.tp // job.sizes.num_key_value_heads
    if twins <= 1:
        return
    weights = 2 * sizes.head_dim * sizes.hidden_size * job.element_bytes
    summed = [weights, sizes.head_dim * WIDE_BYTES] if sizes.qk_norm == "full" else [weights]
    layers = sizes.num_hidden_layers
    sent_bytes = layers * sum(ring_bytes("all_reduce", num_bytes, size=twins) for num_bytes in summed)
    yield Sent("kv", "all_reduce", "replicated", layers * len(summed), sent_bytes)


def _replicated(job: Job) -> Iterator[Sent]:
    """Gradients of what every rank holds whole: a sum per block and one for the last norm, in float32."""
    sizes = job.sizes
    norms = 2 * sizes.hidden_size + (2 * sizes.head_dim if sizes.qk_norm == "head" else 0)
    numbers = sizes.num_hidden_layers * norms + sizes.num_moe_layers * sizes.num_experts * sizes.hidden_size
    numbers += sizes.hidden_size
    sent_bytes = ring_bytes("all_reduce", WIDE_BYTES * numbers, size=job.layout.tp)
    yield Sent("group", "all_reduce", "replicated", sizes.num_hidden_layers + 1, sent_bytes)


def _experts(job: Job) -> Iterator[Sent]:
    """Tokens, weights or rows, and the routing, by modeling/cost.py; counts of choices where there is a capacity."""
    sizes, strategy, forwards = job.sizes, job.moe_strategy, _forwards(job)
    chunks = num_chunks(job) if strategy == "gather_tokens" else 1
    for transfer in moe_traffic(job).transfers(strategy):
        times = sizes.num_moe_layers * (1 if transfer.is_backward else forwards)
        purpose, calls = ("routing", 1) if transfer.is_routing else ("experts", chunks)
        yield Sent("group", transfer.op, purpose, times * calls, times * transfer.sent_bytes)
    if job.model.get("capacity_factor") is not None:
        num_bytes = job.layout.tp * sizes.num_experts_per_tok * (sizes.num_experts + 1) * 8
        yield _sent(job, "all_gather", "capacity", num_bytes=num_bytes, times=sizes.num_moe_layers * forwards)
    if job.wire.resident_experts:
        yield Sent("group", "all_to_all", "copies", 2 * sizes.num_moe_layers, copy_bytes(job))


def _head(job: Job) -> Iterator[Sent]:
    """Tokens gathered and their gradients scattered in the forward; per token a maximum, then two sums, in float32."""
    chunks = num_chunks(job)
    for op in ("all_gather", "reduce_scatter"):
        yield _sent(job, op, "head", num_bytes=_tokens_bytes(job), num_calls=chunks)
    slices = sum(-(-job.layout.tp * rows // head_rows(job)) for rows in _chunk_rows(job, chunks))
    yield Sent(
        "group",
        "all_reduce",
        "head",
        2 * slices,
        ring_bytes("all_reduce", 3 * job.num_tokens * WIDE_BYTES, size=job.layout.tp),
    )


def _chunk_rows(job: Job, chunks: int) -> list[int]:
    """How many of a rank's tokens each chunk has."""
    tokens = job.tokens_per_rank
    bounds = [cost.chunk_bound(k, num_rows=tokens, num_chunks=chunks) for k in range(chunks + 1)]
    return [end - start for start, end in pairwise(bounds)]


def _statistics(job: Job) -> Iterator[Sent]:
    """Per layer and sequence two numbers per expert and three more, all layers in one sum."""
    numbers = job.sizes.num_moe_layers * job.num_sequences * (2 * job.sizes.num_experts + 3)
    yield _sent(job, "all_reduce", "statistics", num_bytes=numbers * WIDE_BYTES)


def _balance_over_groups(job: Job) -> Iterator[Sent]:
    """The choices of all groups, in float64, where load is balanced over the global batch."""
    sizes, dp = job.sizes, job.layout.dp
    if job.model.get("balance_scope") == "global_batch" and dp > 1 and sizes.num_moe_layers:
        num_bytes = 8 * sizes.num_moe_layers * sizes.num_experts
        yield Sent("dp", "all_reduce", "statistics", 1, ring_bytes("all_reduce", num_bytes, size=dp))
