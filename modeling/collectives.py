"""Communication with a backward: the gradient of each function is its conjugate collective (2205.05198, §4.2).

Every function takes the group last and is the identity for `group=None`, the group of one rank. Inputs are made
contiguous: gloo silently mixes up the elements of others.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .cost import ID_BYTES
from .scopes import scope
from .transfers import RowSplits, Transfer, all_gather_rows, all_to_all_rows, reduce_scatter_rows, start_gather


def gather_tokens(x_tD: Tensor, group: ProcessGroup | None) -> Tensor:
    """[t, ...] -> [T, ...]: all ranks' rows in rank order. Backward: the gradients are summed and scattered."""
    return x_tD if group is None else _GatherTokens.apply(x_tD, group)


def scatter_tokens(partial_TD: Tensor, group: ProcessGroup | None) -> Tensor:
    """[T, ...] -> [t, ...]: sum over the ranks, keep own rows. Backward: the gradients are gathered."""
    return partial_TD if group is None else _ScatterTokens.apply(partial_TD, group)


def sum_over_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum of all ranks' x, of which every rank makes its own use. Backward: the gradients are summed too."""
    return x if group is None else _SumOverGroup.apply(x, group)


def total_over_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum of all ranks' x, from which every rank derives the same scalar. Backward: its gradient as it is, unsummed."""
    return x if group is None else _TotalOverGroup.apply(x, group)


def sum_gradients(parameters: list[Tensor], group: ProcessGroup | None, *, upcast: bool = True) -> list[Tensor]:
    """The same values, whose gradients are summed over the group in one all-reduce.

    For parameters that every rank holds whole but uses on its own tokens only. Low-precision parameters come back in
    float32, so that their gradients are summed in it (`upcast=False` keeps the type, for large matrices).
    """
    if group is None:
        return [wide(p) for p in parameters] if upcast else parameters
    return list(_SumGradients.apply(group, upcast, *parameters))


def exchange_rows(x: Tensor, splits: RowSplits, group: ProcessGroup | None) -> Tensor:
    """Rows to whom they belong: [sum(send), ...] -> [sum(receive), ...], both in rank order. Backward: the way back."""
    return x if group is None else _ExchangeRows.apply(x, splits, group)


class GatheredRouting(NamedTuple):
    """Routing of all T tokens of the group: ids [T, A] int64, weights [T, A] float32 or wider."""

    expert_ids_TA: Tensor
    weights_TA: Tensor


class RoutingInFlight(NamedTuple):
    """All ranks' ids and weights on their way, in one collective of bytes."""

    transfer: Transfer
    num_active: int
    dtype: torch.dtype

    def finish(self) -> GatheredRouting:
        id_bytes, weight_bytes = self.transfer.finish().tensor_split([self.num_active * ID_BYTES], dim=1)
        ids_TA = id_bytes.contiguous().view(torch.int16).long()
        return GatheredRouting(ids_TA, weight_bytes.contiguous().view(self.dtype))


@scope("routing")
def start_routing(ids_tA: Tensor, weights_tA: Tensor, group: ProcessGroup) -> RoutingInFlight:
    """Start to gather ids and weights, 2 bytes per id and 4 (8 for float64) per weight, without a backward."""
    id_bytes = ids_tA.to(torch.int16).contiguous().view(torch.uint8)
    weight_bytes = weights_tA.detach().contiguous().view(torch.uint8)
    transfer = start_gather(torch.cat([id_bytes, weight_bytes], dim=1), group)
    return RoutingInFlight(transfer, ids_tA.shape[1], weights_tA.dtype)


def gather_routing(ids_tA: Tensor, weights_tA: Tensor, group: ProcessGroup | None) -> GatheredRouting:
    """Gather ids and weights in one collective of bytes: 2 per id, 4 (8 for float64) per weight.

    Neither gloo nor NCCL carries int16, hence the bytes. Backward: the weights' gradients are summed and scattered.
    """
    if group is None:
        return GatheredRouting(ids_tA, weights_tA)
    return GatheredRouting(*_GatherRouting.apply(ids_tA, weights_tA, group))


def wide(x: Tensor) -> Tensor:
    """x in float32, or as it is where it is wider already."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_rows(grad, ctx.group), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    @scope("embedding")
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_rows(x, group)

    @staticmethod
    @scope("embedding")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_rows(grad, ctx.group), None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    @scope("experts")
    def forward(ctx: Any, x: Tensor, splits: RowSplits, group: ProcessGroup) -> Tensor:
        ctx.splits, ctx.group = splits, group
        return all_to_all_rows(x, splits, group)

    @staticmethod
    @scope("experts")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_to_all_rows(grad, ctx.splits.turned(), ctx.group), None, None


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    @scope("qk_norm")
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    @scope("qk_norm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _TotalOverGroup(torch.autograd.Function):
    @staticmethod
    @scope("statistics")
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, upcast: bool, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.dtypes = [p.dtype for p in parameters]
        return tuple((wide(p) if upcast else p).view_as(p) for p in parameters)

    @staticmethod
    @scope("replicated")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat, group=ctx.group)
        parts = flat.split([g.numel() for g in grads])
        sums = [p.view_as(g).to(dtype) for p, g, dtype in zip(parts, grads, ctx.dtypes, strict=True)]
        return None, None, *sums


class _GatherRouting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_tA: Tensor, weights_tA: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.group = group
        ids_TA, weights_TA = start_routing(ids_tA, weights_tA, group).finish()
        ctx.mark_non_differentiable(ids_TA)
        return ids_TA, weights_TA

    @staticmethod
    @scope("routing")
    def backward(ctx: Any, _: Tensor, grad_TA: Tensor) -> tuple[None, Tensor, None]:
        return None, reduce_scatter_rows(grad_TA, ctx.group), None
