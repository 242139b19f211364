"""The auxiliary losses of a training call: added to the language model's, with the sums that metrics are made of."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .balance import auxiliary_losses, counts_so_far, total_statistics
from .config import GatherMoeConfig
from .mesh import ParallelMesh
from .outputs import BatchCounts, GatherMoeCausalLMOutput, TokenSums
from .rank_loads import rank_loads
from .router import RouterStatistics


class TargetCounts(NamedTuple):
    """How much a loss is made of.

    here        [] targets in this call
    batch       [] targets the loss is divided by
    num_tokens  tokens of this call with a place for a target, padding included
    """

    here: Tensor
    batch: Tensor
    num_tokens: int


def add_auxiliary_losses(
    result: GatherMoeCausalLMOutput,
    *,
    statistics: list[RouterStatistics],
    targets: TargetCounts,
    counts: BatchCounts,
    layers: Iterable[nn.Module],
    config: GatherMoeConfig,
    mesh: ParallelMesh,
) -> None:
    """Complete `result`, which holds the language model's losses and sums, from this rank's statistics per MoE layer.

    Each loss is a sum over this group's valid tokens divided by the number of them in the whole batch.
    """
    assert result.loss is not None
    statistics = total_statistics(statistics, mesh.group)
    expert_counts = torch.stack([layer.counts_BE.sum(0) for layer in statistics])
    if config.balance_scope == "global_batch":
        result.choices = counts_so_far(expert_counts, earlier_LE=counts.earlier_choices, mesh=mesh)
    auxiliary = auxiliary_losses(
        statistics,
        num_active=config.num_experts_per_tok,
        scope=config.balance_scope,
        batch_counts_LE=result.choices,
    )
    if counts.tokens is None:
        # A batch that is cut in several calls: this call's share of the targets stands for its share of tokens.
        valid_tokens = expert_counts[0].sum() / config.num_experts_per_tok
        tokens = valid_tokens * targets.batch.clamp(min=1) / targets.here.clamp(min=1)
    else:
        tokens = torch.as_tensor(counts.tokens, device=expert_counts.device)
    # A batch without any target teaches nothing, the router included.
    share = (targets.batch > 0) / tokens.clamp(min=1)
    balance, z = auxiliary.balance_L.mean() * share, auxiliary.z_L.mean() * share
    if config.router_aux_loss_coef:
        result.loss = result.loss + config.router_aux_loss_coef * balance
    if config.router_z_loss_coef:
        result.loss = result.loss + config.router_z_loss_coef * z
    result.aux_loss, result.z_loss = balance.detach(), z.detach()
    none = result.sums.nll.new_zeros(0)
    entropy = torch.stack([layer.entropy_B.sum() for layer in statistics])
    dropped = none if config.capacity_factor is None else torch.stack([s.dropped_B.sum() for s in statistics])
    loads = rank_loads(expert_counts, layers=layers, config=config, num_tokens=targets.num_tokens)
    sums = (auxiliary.balance_L.detach(), auxiliary.z_L.detach(), entropy, expert_counts, dropped)
    result.sums = TokenSums(result.sums.nll, *sums, *loads)
