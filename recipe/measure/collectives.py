"""Collectives by size on a group, as the model calls them: a line through their times, and how busy a rank is."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import sqrt
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from modeling.comm import RowSplits, all_gather_rows, all_to_all_rows, reduce_scatter_rows
from recipe.measure.timing import Timing, Work
from recipe.plan.hardware import Fit, Link
from recipe.plan.transfer_time import STEPS, fewest_steps

# Multiprocessors and memory that a GPU's collectives take from what runs beside them; not measured.
GPU_BUSY = 0.1


class Sender(NamedTuple):
    """How a collective is run, and which part of its tensor a rank sends, of n ranks."""

    run: Callable[[Tensor, ProcessGroup], object]
    share: Callable[[int], float]


class Reading(NamedTuple):
    """One collective, in which a rank sends this much."""

    sent_bytes: float
    seconds: float


def measure_link(
    timing: Timing, group: ProcessGroup, *, sent_bytes: tuple[int, ...], between_nodes: bool = False
) -> Link:
    """A line for every collective; the link's own numbers are the all-gather's."""
    size = dist.get_world_size(group)
    cases: dict[tuple[str, float], Work] = {}
    for op, sender in SENDERS.items():
        for wanted in sent_bytes:
            x = _tensor(wanted, share=sender.share(size), size=size, device=timing.device)
            cases[op, sender.share(size) * x.numel() * x.element_size()] = partial(sender.run, x, group)
    seconds = timing.measure(cases, name=f"collectives of {size} ranks")
    ops: dict[str, Fit] = {}
    for op in SENDERS:
        readings = [Reading(sent, taken_s) for (found, sent), taken_s in seconds.items() if found == op]
        num_steps = fewest_steps(op, size, device=timing.device) if between_nodes else STEPS[op](size)
        ops[op] = fit_line(readings, num_steps=num_steps)
        timing.say(
            f"{op}: {ops[op].alpha_s * 1e6:.0f} us per step + bytes / {ops[op].bytes_per_s / 1e9:.3g} GB/s, "
            f"residual {ops[op].residual:.0%}"
        )
    gather = ops["all_gather"]
    largest = max((sent, work) for (op, sent), work in cases.items() if op == "all_gather")[1]
    busy = GPU_BUSY if timing.device == "cuda" else _busy_share(timing, largest)
    return Link(alpha_s=gather.alpha_s, bytes_per_s=gather.bytes_per_s, busy=busy, ops=ops)


def fit_line(readings: Sequence[Reading], *, num_steps: int) -> Fit:
    """Fit seconds = alpha x steps + bytes / bandwidth by least squares.

    The squares are of fitted / measured - 1, so that small transfers count as much as large ones.

    alpha is not below 0. Raises ValueError where time does not grow with bytes, or fewer than two sizes were measured.
    """
    if len({reading.sent_bytes for reading in readings}) < 2:
        raise ValueError(f"{len(readings)} transfers of one size make no line; measure two sizes at least")
    # With u = steps / seconds and v = bytes / seconds the best a and b of a u + b v = 1.
    pairs = [(num_steps / r.seconds, r.sent_bytes / r.seconds) for r in readings]
    uu, uv, vv = (sum(p[i] * p[j] for p in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(p[i] for p in pairs) for i in (0, 1))
    alpha_s = (u * vv - v * uv) / (uu * vv - uv * uv)
    if alpha_s < 0:
        alpha_s = 0.0
    slope = (v - alpha_s * uv) / vv
    if slope <= 0:
        raise ValueError("larger transfers took no longer than small ones: the machine was too busy to be measured")
    squares = sum((alpha_s * p[0] + slope * p[1] - 1) ** 2 for p in pairs)
    return Fit(alpha_s, 1 / slope, sqrt(squares / len(pairs)), max(r.sent_bytes for r in readings))


def _tensor(sent_bytes: int, *, share: float, size: int, device: str) -> Tensor:
    """Float32 rows of 16 numbers, as many for every rank, of which about `sent_bytes` leave a rank."""
    rows = max(1, round(sent_bytes / share / (16 * 4) / size))
    return torch.zeros(rows * size, 16, device=device)


def _busy_share(timing: Timing, work: Work, *, repeats: int = 5) -> float:
    """What a transfer takes of the threads that this rank computes with, while it does nothing else.

    Processor seconds of the process, gloo's threads included, over seconds and threads.
    """
    timing.ranks.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        work()
    share = (time.process_time() - start_cpu_s) / (time.perf_counter() - start_s) / torch.get_num_threads()
    return min(1.0, timing.over_ranks({"busy": share})["busy"])


def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_rows(x[: len(x) // dist.get_world_size(group)], group)


def _all_reduce(x: Tensor, group: ProcessGroup) -> None:
    dist.all_reduce(x, group=group)


def _exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    each = [len(x) // size] * size
    return all_to_all_rows(x, RowSplits(each, each), group)


def _broadcast(x: Tensor, group: ProcessGroup) -> None:
    dist.broadcast(x, src=dist.get_global_rank(group, 0), group=group)


def _ring_share(size: int) -> float:
    return (size - 1) / size


SENDERS: Mapping[str, Sender] = {
    "all_gather": Sender(_gather, _ring_share),
    "reduce_scatter": Sender(reduce_scatter_rows, _ring_share),
    "all_reduce": Sender(_all_reduce, lambda size: 2 * _ring_share(size)),
    "all_to_all": Sender(_exchange, _ring_share),
    "broadcast": Sender(_broadcast, _ring_share),
}
