"""What the model returns: outputs, the auxiliary losses of a training call, and the sums that metrics are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

from .comm import at_least_one, scope, total_over_group
from .config import GatherMoeConfig
from .copies import ExpertsWithCopies, largest_loads, least_loads
from .mesh import ParallelMesh
from .router import RouterStatistics, expert_capacity


class LossCounts(NamedTuple):
    """What the losses of a call are made of and divided by; the batch is the one that an optimizer step sees.

    num_targets      [] in this call
    num_tokens       tokens of this call with a place for a target, padding included
    batch_targets    [] what losses over targets are divided by
    batch_tokens     valid tokens, for losses over these; None: this call's, in proportion to its share of the targets
    earlier_choices  [L_moe, E] of each expert in the batch's earlier calls, of all groups; None in the first one
    """

    num_targets: Tensor
    num_tokens: int
    batch_targets: Tensor | int
    batch_tokens: Tensor | int | None
    earlier_choices: Tensor | None


@dataclass
class GatherMoeModelOutput(MoeModelOutputWithPast):
    """`router_statistics`: per MoE layer, sums over this rank's valid tokens."""

    router_statistics: Any = None


class TokenSums(NamedTuple):
    """Undivided sums over the tokens of one call, detached: what metrics are made of.

    nll            []          negative log-likelihoods over the targets, in nats
    balance_L      [L_moe]     balance losses over valid tokens, per layer
    z_L            [L_moe]     router z-losses over valid tokens, per layer
    entropy_L      [L_moe]     entropies of the routers' scores as distributions, in nats
    expert_counts  [L_moe, E]  choices of each expert, dropped ones included
    dropped_L      [L_moe]     choices that found no room; empty where there is no capacity
    slowest_L      [L_moe]     rows that all ranks would have, were each as busy as the busiest: see RankLoads
    bound_L        [L_moe]     what no choice of copies would bring these below; empty without slots for copies

    All over the whole group; all but nll are empty outside training.
    """

    nll: Tensor
    balance_L: Tensor
    z_L: Tensor
    entropy_L: Tensor
    expert_counts: Tensor
    dropped_L: Tensor
    slowest_L: Tensor
    bound_L: Tensor


@dataclass
class GatherMoeCausalLMOutput(MoeCausalLMOutputWithPast):
    """The stock output, with the parts of the loss.

    loss      what is differentiated: lm_loss + coefficients times the others (in training mode)
    lm_loss   cross-entropy in nats over the targets, without any auxiliary term
    aux_loss  balance loss, mean over MoE layers, without its coefficient
    z_loss    router z-loss, likewise
    sums      TokenSums
    choices   [L_moe, E] of each expert in the batch so far, of all groups: the next call's earlier ones. In training
              with balance_scope="global_batch", else None
    """

    lm_loss: Tensor | None = None
    z_loss: Tensor | None = None
    sums: Any = None
    choices: Tensor | None = None


def add_auxiliary_losses(
    result: GatherMoeCausalLMOutput,
    *,
    statistics: list[RouterStatistics],
    counts: LossCounts,
    copies: Sequence[ExpertsWithCopies],
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
    if counts.batch_tokens is None:
        # A batch that is cut in several calls: this call's share of the targets stands for its share of tokens.
        valid_tokens = expert_counts[0].sum() / config.num_experts_per_tok
        tokens: Tensor | int = valid_tokens * at_least_one(counts.batch_targets) / counts.num_targets.clamp(min=1)
    else:
        tokens = counts.batch_tokens
    # A batch without any target teaches nothing, the router included.
    share = (counts.batch_targets > 0) / at_least_one(tokens)
    balance, z = auxiliary.balance_L.mean() * share, auxiliary.z_L.mean() * share
    if config.router_aux_loss_coef:
        result.loss = result.loss + config.router_aux_loss_coef * balance
    if config.router_z_loss_coef:
        result.loss = result.loss + config.router_z_loss_coef * z
    result.aux_loss, result.z_loss = balance.detach(), z.detach()
    none = result.sums.nll.new_zeros(0)
    entropy = torch.stack([layer.entropy_B.sum() for layer in statistics])
    dropped = none if config.capacity_factor is None else torch.stack([s.dropped_B.sum() for s in statistics])
    loads = rank_loads(expert_counts, copies=copies, config=config, mesh=mesh, num_tokens=counts.num_tokens)
    sums = (auxiliary.balance_L.detach(), auxiliary.z_L.detach(), entropy, expert_counts, dropped)
    result.sums = TokenSums(result.sums.nll, *sums, *loads)


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
    # Counts have no gradient, which the sum over all has given them.
    sums = [s if p.requires_grad else s.detach() for s, p in zip(sums, parts, strict=True)]
    width = len(RouterStatistics._fields)
    return [RouterStatistics(*sums[i : i + width]) for i in range(0, len(sums), width)]


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


class RankLoads(NamedTuple):
    """Rows that all ranks together would have, were each as busy as the busiest one: over the real rows it is rho.

    slowest_L  [L_moe] with the copies in place; empty where every rank has a slice of every expert
    bound_L    [L_moe] no choice of as many copies would give less; empty where there are no slots
    """

    slowest_L: Tensor
    bound_L: Tensor


def rank_loads(
    counts_LE: Tensor,
    *,
    copies: Sequence[ExpertsWithCopies],
    config: GatherMoeConfig,
    mesh: ParallelMesh,
    num_tokens: int,
) -> RankLoads:
    """How even the ranks' rows were, and could have been, from the choices of each expert [L_moe, E] in training.

    copies      the experts of every MoE layer where they have slots for copies, else none
    num_tokens  of the call, padding included
    """
    none, num_ranks = counts_LE.new_zeros(0), mesh.layout.ep
    if num_ranks == 1:
        return RankLoads(none, none)
    rows_LE = counts_LE.long()
    if config.capacity_factor is not None:
        capacity = expert_capacity(
            num_tokens,
            num_active=config.num_experts_per_tok,
            num_experts=config.num_experts,
            factor=config.capacity_factor,
        )
        rows_LE = rows_LE.clamp(max=capacity)
    if not copies:
        # Each rank does its own experts' rows.
        return RankLoads(num_ranks * rows_LE.unflatten(1, (num_ranks, -1)).sum(-1).amax(-1), none)
    copies_LPC = torch.stack([experts.copies_PC(counts_LE.device) for experts in copies])
    slowest_L = num_ranks * largest_loads(rows_LE, copies_LPC=copies_LPC)
    bound_L = num_ranks * least_loads(rows_LE, num_ranks=num_ranks, num_copies=copies_LPC.shape[-1])
    return RankLoads(slowest_L, bound_L)
