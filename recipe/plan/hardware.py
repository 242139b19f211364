"""What one rank can do and how ranks are joined, as numbers that each say where they are from.

Two kinds: a GPU of the table, or what `gather-moe probe` measured and wrote to a file, which is read strictly. The
table's peaks and bandwidths are data sheets', one direction. What programs reach of them are start values for want of a
probe: published measurements where there are any, else "assumed". They are the same for every model, layout and length.
"""

import json
import os
import re
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from annotated_types import Ge, Gt, Le, Lt, MinLen

from recipe.plan.job import ELEMENT_BYTES
from recipe.shared.flops import table_peak

# What a file's numbers are held to; neither infinity nor what is no number is below infinity.
Positive = Annotated[float, Gt(0), Lt(inf)]
NotNegative = Annotated[float, Ge(0), Lt(inf)]
Count = Annotated[int, Ge(1)]
Curve = Annotated[tuple[tuple[Positive, Positive], ...], MinLen(1)]  # (size, seconds), sizes rising
PRODUCT_KINDS = ("forward", "input_gradient", "weight_gradient", "expert")
LINK_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


class Fit(NamedTuple):
    """Seconds of one collective = alpha_s x its steps (transfer_time.py) + bytes a rank sends / bytes_per_s.

    residual   the root mean square of measured / fitted - 1
    max_bytes  the most that was measured
    """

    alpha_s: NotNegative
    bytes_per_s: Positive
    residual: NotNegative
    max_bytes: NotNegative


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a rank sends through, in one direction.

    call_s  of any collective, however many ranks and bytes it has
    busy    the share of a transfer's time for which it keeps its rank from computing
    ops     fits of single collectives, measured or published; the others follow the link's own numbers
    """

    alpha_s: NotNegative
    bytes_per_s: Positive
    busy: Annotated[float, Ge(0), Le(1)]
    call_s: NotNegative = 0.0
    ops: Mapping[str, Fit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_names("ops", self.ops, known=LINK_OPS)

    def wait_s(self, op: str, *, num_steps: float) -> float:
        """Return the seconds of a collective in so many pieces that do not depend on their bytes."""
        return self.call_s + (self.ops[op].alpha_s if op in self.ops else self.alpha_s) * num_steps

    def transfer_s(self, op: str, sent_bytes: float) -> float:
        """Return the seconds in which a rank sends this much."""
        return sent_bytes / (self.ops[op].bytes_per_s if op in self.ops else self.bytes_per_s)


class AttentionShare(NamedTuple):
    """Of the peak, by attention over the causal half of long sequences."""

    forward: Positive
    backward: Positive


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """What programs reach of the peaks, where nothing was measured.

    product      of the peak, by a cold device and a product that is large in every dim; above 1 where the sheet's own
                 number is one for a warm device
    half_depth   numbers summed for each result (K) at which a product reaches half of that
    heat         how much longer products take than on a cold device, times the share of the peak that a step on a cold
                 one would reach: power slows the clock
    tiles        results that a product's kernels make at once, (rows, columns): the best of these
    processors   tiles that are made at the same time
    attention    by kernel, "usual" for those not named
    half_length  length of a sequence at which attention reaches half of that
    memory       of the memory's bandwidth, by an elementwise kernel
    """

    product: Positive
    half_depth: Positive
    heat: NotNegative
    tiles: tuple[tuple[Count, Count], ...]
    processors: Count
    attention: Mapping[str, AttentionShare]
    half_length: Positive
    memory: Positive


class ProductRate(NamedTuple):
    """FLOP/s of [rows, width] times [width, width]."""

    rows: Positive
    width: Positive
    flops_per_s: Positive


class AttentionRate(NamedTuple):
    """FLOP/s of causal attention over sequences of this length, the causal half of the scores counted."""

    length: Positive
    head_dim: Positive
    forward: Positive
    backward: Positive


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a probe found in one precision, one rank on its share of the machine and all ranks at work.

    products   "forward", "input_gradient", "weight_gradient" and "expert" (both products of an expert over its rows)
    attention  by length and size of a head
    passes     work bound by memory, of PASSES, seconds by the number of elements
    """

    products: Mapping[str, Annotated[tuple[ProductRate, ...], MinLen(1)]]
    attention: Annotated[tuple[AttentionRate, ...], MinLen(1)]
    passes: Mapping[str, Curve]

    def __post_init__(self) -> None:
        _check_names("products", self.products, known=PRODUCT_KINDS, needs_all=True)
        _check_names("passes", self.passes, known=PASSES, needs_all=True)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One rank's device and its links.

    ranks_per_node       of the usual node, or of the group that was probed
    peak_flops_per_s     dense, by precision ("bf16", "fp32")
    memory_bytes_per_s   of the data sheet; measured: of a large copy
    intra, inter         links inside a node and between nodes; None where they were not measured
    efficiencies         None where rates were measured
    launch_s             of the host for one operator, without a graph
    measured             by precision; empty for a GPU of the table, never in a file
    compute_capability   (major, minor) of a GPU, by which the trainer chooses how experts are multiplied; None: a CPU
    sources              where each number is from, by field
    """

    name: str
    device: str
    memory_bytes: Count
    ranks_per_node: Count
    peak_flops_per_s: Mapping[str, Positive]
    memory_bytes_per_s: Positive
    intra: Link | None
    inter: Link | None
    efficiencies: Efficiencies | None
    launch_s: Positive
    sources: Mapping[str, str]
    measured: Annotated[Mapping[str, Measured], MinLen(1)]
    compute_capability: tuple[Annotated[int, Ge(0)], Annotated[int, Ge(0)]] | None

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"its device is {self.device!r}, not cpu or cuda")
        _check_names("measured", self.measured, known=ELEMENT_BYTES)
        if missing := sorted(self.measured.keys() - self.peak_flops_per_s.keys()):
            raise ValueError(f"peak_flops_per_s has no {', '.join(missing)}, which was measured")


class Pass(NamedTuple):
    """Numbers read and written per element of some work, in the activations' type and in float32, and its kernels."""

    own: float
    wide: float
    num_kernels: int

    def bytes_per_element(self, element_bytes: int) -> float:
        return self.own * element_bytes + self.wide * 4


# As the layers here run them.
PASSES: Mapping[str, Pass] = {
    "copy": Pass(2, 0, 1),
    "add": Pass(3, 0, 1),
    "norm": Pass(2, 0, 1),
    "norm_backward": Pass(3, 0, 2),
    "rotate": Pass(2, 0, 1),
    # Rows looked up by index; rows weighted and added to their tokens.
    "rows": Pass(2, 0, 1),
    "add_rows": Pass(1, 6, 3),
    # The same by kernels on a device, per number read or written: a token's rows summed in registers.
    "combine": Pass(1, 0, 1),
    # Per number of an expert's width: silu(gate) * up, and the gradients of gate, up and the routing weight.
    "activation": Pass(5, 0, 2),
    "activation_backward": Pass(12, 8, 9),
    # The same by kernels, with the routing weight in the product; the backward writes the product again.
    "swiglu": Pass(3, 0, 1),
    "swiglu_back": Pass(6, 0, 1),
    # Per token and expert: scores, sort, weights and statistics, forward and backward.
    "routing": Pass(0, 40, 40),
    # Per logit: read for its row's sums, and replaced by its gradient.
    "loss": Pass(3, 0, 2),
    # Per parameter: from one buffer to another, in place; AdamW; the norm, in float64.
    "refill": Pass(0, 2, 1),
    "sum_up": Pass(0, 3, 1),
    "adamw": Pass(0, 7, 1),
    "squares": Pass(0, 6, 2),
}


MIB = 2**20
ASSUMED = "assumed; `gather-moe probe` measures it"
FITTED = "fitted to published speeds (benchmarks/published.py)"
TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128))  # of the kernels for GPUs
USUAL = "usual"


class Sheet(NamedTuple):
    """Numbers of data sheets, and what of them was measured by others.

    memory_mib   the device's total as its driver reports it
    link_gbs     GB/s of one direction inside a node
    link_shares  what large gathers (and scatters), sums and exchanges reach of it
    nic_gbs      GB/s of the network per device
    product      (cold, heat) as in `Efficiencies`
    attention    shares of the peak by kernel
    capability   as torch reports it; ROCm's are the numbers of the architecture (gfx942)
    """

    device_name: str
    memory_mib: int
    memory_gbs: float
    fp32_tflops: float
    link: str
    link_gbs: float
    link_shares: tuple[float, float, float]
    link_source: str
    nic: str
    nic_gbs: float
    product: tuple[float, float]
    product_source: str
    processors: int
    attention: Mapping[str, AttentionShare]
    attention_source: str
    capability: tuple[int, int]
    ranks_per_node: int = 8


_AMPERE_ATTENTION = {USUAL: AttentionShare(0.47, 0.38)}
_HOPPER_ATTENTION = {USUAL: AttentionShare(0.269, 0.217), "flash_attention_3": AttentionShare(0.627, 0.526)}
_HOPPER_SOURCE = f"FlashAttention-2: {FITTED}; 3: FlashAttention-3 (2407.08608), figures 5 and 6, causal, head size 128"
_NVLINK_4 = f"gathers: {FITTED}; sums: 436 GB/s measured in the same cluster (nanotron); exchanges: {FITTED}"
_A100 = (
    *(19.5, "NVLink 3", 300, (0.37, 0.78, 0.78), FITTED, "200 Gbit/s InfiniBand", 25),
    *((0.985, 0.025), FITTED, 108, _AMPERE_ATTENTION, FITTED, (8, 0)),
)
_HOPPER = (
    *(66.9, "NVLink 4", 450, (0.54, 0.97, 0.84), _NVLINK_4, "400 Gbit/s InfiniBand", 50),
    *((1.04, 0.68), FITTED, 132, _HOPPER_ATTENTION, _HOPPER_SOURCE, (9, 0)),
)
_AS_HOPPER = f"{ASSUMED}: the shares of H100"

SHEETS: Mapping[str, Sheet] = {
    "a100-80g": Sheet("NVIDIA A100", 81920, 2039, *_A100),
    "a100-40g": Sheet("NVIDIA A100", 40960, 1555, *_A100),
    "h100": Sheet("NVIDIA H100", 81559, 3352, *_HOPPER),
    "h200": Sheet("NVIDIA H200", 143771, 4800, *_HOPPER),
    # Of a board with eight (HGX); in a GB200 it is a faster one.
    "b200": Sheet(
        *(
            "NVIDIA B200",
            183359,
            7700,
            75,
            "NVLink 5",
            900,
            (0.54, 0.97, 0.84),
            _AS_HOPPER,
            "400 Gbit/s InfiniBand",
            50,
        ),
        *((1.04, 0.68), _AS_HOPPER, 148),
        *({USUAL: AttentionShare(0.20, 0.16), "flash_attention_4": AttentionShare(0.60, 0.45)}, ASSUMED, (10, 0)),
    ),
    "mi300x": Sheet(
        *("AMD Instinct MI300X", 196592, 5300, 163.4, "Infinity Fabric", 448, (0.5, 0.7, 0.7), ASSUMED),
        *("400 Gbit/s", 50, (0.65, 0.3), ASSUMED, 304, {USUAL: AttentionShare(0.30, 0.22)}, ASSUMED, (9, 4)),
    ),
    "rtx-4090": Sheet(
        *("NVIDIA GeForce RTX 4090", 24564, 1008, 82.6, "PCIe 4 x16", 32, (0.45, 0.45, 0.45), ASSUMED),
        *("100 Gbit/s for 8", 1.56, (0.9, 0.11), ASSUMED, 128, _AMPERE_ATTENTION, ASSUMED, (8, 9)),
    ),
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
        entry = _table_entry(name)
        if entry is None:
            others = {known: [alias for alias, of in ALIASES.items() if of == known] for known in known_names()}
            names = [f"{known} (or {', '.join(more)})" if more else known for known, more in others.items()]
            raise ValueError(
                f"hardware {name!r} is not known; choose one of {', '.join(names)}, or the path of a file "
                "that `gather-moe probe` wrote"
            )
        found = entry
    if device is not None and found.device != device:
        raise ValueError(f"hardware {name!r} is a {found.device}, but the plan is for device {device}")
    return found


def with_network(hardware: Hardware, gbits_per_s: float) -> Hardware:
    """Return a GPU of the table whose nodes are joined by so many Gbit/s per device.

    ValueError for hardware that was measured, its network too, or is a CPU.
    """
    if hardware.measured or hardware.device == "cpu":
        raise ValueError(f"hardware {hardware.name} has its own network; only that of a GPU by name can be stated")
    link = _network(gbits_per_s / 8)
    sources = {**hardware.sources, "inter.bytes_per_s": f"{gbits_per_s:g} Gbit/s per device, as stated"}
    return replace(hardware, inter=link, sources=sources)


def known_names() -> list[str]:
    """Return the names of the table, without aliases."""
    return [*SHEETS, "cpu"]


def _table_entry(name: str) -> Hardware | None:
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
    sheets = f"data sheet of {sheet.device_name}"
    cold, heat = sheet.product
    return Hardware(
        name=name,
        device="cuda",
        memory_bytes=sheet.memory_mib * MIB,
        ranks_per_node=sheet.ranks_per_node,
        peak_flops_per_s={"bf16": peak.flops_per_s, "fp32": sheet.fp32_tflops * 1e12},
        memory_bytes_per_s=sheet.memory_gbs * 1e9,
        intra=_link(sheet.link_gbs, sheet.link_shares, alpha_s=2e-6, call_s=2e-6),
        inter=_network(sheet.nic_gbs),
        efficiencies=Efficiencies(
            product=cold,
            half_depth=560,
            heat=heat,
            tiles=TILES,
            processors=sheet.processors,
            attention=sheet.attention,
            half_length=425,
            memory=0.85,
        ),
        launch_s=15e-6,
        compute_capability=sheet.capability,
        sources={
            "memory_bytes": "the driver's total of the device",
            "peak_flops_per_s": f"bf16: {peak.source}; fp32: {sheets}, without TF32",
            "memory_bytes_per_s": sheets,
            "ranks_per_node": "the usual server",
            "intra.bytes_per_s": f"{sheet.link}, {sheet.link_gbs:g} GB/s each way ({sheets}), of which gathers, sums "
            f"and exchanges reach {', '.join(f'{share:.0%}' for share in sheet.link_shares)}: {sheet.link_source}",
            "intra.alpha_s": FITTED,
            "busy": f"{FITTED}: of what could be hidden about half is",
            "inter.bytes_per_s": f"{sheet.nic} per device, assumed; --network_gbits states another",
            "inter.alpha_s": FITTED,
            "efficiencies.product": sheet.product_source,
            "efficiencies.half_depth": FITTED,
            "efficiencies.attention": sheet.attention_source,
            "efficiencies.memory": ASSUMED,
            "launch_s": f"{FITTED}: 12 to 25 us per operator of eager PyTorch",
        },
        measured={},
    )


BUSY = 0.4


def _network(gbs: float) -> Link:
    """Return a network of so many GB/s per device: gathers and scatters reach half of it, sums in trees more."""
    return _link(gbs, (0.5, 0.85, 0.75), alpha_s=20e-6, call_s=0.3e-3)


def _link(gbs: float, shares: tuple[float, float, float], *, alpha_s: float, call_s: float) -> Link:
    gather, summed, exchanged = (1e9 * gbs * share for share in shares)
    ops = {"all_reduce": Fit(alpha_s, summed, 0.0, 0.0), "all_to_all": Fit(0.0, exchanged, 0.0, 0.0)}
    return Link(alpha_s=alpha_s, bytes_per_s=gather, busy=BUSY, call_s=call_s, ops=ops)


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
            half_depth=16.0,
            heat=0.0,
            tiles=((8, 16),),
            processors=1,
            attention={USUAL: AttentionShare(0.4, 0.4)},
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
        measured={},
        compute_capability=None,
    )


FORMAT = 2  # of a probe's file; rises with every change that makes older numbers mean something else
AGAIN = "measure again with `gather-moe probe`"


@dataclass(frozen=True, kw_only=True)
class HardwareFile:
    """What a probe writes; `machine` says where and how it was measured, for people."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # of all that is inside, too

    format: int
    machine: Mapping[str, Any]
    hardware: Hardware


def hardware_as_json(hardware: Hardware, *, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file; `machine` as in `HardwareFile`."""
    return asdict(HardwareFile(format=FORMAT, machine=machine, hardware=hardware))


def read_hardware(path: Path) -> Hardware:
    """Return the hardware of a file; a ValueError says what is wrong with it and what to do."""
    from pydantic import TypeAdapter, ValidationError

    try:
        text = path.read_bytes()
        whole = json.loads(text)
    except FileNotFoundError:
        raise ValueError(
            f"hardware file {path} does not exist; write it with `gather-moe probe --out {path}`"
        ) from None
    except OSError as error:
        raise ValueError(f"hardware file {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"hardware file {path} is no JSON ({error}); {AGAIN}") from None
    found = whole.get("format") if isinstance(whole, dict) else None
    if found != FORMAT:
        age = "an older" if not isinstance(found, int) or found < FORMAT else "a newer"
        raise ValueError(f"hardware file {path} has {age} format ({found}) than this program's {FORMAT}; {AGAIN}")
    try:
        return TypeAdapter(HardwareFile).validate_json(text, strict=True).hardware
    except ValidationError as error:
        fault = error.errors()[0]
        place, words = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
        given = "" if isinstance(fault["input"], dict) else f" is {reprlib.repr(fault['input'])}"
        raise ValueError(f"hardware file {path} cannot be used: {place}{given}: {words}; {AGAIN}") from None


def _check_names(name: str, found: Collection[str], *, known: Collection[str], needs_all: bool = False) -> None:
    """Raise ValueError where a mapping has a name that is not known, or lacks one that it needs."""
    for entry in found:
        if entry not in known:
            raise ValueError(f"{entry!r} in {name} is not one of {', '.join(known)}")
    for entry in known if needs_all else ():
        if entry not in found:
            raise ValueError(f"{entry!r} is missing in {name}")
