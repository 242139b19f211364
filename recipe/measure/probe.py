"""Everything of this machine that the planner's time model asks for, measured by all ranks at once.

Collectives are run by size on a group, as the model calls them: a line through their times, and how busy a rank is.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from modeling.comm import RowSplits, all_gather_rows, all_to_all_rows, reduce_scatter_rows
from recipe.launch.start import World
from recipe.measure.products import measure_attention, measure_passes, measure_products
from recipe.measure.timing import Sizes, Timing, Work, by_case, sizes_for
from recipe.plan.hardware import Fit, Hardware, Link, Measured
from recipe.plan.transfer_time import STEPS, fewest_steps
from recipe.shared.flops import table_peak
from recipe.shared.ranks import OneRank, Ranks, TorchRanks

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS, QUICK_ROUNDS = 7, 3
# Multiprocessors and memory that a GPU's collectives take from what runs beside them; not measured.
GPU_BUSY = 0.1


def measure_machine(
    world: World, *, precisions: Sequence[str], quick: bool
) -> tuple[Hardware, dict[str, dict[str, list[float]]]]:
    """Measure in `precisions` and in float32, in which routers and optimizers work in any case.

    Return the hardware, and the quartiles of every single reading of it, for whoever reads the file. Collective over
    the world, whose process group exists. All ranks get the same numbers.
    """
    ranks: Ranks = TorchRanks() if world.world_size > 1 else OneRank()
    timing = Timing(device=world.device, ranks=ranks, rounds=QUICK_ROUNDS if quick else ROUNDS)
    sizes = sizes_for(world.device, quick=quick, memory_bytes=_memory_bytes(world))
    torch.manual_seed(0)
    intra, inter = _measure_links(world, timing, sizes)
    measured = {
        precision: Measured(
            products=measure_products(timing, sizes, dtype=DTYPES[precision]),
            attention=measure_attention(timing, sizes, dtype=DTYPES[precision]),
            passes=measure_passes(timing, sizes, dtype=DTYPES[precision]),
        )
        for precision in dict.fromkeys(("fp32", *precisions))
    }
    hardware = _hardware(world, timing, intra=intra, inter=inter, measured=measured)
    return hardware, {name: by_case(found) for name, found in timing.quartiles.items()}


def machine_facts(world: World) -> dict[str, Any]:
    """Describe where and how it was measured, for whoever reads the file."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device_name(world.device),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": torch.get_num_threads(),
        "ranks": world.world_size,
        "ranks_per_node": world.local_world_size,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME"),
        "torch": torch.__version__,
    }


def _measure_links(world: World, timing: Timing, sizes: Sizes) -> tuple[Link | None, Link | None]:
    """Measure inside a node and between nodes; None where there are no two ranks to measure it.

    All nodes' groups at once, then all rings across nodes at once: what a rank gets of what they share.
    """
    per_node, num_nodes = world.local_world_size, world.num_nodes
    intra = inter = None
    if per_node > 1:
        groups = [dist.new_group(list(range(node * per_node, (node + 1) * per_node))) for node in range(num_nodes)]
        intra = measure_link(timing, groups[world.rank // per_node], sent_bytes=sizes.sent_bytes)
    if num_nodes > 1:
        groups = [dist.new_group(list(range(local, world.world_size, per_node))) for local in range(per_node)]
        inter = measure_link(timing, groups[world.local_rank], sent_bytes=sizes.sent_bytes, between_nodes=True)
    return intra, inter


def _hardware(
    world: World, timing: Timing, *, intra: Link | None, inter: Link | None, measured: Mapping[str, Measured]
) -> Hardware:
    found = "measured by `gather-moe probe`"
    largest = [measured["fp32"].passes["copy"][-1]]
    peaks = {
        precision: max(rate.flops_per_s for rates in part.products.values() for rate in rates)
        for precision, part in measured.items()
    }
    sheet = table_peak(_device_name(world.device))
    if sheet is not None and "bf16" in peaks:
        peaks["bf16"] = sheet.flops_per_s
    one = torch.zeros(1, device=world.device)
    launch_s = timing.measure({"launch": lambda: one.add_(1)}, name="launches")["launch"]  # what it costs the host
    return Hardware(
        name=_device_name(world.device),
        device=world.device,
        memory_bytes=_memory_bytes(world),
        ranks_per_node=world.local_world_size,
        peak_flops_per_s=peaks,
        memory_bytes_per_s=max(8 * elements / seconds for elements, seconds in largest),
        intra=intra,
        inter=inter,
        efficiencies=None,
        launch_s=launch_s,
        compute_capability=_capability(world.device),
        sources={
            "peak_flops_per_s": f"bf16: {sheet.source}" if sheet else "the fastest product measured",
            "memory_bytes": "the operating system" if world.device == "cpu" else "the driver",
            "intra": found if intra else "not measured: one rank on a node",
            "inter": found if inter else "not measured: one node",
            "launch_s": found,
            "measured": found,
        },
        measured=measured,
    )


def _capability(device: str) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if device == "cuda" else None


def _memory_bytes(world: World) -> int:
    if world.device == "cuda":
        return torch.cuda.get_device_properties(world.local_rank).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.local_world_size


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


class Sender(NamedTuple):
    """How a collective is run, and which part of its tensor a rank sends, of n ranks."""

    run: Callable[[Tensor, ProcessGroup], object]
    share: Callable[[int], float]


def measure_link(
    timing: Timing, group: ProcessGroup, *, sent_bytes: tuple[int, ...], between_nodes: bool = False
) -> Link:
    """Fit a line for every collective; the link's own numbers are the all-gather's."""
    size = dist.get_world_size(group)
    cases: dict[tuple[str, float], Work] = {}
    for op, sender in SENDERS.items():
        for wanted in sent_bytes:
            x = _tensor(wanted, share=sender.share(size), size=size, device=timing.device)
            cases[op, sender.share(size) * x.numel() * x.element_size()] = partial(sender.run, x, group)
    seconds = timing.measure(cases, name=f"collectives of {size} ranks")
    ops: dict[str, Fit] = {}
    for op in SENDERS:
        readings = [(sent, taken_s) for (found, sent), taken_s in seconds.items() if found == op]
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


def fit_line(readings: Sequence[tuple[float, float]], *, num_steps: int) -> Fit:
    """Fit seconds = alpha x steps + bytes / bandwidth by least squares to (bytes that a rank sends, seconds).

    The squares are of fitted / measured - 1, so that small transfers count as much as large ones.

    alpha is not below 0. Raises ValueError where time does not grow with bytes, or fewer than two sizes were measured.
    """
    if len({sent for sent, _ in readings}) < 2:
        raise ValueError(f"{len(readings)} transfers of one size make no line; measure two sizes at least")
    # With u = steps / seconds and v = bytes / seconds the best a and b of a u + b v = 1.
    pairs = [(num_steps / taken_s, sent / taken_s) for sent, taken_s in readings]
    uu, uv, vv = (sum(p[i] * p[j] for p in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(p[i] for p in pairs) for i in (0, 1))
    alpha_s = (u * vv - v * uv) / (uu * vv - uv * uv)
    if alpha_s < 0:
        alpha_s = 0.0
    slope = (v - alpha_s * uv) / vv
    if slope <= 0:
        raise ValueError("larger transfers took no longer than small ones: the machine was too busy to be measured")
    squares = sum((alpha_s * p[0] + slope * p[1] - 1) ** 2 for p in pairs)
    return Fit(alpha_s, 1 / slope, sqrt(squares / len(pairs)), max(sent for sent, _ in readings))


def _tensor(sent_bytes: int, *, share: float, size: int, device: str) -> Tensor:
    """Make float32 rows of 16 numbers, as many for every rank, of which about `sent_bytes` leave a rank."""
    rows = max(1, round(sent_bytes / share / (16 * 4) / size))
    return torch.zeros(rows * size, 16, device=device)


def _busy_share(timing: Timing, work: Work, *, repeats: int = 5) -> float:
    """Measure what a transfer takes of the threads that this rank computes with, while it does nothing else.

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


def _exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    each = [len(x) // dist.get_world_size(group)] * dist.get_world_size(group)
    return all_to_all_rows(x, RowSplits(each, each), group)


def _ring_share(size: int) -> float:
    return (size - 1) / size


SENDERS: Mapping[str, Sender] = {
    "all_gather": Sender(_gather, _ring_share),
    "reduce_scatter": Sender(reduce_scatter_rows, _ring_share),
    "all_reduce": Sender(lambda x, group: dist.all_reduce(x, group=group), lambda size: 2 * _ring_share(size)),
    "all_to_all": Sender(_exchange, _ring_share),
    "broadcast": Sender(lambda x, group: dist.broadcast(x, group=group, group_src=0), _ring_share),
}
