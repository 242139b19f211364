"""What a rank sends in one optimizer step, collective by collective, before anything runs."""

from collections.abc import Iterator

from recipe.plan.job import Job
from recipe.plan.model_traffic import copy_bytes, micro_batch_traffic
from recipe.plan.sent import Sent, add_up, ring_bytes
from recipe.plan.zero_traffic import zero_traffic

__all__ = ["Sent", "planned_traffic"]


def planned_traffic(job: Job) -> tuple[Sent, ...]:
    """Every collective of a step of a run that has been going for some: all micro-batches, ZeRO's and the update.

    Purposes: of the model "embedding", "attention", "dense", "experts", "routing", "capacity", "qk_norm", "replicated"
    (sums of gradients), "head", "statistics" and "copies"; of the engine "counts", "norm", "router_bias"; "zero" is
    DeepSpeed. Rows of an exchange are the mean over the ranks times `job.rho`, copies are as if every slot held one.
    Logging, evaluation and checkpoints are no part of it, nor the flag of a few bytes by which all ranks agree in every
    step whether to stop, and those of a save under way.
    """
    in_micro_batch = micro_batch_traffic(job)
    micro_batches = [
        Sent(axis, op, purpose, job.accumulation * num_calls, job.accumulation * sent_bytes)
        for axis, op, purpose, num_calls, sent_bytes in in_micro_batch
    ]
    return add_up([*micro_batches, *_engine_traffic(job), *zero_traffic(job)])


def _engine_traffic(job: Job) -> Iterator[Sent]:
    """What recipe/engine/engine.py adds once per step."""
    layout, sizes = job.layout, job.sizes
    if layout.dp > 1:
        yield Sent("dp", "all_reduce", "counts", 1, ring_bytes("all_reduce", 2 * 8, size=layout.dp))
        if job.model.get("balance_bias_update_rate") and sizes.num_moe_layers:
            num_bytes = 8 * sizes.num_moe_layers * sizes.num_experts
            yield Sent("dp", "all_reduce", "router_bias", 1, ring_bytes("all_reduce", num_bytes, size=layout.dp))
    if layout.tp > 1:
        if job.zero_stage == 0:
            yield Sent("group", "all_reduce", "norm", 1, ring_bytes("all_reduce", 8, size=layout.tp))
        if job.wire.resident_experts:
            # What comes into every layer's slots, which is as much as goes from a rank to others' on average.
            yield Sent("group", "all_to_all", "copies", 2 * sizes.num_moe_layers, copy_bytes(job))
