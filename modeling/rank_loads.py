"""How evenly the ranks of a group shared a call's rows, and how evenly they could have: from counts that all know."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .capacity import expert_capacity
from .config import GatherMoeConfig
from .experts import GatherMoeExperts
from .resident import largest_loads, least_loads


class RankLoads(NamedTuple):
    """Rows that all ranks together would have, were each as busy as the busiest one: over the real rows it is rho.

    slowest_L  [L_moe] with the copies in place; empty where every rank has a slice of every expert
    bound_L    [L_moe] no choice of as many copies would give less; empty where there are no slots
    """

    slowest_L: Tensor
    bound_L: Tensor


def rank_loads(
    counts_LE: Tensor, *, layers: Iterable[nn.Module], config: GatherMoeConfig, num_tokens: int
) -> RankLoads:
    """From the choices of each expert [L_moe, E] in a call of `num_tokens` (padding included) in training."""
    experts = (m for layer in layers for m in layer.modules() if isinstance(m, GatherMoeExperts))
    first = next(experts)  # every call comes here: without copies it need not walk through the whole model
    none, num_ranks = counts_LE.new_zeros(0), config.num_experts // first.num_local
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
    if not config.resident_experts:
        no_copies = rows_LE.new_zeros(len(rows_LE), num_ranks, 0)
        return RankLoads(num_ranks * largest_loads(rows_LE, copies_LPC=no_copies), none)
    copies_LPC = torch.stack([layer.copies_PC(counts_LE.device) for layer in (first, *experts)])
    slowest_L = num_ranks * largest_loads(rows_LE, copies_LPC=copies_LPC)
    bound_L = num_ranks * least_loads(rows_LE, num_ranks=num_ranks, num_copies=config.resident_experts)
    return RankLoads(slowest_L, bound_L)
