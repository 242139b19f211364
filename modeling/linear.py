"""A matrix product whose backward looks its weight up again, so that ZeRO-3 may drop the gathered copy in between."""

from typing import Any

import torch
from torch import Tensor, nn


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., I] times weight [O, I] transposed -> [..., O].

    torch's own product saves a transposed view of the weight, and a view keeps ZeRO-3's gathered storage alive until
    the backward; the parameter itself does not (the problem deepspeed.runtime.zero.linear solves for nn.Linear).
    """
    return _Linear.apply(x, weight)


class Linear(nn.Linear):
    """nn.Linear without a bias, for whatever recognises linear layers by their class (adapters, quantisers)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor, *, weight: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out]; `weight` stands in for the module's own where its gradient is handled outside."""
        return linear(x, self.weight if weight is None else weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = torch.matmul(grad, weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad_x, grad_weight
