"""What a rank sends in one optimizer step, collective by collective, before anything runs.

The model's part is that of modeling/cost.py and the shapes, DeepSpeed's that of its 0.19.8 source.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from modeling.cost import MATRICES, chunk_bound
from modeling.layout import ParallelLayout
from modeling.spec import LossSpec, ModelSizes
from recipe.plan.job import Job
from recipe.plan.parameters import held_modules
from recipe.plan.zero3 import PLAIN_BUCKET, Thresholds, Weights, zero3_weights, zero_number
from recipe.settings.resolve import BUCKET_KEY

WIDE_BYTES = 4  # of float32: statistics, losses, sums of replicated parameters' gradients
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


class Sent(NamedTuple):
    """Collectives of one kind, for one purpose, along one axis of the mesh.

    axis        "group" (its tp ranks), "kv" (those of them with the same key-value heads), "dp"
    op          "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"
    sent_bytes  by one rank, as a ring sends them
    """

    axis: str
    op: str
    purpose: str
    num_calls: int
    sent_bytes: float

    def times(self, number: int) -> "Sent":
        return self._replace(num_calls=number * self.num_calls, sent_bytes=number * self.sent_bytes)


def ring_bytes(op: str, num_bytes: float, *, size: int) -> float:
    """Return what each of `size` ranks sends of a whole of `num_bytes`; a gather's whole is its result."""
    share = num_bytes * (size - 1) / size
    return 2 * share if op == "all_reduce" else share


def add_up(rows: Iterable[Sent]) -> tuple[Sent, ...]:
    """Join rows of the same axis, op and purpose, sorted."""
    sums: dict[tuple[str, str, str], tuple[int, float]] = {}
    for axis, op, purpose, num_calls, sent_bytes in rows:
        calls, total = sums.get((axis, op, purpose), (0, 0.0))
        sums[axis, op, purpose] = (calls + num_calls, total + sent_bytes)
    return tuple(Sent(*key, *value) for key, value in sorted(sums.items()))


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
    return add_up([*micro_batches, *_engine(job), *_zero(job)])


def _micro_batch(job: Job) -> Iterator[Sent]:
    """Yield what the model sends: forward, backward, and forward again where blocks are recomputed."""
    if job.model.get("balance_scope") == "global_batch":
        yield from _choices_of_all_groups(job, "statistics")
    if job.layout.tp == 1:
        return
    sizes, forwards = job.sizes, 2 if job.recompute else 1
    tokens_bytes = job.num_tokens * sizes.hidden_size * job.element_bytes  # T D numbers
    # Each rank looks up its part of the vocabulary, zeros for the rest: summed, each keeps its tokens.
    yield _sent(job, "reduce_scatter", "embedding", num_bytes=tokens_bytes)
    yield _sent(job, "all_gather", "embedding", num_bytes=tokens_bytes)
    for purpose, layers in (("attention", sizes.num_hidden_layers), ("dense", len(sizes.dense_layers))):
        if layers:
            # Gathered before the first products, sums scattered after the last; backward the other way round.
            calls = job.num_chunks
            gathers = layers * (forwards + 1 + job.wire.regather)
            yield _sent(job, "all_gather", purpose, num_bytes=tokens_bytes, num_calls=calls, times=gathers)
            scatters = layers * (forwards + 1)
            yield _sent(job, "reduce_scatter", purpose, num_bytes=tokens_bytes, num_calls=calls, times=scatters)
    if sizes.qk_norm == "full":  # two sums of squares per token, forward, and their gradients
        times = sizes.num_hidden_layers * (forwards + 1)
        yield _sent(job, "all_reduce", "qk_norm", num_bytes=2 * job.num_tokens * WIDE_BYTES, times=times)
    yield from _replicated(job)
    yield from _head(job, tokens_bytes=tokens_bytes)
    if sizes.num_moe_layers:
        yield from _experts(job, forwards=forwards)
        # Per layer and sequence two numbers per expert and three more, all layers in one sum.
        numbers = sizes.num_moe_layers * job.num_sequences * (2 * sizes.num_experts + 3)
        yield _sent(job, "all_reduce", "statistics", num_bytes=numbers * WIDE_BYTES)


def _sent(job: Job, op: str, purpose: str, *, num_bytes: float, num_calls: int = 1, times: int = 1) -> Sent:
    """Return `times` whole tensors of `num_bytes` over the group, each in `num_calls`."""
    return Sent("group", op, purpose, times * num_calls, times * ring_bytes(op, num_bytes, size=job.layout.tp))


def _replicated(job: Job) -> Iterator[Sent]:
    """Yield the sums of gradients of what several ranks hold whole: norms and router, key-value heads."""
    sizes, tp = job.sizes, job.layout.tp
    layers, twins = sizes.num_hidden_layers, tp // sizes.num_key_value_heads
    norms = 2 * sizes.hidden_size + (2 * sizes.head_dim if sizes.qk_norm == "head" else 0)
    numbers = layers * norms + sizes.num_moe_layers * sizes.num_experts * sizes.hidden_size + sizes.hidden_size
    sent_bytes = ring_bytes("all_reduce", WIDE_BYTES * numbers, size=tp)
    yield Sent("group", "all_reduce", "replicated", layers + 1, sent_bytes)  # one per block, one for the last norm
    if twins > 1:
        summed = [2 * sizes.head_dim * sizes.hidden_size * job.element_bytes]
        if sizes.qk_norm == "full":
            summed.append(sizes.head_dim * WIDE_BYTES)
        sent_bytes = layers * sum(ring_bytes("all_reduce", num_bytes, size=twins) for num_bytes in summed)
        yield Sent("kv", "all_reduce", "replicated", layers * len(summed), sent_bytes)


def _head(job: Job, *, tokens_bytes: int) -> Iterator[Sent]:
    """Yield tokens gathered and their gradients scattered; per token a maximum, then two sums, in float32."""
    tp, tokens, chunks = job.layout.tp, job.tokens_per_rank, job.num_chunks
    for op in ("all_gather", "reduce_scatter"):
        yield _sent(job, op, "head", num_bytes=tokens_bytes, num_calls=chunks)
    bounds = [chunk_bound(k, num_rows=tokens, num_chunks=chunks) for k in range(chunks + 1)]
    slices = sum(-(-tp * (end - start) // job.head_rows) for start, end in pairwise(bounds))
    sent_bytes = ring_bytes("all_reduce", 3 * job.num_tokens * WIDE_BYTES, size=tp)
    yield Sent("group", "all_reduce", "head", 2 * slices, sent_bytes)


def _experts(job: Job, *, forwards: int) -> Iterator[Sent]:
    """Yield tokens, weights or rows, and the routing; counts of choices with a capacity; gradients of copies."""
    sizes, strategy = job.sizes, job.moe_strategy
    chunks = job.num_chunks if strategy == "gather_tokens" else 1
    for transfer in job.moe_traffic.transfers(strategy):
        times = sizes.num_moe_layers * (1 if transfer.is_backward else forwards)
        purpose, calls = ("routing", 1) if transfer.is_routing else ("experts", chunks)
        yield Sent("group", transfer.op, purpose, times * calls, times * transfer.sent_bytes)
    if job.model.get("capacity_factor") is not None:
        num_bytes = job.layout.tp * sizes.num_experts_per_tok * (sizes.num_experts + 1) * 8
        yield _sent(job, "all_gather", "capacity", num_bytes=num_bytes, times=sizes.num_moe_layers * forwards)
    if job.wire.resident_experts:
        yield Sent("group", "all_to_all", "copies", 2 * sizes.num_moe_layers, _copy_bytes(job))


def _copy_bytes(job: Job) -> float:
    """Return the bytes of all layers' copies of experts: their weights, or the gradients of these."""
    sizes, layout = job.sizes, job.layout
    expert = MATRICES * sizes.hidden_size * sizes.moe_intermediate_size // layout.etp
    return float(sizes.num_moe_layers * job.wire.resident_experts * expert * job.element_bytes)


def _engine(job: Job) -> Iterator[Sent]:
    """Yield what recipe/engine/engine.py adds once per step."""
    layout, sizes = job.layout, job.sizes
    if layout.dp > 1:
        yield Sent("dp", "all_reduce", "counts", 1, ring_bytes("all_reduce", 2 * 8, size=layout.dp))
        if job.model.get("balance_bias_update_rate"):
            yield from _choices_of_all_groups(job, "router_bias")
    if layout.tp > 1:
        if job.zero_stage == 0:
            yield Sent("group", "all_reduce", "norm", 1, ring_bytes("all_reduce", 8, size=layout.tp))
        if job.wire.resident_experts:
            # What comes into every layer's slots, which is as much as goes from a rank to others on average.
            yield Sent("group", "all_to_all", "copies", 2 * sizes.num_moe_layers, _copy_bytes(job))


def _choices_of_all_groups(job: Job, purpose: str) -> Iterator[Sent]:
    """Yield the sum over all groups of how often each expert was chosen, in float64."""
    sizes, dp = job.sizes, job.layout.dp
    if dp > 1 and sizes.num_moe_layers:
        num_bytes = 8 * sizes.num_moe_layers * sizes.num_experts
        yield Sent("dp", "all_reduce", purpose, 1, ring_bytes("all_reduce", num_bytes, size=dp))


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
    dp, stage, times = job.layout.dp, job.zero_stage, job.accumulation
    if dp > 1 and stage == 3:
        # Weights are gathered in every micro-batch; after the update those that stay.
        weights = weights_of(job)
        calls = times * weights.num_gathers + len(weights.kept)
        numbers = times * sum(step.missing + step.ahead for step in weights.steps) + sum(weights.kept)
        if calls:
            sent_bytes = ring_bytes("all_gather", job.element_bytes * numbers, size=dp)
            yield Sent("dp", "all_gather", "zero", calls, sent_bytes)
        yield _gradient_sums(job).times(times)
    elif dp > 1:
        yield _gradient_sums(job).times(times if stage == 2 else 1)
        if stage:
            padded = _padded_groups(job)
            sent_bytes = ring_bytes("all_gather", job.element_bytes * sum(padded), size=dp)
            yield Sent("dp", "all_gather", "zero", len(padded), sent_bytes)
    yield from _norms(job)


def _gradient_sums(job: Job) -> Sent:
    """Return ZeRO's sums of gradients over dp: of one micro-batch for stages 2 and 3, of the whole step below."""
    stage, bucket = job.zero_stage, zero_number(job.zero, BUCKET_KEY)
    if stage == 3:
        op, (calls, numbers) = "reduce_scatter", _scattered(job.sizes, job.layout, bucket)
    elif stage == 1 and job.precision != "fp32":
        # In low precision stage 1 is another optimizer, which sums its flat buffers with their padding.
        padded = _padded_groups(job)
        op, calls, numbers = "all_reduce", _num_flushes(padded), sum(padded)
    else:
        op, (calls, numbers) = "all_reduce", _summed(job.sizes, job.layout, bucket if stage else None)
    return Sent("dp", op, "zero", calls, ring_bytes(op, SUM_BYTES * numbers, size=job.layout.dp))


@lru_cache(maxsize=256)
def _summed(sizes: ModelSizes, layout: ParallelLayout, bucket: int | None) -> tuple[int, int]:
    """Return calls and numbers of all gradients, in buckets of this size, or of the engine's own."""
    numbers = [number for group in flat_groups(sizes, layout) for number in group.values()]
    return _num_flushes(numbers) if bucket is None else _num_buckets(numbers, bucket), sum(numbers)


def _padded_groups(job: Job) -> list[int]:
    step = ALIGNMENT * job.layout.dp
    return [-(-sum(group.values()) // step) * step for group in flat_groups(job.sizes, job.layout)]


@lru_cache(maxsize=256)
def _scattered(sizes: ModelSizes, layout: ParallelLayout, bucket: int) -> tuple[int, int]:
    """Return calls and padded numbers of stage 3's gradients in a micro-batch, in the order of the backward."""
    modules = reversed(held_modules(sizes, layout))
    held = {name: number for module in modules for name, number in module.parameters.items()}
    padded = sum(-(-number // layout.dp) * layout.dp for number in held.values())
    return _num_buckets(tuple(held.values()), bucket), padded


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
    axes = {"dp": job.layout.dp, "group": job.layout.tp}
    num_bytes = [4, 4, *([1] if is_low else [])]  # a number per group of the optimizer, and a flag of one byte
    if stage == 3:
        num_bytes = [8] * _num_sub_groups(job.sizes, job.layout, zero_number(job.zero, "sub_group_size"))
    elif stage == 1 and is_low:
        num_bytes, axes = [4], {"group": job.layout.tp}
    elif stage == 0:
        num_bytes = [4] if job.clips_gradients else []
    for axis, size in axes.items():
        if num_bytes and size > 1:
            sent_bytes = sum(ring_bytes("all_reduce", number, size=size) for number in num_bytes)
            yield Sent(axis, "all_reduce", "zero", len(num_bytes), sent_bytes)


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
