"""The router's auxiliary losses and what they are made of: statistics of a group, choices of the whole batch."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import total_over_group
from .mesh import ParallelMesh
from .router import RouterStatistics
from .scopes import scope


class AuxiliaryLosses(NamedTuple):
    """Sums over valid tokens, one per MoE layer [L]; divide by the number of valid tokens of the batch for means."""

    balance_L: Tensor
    z_L: Tensor


def total_statistics(statistics: list[RouterStatistics], group: ProcessGroup | None) -> list[RouterStatistics]:
    """Sum all layers' statistics over the group in one all-reduce."""
    if group is None:
        return statistics
    parts = [part for layer in statistics for part in layer]
    flat = total_over_group(torch.cat([part.flatten() for part in parts]), group)
    sums = [s.view_as(p) for s, p in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]
    width = len(RouterStatistics._fields)
    totals = [RouterStatistics(*sums[i : i + width]) for i in range(0, len(sums), width)]
    return [
        RouterStatistics(t.counts_BE.detach(), t.probs_BE, t.z_B, t.entropy_B.detach(), t.dropped_B.detach())
        for t in totals
    ]


@scope("statistics")
def counts_so_far(counts_LE: Tensor, *, earlier_LE: Tensor | None, mesh: ParallelMesh) -> Tensor:
    """Choices of each expert [L, E] float64 in the batch so far: this call's of every group, and the earlier calls'.

    One all-reduce over the data-parallel ranks. Whole numbers, so the sum is exact and the same on every rank.
    """
    total_LE = counts_LE.detach().double()
    if mesh.layout.dp > 1:
        dist.all_reduce(total_LE, group=mesh.dp_group)
    return total_LE if earlier_LE is None else earlier_LE + total_LE


def auxiliary_losses(
    statistics: list[RouterStatistics], *, num_active: int, scope: str, batch_counts_LE: Tensor | None = None
) -> AuxiliaryLosses:
    """The balance loss and the router's z-loss of every MoE layer, from sums over the whole group.

    Per layer and scope (a sequence, or the micro-batch) the balance loss is E * sum_i f_i * P_i, with f_i the choices
    of expert i per valid token and P_i its mean probability (2101.03961, eq. 4-6; f sums to A here, as transformers
    counts it), weighted by the scope's valid tokens. In the scope "global_batch" f is that of `batch_counts_LE`
    [L, E], the choices in the batch so far, and P that of the micro-batch (2501.11873, §3). Only the sequence scope is
    the same for every dp, group size and accumulation: f * P is not linear in the tokens.
    """
    counts_LBE = torch.stack([layer.counts_BE for layer in statistics])
    probs_LBE = torch.stack([layer.probs_BE for layer in statistics])
    if scope != "sequence":
        counts_LBE, probs_LBE = counts_LBE.sum(1, keepdim=True), probs_LBE.sum(1, keepdim=True)
    if scope == "global_batch":
        assert batch_counts_LE is not None
        counts_LBE = batch_counts_LE.unsqueeze(1)
    tokens_LB = counts_LBE.sum(-1) / num_active
    frequency_LBE = (counts_LBE / tokens_LB.clamp(min=1.0)[..., None]).to(probs_LBE.dtype)
    num_experts = counts_LBE.shape[-1]
    balance_LB = num_experts * (frequency_LBE * probs_LBE).sum(-1)
    z_LB = torch.stack([layer.z_B for layer in statistics])
    return AuxiliaryLosses(balance_LB.sum(1), z_LB.sum(1))
