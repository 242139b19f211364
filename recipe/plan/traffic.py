"""What a rank sends in one optimizer step, collective by collective, before anything runs.

The model's part is that of modeling/cost.py and the shapes, DeepSpeed's that of its 0.19.8 source.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from modeling.cost import MATRICES, chunk_bound
from modeling.layout import ParallelLayout
from modeling.spec import LossSpec, ModelSizes
from recipe.plan.job import Job
from recipe.plan.parameters import held_modules
from recipe.plan.zero3 import PLAIN_BUCKET, Thresholds, Weights, zero3_weights, zero_number
from recipe.settings.resolve import BUCKET_KEY
from recipe.shared.sent import Sent, add_up

WIDE_BYTES = 4  # of float32: statistics, losses, sums of replicated parameters' gradients
COUNT_BYTES = 8  # of int64 and float64
SUM_BYTES = 4  # ZeRO's gradients travel in float32, in either precision
ALIGNMENT = 2  # numbers; every rank's part of a flat buffer starts at a multiple of it
ROUTER_LOSSES = ("router_aux_loss_coef", "router_z_loss_coef")

# What changes the bytes in a way that nothing here knows.
NO_FORMULA = (
    *("offload_optimizer", "offload_param", "round_robin_gradients", "stage3_use_all_reduce_for_fetch_params"),
    *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights"),
    *("zero_quantized_gradients", "mics_shard_size"),
)
NUMBERS_OF_RANKS = ("zero_hpz_partition_size", "mics_shard_size")


def ring_bytes(op: str, num_bytes: float, *, size: int) -> float:
    """Return what each of `size` ranks sends of a whole of `num_bytes`; a gather's whole is its result."""
    share = num_bytes * (size - 1) / size
    return 2 * share if op == "all_reduce" else share


def planned_traffic(job: Job) -> tuple[Sent, ...]:
    """Return every collective of a step well after a run's start: all micro-batches, ZeRO's and the update.

    Purposes: of the model "embedding", "attention", "dense", "experts", "routing", "capacity", "qk_norm", "replicated"
    (sums of gradients), "head", "statistics" and "copies"; of the engine "counts", "norm", "router_bias"; "zero" is
    DeepSpeed. Rows of an exchange are the mean over the ranks times `job.rho`; copies are as if every slot held one.
    Logging, evaluation and checkpoints are left out, and so is the flag of a few bytes by which all ranks agree in
    every step whether to stop.

    Raises ValueError for options of the "zero_optimization" block that have no formula.
    """
    _check_options(job)
    micro_batches = (row.times(job.accumulation) for row in _micro_batch(job))
    rows = (*micro_batches, *_engine(job), *_zero(job))
    return add_up(row for row in rows if row.sent_bytes)  # a rank alone on an axis sends nothing


def _sent(job: Job, axis: str, op: str, purpose: str, num_bytes: float, *, num_calls: int = 1, times: int = 1) -> Sent:
    """Return `times` whole tensors of `num_bytes` over an axis, each in `num_calls`."""
    sent_bytes = times * ring_bytes(op, num_bytes, size=job.num_ranks(axis))
    return Sent(axis, op, purpose, times * num_calls, sent_bytes)


def _micro_batch(job: Job) -> Iterator[Sent]:
    """Yield what the model sends: forward, backward, and forward again where blocks are recomputed."""
    if job.model.get("balance_scope") == "global_batch":
        yield _choices_of_all_groups(job, "statistics")
    if job.layout.tp == 1:
        return
    sizes, forwards = job.sizes, 2 if job.recompute else 1
    tokens_bytes = job.num_tokens * sizes.hidden_size * job.element_bytes  # T D numbers
    # Each rank looks up its part of the vocabulary, zeros for the rest: summed, each keeps its tokens.
    yield _sent(job, "group", "reduce_scatter", "embedding", tokens_bytes)
    yield _sent(job, "group", "all_gather", "embedding", tokens_bytes)
    for purpose, layers in (("attention", sizes.num_hidden_layers), ("dense", len(sizes.dense_layers))):
        # Gathered before the first products, sums scattered after the last; backward the other way round.
        gathers, scatters = layers * (forwards + 1 + job.execution.regather), layers * (forwards + 1)
        yield _sent(job, "group", "all_gather", purpose, tokens_bytes, num_calls=job.num_chunks, times=gathers)
        yield _sent(job, "group", "reduce_scatter", purpose, tokens_bytes, num_calls=job.num_chunks, times=scatters)
    if sizes.qk_norm == "full":  # two sums of squares per token, forward, and their gradients
        times = sizes.num_hidden_layers * (forwards + 1)
        yield _sent(job, "group", "all_reduce", "qk_norm", 2 * job.num_tokens * WIDE_BYTES, times=times)
    yield from _replicated(job)
    yield from _head(job, tokens_bytes=tokens_bytes)
    if sizes.num_moe_layers:
        yield from _experts(job, forwards=forwards)
        # Per layer and sequence two numbers per expert and three more, all layers in one sum.
        numbers = sizes.num_moe_layers * job.num_sequences * (2 * sizes.num_experts + 3)
        yield _sent(job, "group", "all_reduce", "statistics", numbers * WIDE_BYTES)


def _replicated(job: Job) -> Iterator[Sent]:
    """Yield the sums of gradients of what several ranks hold whole: norms and router, key-value heads."""
    sizes, layers = job.sizes, job.sizes.num_hidden_layers
    norms = 2 * sizes.hidden_size + (2 * sizes.head_dim if sizes.qk_norm == "head" else 0)
    numbers = layers * norms + sizes.num_moe_layers * sizes.num_experts * sizes.hidden_size + sizes.hidden_size
    # One call per block, and one for the last norm.
    yield _sent(job, "group", "all_reduce", "replicated", WIDE_BYTES * numbers, num_calls=layers + 1)
    weights_bytes = 2 * sizes.head_dim * sizes.hidden_size * job.element_bytes
    yield _sent(job, "kv", "all_reduce", "replicated", weights_bytes, times=layers)
    if sizes.qk_norm == "full":
        yield _sent(job, "kv", "all_reduce", "replicated", sizes.head_dim * WIDE_BYTES, times=layers)


def _head(job: Job, *, tokens_bytes: int) -> Iterator[Sent]:
    """Yield tokens gathered and their gradients scattered; per token a maximum, then two sums, in float32."""
    tp, tokens, chunks = job.layout.tp, job.tokens_per_rank, job.num_chunks
    for op in ("all_gather", "reduce_scatter"):
        yield _sent(job, "group", op, "head", tokens_bytes, num_calls=chunks)
    bounds = [chunk_bound(k, num_rows=tokens, num_chunks=chunks) for k in range(chunks + 1)]
    slices = sum(-(-tp * (end - start) // job.head_rows) for start, end in pairwise(bounds))
    yield _sent(job, "group", "all_reduce", "head", 3 * job.num_tokens * WIDE_BYTES, num_calls=2 * slices)


def _experts(job: Job, *, forwards: int) -> Iterator[Sent]:
    """Yield tokens, weights or rows, and the routing; counts of choices with a capacity; gradients of copies."""
    sizes, strategy = job.sizes, job.moe_strategy
    chunks = job.num_expert_chunks if strategy == "gather_tokens" else 1
    for transfer in job.moe_traffic.transfers(strategy):
        times = sizes.num_moe_layers * (1 if transfer.is_backward else forwards)
        purpose, calls = ("routing", 1) if transfer.is_routing else ("experts", chunks)
        yield Sent("group", transfer.op, purpose, calls, transfer.sent_bytes).times(times)
    if job.model.get("capacity_factor") is not None:
        num_bytes = job.layout.tp * sizes.num_experts_per_tok * (sizes.num_experts + 1) * COUNT_BYTES
        yield _sent(job, "group", "all_gather", "capacity", num_bytes, times=sizes.num_moe_layers * forwards)
    yield _copies(job)


def _copies(job: Job) -> Sent:
    """Return the weights of all layers' copies of experts, or the gradients of these.

    What comes into every layer's slots is as much as goes from a rank to others on average.
    """
    sizes = job.sizes
    expert = MATRICES * sizes.hidden_size * sizes.moe_intermediate_size // job.layout.etp
    sent_bytes = sizes.num_moe_layers * job.execution.resident_experts * expert * job.element_bytes
    return Sent("group", "all_to_all", "copies", 2 * sizes.num_moe_layers, float(sent_bytes))


def _engine(job: Job) -> Iterator[Sent]:
    """Yield what recipe/engine/engine.py adds once per step."""
    yield _sent(job, "dp", "all_reduce", "counts", 2 * COUNT_BYTES)
    if job.model.get("balance_bias_update_rate"):
        yield _choices_of_all_groups(job, "router_bias")
    if job.zero_stage == 0:
        yield _sent(job, "group", "all_reduce", "norm", COUNT_BYTES)
    if job.layout.tp > 1:
        yield _copies(job)


def _choices_of_all_groups(job: Job, purpose: str) -> Sent:
    """Return the sum over all groups of how often each expert was chosen, in float64."""
    numbers = job.sizes.num_moe_layers * job.sizes.num_experts
    return _sent(job, "dp", "all_reduce", purpose, numbers * COUNT_BYTES)


def weights_of(job: Job) -> Weights:
    """Return what ZeRO-3 gathers in a micro-batch of this job."""
    # Of the decoder's outputs x has a gradient, and per router a sum for each loss with a weight.
    losses = [name for name in ROUTER_LOSSES if job.model.get(name, getattr(LossSpec, name))]
    return zero3_weights(
        job.sizes,
        job.layout,
        Thresholds.of(job.zero),
        num_outputs=1 + len(losses) * job.sizes.num_moe_layers,
        accumulates=job.accumulation > 1,
    )


@lru_cache(maxsize=256)
def flat_groups(sizes: ModelSizes, layout: ParallelLayout) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers of the optimizer's two groups, with weight decay and without, in the model's order."""
    held = {name: number for module in held_modules(sizes, layout) for name, number in module.parameters.items()}
    vectors = {name: number for name, number in held.items() if name.endswith("norm.weight")}
    return {name: number for name, number in held.items() if name not in vectors}, vectors


def _zero(job: Job) -> Iterator[Sent]:
    """Yield what ZeRO sends over dp, gradients summed and weights gathered, and its norms over the group as well."""
    stage, times = job.zero_stage, job.accumulation
    if job.layout.dp > 1:
        yield _gradient_sums(job).times(times if stage >= 2 else 1)
        if stage == 3:  # in every micro-batch; after the update those that stay
            weights = weights_of(job)
            gathered = [number for step in weights.steps for number in (step.missing, step.ahead) if number]
            yield _gathers(job, gathered).times(times)
            yield _gathers(job, weights.kept)
        elif stage:
            yield _gathers(job, _padded_groups(job))
    yield from _norms(job)


def _gathers(job: Job, numbers: Sequence[int]) -> Sent:
    """Return gathers of weights over dp, of so many numbers each."""
    return _sent(job, "dp", "all_gather", "zero", job.element_bytes * sum(numbers), num_calls=len(numbers))


def _gradient_sums(job: Job) -> Sent:
    """Return ZeRO's sums of gradients over dp: of one micro-batch for stages 2 and 3, of the whole step below."""
    stage, bucket = job.zero_stage, zero_number(job.zero, BUCKET_KEY)
    op = "all_reduce"
    if stage == 3:
        op, (calls, numbers) = "reduce_scatter", _scattered(job.sizes, job.layout, bucket)
    elif stage == 1 and job.precision != "fp32":
        # In low precision stage 1 is another optimizer, which sums its flat buffers with their padding.
        padded = _padded_groups(job)
        calls, numbers = _num_flushes(padded), sum(padded)
    else:
        calls, numbers = _summed(job.sizes, job.layout, bucket if stage else None)
    return _sent(job, "dp", op, "zero", SUM_BYTES * numbers, num_calls=calls)


@lru_cache(maxsize=256)
def _summed(sizes: ModelSizes, layout: ParallelLayout, bucket: int | None) -> tuple[int, int]:
    """Return calls and numbers of all gradients, in buckets of this size, or of the engine's own."""
    numbers = [number for group in flat_groups(sizes, layout) for number in group.values()]
    return _num_flushes(numbers) if bucket is None else _num_buckets(numbers, bucket), sum(numbers)


@lru_cache(maxsize=256)
def _scattered(sizes: ModelSizes, layout: ParallelLayout, bucket: int) -> tuple[int, int]:
    """Return calls and padded numbers of stage 3's gradients in a micro-batch, in the order of the backward."""
    modules = reversed(held_modules(sizes, layout))
    held = {name: number for module in modules for name, number in module.parameters.items()}
    padded = sum(-(-number // layout.dp) * layout.dp for number in held.values())
    return _num_buckets(tuple(held.values()), bucket), padded


def _padded_groups(job: Job) -> list[int]:
    step = ALIGNMENT * job.layout.dp
    return [-(-sum(group.values()) // step) * step for group in flat_groups(job.sizes, job.layout)]


def _num_buckets(numbers: Sequence[int], bucket: int) -> int:
    """Count sums of gradients that are packed into buckets in this order."""
    filled, buckets = 0, 1
    for number in numbers:
        if filled and filled + number > bucket:
            filled, buckets = 0, buckets + 1
        filled += number
    return buckets


def _num_flushes(numbers: Sequence[int]) -> int:
    """Count sums of gradients by the engine itself: as soon as there are more numbers than a bucket has."""
    filled, flushes = 0, 0
    for number in numbers:
        filled += number
        if filled > PLAIN_BUCKET:
            filled, flushes = 0, flushes + 1
    return flushes + (filled > 0)


def _norms(job: Job) -> Iterator[Sent]:
    """Yield the sums for the gradients' norm and for whether all is finite, over dp and over the group."""
    stage, is_low = job.zero_stage, job.precision != "fp32"
    axes = ("group",) if stage == 1 and is_low else ("dp", "group")
    if stage == 3:
        num_bytes = [8] * _num_sub_groups(job.sizes, job.layout, zero_number(job.zero, "sub_group_size"))
    elif stage == 0:
        num_bytes = [4] if job.clips_gradients else []
    elif axes == ("group",):
        num_bytes = [4]
    else:
        num_bytes = [4, 4, *([1] if is_low else [])]  # a number per group of the optimizer, and a flag of one byte
    for axis in axes:
        yield _sent(job, axis, "all_reduce", "zero", sum(num_bytes), num_calls=len(num_bytes))


@lru_cache(maxsize=256)
def _num_sub_groups(sizes: ModelSizes, layout: ParallelLayout, size: int) -> int:
    """Count the parts of so many numbers in which stage 3 updates the optimizer's groups."""
    count = 0
    for group in flat_groups(sizes, layout):
        filled, count = 0, count + 1
        for number in list(group.values())[:-1]:
            filled += -(-number // layout.dp)
            if filled >= size:
                filled, count = 0, count + 1
    return count


def _check_options(job: Job) -> None:
    found = [key for key in NO_FORMULA if not _is_off(key, job.zero.get(key))]
    if job.zero_stage == 3 and not job.zero.get("reduce_scatter", True):
        found.append("reduce_scatter")
    if job.zero_stage in (1, 2) and not job.zero.get("use_multi_rank_bucket_allreduce", True):
        found.append("use_multi_rank_bucket_allreduce")
    if found:
        raise ValueError(
            f'"zero_optimization" sets {", ".join(found)}, and what ZeRO sends then has no formula here; plan without'
        )


def _is_off(key: str, value: Any) -> bool:
    """Tell whether an option is absent or says no: a part of 1 or -1 rank, a device "none"."""
    if isinstance(value, Mapping):
        return value.get("device", "none") == "none"
    return not value or (key in NUMBERS_OF_RANKS and value in (1, -1))
