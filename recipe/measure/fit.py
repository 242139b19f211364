"""The line of a collective: seconds = alpha x steps + bytes / bandwidth, by least squares."""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from recipe.plan.hardware_values import Fit


class Reading(NamedTuple):
    """One collective, in which a rank sends this much."""

    sent_bytes: float
    seconds: float


def fit_line(readings: Sequence[Reading], *, num_steps: int) -> Fit:
    """The alpha and bandwidth with the least sum of (fitted / measured - 1)^2, so that small transfers count as much.

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
