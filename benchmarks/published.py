"""Published training speeds beside what the time model makes of them, for its errors to be seen.

    PYTHONPATH=. python benchmarks/published.py

A published system is described by sizes that this project's own layouts do not have, tensor, expert and pipeline
parallelism of separate sizes and an exchange of tokens. The description feeds the planner's cost terms with the numbers
of recipe/plan/hardware.py, the same for every point; the planner itself never proposes such a system.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import comb
from typing import NamedTuple

from published_points import Description, Published, published_points

from modeling.cost import MATRICES
from modeling.execution import Execution
from modeling.layout import ParallelLayout
from recipe.plan.compute_time import Rates, attention_times, expert_times, head_times, num_launches, router_times
from recipe.plan.hardware import PASSES, Hardware, Pass, find_hardware
from recipe.plan.job import Job
from recipe.plan.traffic import ring_bytes
from recipe.plan.transfer_time import Lanes, Ring, call_seconds
from recipe.shared.flops import count_parameters, model_flops_per_token

BF16_BYTES = 2
# Numbers that one kernel reads and writes, in the type of the activations; and norms operator by operator.
FUSED = {
    name: Pass(numbers, 0, 1)
    for name, numbers in {
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
        "loss": 3,
        "refill": 4,
        "sum_up": 6,
        "adamw": 14,
        "squares": 2,
    }.items()
}
EAGER = {**PASSES, "norm": Pass(2, 8, 6), "norm_backward": Pass(3, 18, 11)}


class PublishedRow(NamedTuple):
    """`error` is predicted / published - 1."""

    name: str
    unit: str
    published: float
    predicted: float
    error: float
    missing: str


class StepTime(NamedTuple):
    """Seconds of a step of another system, by what it is spent on; `bubble_s` waits in the pipeline."""

    compute_s: float
    exchange_s: float
    tensor_parallel_s: float
    bubble_s: float
    data_parallel_s: float
    optimizer_s: float
    launch_s: float

    @property
    def step_s(self) -> float:
        return sum(self)


def published_table() -> tuple[PublishedRow, ...]:
    """Every published point recomputed."""
    rows = []
    for point in published_points():
        predicted = _in_unit(point, described_time(point.description).step_s)
        error = predicted / point.value - 1
        rows.append(PublishedRow(point.name, point.unit, point.value, predicted, error, point.missing))
    return tuple(rows)


def describe_published() -> list[str]:
    """The table as lines."""
    lines = [f"{'system':<52} {'unit':<13} {'published':>9} {'predicted':>9} {'error':>6}  what the model lacks"]
    for row in published_table():
        form = "9.1%" if row.unit == "MFU" else "9,.0f"
        numbers = f"{row.published:>{form}} {row.predicted:>{form}} {row.error:>+6.0%}"
        lines.append(f"{row.name:<52} {row.unit:<13} {numbers}  {row.missing}".rstrip())
    return [*lines, "MFU counts causal attention once; one set of constants (recipe/plan/hardware.py) for all points"]


def described_time(what: Description) -> StepTime:
    """A step of the slowest rank of the last stage, which has the head. Kernels are launched one by one."""
    hardware, system, times = find_hardware(what.gpu), what.system, what.accumulation
    passes = FUSED if system.fused else EAGER
    rates, exact = (Rates(hardware, precision=precision, passes=passes) for precision in ("bf16", "fp32"))
    dense, shared = _dense_job(what), _expert_job(what)
    layers = shared.sizes.num_hidden_layers / what.pp
    parts = (attention_times(dense, rates), router_times(shared, exact), expert_times(shared, rates))
    forward_s, backward_s = (layers * sum(part[i].total for part in parts) for i in (0, 1))
    head_s = head_times(dense, rates).total(recompute=False)
    exchange_s, tensor_s = layers * _exchange_s(what, hardware), layers * _tensor_parallel_s(what, hardware)
    device_s = forward_s + backward_s + head_s + exchange_s + tensor_s
    grouped = replace(
        shared, execution=replace(shared.execution, experts_backend="grouped")
    )  # as all of these systems multiply
    launch_s = max(0.0, num_launches(grouped, passes=passes) / what.pp * hardware.launch_s - device_s)
    micro_s = device_s + launch_s
    share = forward_s / (forward_s + backward_s)
    return StepTime(
        compute_s=times * (forward_s + backward_s + head_s),
        exchange_s=times * exchange_s,
        tensor_parallel_s=times * tensor_s,
        bubble_s=(what.pp - 1) * micro_s,
        data_parallel_s=_exposed_data_parallel_s(
            what, hardware, forward_s=share * micro_s, backward_s=(1 - share) * micro_s
        ),
        optimizer_s=rates.pass_s("adamw", sum(n / over for n, over in _owned(what))),
        launch_s=times * launch_s,
    )


def _in_unit(point: Published, step_s: float) -> float:
    what = point.description
    sizes = _expert_job(what).sizes
    tokens = what.num_gpus / what.tp / what.pp * what.accumulation * what.num_sequences * what.block_size
    rate = tokens / step_s / what.num_gpus
    if point.unit != "MFU":
        return rate
    flops = model_flops_per_token(sizes, attention_length=what.block_size)
    return rate * flops / find_hardware(what.gpu).peak_flops_per_s["bf16"]


def _dense_job(what: Description) -> Job:
    """The micro-batch of a tensor-parallel group."""
    return _job(what, ParallelLayout(tp=what.tp), num_sequences=what.num_sequences, block_size=what.block_size)


def _expert_job(what: Description) -> Job:
    """The tokens of all ranks that share the experts."""
    layout = ParallelLayout(tp=what.ep, ep=what.ep)
    return _job(what, layout, num_sequences=what.ep, block_size=what.num_sequences * what.block_size // what.tp)


def _job(what: Description, layout: ParallelLayout, *, num_sequences: int, block_size: int) -> Job:
    return Job(
        model=what.model,
        layout=layout,
        num_sequences=num_sequences,
        block_size=block_size,
        accumulation=1,
        execution=Execution(strategy="all_to_all" if layout.ep > 1 else "gather_tokens", experts_backend="loop"),
        zero={"stage": what.system.zero},
        precision="bf16",
        recompute=False,
        device="cuda",
    )


def _exchange_s(what: Description, hardware: Hardware) -> float:
    """Of one layer: rows to their experts and back, forward and backward."""
    if what.ep == 1:
        return 0.0
    job = _expert_job(what)
    ring = Ring(what.ep, min(what.ep, hardware.ranks_per_node))
    sizes, tokens = job.sizes, job.tokens_per_rank
    row_bytes = sizes.hidden_size * BF16_BYTES
    rows = tokens * sizes.num_experts_per_tok
    sent_bytes = rows * row_bytes * (ring.num_ranks - 1) / ring.num_ranks
    once_s = call_seconds("all_to_all", sent_bytes, ring=ring, hardware=hardware)
    if what.system.exchange == "per node" and ring.num_ranks > ring.per_node:
        # To every other node with one of the token's experts once; there it is passed on inside the node.
        nodes = ring.num_ranks // ring.per_node
        here = sizes.num_experts // nodes
        hit = 1 - comb(sizes.num_experts - here, sizes.num_experts_per_tok) / comb(
            sizes.num_experts, sizes.num_experts_per_tok
        )
        assert hardware.inter is not None
        outside_s = hardware.inter.seconds(
            "all_to_all", num_steps=nodes - 1, sent_bytes=tokens * row_bytes * hit * (nodes - 1)
        )
        inside_s = call_seconds("all_to_all", sent_bytes, ring=Ring(ring.per_node, ring.per_node), hardware=hardware)
        once_s = max(outside_s, inside_s)
    return 4 * once_s


def _tensor_parallel_s(what: Description, hardware: Hardware) -> float:
    """Of one layer, forward and backward."""
    if what.tp == 1:
        return 0.0
    ring = Ring(what.tp, min(what.tp, hardware.ranks_per_node))
    sizes = _dense_job(what).sizes
    whole_bytes = what.num_sequences * what.block_size * sizes.hidden_size * BF16_BYTES
    sent_bytes = whole_bytes * (what.tp - 1) / what.tp
    if what.system.tensor_parallel == "sequence":
        # Gathered and scattered either way, and gathered once more in the backward.
        return 5 * call_seconds("all_gather", sent_bytes, ring=ring, hardware=hardware)
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
    for number, ranks in _owned(what):
        apart = what.num_gpus // what.pp // ranks
        ring = Ring(ranks, min(ranks, max(1, hardware.ranks_per_node // apart)))
        op = what.system.sums
        sent_bytes = ring_bytes(op, what.system.gradient_bytes * number, size=ranks)
        sum_s += call_seconds(op, sent_bytes, ring=ring, hardware=hardware)
        sent_bytes = ring_bytes("all_gather", BF16_BYTES * number, size=ranks)
        gather_s += call_seconds("all_gather", sent_bytes, ring=ring, hardware=hardware)
    return DataParallel(gather_s, sum_s)


def _exposed_data_parallel_s(what: Description, hardware: Hardware, *, forward_s: float, backward_s: float) -> float:
    """Of a step; the seconds are a micro-batch's."""
    found = _data_parallel(what, hardware)
    if what.system.overlap == "step":
        return max(0.0, found.gather_s - forward_s) + max(0.0, found.sum_s - backward_s)
    if what.system.overlap == "block":
        return what.accumulation * _block_by_block(what, hardware, found, forward_s=forward_s, backward_s=backward_s)
    return found.gather_s + found.sum_s


def _block_by_block(
    what: Description, hardware: Hardware, found: DataParallel, *, forward_s: float, backward_s: float
) -> float:
    """What is waited for in a micro-batch, as if all blocks were alike: each is gathered forward and backward."""
    assert hardware.inter is not None
    lanes, num = Lanes(busy=hardware.inter.busy), _expert_job(what).sizes.num_hidden_layers
    numbers = sum(number for number, _ in _owned(what)) / num
    gather_s = found.gather_s / num
    early_s = min(1.0, what.system.ahead / numbers) * gather_s
    late_s, arrival, sums = gather_s, 0.0, 0.0
    for i in range(2 * num):
        is_backward = i >= num
        lanes.wait(lanes.send(late_s) if late_s else arrival)
        if i + 1 < 2 * num:
            arrival, late_s = lanes.send(early_s), gather_s - early_s
        lanes.work((backward_s if is_backward else forward_s) / num)
        if is_backward:
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
    print(*describe_published(), sep="\n")
