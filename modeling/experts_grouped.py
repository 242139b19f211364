"""A rank's experts as grouped products over buffers of fixed size, offsets on the device; the host reads nothing.

Buffers hold as many rows as could ever be this rank's, up to N times those of a balanced routing; what works on them
stops at the last real one (rows.py).

The products are torch's, or kernels of ours for GPUs and types on which torch's reads the offsets on the host, so that
no CUDA graph can hold it. Their launch grid depends on shapes alone, and tiles are chosen from shapes and type, never
by timing: every rank, and a graph's replay, must do the same. Each is an operator of torch's, so that torch.compile and
fake tensors take it as one; they are defined when first used, and Triton is not needed before.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .comm import Chunks, GatherInChunks, wide
from .cost import chunk_bound, tokens_at_once
from .operators import NAMESPACE, next_power_of_2
from .rows import Rows, clear_empty, combine, permute, sort_rows, swiglu, swiglu_back

# Row tiles that are worked on together before the next columns; see the kernel.
BAND = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Piece(NamedTuple):
    """Tokens of one chunk whose rows are worked on together.

    number     of the piece
    tokens     where they are, in chunk order
    group      of pieces, whose rows lie side by side until they are multiplied to the weights' gradients
    first_row  of theirs, in the buffers of the group
    """

    number: int
    chunk: int
    tokens: slice
    group: int
    first_row: int
    rows: Rows


class GroupedExperts:
    """One forward, or one backward, of a rank's experts; arguments and methods as those of `LoopExperts`.

    No buffer of rows is larger than ROW_BUFFER_BYTES (cost.py). Tokens whose rows fit together are a group, whose
    weights' gradients are one product; those of several groups are added in float32.

    triton     by our kernels instead of torch's grouped product
    recompute  the backward makes the products of the forward again, which keeps none; so it does with several groups
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
        self._triton, self._slots_TA, self._weights_TA = triton, slots_TA, weights_TA
        self._stack_sizes = [stack.shape[0] for stack in stacks[1::2]]
        # A grouped product takes no list.
        self._gate_up, self._down = (
            kind[0] if len(kind) == 1 else torch.cat(list(kind)) for kind in (stacks[::2], stacks[1::2])
        )
        self.pieces = self._cut(chunks)
        self._recompute = recompute or self.pieces[-1].group > 0
        self._gate_up_R2f = list(kept)  # of each piece
        # Filled by a backward: all that the rows of a group leave for their weights' gradients, and these.
        self._act_Rf = self._grad_gate_up_R2f = self._gate_up.new_empty(0)
        self._grad_weights_cA: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def to_keep(self) -> list[Tensor]:
        """The gate and up products [R, 2f] of each piece."""
        return self._gate_up_R2f

    def forward_chunk(self, k: int, x_cD: Tensor, *, dtype: torch.dtype) -> Tensor:
        outs = []
        pieces = self._of_chunk(k)
        for piece in pieces:
            gate_up_R2f = self._multiply_in(piece, x_cD[_within(piece.tokens, pieces[0].tokens)])
            if not self._recompute:
                self._gate_up_R2f.append(gate_up_R2f)
            act_Rf = swiglu(gate_up_R2f, self._weights_TA[piece.tokens], piece.rows)
            del gate_up_R2f
            outs.append(combine(self._multiply(act_Rf, self._down, piece.rows), piece.rows, dtype=dtype))
        return _joined(outs)

    def backward_chunk(self, k: int, grads: GatherInChunks, tokens: GatherInChunks) -> Tensor:
        outs = []
        pieces, grad_cD = self._of_chunk(k), grads.chunk(k)
        for piece in pieces:
            outs.append(self._back(piece, grad_cD[_within(piece.tokens, pieces[0].tokens)], tokens))
            following = self.pieces[piece.number + 1 :]
            if following and following[0].group > piece.group:
                self._add_weight_gradients(piece.group, grads.buffer, tokens.buffer)
        return _joined(outs)

    def routing_gradient(self) -> Tensor:
        return _joined(self._grad_weights_cA)

    def weight_gradients(self, grad_TD: Tensor, x_TD: Tensor) -> list[Tensor]:
        self._add_weight_gradients(self.pieces[-1].group, grad_TD, x_TD)
        grad_gate_up, grad_down = (gradient.to(x_TD.dtype) for gradient in self._gradients)
        if len(self._stack_sizes) == 1:
            return [grad_gate_up, grad_down]
        parts = (grad_gate_up.split(self._stack_sizes), grad_down.split(self._stack_sizes))
        return [part for stack in zip(*parts, strict=True) for part in stack]

    def _cut(self, chunks: Chunks) -> list[Piece]:
        """Cut every chunk in equal pieces that fit, and put as many as fit together into a group."""
        num_active, num_slots = self._slots_TA.shape[1], sum(self._stack_sizes)
        _, twice_width, hidden = self._gate_up.shape
        most = tokens_at_once(
            min(num_active, num_slots), hidden, twice_width, element_bytes=self._gate_up.element_size()
        )
        pieces: list[Piece] = []
        group = num_tokens = first_row = 0
        for k in range(chunks.num_chunks):
            chunk = chunks.gathered_rows(k)
            length = chunk.stop - chunk.start
            num = max(1, -(-length // most))
            for i in range(num):
                start, end = (chunk_bound(j, num_rows=length, num_chunks=num) for j in (i, i + 1))
                if num_tokens and num_tokens + end - start > most:
                    group, num_tokens, first_row = group + 1, 0, 0
                here = slice(chunk.start + start, chunk.start + end)
                rows = sort_rows(self._slots_TA[here], num_slots=num_slots)
                pieces.append(Piece(len(pieces), k, here, group, first_row, rows))
                num_tokens, first_row = num_tokens + end - start, first_row + len(rows.pair_R)
        return pieces

    def _of_chunk(self, k: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece.chunk == k]

    def _of_group(self, group: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece.group == group]

    def _multiply(self, x_RI: Tensor, weight_eOI: Tensor, rows: Rows) -> Tensor:
        return multiply(x_RI, weight_eOI, rows.offsets_e, triton=self._triton)

    def _multiply_in(self, piece: Piece, x_cD: Tensor) -> Tensor:
        return self._multiply(permute(x_cD, piece.rows), self._gate_up, piece.rows)

    def _back(self, piece: Piece, grad_cD: Tensor, tokens: GatherInChunks) -> Tensor:
        """The gradient of the sums of a piece's tokens -> that of the tokens."""
        rows, twice_width = piece.rows, self._gate_up.shape[1]
        if piece.first_row == 0:
            num_rows = sum(len(each.rows.pair_R) for each in self._of_group(piece.group))
            self._act_Rf = grad_cD.new_empty(num_rows, twice_width // 2)
            self._grad_gate_up_R2f = grad_cD.new_empty(num_rows, twice_width)
        here = slice(piece.first_row, piece.first_row + len(rows.pair_R))
        if self._gate_up_R2f:
            gate_up_R2f = self._gate_up_R2f[piece.number]
        else:
            tokens.chunk(piece.chunk)
            gate_up_R2f = self._multiply_in(piece, tokens.buffer[piece.tokens])
        grad_act_Rf = self._multiply(permute(grad_cD, rows), self._down.transpose(1, 2), rows)
        grad_gate_up_R2f, weights_cA = self._grad_gate_up_R2f[here], self._weights_TA[piece.tokens]
        outs = {"grad_gate_up_R2f": grad_gate_up_R2f, "act_Rf": self._act_Rf[here]}
        self._grad_weights_cA.append(swiglu_back(grad_act_Rf, gate_up_R2f, weights_cA, rows, **outs))
        del grad_act_Rf, gate_up_R2f
        return combine(self._multiply(grad_gate_up_R2f, self._gate_up.transpose(1, 2), rows), rows, dtype=grad_cD.dtype)

    def _add_weight_gradients(self, group: int, grad_TD: Tensor, x_TD: Tensor) -> None:
        """Add the gradients that a group's rows, whose backward is done, have for the weights."""
        pieces = self._of_group(group)
        here = slice(pieces[0].tokens.start, pieces[-1].tokens.stop)
        rows, act_Rf, grad_gate_up_R2f = pieces[0].rows, self._act_Rf, self._grad_gate_up_R2f
        if len(pieces) > 1:
            rows = sort_rows(self._slots_TA[here], num_slots=sum(self._stack_sizes))
            where_TA = torch.cat([piece.rows.row_TA + piece.first_row for piece in pieces])
            act_Rf = permute(act_Rf, rows, through_TA=where_TA)
            grad_gate_up_R2f = permute(grad_gate_up_R2f, rows, through_TA=where_TA)

        def outer(grad_RO: Tensor, x_RI: Tensor) -> Tensor:
            gradient = multiply_outer(grad_RO, x_RI, rows.offsets_e, triton=self._triton)
            return gradient if self._triton else clear_empty(gradient, rows)  # our own kernel writes zeros itself

        grad_down = outer(permute(grad_TD[here], rows), act_Rf)
        grad_gate_up = outer(grad_gate_up_R2f, permute(x_TD[here], rows))
        if not self._gradients:
            self._gradients = [grad_gate_up, grad_down]
            return
        for i, gradient in enumerate((grad_gate_up, grad_down)):
            self._gradients[i] = wide(self._gradients[i]).add_(gradient)


def _within(inner: slice, outer: slice) -> slice:
    return slice(inner.start - outer.start, inner.stop - outer.start)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "experts_backend='triton' needs the package triton, which is not installed; `pip install triton` (Linux), "
            "or choose experts_backend='grouped' or 'loop'"
        )
    define_products()
    from .kernels import interpreted

    return interpreted()


@cache
def define_products() -> None:
    """Define the operators `multiply` and `multiply_outer` in NAMESPACE; on fake tensors they need no Triton."""
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
