"""How long an optimizer step takes on the slowest rank, by what the time is spent on.

A part computes for the greater of operations over their rate and bytes over the memory's bandwidth (compute_time.py);
transfers are as long as their links make them, and what of them overlaps follows the code's order (transfer_time.py).
MFU counts causal attention once (half of the score square), as recipe/shared/flops.py does.
"""

from collections.abc import Mapping
from functools import cache
from math import sqrt
from typing import Any, NamedTuple

from recipe.plan import compute_time
from recipe.plan.compute_time import LayerTimes, Rates
from recipe.plan.hardware import Hardware
from recipe.plan.job import Job
from recipe.plan.traffic import planned_traffic, ring_bytes
from recipe.plan.transfer_time import busy_share, call_seconds, exposed_shares, hidden_seconds, ring_of
from recipe.shared.flops import model_flops_per_token
from recipe.shared.sent import Sent


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

    def interval(self, hardware: Hardware) -> "Interval":
        """Return between what a step of this hardware probably takes.

        Errors of what is computed go together, for they are mostly one rate's; those of transfers and of the host are
        others'. A transfer that is thought to be hidden may be found not to be.
        """
        sent_s = self.communication_s + self.data_parallel_s
        computed_s = self.step_s - sent_s - self.launch_s
        doubts = DOUBTS[bool(hardware.measured)]
        return doubts.interval(self.step_s, (computed_s, sent_s + self.hidden_s, self.launch_s))


class Interval(NamedTuple):
    """Seconds of a step: as likely shorter than the first as longer than the second."""

    low_s: float
    high_s: float


class Doubts(NamedTuple):
    """How far a predicted time may be off, as a share of it, by what it is of."""

    computing: float
    transfers: float
    host: float

    def interval(self, step_s: float, parts_s: tuple[float, float, float]) -> Interval:
        """Return between what a step lies that has so many seconds of each, which may be off independently."""
        width_s = sqrt(sum((seconds * doubt) ** 2 for seconds, doubt in zip(parts_s, self, strict=True)))
        return Interval(step_s**2 / (step_s + width_s), step_s + width_s)


# Without a probe: about nine of ten published speeds of systems whose host keeps up lie within
# (benchmarks/published.py). With one: all ten steps of benchmarks/predicted.py on either network do.
DOUBTS = {False: Doubts(0.15, 0.50, 0.50), True: Doubts(0.15, 0.20, 0.20)}


def predict_time(job: Job, *, hardware: Hardware, ranks_per_node: int | None = None) -> TimePlan:
    """Predict what a step of this job takes on this hardware; see `TimeModel`."""
    return TimeModel(hardware, ranks_per_node=ranks_per_node).predict(job)


class TimeModel:
    """One kind of hardware on nodes of a size, for many jobs; what several of them share is computed once."""

    def __init__(self, hardware: Hardware, *, ranks_per_node: int | None = None) -> None:
        """Take the hardware's own number of ranks per node by default; ValueError for less than one."""
        self._hardware = hardware
        self._per_node = hardware.ranks_per_node if ranks_per_node is None else ranks_per_node
        if self._per_node < 1:
            raise ValueError(f"ranks_per_node={ranks_per_node} must be at least 1")
        self._rates = cache(
            lambda precision, utilization: Rates(hardware, precision=precision, utilization=utilization)
        )
        self._layers: dict[Any, LayerTimes] = {}

    def predict(self, job: Job) -> TimePlan:
        """Return the seconds of one step.

        Raises ValueError where the hardware is not the job's device, was not measured in its precision or with so
        many ranks on a node, or has no link that the layout needs.
        """
        self._check(job)
        cold = self._predict(job, utilization=0.0)
        reached = self._hardware.efficiencies
        if reached is None or not reached.heat:
            return cold
        # What is computed again is work, too.
        utilization = mfu(job, cold.step_s, self._hardware) * (4 / 3 if job.recompute else 1)
        return self._predict(job, utilization=round(utilization, 4))

    def _predict(self, job: Job, *, utilization: float) -> TimePlan:
        layer = self._layer_times(job, utilization)
        sizes, times, again = job.sizes, job.accumulation, job.recompute
        moe, dense = times * sizes.num_moe_layers, times * len(sizes.dense_layers)
        rows = planned_traffic(job)
        calls_s = {row: self._call_s(job, row.op, row.sent_bytes / row.num_calls, axis=row.axis) for row in rows}
        group_s, exposed_s = self._group_s(job, calls_s, layer=layer)
        beside_s = self._hidden_zero_s(job, layer=layer)
        plan = TimePlan(
            attention_s=(moe + dense) * layer["attention"].total(recompute=again),
            experts_s=moe * layer["experts"].total(recompute=again),
            router_s=moe * layer["router"].total(recompute=again),
            dense_s=dense * layer["dense"].total(recompute=again),
            head_s=times * layer["head"].total(recompute=False),
            other_s=times * layer["other"].total(recompute=False),
            optimizer_s=compute_time.update_time(job, self._rates("fp32", 0.0)),
            communication_s=exposed_s,
            data_parallel_s=sum(row.num_calls * calls_s[row] for row in rows) - group_s - beside_s,
            launch_s=0.0,
            hidden_s=group_s - exposed_s + beside_s,
        )
        return plan._replace(launch_s=self._launching(job, plan))

    def _check(self, job: Job) -> None:
        hardware = self._hardware
        if hardware.device != job.device:
            raise ValueError(f"hardware {hardware.name} is a {hardware.device}, but the job is for device {job.device}")
        together = min(self._per_node, job.layout.world_size)
        if hardware.measured and hardware.device == "cpu" and together > hardware.ranks_per_node:
            raise ValueError(
                f"hardware {hardware.name} was measured as {hardware.ranks_per_node} rank(s) on a node, and {together} "
                f"would share its cores; measure again with `gather-moe probe --ranks {together}`"
            )

    def _layer_times(self, job: Job, utilization: float) -> LayerTimes:
        key = (job.micro_batch_key, utilization)
        if key not in self._layers:
            rates, exact = (self._rates(precision, utilization) for precision in (job.precision, "fp32"))
            self._layers[key] = compute_time.layer_times(job, rates, exact=exact)
        return self._layers[key]

    def _group_s(self, job: Job, calls_s: Mapping[Sent, float], *, layer: LayerTimes) -> tuple[float, float]:
        """Return the seconds of the group's transfers: all, and those that a rank waits for or is kept busy by.

        calls_s  of one call of each row
        """
        group_s = exposed_s = 0.0
        calls = {(row.purpose, row.op): call_s for row, call_s in calls_s.items() if row.axis == "group"}
        shares = exposed_shares(job, layer=layer, calls=calls, busy=self._busy(job, axis="group"))
        for row, call_s in calls_s.items():
            if row.axis != "dp":
                # Sums are waited for where they are started, and so is what twins of key-value heads send.
                overlaps = row.axis == "group" and row.op != "all_reduce"
                group_s += row.num_calls * call_s
                exposed_s += row.num_calls * call_s * (shares.get(row.purpose, 1.0) if overlaps else 1.0)
        return group_s, exposed_s

    def _hidden_zero_s(self, job: Job, *, layer: LayerTimes) -> float:
        """Return the seconds of ZeRO's transfers over dp that no rank waits for."""

        def call_s(op: str, num_bytes: float) -> float:
            return self._call_s(job, op, ring_bytes(op, num_bytes, size=job.layout.dp), axis="dp")

        return hidden_seconds(job, layer=layer, busy=self._busy(job, axis="dp"), call_s=call_s)

    def _call_s(self, job: Job, op: str, sent_bytes: float, *, axis: str) -> float:
        ring = ring_of(axis, job, ranks_per_node=self._per_node)
        return call_seconds(op, sent_bytes, ring=ring, hardware=self._hardware)

    def _busy(self, job: Job, *, axis: str) -> float:
        return busy_share(ring_of(axis, job, ranks_per_node=self._per_node), hardware=self._hardware)

    def _launching(self, job: Job, plan: TimePlan) -> float:
        """Return what the host needs beyond the device's own time; a CPU is its own host, whose times hold it."""
        if job.device == "cpu" or job.execution.cuda_graph:
            return 0.0
        device_s = plan.step_s - plan.optimizer_s - plan.data_parallel_s
        return max(0.0, compute_time.num_launches(job) * self._hardware.launch_s - device_s)


def mfu(job: Job, step_s: float, hardware: Hardware) -> float:
    """Return the model FLOPs of the step over what all devices could do in it at their peak."""
    length = job.attention_length or job.block_size
    flops = model_flops_per_token(job.sizes, attention_length=length) * job.tokens_per_step
    return flops / (step_s * job.layout.world_size * hardware.peak_flops_per_s[job.precision])
