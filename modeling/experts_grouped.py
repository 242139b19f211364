"""A rank's experts as grouped products over buffers of fixed size, offsets on the device; the host reads nothing.

Every chunk has as many rows as could ever be this rank's. With `recompute` a forward keeps nothing and the backward
makes the gate and up products again: these buffers hold up to N times the rows of a balanced routing.

The products are torch's, or kernels of ours for GPUs and types on which torch's reads the offsets on the host, so that
no CUDA graph can hold it. Their launch grid depends on shapes alone, and tiles are chosen from shapes and type, never
by timing: every rank, and a graph's replay, must do the same. Each is an operator of torch's, so that torch.compile and
fake tensors take it as one; they are defined when first used, and Triton is not needed before.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .comm import Chunks, GatherInChunks
from .rows import NAMESPACE, clear_empty, combine, next_power_of_2, permute, sort_rows, swiglu, swiglu_back

# Row tiles that are worked on together before the next columns; see the kernel.
BAND = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class GroupedExperts:
    """One forward, or one backward, of a rank's experts; arguments and methods as those of `LoopExperts`.

    triton     by our kernels instead of torch's grouped product
    recompute  the backward makes the products of the forward again, which keeps none
    """

    def __init__(
        self,
        stacks: Sequence[Tensor],
        slots_TA: Tensor,
        weights_TA: Tensor,
        chunks: Chunks,
        kept: Sequence[Tensor] = (),
        *,
        triton: bool = False,
        recompute: bool = False,
    ) -> None:
        self._triton, self._recompute = triton, recompute
        self._slots_TA = slots_TA
        self._stack_sizes = [stack.shape[0] for stack in stacks[1::2]]
        # A grouped product takes no list.
        self._gate_up, self._down = (
            kind[0] if len(kind) == 1 else torch.cat(list(kind)) for kind in (stacks[::2], stacks[1::2])
        )
        places = [chunks.gathered_rows(k) for k in range(chunks.num_chunks)]
        self.rows = [sort_rows(slots_TA[here], num_slots=sum(self._stack_sizes)) for here in places]
        self._weights_cA = [weights_TA[here] for here in places]
        # The rows of all chunks one after another.
        self._row_ends = list(accumulate((len(rows.pair_R) for rows in self.rows), initial=0))
        self._gate_up_R2f = list(kept)
        # Filled by a backward.
        self._act_Rf = self._grad_gate_up_R2f = self._gate_up.new_empty(0)
        self._grad_weights_cA: list[Tensor] = []

    def to_keep(self) -> list[Tensor]:
        """The gate and up products [R, 2f] of each chunk."""
        return self._gate_up_R2f

    def forward_chunk(self, k: int, x_cD: Tensor, *, dtype: torch.dtype) -> Tensor:
        rows = self.rows[k]
        gate_up_R2f = self._multiply_in(k, x_cD)
        if not self._recompute:
            self._gate_up_R2f.append(gate_up_R2f)
        act_Rf = swiglu(gate_up_R2f, self._weights_cA[k], rows)
        return combine(multiply(act_Rf, self._down, rows.offsets_e, triton=self._triton), rows, dtype=dtype)

    def backward_chunk(self, k: int, grad_cD: Tensor, tokens: GatherInChunks) -> Tensor:
        rows, here = self.rows[k], slice(self._row_ends[k], self._row_ends[k + 1])
        if k == 0:
            num_rows, twice_width = self._row_ends[-1], self._gate_up.shape[1]
            self._act_Rf = grad_cD.new_empty(num_rows, twice_width // 2)
            self._grad_gate_up_R2f = grad_cD.new_empty(num_rows, twice_width)
        gate_up_R2f = self._gate_up_R2f[k] if self._gate_up_R2f else self._multiply_in(k, tokens.chunk(k))
        grad_act_Rf = multiply(permute(grad_cD, rows), self._down.transpose(1, 2), rows.offsets_e, triton=self._triton)
        grad_gate_up_R2f = self._grad_gate_up_R2f[here]
        grad_weights_cA = swiglu_back(
            grad_act_Rf,
            gate_up_R2f,
            self._weights_cA[k],
            rows,
            grad_gate_up_R2f=grad_gate_up_R2f,
            act_Rf=self._act_Rf[here],
        )
        self._grad_weights_cA.append(grad_weights_cA)
        del grad_act_Rf, gate_up_R2f
        grad_x_RD = multiply(grad_gate_up_R2f, self._gate_up.transpose(1, 2), rows.offsets_e, triton=self._triton)
        return combine(grad_x_RD, rows, dtype=grad_cD.dtype)

    def routing_gradient(self) -> Tensor:
        return self._grad_weights_cA[0] if len(self.rows) == 1 else torch.cat(self._grad_weights_cA)

    def weight_gradients(self, grad_TD: Tensor, x_TD: Tensor) -> list[Tensor]:
        rows, act_Rf, grad_gate_up_R2f = self.rows[0], self._act_Rf, self._grad_gate_up_R2f
        if len(self.rows) > 1:
            rows = sort_rows(self._slots_TA, num_slots=sum(self._stack_sizes))
            where_TA = torch.cat([part.row_TA + start for part, start in zip(self.rows, self._row_ends, strict=False)])
            act_Rf = permute(act_Rf, rows, through_TA=where_TA)
            grad_gate_up_R2f = permute(grad_gate_up_R2f, rows, through_TA=where_TA)
        grad_down = clear_empty(
            multiply_outer(permute(grad_TD, rows), act_Rf, rows.offsets_e, triton=self._triton), rows
        )
        grad_gate_up = clear_empty(
            multiply_outer(grad_gate_up_R2f, permute(x_TD, rows), rows.offsets_e, triton=self._triton), rows
        )
        if len(self._stack_sizes) == 1:
            return [grad_gate_up, grad_down]
        parts = (grad_gate_up.split(self._stack_sizes), grad_down.split(self._stack_sizes))
        return [part for stack in zip(*parts, strict=True) for part in stack]

    def _multiply_in(self, k: int, x_cD: Tensor) -> Tensor:
        rows = self.rows[k]
        return multiply(permute(x_cD, rows), self._gate_up, rows.offsets_e, triton=self._triton)


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


# The two grouped products. The dry run replaces them, whose fake tensors need nothing but shapes.
def multiply(x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor, *, triton: bool, tile: Tile | None = None) -> Tensor:
    """Multiply each row by its expert's weight transposed: [R, I], [e, O, I] -> [R, O] in x's type.

    offsets_e [e] int32, the end of each expert's rows, never descending and at most R. Rows after the last are zero
    with `triton`, else anything. ValueError where Triton cannot work.
    """
    if not triton:
        return F.grouped_mm(x_RI, weight_eOI.transpose(1, 2), offs=offsets_e)
    _check(x_RI, weight_eOI, offsets_e)
    return getattr(torch.ops, NAMESPACE).multiply(x_RI, weight_eOI, offsets_e, tile and list(tile))


def multiply_outer(
    grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor, *, triton: bool, tile: Tile | None = None
) -> Tensor:
    """Compute the gradient of `multiply` for the weights: [R, O], [R, I] -> [e, O, I].

    Zeros for experts without rows; rows after the last offset are not read. ValueError where Triton cannot work.
    """
    if not triton:
        return F.grouped_mm(grad_RO.t(), x_RI, offs=offsets_e)
    assert grad_RO.shape[0] == x_RI.shape[0]
    _check(grad_RO, x_RI, offsets_e)
    return getattr(torch.ops, NAMESPACE).multiply_outer(grad_RO, x_RI, offsets_e, tile and list(tile))


def choose_tile(*, height: int, width: int, dtype: torch.dtype) -> Tile:
    """A tile for outputs of about this size: at most 128 x 128, in float32, whose operands are larger, 64 x 64.

    Four stages of the largest take 64 KiB of shared memory, which every GPU since compute capability 8.0 has. Compiled
    for 8.0 and 9.0 the largest spill no registers; none has been timed.
    """
    side = 64 if dtype == torch.float32 else 128
    tall, wide = (min(side, max(16, next_power_of_2(size))) for size in (height, width))
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


# torch.compile calls it while it traces and keeps the answer: it cannot look into what defines an operator.
@torch.compiler.assume_constant_result
def _prepare() -> bool:
    """Define the operators, once; whether Triton interprets. ValueError where there is no Triton."""
    _define_operators()
    from .kernels import interpreted

    return interpreted()


@cache
def _define_operators() -> None:
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "experts_backend='triton' needs the package triton, which is not installed; `pip install triton` (Linux), "
            "or choose experts_backend='grouped' or 'loop'"
        )

    multiply = torch.library.custom_op(f"{NAMESPACE}::multiply", _launch_multiply, mutates_args=())
    multiply.register_fake(lambda x_RI, weight_eOI, offsets_e, sides: x_RI.new_empty(len(x_RI), weight_eOI.shape[1]))
    outer = torch.library.custom_op(f"{NAMESPACE}::multiply_outer", _launch_multiply_outer, mutates_args=())
    outer.register_fake(
        lambda grad_RO, x_RI, offsets_e, sides: x_RI.new_empty(len(offsets_e), grad_RO.shape[1], x_RI.shape[1])
    )


def _launch_multiply(x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor, sides: list[int] | None) -> Tensor:
    from .kernels import multiply_rows

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
            SEGMENTS=next_power_of_2(num_experts + 1),
            BAND=BAND,
            **_launch_options(tile, x_RI.device),
        )
    return out_RO


def _launch_multiply_outer(grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor, sides: list[int] | None) -> Tensor:
    from .kernels import sum_outer

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
            **_launch_options(tile, x_RI.device),
        )
    return out_eOI


def _launch_options(tile: Tile, device: torch.device) -> dict[str, Any]:
    from .kernels import interpreted

    return {
        "PRECISION": fp32_precision(device.type),
        "WIDEN": interpreted(),
        "HEIGHT": tile.height,
        "WIDTH": tile.width,
        "DEPTH": tile.depth,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


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
