"""Hardware by its name in a table, a line and a source for every number, or by the path of a probe's file.

Peaks and bandwidths are data sheets', one direction. What programs reach of them are start values for want of a probe:
published measurements where there are any, else "assumed". They are the same for every model, layout and length.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from recipe.plan.hardware_file import read_hardware
from recipe.plan.hardware_values import Efficiencies, Hardware, Link
from recipe.shared.flops import table_peak

MIB = 2**20
ASSUMED = "assumed; `gather-moe probe` measures it"
# Kernels of 128 rows: the last tile of an expert is half empty on average, 64 rows of padding.
HALF_ROWS = 64.0


class Sheet(NamedTuple):
    """Numbers of data sheets, and what of them was measured by others.

    memory_mib          the device's total as its driver reports it
    link_gbs, link_share  GB/s of one direction inside a node, and what large collectives reach of it
    link_source         of the share
    nic_gbs             GB/s of the network per device
    attention           (forward, backward) share of the peak for long causal sequences
    """

    device_name: str
    memory_mib: int
    memory_gbs: float
    fp32_tflops: float
    link: str
    link_gbs: float
    link_share: float
    link_source: str
    nic: str
    nic_gbs: float
    attention: tuple[float, float]
    attention_source: str
    ranks_per_node: int = 8


_FA2_A100 = (
    "FlashAttention-2 (2307.08691), figures 5 and 6: up to 73 % forward and 63 % backward on A100, less where causal"
)
_FA2_H100 = "FlashAttention-3 (2407.08608), figures 5 and 6, its FlashAttention-2 curves on H100, causal"
_NVLINK_3 = "NCCL's own model of its speed allows 235 of 300 GB/s (src/graph/tuning.cc, devices of capability 8.0)"
_NVLINK_4 = "nccl-tests issue 212: 370 of 450 GB/s on H100"
_IB_200, _IB_400 = ("200 Gbit/s InfiniBand", 25), ("400 Gbit/s InfiniBand", 50)

SHEETS: Mapping[str, Sheet] = {
    "a100-80g": Sheet(
        "NVIDIA A100", 81920, 2039, 19.5, "NVLink 3", 300, 0.78, _NVLINK_3, *_IB_200, (0.55, 0.45), _FA2_A100
    ),
    "a100-40g": Sheet(
        "NVIDIA A100", 40960, 1555, 19.5, "NVLink 3", 300, 0.78, _NVLINK_3, *_IB_200, (0.55, 0.45), _FA2_A100
    ),
    "h100": Sheet(
        "NVIDIA H100", 81559, 3352, 66.9, "NVLink 4", 450, 0.82, _NVLINK_4, *_IB_400, (0.38, 0.32), _FA2_H100
    ),
    "h200": Sheet(
        "NVIDIA H200", 143771, 4800, 66.9, "NVLink 4", 450, 0.82, _NVLINK_4, *_IB_400, (0.38, 0.32), _FA2_H100
    ),
    # Of a board with eight (HGX); in a GB200 it is a faster one.
    "b200": Sheet(
        *("NVIDIA B200", 183359, 7700, 75, "NVLink 5", 900, 0.82, f"{_NVLINK_4}, the same share assumed"),
        *(*_IB_400, (0.30, 0.25), ASSUMED),
    ),
    "mi300x": Sheet(
        *("AMD Instinct MI300X", 196592, 5300, 163.4, "Infinity Fabric", 448, 0.70, ASSUMED),
        *("400 Gbit/s", 50, (0.30, 0.22), ASSUMED),
    ),
    "rtx-4090": Sheet(
        *("NVIDIA GeForce RTX 4090", 24564, 1008, 82.6, "PCIe 4 x16", 32, 0.45, ASSUMED),
        *("100 Gbit/s for 8", 1.56, (0.55, 0.45), ASSUMED),
    ),
}
# As torch reports them; ROCm's are the numbers of the architecture (gfx942).
CAPABILITIES: Mapping[str, tuple[int, int]] = {
    "a100-80g": (8, 0),
    "a100-40g": (8, 0),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "mi300x": (9, 4),
    "rtx-4090": (8, 9),
}
ALIASES: Mapping[str, str] = {
    "a100": "a100-80g",
    "h100-80g": "h100",
    "h200-141g": "h200",
    "b200-180g": "b200",
    "mi300x-192g": "mi300x",
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
}
# What people write before and after the words of a name.
_MAKERS = re.compile(r"^(nvidia|amd|geforce|instinct)-")
_SOCKET = re.compile(r"-(sxm\d?|oam|hbm\d\w?)(?=-|$)")


def find_hardware(name: str, *, device: str | None = None) -> Hardware:
    """Return a GPU of the table by its name ("a100-80g", "h100", ...), "cpu", or what a probe wrote to the file `name`.

    Raises ValueError for what is neither, a file that cannot be used, and another device than `device`.
    """
    if name.endswith(".json") or Path(name).is_file():
        found = read_hardware(Path(name))
    else:
        entry = table_entry(name)
        if entry is None:
            raise ValueError(
                f"hardware {name!r} is not known; choose one of {names_with_aliases()}, or the path of a file "
                "that `gather-moe probe` wrote"
            )
        found = entry
    if device is not None and found.device != device:
        raise ValueError(f"hardware {name!r} is a {found.device}, but the plan is for device {device}")
    return found


def known_names() -> list[str]:
    """Return the names that `table_entry` knows, without aliases."""
    return [*SHEETS, "cpu"]


def names_with_aliases() -> str:
    """Return the names as a sentence lists them."""
    others = {name: [alias for alias, of in ALIASES.items() if of == name] for name in known_names()}
    return ", ".join(f"{name} (or {', '.join(found)})" if found else name for name, found in others.items())


def table_entry(name: str) -> Hardware | None:
    """Return the hardware of that name, whatever its case, separators, maker and socket; None where there is none."""
    plain = re.sub(r"[_ ]+", "-", name.strip().lower())
    while (shorter := _MAKERS.sub("", plain)) != plain:
        plain = shorter
    plain = re.sub(r"(?<=\d)gb\b", "g", _SOCKET.sub("", plain))
    plain = ALIASES.get(plain, plain)
    if plain == "cpu":
        return _this_cpu()
    sheet = SHEETS.get(plain)
    return None if sheet is None else _gpu(plain, sheet)


def _gpu(name: str, sheet: Sheet) -> Hardware:
    peak = table_peak(sheet.device_name)
    assert peak is not None
    forward, backward = sheet.attention
    sheets = f"data sheet of {sheet.device_name}"
    return Hardware(
        name=name,
        device="cuda",
        memory_bytes=sheet.memory_mib * MIB,
        ranks_per_node=sheet.ranks_per_node,
        peak_flops_per_s={"bf16": peak.flops_per_s, "fp32": sheet.fp32_tflops * 1e12},
        memory_bytes_per_s=sheet.memory_gbs * 1e9,
        intra=Link(alpha_s=2.5e-6, bytes_per_s=sheet.link_gbs * sheet.link_share * 1e9, busy=0.1),
        inter=Link(alpha_s=5e-6, bytes_per_s=0.9 * sheet.nic_gbs * 1e9, busy=0.1),
        efficiencies=Efficiencies(
            product=0.75,
            half_rows=HALF_ROWS,
            half_width=128.0,
            attention_forward=forward,
            attention_backward=backward,
            half_length=512.0,
            memory=0.85,
        ),
        launch_s=5e-6,
        compute_capability=CAPABILITIES[name],
        sources={
            "memory_bytes": "the driver's total of the device",
            "peak_flops_per_s": f"bf16: {peak.source}; fp32: {sheets}, without TF32",
            "memory_bytes_per_s": sheets,
            "ranks_per_node": "the usual server",
            "intra.bytes_per_s": f"{sheet.link}, {sheet.link_gbs:g} GB/s each way ({sheets}) x {sheet.link_share:g}: "
            + sheet.link_source,
            "intra.alpha_s": ASSUMED,
            "intra.busy": f"{ASSUMED}: the multiprocessors and the memory that a collective takes",
            "inter.bytes_per_s": f"{sheet.nic} per device, {sheet.nic_gbs:g} GB/s x 0.9: 45 of 50 GB/s in Megatron "
            "Core's report on all-to-alls over 64 H100",
            "inter.alpha_s": ASSUMED,
            "efficiencies.product": ASSUMED,
            "efficiencies.half_rows": "derived: tiles of 128 rows, half a tile of padding per expert",
            "efficiencies.half_width": ASSUMED,
            "efficiencies.attention": sheet.attention_source,
            "efficiencies.memory": ASSUMED,
            "launch_s": ASSUMED,
        },
    )


def _this_cpu() -> Hardware:
    """Return a rough guess of this machine, a core for each rank."""
    cores = len(os.sched_getaffinity(0))
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = ("peak_flops_per_s", "memory_bytes_per_s", "intra", "efficiencies", "launch_s")
    return Hardware(
        name="cpu",
        device="cpu",
        memory_bytes=total_bytes // cores,
        ranks_per_node=cores,
        peak_flops_per_s={"bf16": 200e9, "fp32": 100e9},
        memory_bytes_per_s=10e9,
        intra=Link(alpha_s=200e-6, bytes_per_s=1.5e9, busy=0.8),
        inter=Link(alpha_s=200e-6, bytes_per_s=0.117e9, busy=0.1),
        efficiencies=Efficiencies(
            product=0.8,
            half_rows=8.0,
            half_width=32.0,
            attention_forward=0.4,
            attention_backward=0.4,
            half_length=64.0,
            memory=0.8,
        ),
        launch_s=5e-6,
        sources={
            "memory_bytes": "this machine's memory, an equal part per core",
            "ranks_per_node": "this machine's cores",
            "inter": "1 Gbit/s Ethernet, assumed",
            **dict.fromkeys(names, ASSUMED),
        },
    )
