"""What one rank can do and how ranks are joined, as numbers that each say where they are from.

Two kinds: a GPU of the table (hardware.py), data sheets times stated efficiencies, or what `gather-moe probe`
measured and wrote to a file (hardware_file.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Curve = tuple[tuple[float, float], ...]  # (size, seconds), sizes rising


class Fit(NamedTuple):
    """Seconds of one collective = alpha_s x its steps (wire_time.py) + bytes a rank sends / bytes_per_s.

    residual   the root mean square of measured / fitted - 1; 0 where nothing was measured
    max_bytes  the most that was measured
    """

    alpha_s: float
    bytes_per_s: float
    residual: float = 0.0
    max_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a rank sends through, in one direction.

    busy  the share of a transfer's time for which it keeps its rank from computing
    ops   fits of single collectives where they were measured; the others follow the link's own numbers
    """

    alpha_s: float
    bytes_per_s: float
    busy: float
    ops: Mapping[str, Fit] = field(default_factory=dict)

    def seconds(self, op: str, *, num_steps: float, sent_bytes: float) -> float:
        """Return the seconds of a collective in which a rank sends `sent_bytes` in `num_steps` pieces."""
        fit = self.ops.get(op)
        alpha_s, rate = (self.alpha_s, self.bytes_per_s) if fit is None else fit[:2]
        return alpha_s * num_steps + sent_bytes / rate


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """What of the peaks programs reach, where nothing was measured.

    product             of the peak, by a product that is large in every dim
    half_rows           rows, per expert where grouped, at which a product reaches half of that
    half_width          the same for the harmonic mean of its other two dims
    attention_forward   of the peak, over the causal half of the scores, for long sequences
    attention_backward  the same
    half_length         length of a sequence at which attention reaches half of that
    memory              of the memory's bandwidth, by an elementwise kernel
    """

    product: float
    half_rows: float
    half_width: float
    attention_forward: float
    attention_backward: float
    half_length: float
    memory: float


class ProductRate(NamedTuple):
    """FLOP/s of [rows, width] times [width, width]."""

    rows: float
    width: float
    flops_per_s: float


class AttentionRate(NamedTuple):
    """FLOP/s of causal attention over sequences of this length, the causal half of the scores counted."""

    length: float
    head_dim: float
    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a probe found in one precision, one rank on its share of the machine and all ranks at work.

    products   "forward", "input_gradient", "weight_gradient" and "expert" (both products of an expert over its rows)
    attention  by length and size of a head
    passes     work bound by memory (rates.py), seconds by the number of elements
    """

    products: Mapping[str, tuple[ProductRate, ...]]
    attention: tuple[AttentionRate, ...]
    passes: Mapping[str, Curve]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One rank's device and its links.

    ranks_per_node       of the usual node, or of the group that was probed
    peak_flops_per_s     dense, by precision ("bf16", "fp32")
    memory_bytes_per_s   of the data sheet; measured: of a large copy
    intra, inter         links inside a node and between nodes; None where they were not measured
    launch_s             from one kernel's launch to the next, as the host gives them without a graph
    measured             by precision; empty for a GPU of the table
    compute_capability   (major, minor) of a GPU, by which the trainer chooses how experts are multiplied; None: a CPU
    sources              where each number is from, by field
    """

    name: str
    device: str
    memory_bytes: int
    ranks_per_node: int
    peak_flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    intra: Link | None
    inter: Link | None
    efficiencies: Efficiencies
    launch_s: float
    sources: Mapping[str, str]
    measured: Mapping[str, Measured] = field(default_factory=dict)
    compute_capability: tuple[int, int] | None = None
