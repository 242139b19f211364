"""A rank's experts as grouped products over buffers of fixed size, offsets on the device; the host reads nothing.

Every chunk has as many rows as could ever be this rank's. With `recompute` a forward keeps nothing and the backward
makes the gate and up products again: these buffers hold up to N times the rows of a balanced routing.

The products are torch's, or kernels of ours for GPUs and types on which torch's reads the offsets on the host, so that
no CUDA graph can hold it. Their launch grid depends on shapes alone, and tiles are chosen from shapes and type, never
by timing: every rank, and a graph's replay, must do the same. Each is an operator of torch's, so that torch.compile and
fake tensors take it as one; they are defined when first used, and Triton is not needed before.
"""

import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .comm import Chunks, GatherInChunks, wide

# Row tiles that are worked on together before the next columns; see the kernel.
BAND = 8
# A checkpoint may bring another version of this file along, whose operators must not replace these.
NAMESPACE = re.sub(r"\W", "_", __name__)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Rows(NamedTuple):
    """The token-expert pairs of a rank as a buffer of fixed size, sorted by slot; nothing was read by the host.

    A pair's slot is the number of its expert among those of this rank; every other number is another rank's pair, or
    padding.

    token_R    [R] int64   which token each row is
    pair_R     [R] int64   which of the T * A pairs each row is
    valid_R    [R] bool    False in the tail that no pair fills
    offsets_e  [e] int32   end of each slot's rows
    """

    token_R: Tensor
    pair_R: Tensor
    valid_R: Tensor
    offsets_e: Tensor


def sort_rows(slots_TA: Tensor, *, num_slots: int) -> Rows:
    """Sort the pairs [T, A] by slot, stable, those of other ranks last and cut off after T * min(A, num_slots)."""
    num_tokens, num_active = slots_TA.shape
    slots = slots_TA.flatten()
    key, order = torch.where((slots >= 0) & (slots < num_slots), slots, num_slots).sort(stable=True)
    offsets_e = torch.searchsorted(key, torch.arange(num_slots, device=key.device), right=True).to(torch.int32)
    order = order[: num_tokens * min(num_active, num_slots)]
    return Rows(order // num_active, order, key[: order.shape[0]] < num_slots, offsets_e)


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
        kept: Tensor | None = None,
        *,
        triton: bool = False,
        recompute: bool = False,
    ) -> None:
        self._triton, self._recompute = triton, recompute
        self.chunks, self._weights_TA, self._num_active = chunks, weights_TA, slots_TA.shape[1]
        self._stack_sizes = [stack.shape[0] for stack in stacks[1::2]]
        # A grouped product takes no list.
        self._gate_up, self._down = (
            kind[0] if len(kind) == 1 else torch.cat(list(kind)) for kind in (stacks[::2], stacks[1::2])
        )
        places = [chunks.gathered_rows(k) for k in range(chunks.num_chunks)]
        self.rows: list[Rows] = [sort_rows(slots_TA[here], num_slots=sum(self._stack_sizes)) for here in places]
        weights = [weights_TA[here].flatten() for here in places]
        self._weight_R = [w[rows.pair_R] for w, rows in zip(weights, self.rows, strict=True)]
        sizes = [rows.token_R.shape[0] for rows in self.rows]
        self._gate_up_R2f: list[Tensor] = [] if kept is None else list(kept.split(sizes))
        # Filled by a backward, the rows of all chunks concatenated.
        self._row_ends = list(accumulate(sizes, initial=0))
        self._act_Rf = self._grad_gate_up_R2f = self._gate_up.new_empty(0)
        self._grad_weight_R: list[Tensor] = []

    def to_keep(self) -> Tensor | None:
        """The gate and up products [R, 2f] of all chunks."""
        if self._recompute:
            return None
        return self._gate_up_R2f[0] if len(self.rows) == 1 else torch.cat(self._gate_up_R2f)

    def forward_chunk(self, k: int, x_cD: Tensor) -> Tensor:
        rows = self.rows[k]
        gate_up_R2f = self._multiply_in(k, x_cD)
        if not self._recompute:
            self._gate_up_R2f.append(gate_up_R2f)
        gate, up = gate_up_R2f.chunk(2, dim=-1)
        y_RD = multiply(F.silu(gate) * up, self._down, rows.offsets_e, triton=self._triton)
        return self._sum_by_token(k, y_RD, self._weight_R[k])

    def backward_chunk(self, k: int, grad_cD: Tensor, tokens: GatherInChunks) -> Tensor:
        rows, weight_R = self.rows[k], self._weight_R[k]
        here = slice(self._row_ends[k], self._row_ends[k + 1])
        if k == 0:
            num_rows, twice_width = self._row_ends[-1], self._gate_up.shape[1]
            self._act_Rf = grad_cD.new_empty(num_rows, twice_width // 2)
            self._grad_gate_up_R2f = grad_cD.new_empty(num_rows, twice_width)
        gate_up_R2f = self._multiply_in(k, tokens.chunk(k)) if not self._gate_up_R2f else self._gate_up_R2f[k]
        gate, up = _clear_tail(gate_up_R2f, rows).chunk(2, dim=-1)
        silu = F.silu(gate)
        self._act_Rf[here] = act_Rf = silu * up
        # The output's gradient before its routing weight; times the activation it is also the weight's gradient.
        grad_y_RD = _clear_tail(grad_cD[rows.token_R], rows)
        grad_act_Rf = multiply(grad_y_RD, self._down.transpose(1, 2), rows.offsets_e, triton=self._triton)
        grad_act_Rf = _clear_tail(grad_act_Rf, rows)
        del grad_y_RD
        self._grad_weight_R.append((wide(grad_act_Rf) * wide(act_Rf)).sum(-1))
        grad_act_Rf = (grad_act_Rf * weight_R[:, None]).to(act_Rf.dtype)
        grad_gate_up_R2f, width = self._grad_gate_up_R2f[here], act_Rf.shape[1]
        grad_gate_up_R2f[:, width:] = grad_act_Rf * silu
        grad_gate_up_R2f[:, :width] = torch.ops.aten.silu_backward(grad_act_Rf * up, gate)
        grad_x_RD = multiply(grad_gate_up_R2f, self._gate_up.transpose(1, 2), rows.offsets_e, triton=self._triton)
        return self._sum_by_token(k, grad_x_RD, None)

    def routing_gradient(self) -> Tensor:
        grad_weights = torch.zeros_like(self._weights_TA)
        for k, (rows, grad_R) in enumerate(zip(self.rows, self._grad_weight_R, strict=True)):
            here = grad_weights[self.chunks.gathered_rows(k)].view(-1)
            here[rows.pair_R] = grad_R.to(grad_weights.dtype)
        return grad_weights

    def weight_gradients(self, grad_TD: Tensor, x_TD: Tensor) -> list[Tensor]:
        rows, order_R = self._all_rows()

        def in_order(x: Tensor) -> Tensor:
            return x if order_R is None else x[order_R]

        weight_R = self._weights_TA.flatten()[rows.pair_R]
        grad_y_RD = _clear_tail((grad_TD[rows.token_R] * weight_R[:, None]).to(x_TD.dtype), rows)
        grad_down = multiply_outer(grad_y_RD, in_order(self._act_Rf), rows.offsets_e, triton=self._triton)
        del grad_y_RD
        grad_R2f = in_order(self._grad_gate_up_R2f)
        grad_gate_up = multiply_outer(grad_R2f, x_TD[rows.token_R], rows.offsets_e, triton=self._triton)
        if len(self._stack_sizes) == 1:
            return [grad_gate_up, grad_down]
        parts = (grad_gate_up.split(self._stack_sizes), grad_down.split(self._stack_sizes))
        return [part for stack in zip(*parts, strict=True) for part in stack]

    def _multiply_in(self, k: int, x_cD: Tensor) -> Tensor:
        rows = self.rows[k]
        return multiply(x_cD[rows.token_R], self._gate_up, rows.offsets_e, triton=self._triton)

    def _sum_by_token(self, k: int, y_RD: Tensor, weight_R: Tensor | None) -> Tensor:
        """Add every row, times its weight, to its token, always in the same order: -> [c, D]."""
        rows, num_active = self.rows[k], self._num_active
        here = self.chunks.gathered_rows(k)
        num_rows, num_tokens = y_RD.shape[0], here.stop - here.start
        out_cD = wide(y_RD[:0]).new_zeros(num_tokens, y_RD.shape[1])
        # On a device index_add adds in any order; so look up each pair's row instead and add choice after choice.
        row_of_pair = rows.pair_R.new_full((num_tokens * num_active,), num_rows)
        row_of_pair[rows.pair_R] = torch.arange(num_rows, device=y_RD.device)
        scale_R = rows.valid_R.to(out_cD.dtype) if weight_R is None else weight_R
        for choice in row_of_pair.view(num_tokens, num_active).unbind(1):
            row = choice.clamp(max=num_rows - 1)
            taken = (choice < num_rows) & rows.valid_R[row]
            # Rows past the last offset are uninitialised memory: mask by selection, never by multiplying with 0.
            part = torch.where(taken[:, None], wide(y_RD[row]), 0.0)
            out_cD += part * scale_R[row, None]
        return out_cD

    def _all_rows(self) -> tuple[Rows, Tensor | None]:
        """Sort the rows of all chunks by slot, and say which of the concatenated ones each is; None for one chunk."""
        if len(self.rows) == 1:
            return self.rows[0], None
        slots, pairs = [], []
        for k, rows in enumerate(self.rows):
            number = torch.arange(rows.token_R.shape[0], device=rows.token_R.device)
            slots.append(torch.searchsorted(rows.offsets_e, number, right=True))
            pairs.append(rows.pair_R + self.chunks.gathered_rows(k).start * self._num_active)
        key, order_R = torch.cat(slots).sort(stable=True)
        pair_R, num_slots = torch.cat(pairs)[order_R], sum(self._stack_sizes)
        offsets_e = torch.searchsorted(key, torch.arange(num_slots, device=key.device), right=True).to(torch.int32)
        return Rows(pair_R // self._num_active, pair_R, key < num_slots, offsets_e), order_R


def _clear_tail(x: Tensor, rows: Rows) -> Tensor:
    """Zero the rows that no pair fills."""
    return torch.where(rows.valid_R[:, None], x, 0.0)


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
            SEGMENTS=_next_power_of_2(num_experts + 1),
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


def _next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
