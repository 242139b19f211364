"""The experts' three products by Triton: offsets stay on the device, and the launch grid depends on shapes alone.

For GPUs and types on which torch's own grouped product reads the offsets on the host, so that no CUDA graph can hold
it. Tiles are chosen from shapes and type, never by timing: every rank, and a graph's replay, must do the same.

Each product is an operator of torch's, so that torch.compile and fake tensors take it as one; they are defined when
first used, and Triton is not needed before.
"""

import importlib.util
import re
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Row tiles that are worked on together before the next columns; see the kernel.
BAND = 8
# A checkpoint may bring another version of this file along, whose operators must not replace these.
NAMESPACE = re.sub(r"\W", "_", __name__)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """What one program computes, height x width, in steps of `depth` of the dimension summed over; powers of two."""

    height: int
    width: int
    depth: int
    num_warps: int
    num_stages: int


def grouped_backend(dtype: torch.dtype, *, capability: tuple[int, int]) -> str:
    """What "auto" of `experts_backend` is on a GPU of this compute capability.

    torch's grouped product (2.11 to 2.13) leaves the offsets on the device only for bfloat16 on compute capability 9
    and 10; elsewhere it copies them to the host and multiplies in a loop. Neither it nor Triton's multiplies float64.
    """
    if dtype not in DTYPES:
        return "loop"
    return "grouped" if dtype == torch.bfloat16 and capability[0] in (9, 10) else "triton"


def rows_times_weights(x_RI: Tensor, *, weight_eOI: Tensor, offsets_e: Tensor, tile: Tile | None = None) -> Tensor:
    """Each row times its expert's weight transposed: [R, I], [e, O, I] -> [R, O] in x's type.

    offsets_e [e] int32, the end of each expert's rows, never descending and at most R. Rows after the last are zero.
    Raises ValueError where Triton cannot work; so do the other two.
    """
    _check(x_RI, weight_eOI, offsets_e)
    return _operators().rows_times_weights(x_RI, weight_eOI, offsets_e, tile and list(tile))


def rows_times_weights_back(
    grad_RO: Tensor, *, weight_eOI: Tensor, offsets_e: Tensor, tile: Tile | None = None
) -> Tensor:
    """The gradient of `rows_times_weights` for its rows: [R, O], [e, O, I] -> [R, I]; zeros after the last offset."""
    weight_eIO = weight_eOI.transpose(1, 2)
    _check(grad_RO, weight_eIO, offsets_e)
    return _operators().rows_times_weights(grad_RO, weight_eIO, offsets_e, tile and list(tile))


def weight_gradient(grad_RO: Tensor, *, x_RI: Tensor, offsets_e: Tensor, tile: Tile | None = None) -> Tensor:
    """The gradient of `rows_times_weights` for the weights: [R, O], [R, I] -> [e, O, I].

    Zeros for experts without rows; rows after the last offset are not read.
    """
    assert grad_RO.shape[0] == x_RI.shape[0]
    _check(grad_RO, x_RI, offsets_e)
    return _operators().weight_gradient(grad_RO, x_RI, offsets_e, tile and list(tile))


def choose_tile(*, height: int, width: int, dtype: torch.dtype) -> Tile:
    """A tile for outputs of about this size: at most 128 x 128, in float32, whose operands are larger, 64 x 64.

    Four stages of the largest take 64 KiB of shared memory, which every GPU since compute capability 8.0 has. Compiled
    for 8.0 and 9.0 the largest spill no registers; none has been timed.
    """
    side = 64 if dtype == torch.float32 else 128
    tall, wide = (min(side, max(16, _next_power_of_2(size))) for size in (height, width))
    num_warps = 8 if tall * wide >= 128 * 128 else 4
    return Tile(height=tall, width=wide, depth=32, num_warps=num_warps, num_stages=4)


def num_row_tiles(num_rows: int, *, num_experts: int, height: int) -> int:
    """Row tiles enough for any routing.

    Each expert with rows, and the rows of none, begin a tile of their own: with s of them at most
    (R - s) // height + s are needed, which is largest where all e + 1 have a row.
    """
    return -(-num_rows // height) + num_experts


def fp32_precision(device_type: str) -> str:
    """How float32 is multiplied: "tf32" on a GPU if torch.backends.cuda.matmul says so, else "ieee"."""
    allowed = device_type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


def _operators() -> Any:
    """Where torch keeps this file's operators, once they are defined."""
    return getattr(torch.ops, NAMESPACE)


# torch.compile calls it while it traces and keeps the answer: it cannot look into what defines an operator.
@torch.compiler.assume_constant_result
def _prepare() -> bool:
    """Define the operators, once; whether Triton interprets. ValueError where there is no Triton."""
    _define_operators()
    from .triton_kernels import interpreted

    return interpreted()


@cache
def _define_operators() -> None:
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "experts_backend='triton' needs the package triton, which is not installed; `pip install triton` (Linux), "
            "or choose experts_backend='grouped' or 'loop'"
        )

    @torch.library.custom_op(f"{NAMESPACE}::rows_times_weights", mutates_args=())
    def rows_times_weights(x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor, tile: list[int] | None) -> Tensor:
        return _launch_multiply_rows(x_RI, weight_eOI, offsets_e, tile)

    @rows_times_weights.register_fake
    def _(x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor, tile: list[int] | None) -> Tensor:
        return x_RI.new_empty(x_RI.shape[0], weight_eOI.shape[1])

    @torch.library.custom_op(f"{NAMESPACE}::weight_gradient", mutates_args=())
    def weight_gradient(grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor, tile: list[int] | None) -> Tensor:
        return _launch_sum_outer(grad_RO, x_RI, offsets_e, tile)

    @weight_gradient.register_fake
    def _(grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor, tile: list[int] | None) -> Tensor:
        return x_RI.new_empty(offsets_e.shape[0], grad_RO.shape[1], x_RI.shape[1])


def _launch_multiply_rows(x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor, sides: list[int] | None) -> Tensor:
    from .triton_kernels import interpreted, multiply_rows

    num_rows, num_in = x_RI.shape
    num_experts, num_out, _ = weight_eOI.shape
    # Rows an expert has on average; higher tiles would mostly be empty.
    mean_rows = -(-num_rows // num_experts)
    tile = Tile(*sides) if sides else choose_tile(height=mean_rows, width=num_out, dtype=x_RI.dtype)
    out_RO = x_RI.new_empty(num_rows, num_out)
    num_bands = -(-num_row_tiles(num_rows, num_experts=num_experts, height=tile.height) // BAND)
    grid = (num_bands * BAND * -(-num_out // tile.width),)
    with torch.cuda.device_of(x_RI):
        multiply_rows[grid](
            x_RI,
            weight_eOI,
            offsets_e,
            out_RO,
            num_rows,
            num_out,
            num_in,
            num_experts,
            *x_RI.stride(),
            *weight_eOI.stride(),
            PRECISION=fp32_precision(x_RI.device.type),
            WIDEN=interpreted(),
            SEGMENTS=_next_power_of_2(num_experts + 1),
            BAND=BAND,
            HEIGHT=tile.height,
            WIDTH=tile.width,
            DEPTH=tile.depth,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out_RO


def _launch_sum_outer(grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor, sides: list[int] | None) -> Tensor:
    from .triton_kernels import interpreted, sum_outer

    num_experts, num_out, num_in = offsets_e.shape[0], grad_RO.shape[1], x_RI.shape[1]
    tile = Tile(*sides) if sides else choose_tile(height=num_out, width=num_in, dtype=x_RI.dtype)
    out_eOI = x_RI.new_empty(num_experts, num_out, num_in)
    grid = (num_experts * -(-num_out // tile.height) * -(-num_in // tile.width),)
    with torch.cuda.device_of(x_RI):
        sum_outer[grid](
            grad_RO,
            x_RI,
            offsets_e,
            out_eOI,
            num_out,
            num_in,
            *grad_RO.stride(),
            *x_RI.stride(),
            PRECISION=fp32_precision(x_RI.device.type),
            WIDEN=interpreted(),
            HEIGHT=tile.height,
            WIDTH=tile.width,
            DEPTH=tile.depth,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out_eOI


def _check(first: Tensor, second: Tensor, offsets_e: Tensor) -> None:
    if first.dtype not in DTYPES:
        raise ValueError(
            f"experts_backend='triton' multiplies bfloat16, float16 and float32, not {first.dtype}; "
            "train in one of these or choose experts_backend='loop'"
        )
    interpreted = _prepare()
    if first.device.type == "cpu" and not interpreted:
        raise ValueError(
            f"experts_backend='triton' needs a GPU, and the experts are on {first.device}; "
            "choose experts_backend='loop' or 'grouped'"
        )
    assert first.dtype == second.dtype
    assert offsets_e.dtype == torch.int32


def _next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
