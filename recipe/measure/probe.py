"""Everything of this machine that the planner's time model asks for, measured by all ranks at once."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from recipe.launch.start import World
from recipe.measure.collectives import measure_link
from recipe.measure.products import best_rate, measure_attention, measure_passes, measure_products
from recipe.measure.timing import Sizes, Timing, by_case, sizes_for
from recipe.plan.hardware import Efficiencies, Hardware, Link, Measured
from recipe.shared.flops import table_peak
from recipe.shared.ranks import OneRank, Ranks, TorchRanks

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS, QUICK_ROUNDS = 7, 3


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """`precisions` besides float32, in which routers and optimizers work in any case."""

    precisions: tuple[str, ...]
    quick: bool


class Links(NamedTuple):
    """Inside a node and between nodes; None where there are no two ranks to measure it."""

    intra: Link | None
    inter: Link | None


class Probed(NamedTuple):
    """The hardware, and what every single reading of it was spread over, for whoever reads the file."""

    hardware: Hardware
    readings: dict[str, dict[str, list[float]]]


def measure_machine(world: World, options: ProbeOptions) -> Probed:
    """Collective over the world, whose process group exists. All ranks get the same numbers."""
    ranks: Ranks = TorchRanks() if world.world_size > 1 else OneRank()
    timing = Timing(device=world.device, ranks=ranks, rounds=QUICK_ROUNDS if options.quick else ROUNDS)
    sizes = sizes_for(world.device, quick=options.quick, memory_bytes=_memory_bytes(world))
    torch.manual_seed(0)
    links = _measure_links(world, timing, sizes)
    measured = {
        precision: _measure_rank(timing, sizes, dtype=DTYPES[precision])
        for precision in dict.fromkeys(("fp32", *options.precisions))
    }
    hardware = _hardware(world, timing, links=links, measured=measured)
    return Probed(hardware, {name: by_case(found) for name, found in timing.quartiles.items()})


def machine_facts(world: World) -> dict[str, Any]:
    """Where and how it was measured, for whoever reads the file."""
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


def _measure_rank(timing: Timing, sizes: Sizes, *, dtype: torch.dtype) -> Measured:
    return Measured(
        products=measure_products(timing, sizes, dtype=dtype),
        attention=measure_attention(timing, sizes, dtype=dtype),
        passes=measure_passes(timing, sizes, dtype=dtype),
    )


def _measure_links(world: World, timing: Timing, sizes: Sizes) -> Links:
    """All nodes' groups at once, then all rings across nodes at once: what a rank gets of what they share."""
    per_node, num_nodes = world.local_world_size, world.num_nodes
    intra = inter = None
    if per_node > 1:
        groups = [dist.new_group(list(range(node * per_node, (node + 1) * per_node))) for node in range(num_nodes)]
        intra = measure_link(timing, groups[world.rank // per_node], sent_bytes=sizes.sent_bytes)
    if num_nodes > 1:
        groups = [dist.new_group(list(range(local, world.world_size, per_node))) for local in range(per_node)]
        inter = measure_link(timing, groups[world.local_rank], sent_bytes=sizes.sent_bytes, between_nodes=True)
    return Links(intra, inter)


def _hardware(world: World, timing: Timing, *, links: Links, measured: Mapping[str, Measured]) -> Hardware:
    found = "measured by `gather-moe probe`"
    largest = [measured["fp32"].passes["copy"][-1]]
    peaks = {precision: best_rate(dict(part.products)) for precision, part in measured.items()}
    sheet = table_peak(_device_name(world.device))
    if sheet is not None and "bf16" in peaks:
        peaks["bf16"] = sheet.flops_per_s
    return Hardware(
        name=_device_name(world.device),
        device=world.device,
        memory_bytes=_memory_bytes(world),
        ranks_per_node=world.local_world_size,
        peak_flops_per_s=peaks,
        memory_bytes_per_s=max(8 * elements / seconds for elements, seconds in largest),
        intra=links.intra,
        inter=links.inter,
        efficiencies=Efficiencies(**dict.fromkeys(Efficiencies.__annotations__, 1.0)),
        launch_s=_launch_s(timing),
        compute_capability=_capability(world.device),
        sources={
            "peak_flops_per_s": f"bf16: {sheet.source}" if sheet else "the fastest product measured",
            "memory_bytes": "the operating system" if world.device == "cpu" else "the driver",
            "intra": found if links.intra else "not measured: one rank on a node",
            "inter": found if links.inter else "not measured: one node",
            "efficiencies": "not used: rates are measured",
            "launch_s": found,
            "measured": found,
        },
        measured=measured,
    )


def _capability(device: str) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if device == "cuda" else None


def _launch_s(timing: Timing) -> float:
    """What an operator on one number costs the host."""
    x = torch.zeros(1, device=timing.device)
    return timing.measure({"launch": lambda: x.add_(1)}, name="launches")["launch"]


def _memory_bytes(world: World) -> int:
    if world.device == "cuda":
        return torch.cuda.get_device_properties(world.local_rank).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.local_world_size


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    names = (line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
