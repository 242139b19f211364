"""Published training speeds beside what the time model makes of them, for its errors to be seen.

    PYTHONPATH=. python benchmarks/published.py

A published system is described by sizes that this project's own layouts do not have, tensor, expert and pipeline
parallelism of separate sizes and an exchange of tokens. The description feeds the planner's cost terms with the numbers
of recipe/plan/hardware.py, the same for every point; the planner itself never proposes such a system.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil, comb
from statistics import median
from typing import NamedTuple

from published_points import (
    DENSE,
    FITTED,
    HELD_OUT,
    LAYERS,
    LIKE_OURS,
    OTHERS,
    Description,
    Published,
    System,
    published_points,
)

from modeling.cost import MATRICES
from modeling.execution import Execution
from modeling.layout import ParallelLayout
from recipe.plan.compute_time import Both, Rates, expert_times, layer_times, router_times
from recipe.plan.hardware import USUAL, AttentionShare, Hardware, Pass, find_hardware
from recipe.plan.job import Job
from recipe.plan.step_time import DOUBTS, Interval
from recipe.plan.traffic import ring_bytes
from recipe.plan.transfer_time import Lanes, Ring, call_seconds
from recipe.shared.flops import count_parameters, model_flops_per_token

BF16_BYTES = 2
# Numbers that one kernel reads and writes, in the type of the activations.
ONE_KERNEL = {
    "copy": 2,
    "add": 3,
    "norm": 2,
    "norm_backward": 3,
    "rotate": 2,
    "rows": 2,
    "add_rows": 2,
    "combine": 1,
    "activation": 3,
    "activation_backward": 5,
    "swiglu": 3,
    "swiglu_back": 6,
    "routing": 4,
    "sum_up": 6,
    "adamw": 14,
}
# Errors that are called small, by kind.
SMALL = {LAYERS: 0.10, DENSE: 0.15, LIKE_OURS: 0.20, OTHERS: 0.20}


class PublishedRow(NamedTuple):
    """`error` is predicted / published - 1; `is_inside`: a whole step is as long as the planner's interval allows."""

    point: Published
    predicted: float
    error: float
    is_inside: bool | None


class StepTime(NamedTuple):
    """Seconds of a step of another system, by what it is spent on; `bubble_s` waits in the pipeline."""

    compute_s: float
    exchange_s: float
    tensor_parallel_s: float
    bubble_s: float
    data_parallel_s: float
    optimizer_s: float
    host_s: float

    @property
    def step_s(self) -> float:
        return sum(self)

    @property
    def interval(self) -> Interval:
        """Between what the step lies, as the planner has it for its own."""
        sent_s = self.exchange_s + self.tensor_parallel_s + self.data_parallel_s
        return DOUBTS[False].interval(self.step_s, (self.step_s - sent_s - self.host_s, sent_s, self.host_s))


def published_table() -> tuple[PublishedRow, ...]:
    """Every published point recomputed."""
    rows = []
    for point in published_points():
        what, is_inside = point.description, None
        if point.kind == LAYERS:
            predicted = _predicted_layer_ms(point)
        else:
            found = described_time(what)
            predicted = _tokens_per_step(what) / found.step_s / what.num_gpus
            is_inside = found.interval.low_s <= predicted / point.value * found.step_s <= found.interval.high_s
        rows.append(PublishedRow(point, predicted, predicted / point.value - 1, is_inside))
    return tuple(rows)


def describe_published() -> Iterator[str]:
    """Yield the table as lines, and how each kind is met."""
    rows = published_table()
    yield f"{'system':<62} {'unit':<13} {'published':>9} {'predicted':>9} {'error':>6}  use       what the model lacks"
    for point, predicted, error, _ in rows:
        form = "9,.0f" if point.value > 100 else "9.2f"
        numbers = f"{point.value:>{form}} {predicted:>{form}} {error:>+6.0%}"
        yield f"{point.name:<62} {point.unit:<13} {numbers}  {point.use:<8}  {point.missing}".rstrip()
    yield ""
    yield f"{'kind':<20} {'use':<9} {'points':>6} {'median error':>12}  within"
    for kind, limit in SMALL.items():
        for use in (FITTED, HELD_OUT):
            if alike := [row for row in rows if (row.point.kind, row.point.use) == (kind, use)]:
                errors, found = [abs(row.error) for row in alike], [row.is_inside for row in alike]
                inside = sum(error <= limit for error in errors) / len(errors)
                line = f"{kind:<20} {use:<9} {len(errors):>6} {median(errors):>12.1%}  {limit:.0%}: {inside:.0%}"
                yield (
                    line
                    if None in found
                    else f"{line}; the planner's interval: {sum(map(bool, found)) / len(found):.0%}"
                )
    yield "one set of constants (recipe/plan/hardware.py) for all points; MFU counts causal attention once"


def _predicted_layer_ms(point: Published) -> float:
    is_backward = {"ms forward": False, "ms backward": True}[point.unit]
    return 1e3 * _experts_alone(point.description)[is_backward]


def described_time(what: Description) -> StepTime:
    """A step of the slowest rank of the last stage, which has the head."""
    cold = _described_time(what, utilization=0.0)
    return _described_time(what, utilization=_utilization(what, cold.step_s))


def _described_time(what: Description, *, utilization: float) -> StepTime:
    hardware, system, times = _hardware_of(what), what.system, what.accumulation
    rates, exact = _rates(what, hardware, utilization)
    dense, shared = _dense_job(what), _expert_job(what)
    whole = layer_times(dense, rates, exact=exact)
    parts = {name: whole[name] for name in ("attention", "dense")}
    if shared.sizes.num_moe_layers:
        parts |= _expert_parts(what, hardware, utilization=utilization)
    sizes = shared.sizes
    count = {"attention": sizes.num_hidden_layers, "dense": len(sizes.dense_layers)}

    def seconds(backward: bool) -> float:
        return (
            sum(count.get(name, sizes.num_moe_layers) * part[backward].total for name, part in parts.items()) / what.pp
        )

    forward_s, backward_s = seconds(False), seconds(True) + (seconds(False) if what.recompute else 0.0)
    head_s = whole["head"].total(recompute=False) + whole["other"].total(recompute=False)
    exchange_s = sizes.num_moe_layers / what.pp * 4 * _exchange_s(what, hardware)
    tensor_s = sizes.num_hidden_layers / what.pp * _tensor_parallel_s(what, hardware)
    device_s = forward_s + backward_s + head_s + exchange_s + tensor_s
    host_s = max(0.0, sizes.num_hidden_layers / what.pp * system.host_s - device_s)
    micro_s = device_s + host_s
    share = forward_s / (forward_s + backward_s)
    return StepTime(
        compute_s=times * (forward_s + backward_s + head_s),
        exchange_s=times * exchange_s,
        tensor_parallel_s=times * tensor_s,
        bubble_s=(what.pp - 1) / what.vp * micro_s,
        data_parallel_s=_exposed_data_parallel_s(
            what, hardware, forward_s=share * micro_s, backward_s=(1 - share) * micro_s
        ),
        optimizer_s=rates.pass_s("adamw", sum(n / (over if system.zero else 1) for n, over in _owned(what))),
        host_s=times * host_s,
    )


def _expert_parts(what: Description, hardware: Hardware, *, utilization: float) -> dict[str, Both]:
    """Return what the experts of a layer take, and what stands beside them."""
    rates, exact = _rates(what, hardware, utilization)
    job, kept = _expert_job(what), _rates(what, hardware, utilization, kept=True)[0]
    forward, backward = (expert_times(job, each) for each in (rates, kept))
    in_float32 = replace(job, precision="fp32")  # as Megatron's recipes have the router
    parts = {"router": router_times(in_float32, rates, exact), "experts": Both(forward.forward, backward.backward)}
    if what.shared_width:
        dense = {**what.model, "num_experts": 0, "intermediate_size": what.shared_width}
        alone = _job(what, ParallelLayout(), model=dense, num_sequences=what.num_sequences, block_size=what.block_size)
        parts["shared"] = layer_times(alone, rates, exact=exact)["dense"]
    return parts


def _experts_alone(what: Description) -> tuple[float, float]:
    """Return the seconds of a layer's experts, forward and backward, on a device that stays cold."""
    hardware = _hardware_of(what)
    parts = _expert_parts(what, hardware, utilization=0.0).values()
    exchange_s = 2 * _exchange_s(what, hardware)
    return tuple(sum(part[i].total for part in parts) + exchange_s for i in (0, 1))  # type: ignore[return-value]


def _hardware_of(what: Description) -> Hardware:
    """Return the table's hardware with what is known of the system's attention kernel."""
    found, system = find_hardware(what.gpu), what.system
    assert found.efficiencies is not None
    if isinstance(system.attention, AttentionShare):
        kernels = {USUAL: system.attention}
        found = replace(found, efficiencies=replace(found.efficiencies, attention=kernels))
    return found


def _rates(what: Description, hardware: Hardware, utilization: float, *, kept: bool = False) -> tuple[Rates, Rates]:
    """Return the rates in bf16 and in float32; `kept`: rows are, and not fetched again in the backward."""
    passes = {**_passes(what.system), **({"rows": Pass(0, 0, 0)} if kept else {})}
    rates, exact = (
        Rates(hardware, precision=precision, utilization=utilization, passes=passes) for precision in ("bf16", "fp32")
    )
    return rates, exact


def _passes(system: System) -> Mapping[str, Pass]:
    found = {name: Pass(system.moves * numbers, 0, 1) for name, numbers in ONE_KERNEL.items()}
    if system.exchange != "rows":  # what sends tokens once lays them out as rows where they arrive
        found |= dict.fromkeys(("rows", "add_rows"), Pass(0, 0, 0))
    return {**found, "loss": Pass(system.logit_bytes / BF16_BYTES, 0, 1)}


def _tokens_per_step(what: Description) -> float:
    return what.num_gpus / what.tp / what.pp * what.accumulation * what.num_sequences * what.block_size


def _utilization(what: Description, step_s: float) -> float:
    """Return the share of the peak that a step reaches, what is computed again included."""
    sizes = _expert_job(what).sizes
    peak = find_hardware(what.gpu).peak_flops_per_s["bf16"]
    per_token = model_flops_per_token(sizes, attention_length=what.block_size) * (4 / 3 if what.recompute else 1)
    return per_token * _tokens_per_step(what) / (step_s * what.num_gpus * peak)


def _dense_job(what: Description) -> Job:
    """The micro-batch of a tensor-parallel group."""
    layout = ParallelLayout(tp=what.tp)
    return _job(what, layout, num_sequences=what.num_sequences, block_size=what.block_size)


def _expert_job(what: Description) -> Job:
    """The tokens of all ranks that share the experts."""
    layout = ParallelLayout(tp=what.ep, ep=what.ep)
    return _job(what, layout, num_sequences=what.ep, block_size=what.num_sequences * what.block_size // what.tp)


def _job(
    what: Description,
    layout: ParallelLayout,
    *,
    num_sequences: int,
    block_size: int,
    model: Mapping[str, object] | None = None,
) -> Job:
    return Job(
        model=what.model if model is None else model,
        layout=layout,
        num_sequences=num_sequences,
        block_size=block_size,
        accumulation=1,
        execution=Execution(
            strategy="all_to_all" if layout.ep > 1 else "gather_tokens", experts_backend="grouped", overlap=False
        ),
        zero={"stage": what.system.zero},
        precision="bf16",
        recompute=False,
        device="cuda",
        attention=what.system.attention if isinstance(what.system.attention, str) else USUAL,
        attention_length=what.block_size,
        rho=what.rho,
    )


def _exchange_s(what: Description, hardware: Hardware) -> float:
    """Of one layer: rows to their experts, or back."""
    if what.ep == 1:
        return 0.0
    job, system = _expert_job(what), what.system
    ring = Ring(what.ep, min(what.ep, hardware.ranks_per_node))
    sizes = job.sizes
    token_bytes = job.tokens_per_rank * sizes.hidden_size * BF16_BYTES * what.rho

    def visits(places: float) -> float:
        """Other places, of so many with equal parts of the experts, that a token's rows go to."""
        experts, active = sizes.num_experts, sizes.num_experts_per_tok
        if system.exchange == "rows":
            return (places - 1) * active / places
        chosen_from = what.choices or experts
        missed = comb(chosen_from - round(experts / places), active) / comb(chosen_from, active)
        return (places - 1) * chosen_from / experts * (1 - missed)

    def seconds(places: float, ring: Ring) -> float:
        return call_seconds("all_to_all", token_bytes * visits(places), ring=ring, hardware=hardware)

    once_s = seconds(ring.num_ranks, ring)
    if system.exchange == "nodes" and ring.num_ranks > ring.per_node:
        nodes = round(ring.num_nodes)
        once_s = max(seconds(nodes, Ring(nodes, 1)), seconds(ring.per_node, Ring(ring.per_node, ring.per_node)))
    return (1 - system.exchange_hides) * once_s


def _tensor_parallel_s(what: Description, hardware: Hardware) -> float:
    """Of one layer, forward and backward."""
    if what.tp == 1:
        return 0.0
    ring = Ring(what.tp, min(what.tp, hardware.ranks_per_node))
    sizes = _dense_job(what).sizes
    whole_bytes = what.num_sequences * what.block_size * sizes.hidden_size * BF16_BYTES
    sent_bytes = whole_bytes * (what.tp - 1) / what.tp
    if what.system.tensor_parallel == "sequence":
        # Gathered and scattered either way around attention and feed-forward, but not around experts, and gathered once
        # more in the backward: that and the backward's scatter are beside products.
        assert hardware.intra is not None
        times = (2 if sizes.dense_layers else 1) * (3 + 2 * hardware.intra.busy + (2 if what.recompute else 0))
        return times * call_seconds("all_gather", sent_bytes, ring=ring, hardware=hardware)
    # Attention's output and its input's gradient; the rows, and their gradients over all ranks, each rank's in turn.
    rows_bytes = sizes.num_experts_per_tok * sent_bytes
    summed_s = what.tp * call_seconds("all_reduce", 2 * rows_bytes / what.tp, ring=ring, hardware=hardware)
    restored_s = call_seconds("all_gather", rows_bytes, ring=ring, hardware=hardware)
    return 2 * call_seconds("all_reduce", 2 * sent_bytes, ring=ring, hardware=hardware) + restored_s + summed_s


class DataParallel(NamedTuple):
    """Seconds of all weights gathered once, and of all gradients summed once."""

    gather_s: float
    sum_s: float


def _data_parallel(what: Description, hardware: Hardware) -> DataParallel:
    gather_s = sum_s = 0.0
    system = what.system
    for number, ranks in _owned(what):
        apart = what.num_gpus // what.pp // ranks
        ring = Ring(ranks, min(ranks, max(1, hardware.ranks_per_node // apart)))
        blocks = _expert_job(what).sizes.num_hidden_layers / what.pp

        def seconds(op: str, num_bytes: float, ring: Ring = ring, blocks: float = blocks) -> float:
            if not num_bytes:
                return 0.0
            calls = blocks if system.overlap == "block" else ceil(num_bytes / system.bucket_bytes)
            sent_bytes = ring_bytes(op, num_bytes / calls, size=ring.num_ranks)
            return calls * call_seconds(op, sent_bytes, ring=ring, hardware=hardware)

        sum_s += seconds(system.sums, system.gradient_bytes * number)
        gather_s += seconds("all_gather", BF16_BYTES * number) if system.zero else 0.0
    return DataParallel(gather_s, sum_s)


def _exposed_data_parallel_s(what: Description, hardware: Hardware, *, forward_s: float, backward_s: float) -> float:
    """Of a step; the seconds are a micro-batch's."""
    found, system = _data_parallel(what, hardware), what.system
    assert hardware.inter is not None
    if system.overlap == "none":
        return found.gather_s + found.sum_s
    if system.overlap == "block":
        return what.accumulation * _block_by_block(
            what, found, hardware.inter.busy, forward_s=forward_s, backward_s=backward_s
        )
    exposed_s = 0.0
    for sent_s, beside_s in ((found.gather_s, forward_s), (found.sum_s, backward_s)):
        exposed_s += sent_s - (1 - hardware.inter.busy) * min(sent_s, beside_s)
    return exposed_s


def _block_by_block(
    what: Description, found: DataParallel, busy: float, *, forward_s: float, backward_s: float
) -> float:
    """What is waited for in a micro-batch, as if all blocks were alike: each is gathered forward and backward."""
    lanes, num = Lanes(busy=busy), _expert_job(what).sizes.num_hidden_layers
    gathers = num if what.system.zero < 3 else 2 * num
    arrival = lanes.send(found.gather_s / num)
    sums = 0.0
    for i in range(2 * num):
        lanes.wait(arrival)
        if i + 1 < gathers:
            arrival = lanes.send(found.gather_s / num)
        lanes.work((backward_s if i >= num else forward_s) / num)
        if i >= num:
            sums = lanes.send(found.sum_s / num)
    lanes.wait(sums)
    return lanes.exposed_s


def _owned(what: Description) -> Iterator[tuple[float, int]]:
    """Parameters that a rank computes with, and over how many ranks their states are spread: dense, then experts'."""
    sizes = _expert_job(what).sizes
    experts = sizes.num_moe_layers * MATRICES * sizes.num_experts * sizes.moe_intermediate_size * sizes.hidden_size
    dense = count_parameters(sizes).total - experts
    yield dense / what.tp / what.pp, what.num_gpus // what.tp // what.pp
    yield experts / what.ep / what.pp, what.num_gpus // what.ep // what.pp


if __name__ == "__main__":
    for line in describe_published():
        print(line)
