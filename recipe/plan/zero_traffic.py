"""What DeepSpeed's ZeRO sends in one optimizer step, as 0.19.8 does it: gradients, weights, norms, overflow checks."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from modeling.layout import ParallelLayout
from modeling.spec import ModelSizes, layer_shapes, outer_shapes
from recipe.plan.job import Job
from recipe.plan.parameters import held_numbers
from recipe.plan.sent import Sent, ring_bytes
from recipe.plan.zero3_fetches import Fetch, Module, Thresholds, Way, fetches_of_a_micro_batch, gathers_of, persistent
from recipe.plan.zero_defaults import PLAIN_BUCKET, zero_number

SUM_BYTES = 4  # gradients travel in float32, in either precision
ALIGNMENT = 2  # numbers; every rank's part of a flat buffer starts at a multiple of it
NUM_OUTPUTS = {False: 3, True: 1}  # of a block, dense or not, with a gradient: x, and two of the router's sums

ROUTER_LOSSES = {"router_aux_loss_coef": 0.001, "router_z_loss_coef": 0.0}  # defaults of the model's configuration

# What changes the bytes in a way that nothing here knows.
NO_FORMULA = (
    *("offload_optimizer", "offload_param", "round_robin_gradients"),
    *("stage3_use_all_reduce_for_fetch_params",),
    *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights"),
    *("zero_quantized_gradients", "mics_shard_size"),
)
NUMBERS_OF_RANKS = ("zero_hpz_partition_size", "mics_shard_size")


def zero_traffic(job: Job) -> Iterator[Sent]:
    """Over dp, and the norms and checks over the group.

    ValueError for options of the "zero_optimization" block that have no formula.
    """
    _check_options(job)
    if job.layout.dp > 1:
        yield from (_sharded(job) if job.zero_stage == 3 else _flat(job))
    yield from _norms(job)


@lru_cache(maxsize=64)
def held_modules(sizes: ModelSizes, layout: ParallelLayout) -> tuple[Module, ...]:
    """What each rank of a group holds: the embedding, every block, the last norm, the head, as they run."""
    outer = held_numbers(outer_shapes(sizes), sizes=sizes, layout=layout)
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    head = "lm_head.weight" if "lm_head.weight" in outer else embedding  # tied: the same parameter
    kinds = {
        dense: held_numbers(layer_shapes(sizes, is_dense=dense), sizes=sizes, layout=layout)
        for dense in {i in sizes.dense_layers for i in range(sizes.num_hidden_layers)}
    }
    blocks = []
    for i in range(sizes.num_hidden_layers):
        dense = i in sizes.dense_layers
        parameters = {f"model.layers.{i}.{name}": kinds[dense][name] for name in sorted(kinds[dense], key=_place)}
        blocks.append(Module(f"block {i}", parameters, is_block=True, num_outputs=NUM_OUTPUTS[dense]))
    ends = [Module(part, {name: outer[name]}) for part, name in (("norm", norm), ("head", head))]
    return (Module("embedding", {embedding: outer[embedding]}), *blocks, *ends)


@lru_cache(maxsize=64)
def held_fetches(sizes: ModelSizes, layout: ParallelLayout, thresholds: Thresholds, *, way: Way) -> list[Fetch]:
    """What stage 3 gathers of them in a micro-batch, and when."""
    return fetches_of_a_micro_batch(held_modules(sizes, layout), thresholds, way=way)


def way_of(job: Job) -> Way:
    """Of the decoder's outputs x has a gradient, and per router a sum for each loss with a weight."""
    losses = [name for name, default in ROUTER_LOSSES.items() if job.model.get(name, default)]
    return Way(1 + len(losses) * job.sizes.num_moe_layers, job.accumulation > 1)


@lru_cache(maxsize=64)
def flat_groups(sizes: ModelSizes, layout: ParallelLayout) -> list[dict[str, int]]:
    """The optimizer's two groups, with weight decay and without: matrices and vectors, in the model's order."""
    held = {name: numel for module in held_modules(sizes, layout) for name, numel in module.parameters.items()}
    vectors = {name: numel for name, numel in held.items() if name.endswith("norm.weight")}
    return [{name: numel for name, numel in held.items() if name not in vectors}, vectors]


def _place(name: str) -> int:
    """Where a parameter stands in its block."""
    return next(i for i, start in enumerate(("self_attn", "mlp", "input", "post")) if name.startswith(start))


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
    """Whether an option is absent or says no: a part of 1 or -1 rank, a device "none"."""
    if isinstance(value, Mapping):
        return value.get("device", "none") == "none"
    return not value or (key in NUMBERS_OF_RANKS and value in (1, -1))


def _flat(job: Job) -> Iterator[Sent]:
    """Stages 0 to 2: gradients summed, once per step or, by stage 2, per micro-batch; weights gathered."""
    dp, groups = job.layout.dp, flat_groups(job.sizes, job.layout)
    step = ALIGNMENT * dp
    padded = [-(-sum(group.values()) // step) * step for group in groups]
    each = [numel for group in groups for numel in group.values()]
    # In low precision stage 1 is another optimizer, which sums its flat buffers with their padding.
    summed = padded if job.zero_stage == 1 and job.precision != "fp32" else each
    times = job.accumulation if job.zero_stage == 2 else 1
    sent_bytes = ring_bytes("all_reduce", SUM_BYTES * sum(summed), size=dp)
    through_engine = job.zero_stage == 0 or summed is padded
    calls = _num_flushes(summed) if through_engine else _num_buckets(summed, job)
    yield Sent("dp", "all_reduce", "zero", times * calls, times * sent_bytes)
    if job.zero_stage > 0:
        sent_bytes = ring_bytes("all_gather", job.element_bytes * sum(padded), size=dp)
        yield Sent("dp", "all_gather", "zero", len(groups), sent_bytes)


def _sharded(job: Job) -> Iterator[Sent]:
    """Stage 3: in every micro-batch weights gathered and gradients scattered; at its end what stays is gathered."""
    dp, thresholds, modules = job.layout.dp, Thresholds.of(job.zero), held_modules(job.sizes, job.layout)
    padded = {name: -(-numel // dp) * dp for module in modules for name, numel in module.parameters.items()}
    gathers = gathers_of(held_fetches(job.sizes, job.layout, thresholds, way=way_of(job)))
    kept = persistent(modules, thresholds)
    numbers = job.accumulation * sum(padded[name] for gather in gathers for name in gather)
    numbers += sum(padded[name] for name in kept)
    calls = job.accumulation * len(gathers) + len(kept)
    if calls:
        yield Sent("dp", "all_gather", "zero", calls, ring_bytes("all_gather", job.element_bytes * numbers, size=dp))
    sent_bytes = ring_bytes("reduce_scatter", SUM_BYTES * sum(padded.values()), size=dp)
    held = {name: numel for module in reversed(modules) for name, numel in module.parameters.items()}
    calls = job.accumulation * _num_buckets(list(held.values()), job)
    yield Sent("dp", "reduce_scatter", "zero", calls, job.accumulation * sent_bytes)


def _norms(job: Job) -> Iterator[Sent]:
    """The gradients' norm, a number per buffer, and whether all is finite, one byte, over dp and over the group."""
    stage, is_low = job.zero_stage, job.precision != "fp32"
    groups = flat_groups(job.sizes, job.layout)
    if stage == 3:
        num_bytes, over_dp, over_group = [8] * sum(_num_sub_groups(group, job) for group in groups), True, True
    elif stage == 1 and is_low:
        num_bytes, over_dp, over_group = [4], False, True
    elif stage == 0 and not job.clips_gradients:
        num_bytes, over_dp, over_group = [], False, False
    elif stage == 0:
        num_bytes, over_dp, over_group = [4], True, True
    else:
        num_bytes = [4] * len(groups) + ([1] if is_low else [])
        over_dp = over_group = True
    for axis, size, is_sent in (("dp", job.layout.dp, over_dp), ("group", job.layout.tp, over_group)):
        if is_sent and size > 1:
            sent_bytes = sum(ring_bytes("all_reduce", number, size=size) for number in num_bytes)
            yield Sent(axis, "all_reduce", "zero", len(num_bytes), sent_bytes)


def _num_buckets(numels: Sequence[int], job: Job) -> int:
    """Sums of gradients, packed one after the other into buckets; the order decides, which is here the model's."""
    size, filled, buckets = zero_number(job.zero, "reduce_bucket_size"), 0, 1
    for numel in numels:
        if filled and filled + numel > size:
            filled, buckets = 0, buckets + 1
        filled += numel
    return buckets


def _num_flushes(numels: Sequence[int]) -> int:
    """Sums of gradients where the engine itself sums them: as soon as there are more numbers than a bucket has."""
    filled, flushes = 0, 0
    for numel in numels:
        filled += numel
        if filled > PLAIN_BUCKET:
            filled, flushes = 0, flushes + 1
    return flushes + (filled > 0)


def _num_sub_groups(group: Mapping[str, int], job: Job) -> int:
    """Stage 3 updates a group's parts of so many numbers one by one."""
    size, filled, number = zero_number(job.zero, "sub_group_size"), 0, 1
    parts = [-(-numel // job.layout.dp) for numel in group.values()]
    for part in parts[:-1]:
        filled += part
        if filled >= size:
            filled, number = 0, number + 1
    return number
