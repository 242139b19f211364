"""RMS norm (Zhang and Sennrich, 1910.07467) in float32 at least, over a whole row or over heads split across ranks."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .comm import sum_gradients, sum_over_group, wide
from .operators import NAMESPACE, Operator, define_operators


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x [..., C] scaled to unit root mean square and by weight [C]; computed wide, returned in x's type.

    Keeps x and one number per row for the backward, where autograd would keep two wide copies of x. One operator each
    way: on a GPU torch's own fused kernels.
    """
    return _RmsNorm.apply(x, weight, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = _operators().rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_x, grad_weight = _operators().rms_norm_back(grad, *ctx.saved_tensors)
        return grad_x, grad_weight, None


def _operators() -> Any:
    _define_operators()
    return getattr(torch.ops, NAMESPACE)


# torch.compile keeps the answer: it cannot look into what defines an operator.
@torch.compiler.assume_constant_result
def _define_operators() -> bool:
    return _define_once()


@cache
def _define_once() -> bool:
    operators: list[Operator] = [
        (_rms_norm, lambda x, _, __: (x.new_empty(x.shape), _one_per_row(x)), ()),
        (_rms_norm_back, lambda _, x, weight, __: (x.new_empty(x.shape), torch.empty_like(weight)), ()),
    ]
    define_operators(NAMESPACE, operators)
    return True


def _one_per_row(x: Tensor) -> Tensor:
    return wide(x[..., :0]).new_empty(*x.shape[:-1], 1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        return fused_rms_norm(x, weight, eps)
    x_wide = wide(x)
    scale = torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)
    return (x_wide * scale).mul_(wide(weight)).to(x.dtype).contiguous(), scale


def _rms_norm_back(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        return fused_rms_norm_back(grad, x, weight, scale)
    grad_wide, unit = wide(grad), wide(x) * scale
    grad_weight = (grad_wide * unit).flatten(0, -2).sum(0).to(weight.dtype)
    grad_unit = grad_wide * wide(weight)
    along = (grad_unit * unit).mean(-1, keepdim=True)
    return grad_unit.sub_(unit.mul_(along)).mul_(scale).to(x.dtype).contiguous(), grad_weight


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """torch's kernel, and the number per row that its backward needs; the weight in x's type, as it asks for."""
    return torch.ops.aten._fused_rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def fused_rms_norm_back(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward(
        grad, x, weight.shape, scale, weight.to(x.dtype), [True, True]
    )
    return grad_x, grad_weight.to(weight.dtype)


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
