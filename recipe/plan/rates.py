"""Seconds of products, attention and memory-bound work of one rank, by their shapes.

Memory-bound work is named in PASSES, with the numbers that each element makes travel. The counts are of the torch
operators that the code runs one after another, each reading its inputs and writing its result; a probe runs the same
operators (recipe/measure/passes.py) and times them instead.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import exp, log
from typing import NamedTuple

from recipe.plan.hardware_values import AttentionRate, Hardware, Measured, ProductRate
from recipe.plan.job import ELEMENT_BYTES

Points = list[tuple[float, float]]  # (log size, log value), sizes rising
# A causal backward multiplies five times where its forward does twice (FlashAttention, 2205.14135, appendix B).
ATTENTION_BACKWARD_FLOPS = 2.5


class Pass(NamedTuple):
    """Numbers read and written per element of some work, in the activations' type and in float32, and its kernels.

    fused  the numbers of one kernel that reads its inputs and writes its results once, in the type of the activations;
           for other systems, which have such
    """

    own: float
    wide: float
    num_kernels: int
    fused: float

    def bytes_per_element(self, element_bytes: int, *, fused: bool = False) -> float:
        return self.fused * element_bytes if fused else self.own * element_bytes + self.wide * 4


PASSES: Mapping[str, Pass] = {
    "copy": Pass(2, 0, 1, 2),
    "add": Pass(3, 0, 1, 3),
    # Per number of the row: squares, mean, scaled, weighted, and the same back with two means along the row.
    "norm": Pass(2, 8, 6, 2),
    "norm_backward": Pass(3, 18, 11, 3),
    "rotate": Pass(5, 0, 3, 2),
    # Rows looked up by index; rows weighted and added to their tokens.
    "rows": Pass(2, 0, 1, 2),
    "add_rows": Pass(1, 6, 3, 2),
    # The same in a fixed order on a device: for each choice of a token its row looked up, selected, weighted, added.
    "sum_rows": Pass(3, 8, 6, 2),
    # Per number of an expert's width: silu(gate) * up, and the gradients of gate, up and the routing weight.
    "activation": Pass(5, 0, 2, 3),
    "activation_backward": Pass(12, 8, 9, 5),
    # Per token and expert: scores, sort, weights and statistics, forward and backward.
    "routing": Pass(0, 40, 40, 4),
    # Per logit: maximum, exponential, sum, probability, gradient.
    "loss": Pass(2, 9, 10, 3),
    # Per parameter: from one buffer to another, in place; AdamW; the norm, in float64.
    "refill": Pass(0, 2, 1, 4),
    "sum_up": Pass(0, 3, 1, 6),
    "adamw": Pass(0, 7, 1, 14),
    "squares": Pass(0, 6, 2, 2),
}


class Rates:
    """One rank's speed in one precision: as measured where a probe did, else a roofline under stated efficiencies.

    All sizes are of the rank's own work; `fused` prices passes as one kernel each, which ours are not.
    Raises ValueError for a precision that a hardware file does not hold.
    """

    def __init__(self, hardware: Hardware, *, precision: str, fused: bool = False) -> None:
        if hardware.measured and precision not in hardware.measured:
            raise ValueError(
                f"hardware {hardware.name} was measured in {', '.join(sorted(hardware.measured))}, not in {precision}; "
                f"measure again with `gather-moe probe --precision {precision}`"
            )
        self._hardware, self._precision = hardware, precision
        self._bytes, self._fused = ELEMENT_BYTES[precision], fused
        self._measured = _Tables(hardware.measured[precision]) if hardware.measured else None
        self._seconds: dict[tuple[str, float, float, float], float] = {}

    def product_s(self, kind: str, *, rows: float, width: float, out: float, count: float = 1) -> float:
        """Return the seconds of `count` products of [rows, width] with [width, out]; kinds are `Measured`'s."""
        key = (kind, rows, width, out)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = self._product_s(*key)
        return found * count

    def pass_s(self, name: str, elements: float, *, count: float = 1) -> float:
        """Return the seconds of `count` passes of PASSES over this many elements."""
        if self._measured is not None:
            return count * _seconds_at(self._measured.passes[name], elements)
        hardware = self._hardware
        moved_bytes = PASSES[name].bytes_per_element(self._bytes, fused=self._fused) * elements
        return count * moved_bytes / (hardware.memory_bytes_per_s * hardware.efficiencies.memory)

    def attention_s(self, *, tokens: float, num_heads: float, head_dim: int, length: float, backward: bool) -> float:
        """Return the seconds of causal attention of this many tokens in sequences of `length`."""
        flops = 2 * tokens * length * num_heads * head_dim
        if self._measured is not None:
            forward, back = self._measured.attention_rates(length, head_dim)
            return flops * ATTENTION_BACKWARD_FLOPS / back if backward else flops / forward
        reached = self._hardware.efficiencies
        share = reached.attention_backward if backward else reached.attention_forward
        peak = self._hardware.peak_flops_per_s[self._precision]
        flops *= ATTENTION_BACKWARD_FLOPS if backward else 1
        return flops / (peak * share) * (1 + reached.half_length / length)

    def _product_s(self, kind: str, rows: float, width: float, out: float) -> float:
        flops = 2 * rows * width * out
        if not flops:
            return 0.0
        mean = 2 * width * out / (width + out)
        if self._measured is not None:
            return flops / self._measured.product_rate(kind, rows, mean)
        hardware, reached = self._hardware, self._hardware.efficiencies
        share = reached.product / (1 + reached.half_rows / rows) / (1 + reached.half_width / mean)
        moved_bytes = self._bytes * (rows * width + width * out + rows * out)
        return max(
            flops / (hardware.peak_flops_per_s[self._precision] * share),
            moved_bytes / (hardware.memory_bytes_per_s * reached.memory),
        )


class _Tables:
    """A probe's measurements, ready to be looked up between the measured sizes."""

    def __init__(self, measured: Measured) -> None:
        self.passes = {name: _logs(curve) for name, curve in measured.passes.items()}
        self._products = {kind: _by_width(rates) for kind, rates in measured.products.items()}
        self._attention = _by_head(measured.attention)

    def product_rate(self, kind: str, rows: float, width: float) -> float:
        """Interpolate between two widths, each at `rows`. Fewer rows than measured take as long as the fewest."""
        curves = self._products[kind]
        return exp(_between([(at, _value_at(curve, log(rows), below=1.0)) for at, curve in curves], log(width)))

    def attention_rates(self, length: float, head_dim: float) -> tuple[float, float]:
        forward, backward = (
            exp(_between([(at, _value_at(curves[i], log(length))) for at, curves in self._attention], log(head_dim)))
            for i in (0, 1)
        )
        return forward, backward


def _seconds_at(points: Points, size: float) -> float:
    """Look up seconds between measured sizes; below them what the smallest takes, above them in proportion."""
    return exp(_value_at(points, log(max(size, 1.0)), above=1.0))


def _value_at(points: Points, x: float, *, below: float = 0.0, above: float = 0.0) -> float:
    """Interpolate between points; outside go on with these slopes from the nearest."""
    first, last = points[0], points[-1]
    if x <= first[0]:
        return first[1] + below * (x - first[0])
    if x >= last[0]:
        return last[1] + above * (x - last[0])
    return _between(points, x)


def _between(points: Points, x: float) -> float:
    """Interpolate between points; outside take the nearest one's value."""
    i = bisect_left(points, (x,))
    if i == 0 or i == len(points):
        return points[min(i, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _logs(curve: Iterable[tuple[float, float]]) -> Points:
    return sorted((log(size), log(value)) for size, value in curve)


def _by_width(rates: Iterable[ProductRate]) -> list[tuple[float, Points]]:
    curves = defaultdict(list)
    for rate in rates:
        curves[rate.width].append((rate.rows, rate.flops_per_s))
    return [(log(width), _logs(curve)) for width, curve in sorted(curves.items())]


def _by_head(rates: Iterable[AttentionRate]) -> list[tuple[float, tuple[Points, Points]]]:
    heads = defaultdict(list)
    for rate in rates:
        heads[rate.head_dim].append(rate)
    return [
        (
            log(head_dim),
            (_logs((r.length, r.forward) for r in found), _logs((r.length, r.backward) for r in found)),
        )
        for head_dim, found in sorted(heads.items())
    ]
