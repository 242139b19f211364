"""What blocks are made of: products with weights, on one process or around transfers, and RMS norms.

Every product's backward looks its weight up again, so that ZeRO-3 may drop the gathered copy in between. In chunks,
forward and backward, a chunk's product runs while the next chunk travels, and weight gradients run while the last
gradients travel home (sequence parallelism, 2205.05198, §4.2.2, with the overlap of MegaScale, 2402.15627, §3.2).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .comm import (
    Chunks,
    GatherInChunks,
    ScatterInChunks,
    scope,
    sum_gradients,
    sum_over_group,
    tokens_again,
    tokens_to_keep,
    wide,
)
from .operators import normalise, normalise_back


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [..., I] by weight [O, I] transposed: -> [..., O].

    torch's own product saves a transposed view of the weight, and a view keeps ZeRO-3's gathered storage alive until
    the backward; the parameter itself does not (the problem deepspeed.runtime.zero.linear solves for nn.Linear).
    """
    return _Linear.apply(*autocast_inputs(x, weight))


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return float32 tensors in autocast's type where autocast is on, all others as they are.

    torch does this for its own products; an autograd Function of ours has to ask for it.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)


class Linear(nn.Linear):
    """nn.Linear without a bias, for whatever recognises linear layers by their class (adapters, quantisers).

    Called on one process alone; under a mesh its weight is multiplied while tokens travel.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return linear(x, self.weight)


def plain_weight(module: nn.Module, *, kind: type[nn.Module] = Linear) -> Tensor:
    """Return the weight of a module that a group shares, for a product that is part of a transfer, say.

    ValueError where it is not of its `kind`: what replaced it would be left out.
    """
    check_plain(module, kind=kind)
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def check_plain(module: nn.Module, *, kind: type[nn.Module]) -> None:
    """Raise ValueError where a module that a group shares was replaced by one that knows nothing of the group."""
    if not isinstance(module, kind):
        raise ValueError(
            f"a {kind.__name__} was replaced by {type(module).__name__}, which a model shared by several ranks would "
            "leave out; train adapters on one process, from a checkpoint's hf/ folder"
        )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_needs_gradient, weight_needs_gradient = ctx.needs_input_grad
        grad_x = torch.matmul(grad, weight) if x_needs_gradient else None
        grad_weight = None
        if weight_needs_gradient:
            grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad_x, grad_weight


def gather_linear(x_tD: Tensor, weights: Sequence[Tensor], *, chunks: Chunks) -> list[Tensor]:
    """Multiply every rank's x_tD [t, D] by each weight [O, D] transposed: -> for each [T, O], in token order."""
    return list(_GatherLinear.apply(chunks, *autocast_inputs(x_tD, *weights)))


def linear_scatter(y_TI: Tensor, weight: Tensor, *, chunks: Chunks) -> Tensor:
    """Multiply y_TI [T, I] in token order by weight [O, I] transposed and sum over the ranks: -> own rows [t, O]."""
    return _LinearScatter.apply(chunks, *autocast_inputs(y_TI, weight))


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    @scope("attention")
    def forward(ctx: Any, chunks: Chunks, x_tD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        gather = GatherInChunks(x_tD, chunks)
        weight_OD = torch.cat(weights)
        out_TO = x_tD.new_empty(gather.buffer.shape[0], weight_OD.shape[0])
        for k in range(chunks.num_chunks):
            torch.mm(gather.chunk(k), weight_OD.t(), out=out_TO[chunks.gathered_rows(k)])
        ctx.chunks = chunks
        ctx.save_for_backward(tokens_to_keep(gather, x_tD), *weights)
        return chunks.to_token_order(out_TO).split([w.shape[0] for w in weights], dim=1)

    @staticmethod
    @scope("attention")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        chunks: Chunks = ctx.chunks
        _, _, *weights_need_gradients = ctx.needs_input_grad
        kept, *weights = ctx.saved_tensors
        tokens = tokens_again(kept, chunks)
        tokens.start_rest()
        grad_TO = chunks.to_chunk_order(torch.cat(grads, dim=1))
        weight_OD = torch.cat(weights)
        scatter = ScatterInChunks(kept.new_empty(chunks.num_tokens, kept.shape[1]), chunks)
        for k in range(chunks.num_chunks):
            scatter.add(k, grad_TO[chunks.gathered_rows(k)] @ weight_OD)
        x_TD = tokens.all()
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(weights_need_gradients):
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
        _, _, weight_needs_gradient = ctx.needs_input_grad
        if weight_needs_gradient:
            grad_weight = gather.all().t() @ chunks.to_chunk_order(y_TI)
        return None, chunks.to_token_order(grad_y_TI), grad_weight


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x [..., C] scaled to unit root mean square and by weight [C] (Zhang and Sennrich, 1910.07467), in x's type.

    Computed in float32 at least. Keeps x and one number per row for the backward, where autograd would keep two wide
    copies of x.
    """
    return _RmsNorm.apply(x, weight, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = normalise(x, weight, eps=eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_x, grad_weight = normalise_back(grad, *ctx.saved_tensors)
        return grad_x, grad_weight, None


class RmsNorm(nn.Module):
    """A norm whose weight every rank of the group holds; under a group its gradient is summed in `forward`.

    Inside a decoder block the block sums all such gradients at once and passes the weight in.
    """

    def __init__(self, width: int, *, eps: float, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.group = group

    def forward(self, x: Tensor, *, weight: Tensor | None = None) -> Tensor:
        if weight is None:
            [weight] = sum_gradients([self.weight], self.group)
        return rms_norm(x, weight, eps=self.eps)


class SplitNorm(nn.Module):
    """The weight of a norm over a row whose channels are split over the group; `split_rms_norms` applies it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def split_rms_norms(
    rows: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    *,
    full_widths: tuple[int, int],
    shares: tuple[float, float],
    eps: float,
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Normalise two rows (q and k) over their full width, of which each rank holds a part, with one small all-reduce.

    rows    q [..., hK] and k [..., gK], this rank's channels
    shares  what a rank's sum of squares counts for: 1, or 1 / replicas where several ranks hold the same channels

    Only one number per token and row travels, the sum of squares in float32 at least, instead of the rows themselves.
    """
    wide_rows = [wide(row) for row in rows]
    squares = [row.pow(2).sum(-1) * share for row, share in zip(wide_rows, shares, strict=True)]
    totals = sum_over_group(torch.stack(squares), group)
    outs = []
    for row, weight, total, width in zip(wide_rows, weights, totals, full_widths, strict=True):
        outs.append(row * torch.rsqrt(total / width + eps).unsqueeze(-1) * wide(weight))
    return outs[0].to(rows[0].dtype), outs[1].to(rows[1].dtype)
