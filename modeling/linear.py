"""A matrix product whose backward looks its weight up again, so that ZeRO-3 may drop the gathered copy in between."""

from typing import Any

import torch
from torch import Tensor, nn


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., I] times weight [O, I] transposed -> [..., O].

    torch's own product saves a transposed view of the weight, and a view keeps ZeRO-3's gathered storage alive until
    the backward; the parameter itself does not (the problem deepspeed.runtime.zero.linear solves for nn.Linear).
    """
    return _Linear.apply(*autocast_inputs(x, weight))


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Float32 tensors in autocast's type where autocast is on, all others as they are.

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
    """The weight of a module that a group shares, whose work is done elsewhere: a product as a part of a transfer, say.

    ValueError where it is not of its `kind`: what else stands in for it would be left out.
    """
    check_plain(module, kind=kind)
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def check_plain(module: nn.Module, *, kind: type[nn.Module]) -> None:
    """ValueError where something else stands in for a module that a group shares, which knows nothing of the group."""
    if type(module) is not kind:
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
        grad_x = torch.matmul(grad, weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad_x, grad_weight
