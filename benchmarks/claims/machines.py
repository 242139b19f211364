"""The machines that claims are measured against: data sheets, and what others have measured of them."""

from typing import NamedTuple

from recipe.plan.hardware import find_hardware

A100 = "a100-80g"
H100 = "h100"
RTX_4090 = "rtx-4090"

NVLINK_BYTES_PER_S = 25e9  # one link, one direction, third and fourth generation
A100_NVLINKS = 12
H100_NVLINKS = 18
NVLINK_DOMAIN = 8  # GPUs of a server that NVSwitch joins
A100_LINK_BYTES_PER_S = A100_NVLINKS * NVLINK_BYTES_PER_S
H100_LINK_BYTES_PER_S = H100_NVLINKS * NVLINK_BYTES_PER_S
A100_BUS_BYTES_PER_S = 200e9  # what nccl-tests shows
NETWORK_BYTES_PER_S = 25e9  # between nodes, one 200 Gbit/s adapter per GPU

A100_MULTIPROCESSORS = 108
A100_SHARED_BYTES = 192 * 2**10  # of a multiprocessor, L1 cache and shared memory together
A100_USABLE_SHARED_BYTES = 167_936
A100_L2_BYTES = 41_943_040

NVIDIA_A100 = "NVIDIA A100 data sheet and architecture paper"
NCCL_TESTS = "NVIDIA/nccl-tests issues 149 and 178: 200 to 208 GB/s on A100 with NVLink"
NCCL_TESTS_H100 = "NVIDIA/nccl-tests issue 212: about 20 % of NVLink's 450 GB/s is protocol"
DEVICE_QUERY = "deviceQuery of an A100: 41,943,040 bytes of L2, 167,936 bytes of shared memory per SM"


class Machine(NamedTuple):
    """A device at the rates it is assumed to reach.

    products_flops_per_s, attention_flops_per_s  of matrix products, and of attention's causal half
    link_bytes_per_s                             of one rank, one direction
    """

    name: str
    products_flops_per_s: float
    attention_flops_per_s: float
    link_bytes_per_s: float


class Assumption(NamedTuple):
    """What of a machine programs are taken to reach: shares of the peak, and bytes/s of one rank, one direction."""

    products: float
    attention: float
    link_bytes_per_s: float


# Round numbers that claims about no program in particular are held against; the planner's own are find_hardware's.
A100_ASSUMED = Assumption(products=0.60, attention=0.55, link_bytes_per_s=A100_BUS_BYTES_PER_S)
H100_ASSUMED = Assumption(products=0.60, attention=0.60, link_bytes_per_s=0.8 * H100_LINK_BYTES_PER_S)


class Machines(NamedTuple):
    """Each at its data sheet's rates, and as assumed of real programs."""

    a100_peak: Machine
    a100: Machine
    h100_peak: Machine
    h100: Machine


def peak_flops_per_s(name: str) -> float:
    """Dense bf16."""
    return find_hardware(name).peak_flops_per_s["bf16"]


def memory_bytes_per_s(name: str) -> float:
    return find_hardware(name).memory_bytes_per_s


def at_peak(name: str, *, label: str, link_bytes_per_s: float) -> Machine:
    peak = peak_flops_per_s(name)
    return Machine(f"{label}, peak", peak, peak, link_bytes_per_s)


def as_assumed(name: str, *, label: str, what: Assumption) -> Machine:
    peak, rate = peak_flops_per_s(name), what.link_bytes_per_s
    words = f"{label}, {what.products:.0%} in products, {what.attention:.0%} in attention, {rate / 1e9:.0f} GB/s"
    return Machine(words, what.products * peak, what.attention * peak, rate)


def machines() -> Machines:
    return Machines(
        at_peak(A100, label="A100", link_bytes_per_s=A100_LINK_BYTES_PER_S),
        as_assumed(A100, label="A100", what=A100_ASSUMED),
        at_peak(H100, label="H100", link_bytes_per_s=H100_LINK_BYTES_PER_S),
        as_assumed(H100, label="H100", what=H100_ASSUMED),
    )
