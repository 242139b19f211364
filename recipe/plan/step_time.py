"""How long one optimizer step takes on the slowest rank, by what the time is spent on.

A part computes for the greater of operations over their rate and bytes over the memory's bandwidth; a collective takes
alpha times the steps of a ring plus bytes over bandwidth; what overlaps is played through in the order of the code.
MFU counts causal attention once (half of the score square), as recipe/shared/flops.py does.
"""

from typing import NamedTuple

from recipe.plan.compute_time import (
    Both,
    attention_times,
    dense_times,
    expert_times,
    head_times,
    other_times,
    router_times,
)
from recipe.plan.hardware_values import Hardware
from recipe.plan.host_time import num_launches
from recipe.plan.job import Job
from recipe.plan.overlap import ExposedShares, LayerTimes, exposed_shares
from recipe.plan.rates import Rates
from recipe.plan.traffic import planned_traffic
from recipe.plan.update_time import update_time
from recipe.plan.wire_time import WireTime, busy_share, ring_of, wire_times
from recipe.plan.zero_overlap import PartTimes, hidden_seconds
from recipe.shared.flops import model_flops_per_token

# The group's transfers that products run beside, and the part of a layer that they belong to.
IN_LAYERS = {"attention": "attention", "experts": "experts", "routing": "experts", "dense": "dense", "head": "head"}


class TimePlan(NamedTuple):
    """Seconds of a step on the slowest rank, all micro-batches, forward, backward and what is computed again.

    attention_s .. other_s  computing; other: embedding and last norm
    optimizer_s      gradients' sums over micro-batches, their norm, AdamW
    communication_s  the group's collectives, as far as they are waited for or keep the rank from computing
    data_parallel_s  the same of ZeRO's
    launch_s         the host launches kernels for longer than the device needs for them
    hidden_s         transfers that cost nothing, being done while the rank computes; not a part of the step
    """

    attention_s: float
    experts_s: float
    router_s: float
    dense_s: float
    head_s: float
    other_s: float
    optimizer_s: float
    communication_s: float
    data_parallel_s: float
    launch_s: float
    hidden_s: float

    @property
    def step_s(self) -> float:
        return sum(self) - self.hidden_s


class _Computing(NamedTuple):
    """One layer of each kind, and what is around the layers."""

    layer: LayerTimes
    other: Both


def predict_time(job: Job, *, hardware: Hardware, ranks_per_node: int | None = None) -> TimePlan:
    """What a step of this job takes on this hardware.

    ranks_per_node  the hardware's own by default

    Raises ValueError where the hardware is not the job's device, was not measured in its precision or with so many
    ranks on a node, or has no link that the layout needs; and for less than one rank per node.
    """
    per_node = hardware.ranks_per_node if ranks_per_node is None else ranks_per_node
    _check(job, hardware, per_node=per_node)
    found = _computing(job, hardware)
    layer, recompute = found.layer, job.recompute
    sizes, times = job.sizes, job.accumulation
    moe, dense = times * sizes.num_moe_layers, times * len(sizes.dense_layers)
    wires = wire_times(planned_traffic(job), job, hardware=hardware, ranks_per_node=per_node)
    calls = {(w.sent.purpose, w.sent.op): w.seconds / w.sent.num_calls for w in wires if w.sent.axis == "group"}
    busy = busy_share(ring_of("group", job, ranks_per_node=per_node), hardware=hardware)
    shares = exposed_shares(job, layer=layer, calls=calls, busy=busy)
    group = [wire for wire in wires if wire.sent.axis in ("group", "kv")]
    exposed_s = sum(_exposed_share(wire, shares) * wire.seconds for wire in group)
    others_s = sum(wire.seconds for wire in wires) - sum(wire.seconds for wire in group)
    beside_s = hidden_seconds(
        job, hardware=hardware, ring=ring_of("dp", job, ranks_per_node=per_node), parts=_parts(found, job)
    )
    plan = TimePlan(
        attention_s=times * sizes.num_hidden_layers * layer.attention.total(recompute=recompute),
        experts_s=moe * layer.experts.total(recompute=recompute),
        router_s=moe * layer.router.total(recompute=recompute),
        dense_s=dense * layer.dense.total(recompute=recompute),
        head_s=times * layer.head.total(recompute=False),
        other_s=times * found.other.total(recompute=False),
        optimizer_s=update_time(job, Rates(hardware, precision="fp32")),
        communication_s=exposed_s,
        data_parallel_s=others_s - beside_s,
        launch_s=0.0,
        hidden_s=sum(wire.seconds for wire in group) - exposed_s + beside_s,
    )
    return plan._replace(launch_s=_launching(job, hardware, plan=plan))


def mfu(job: Job, step_s: float, hardware: Hardware) -> float:
    """Model FLOPs of the step over what all devices could do in it at their peak."""
    length = job.attention_length or job.block_size
    flops = model_flops_per_token(job.sizes, attention_length=length) * job.tokens_per_step
    return flops / (step_s * job.layout.world_size * hardware.peak_flops_per_s[job.precision])


def _check(job: Job, hardware: Hardware, *, per_node: int) -> None:
    if hardware.device != job.device:
        raise ValueError(f"hardware {hardware.name} is a {hardware.device}, but the job is for device {job.device}")
    if per_node < 1:
        raise ValueError(f"ranks_per_node={per_node} must be at least 1")
    together = min(per_node, job.layout.world_size)
    if hardware.measured and hardware.device == "cpu" and together > hardware.ranks_per_node:
        raise ValueError(
            f"hardware {hardware.name} was measured as {hardware.ranks_per_node} rank(s) on a node, and {together} "
            f"would share its cores; measure again with `gather-moe probe --ranks {together}`"
        )


def _computing(job: Job, hardware: Hardware) -> _Computing:
    rates, exact = Rates(hardware, precision=job.precision), Rates(hardware, precision="fp32")
    has_experts = job.sizes.num_moe_layers > 0
    layer = LayerTimes(
        attention=attention_times(job, rates),
        router=router_times(job, exact) if has_experts else Both.none(),
        experts=expert_times(job, rates) if has_experts else Both.none(),
        dense=dense_times(job, rates) if job.sizes.dense_layers else Both.none(),
        head=head_times(job, rates),
    )
    return _Computing(layer, other_times(job, rates))


def _parts(found: _Computing, job: Job) -> dict[str, PartTimes]:
    """The same by what ZeRO takes as a part of the model; the head's gradients are made in its forward."""

    def together(*parts: Both) -> PartTimes:
        forward_s = sum(part.forward.total for part in parts)
        again_s = forward_s if job.recompute else 0.0
        return PartTimes(forward_s, again_s + sum(part.backward.total for part in parts))

    layer, other = found.layer, found.other
    return {
        "embedding": PartTimes(other.forward.before, other.backward.after),
        "block": together(layer.attention, layer.router, layer.experts),
        "dense block": together(layer.attention, layer.dense),
        "norm": PartTimes(other.forward.after, other.backward.before),
        "head": PartTimes(layer.head.forward.total, layer.head.backward.total),
    }


def _exposed_share(wire: WireTime, shares: ExposedShares) -> float:
    """Of one row's seconds; collectives that a rank starts and then waits for are exposed in full."""
    axis, op, purpose = wire.sent[:3]
    part = IN_LAYERS.get(purpose)
    if axis != "group" or op == "all_reduce" or part is None:
        return 1.0
    return float(getattr(shares, part))


def _launching(job: Job, hardware: Hardware, *, plan: TimePlan) -> float:
    """What the host needs beyond the device's own time; a CPU is its own host, and its measured times hold it."""
    if job.device == "cpu" or job.cuda_graph:
        return 0.0
    device_s = plan.step_s - plan.optimizer_s - plan.data_parallel_s
    return max(0.0, num_launches(job) * hardware.launch_s - device_s)
