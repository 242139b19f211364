"""Work of a step that is bound by memory, named, with the numbers that each element makes travel.

The counts are of the torch operators that the code runs one after another, each reading its inputs and writing its
result. A probe runs the same operators (recipe/measure/products.py) and times them instead.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Pass(NamedTuple):
    """Numbers read and written per element: in the type of the activations, and in float32; and kernels of a call.

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
