"""Matrix products between sharded and gathered tokens: gather, multiply; multiply, sum and scatter. In chunks.

Forward and backward, a chunk's product runs while the next chunk travels, and weight gradients run while the last
gradients travel home (sequence parallelism, 2205.05198, §4.2.2, with the overlap of MegaScale, 2402.15627, §3.2).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .linear import autocast_inputs
from .scopes import scope
from .transfers import Chunks, GatherInChunks, KeptChunks, ScatterInChunks


class Gathering(NamedTuple):
    """How tokens are gathered: the chunks, and whether the backward gathers them again instead of keeping them."""

    chunks: Chunks
    regather: bool


def gather_linear(x_tD: Tensor, weights: Sequence[Tensor], *, gathering: Gathering) -> list[Tensor]:
    """x_tD [t, D] of every rank times each weight [O, D] transposed -> for each [T, O], in token order."""
    return list(_GatherLinear.apply(gathering, *autocast_inputs(x_tD, *weights)))


def linear_scatter(y_TI: Tensor, weight: Tensor, *, chunks: Chunks) -> Tensor:
    """y_TI [T, I] in token order times weight [O, I] transposed, summed over the ranks -> this rank's rows [t, O]."""
    return _LinearScatter.apply(chunks, *autocast_inputs(y_TI, weight))


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    @scope("attention")
    def forward(ctx: Any, gathering: Gathering, x_tD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        chunks = gathering.chunks
        gather = GatherInChunks(x_tD, chunks)
        weight_OD = torch.cat(weights)
        out_TO = x_tD.new_empty(gather.buffer.shape[0], weight_OD.shape[0])
        for k in range(chunks.num_chunks):
            torch.mm(gather.chunk(k), weight_OD.t(), out=out_TO[chunks.gathered_rows(k)])
        ctx.gathering = gathering
        ctx.save_for_backward(x_tD if gathering.regather else gather.buffer, *weights)
        return chunks.to_token_order(out_TO).split([w.shape[0] for w in weights], dim=1)

    @staticmethod
    @scope("attention")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        chunks, regather = ctx.gathering
        x, *weights = ctx.saved_tensors
        tokens = GatherInChunks(x, chunks) if regather else KeptChunks(x, chunks)
        tokens.start_rest()
        grad_TO = chunks.to_chunk_order(torch.cat(grads, dim=1))
        weight_OD = torch.cat(weights)
        scatter = ScatterInChunks(x.new_empty(chunks.num_tokens, x.shape[1]), chunks)
        for k in range(chunks.num_chunks):
            scatter.add(k, grad_TO[chunks.gathered_rows(k)] @ weight_OD)
        x_TD = tokens.all()
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            grad_weights = (grad_TO.t() @ x_TD).split([w.shape[0] for w in weights])
        return None, scatter.finish(), *grad_weights


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    @scope("attention")
    def forward(ctx: Any, chunks: Chunks, y_TI: Tensor, weight_OI: Tensor) -> Tensor:
        scatter = ScatterInChunks(y_TI.new_empty(chunks.num_tokens, weight_OI.shape[0]), chunks)
        for k in range(chunks.num_chunks):
            scatter.add(k, chunks.pick(y_TI, k) @ weight_OI.t())
        ctx.chunks = chunks
        ctx.save_for_backward(y_TI, weight_OI)
        return scatter.finish()

    @staticmethod
    @scope("attention")
    def backward(ctx: Any, grad_tO: Tensor) -> tuple[None, Tensor, Tensor | None]:
        chunks: Chunks = ctx.chunks
        y_TI, weight_OI = ctx.saved_tensors
        gather = GatherInChunks(grad_tO, chunks)
        grad_y_TI = y_TI.new_empty(y_TI.shape)
        for k in range(chunks.num_chunks):
            torch.mm(gather.chunk(k), weight_OI, out=grad_y_TI[chunks.gathered_rows(k)])
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = gather.all().t() @ chunks.to_chunk_order(y_TI)
        return None, chunks.to_token_order(grad_y_TI), grad_weight
