"""Top-k routing of this rank's tokens, in float32 at least, with a reproducible choice among equals."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .collectives import wide
from .config import GatherMoeConfig


class Routing(NamedTuple):
    """Where tokens go.

    logits_tE      [t, E]  float32 or wider
    expert_ids_tA  [t, A]  int64, best expert first; E, which no rank owns, for tokens that are padding
    weights_tA     [t, A]  what the experts' outputs are summed with; 0 for padding
    """

    logits_tE: Tensor
    expert_ids_tA: Tensor
    weights_tA: Tensor


class RouterStatistics(NamedTuple):
    """Sums over valid tokens, per sequence, from which the auxiliary losses are made.

    counts_BE  [B, E]  choices of each expert, no gradient
    probs_BE   [B, E]  sums of the softmax over all experts
    z_B        [B]     sums of the squared log-sum-exp of the logits
    """

    counts_BE: Tensor
    probs_BE: Tensor
    z_B: Tensor


class GatherMoeRouter(nn.Module):
    """The gate of one MoE layer; every rank of the group holds its weight and routes its own tokens with it."""

    def __init__(self, config: GatherMoeConfig) -> None:
        super().__init__()
        self.num_active = config.num_experts_per_tok
        self.renormalise = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x_tD: Tensor, *, weight: Tensor | None = None, token_mask_t: Tensor | None = None) -> Routing:
        """Route x_tD [t, D]; tokens whose mask is False go to no expert."""
        weight_ED = wide(self.weight if weight is None else weight)
        with torch.autocast(x_tD.device.type, enabled=False):
            logits_tE = wide(x_tD) @ weight_ED.t()
        return route(logits_tE, num_active=self.num_active, renormalise=self.renormalise, token_mask_t=token_mask_t)


def route(logits_tE: Tensor, *, num_active: int, renormalise: bool, token_mask_t: Tensor | None = None) -> Routing:
    """Softmax over all experts, keep the best `num_active`, renormalise them where asked (Mixtral, 2401.04088, §2.1).

    Among equal probabilities the lower expert id wins, on every device: a stable sort promises that, torch.topk
    does not.
    """
    num_experts = logits_tE.shape[-1]
    probs_tE = logits_tE.softmax(dim=-1)
    order_tE = probs_tE.detach().sort(dim=-1, descending=True, stable=True).indices
    ids_tA = order_tE[:, :num_active].contiguous()
    weights_tA = probs_tE.gather(-1, ids_tA)
    if renormalise:
        weights_tA = weights_tA / weights_tA.sum(dim=-1, keepdim=True)
    if token_mask_t is not None:
        ids_tA = ids_tA.masked_fill(~token_mask_t[:, None], num_experts)
        weights_tA = weights_tA * token_mask_t[:, None]
    return Routing(logits_tE, ids_tA, weights_tA)


def router_statistics(
    routing: Routing, *, sequence_of_token_t: Tensor, num_sequences: int, token_mask_t: Tensor | None
) -> RouterStatistics:
    """Sum counts, probabilities and squared log-sum-exps of the tokens here, sequence by sequence."""
    logits_tE = routing.logits_tE
    num_experts = logits_tE.shape[-1]
    logsumexp_t = logits_tE.logsumexp(dim=-1)
    probs_tE = (logits_tE - logsumexp_t[:, None]).exp()
    z_t = logsumexp_t.square()
    if token_mask_t is not None:
        probs_tE, z_t = probs_tE * token_mask_t[:, None], z_t * token_mask_t
    probs_BE = probs_tE.new_zeros(num_sequences, num_experts).index_add(0, sequence_of_token_t, probs_tE)
    z_B = z_t.new_zeros(num_sequences).index_add(0, sequence_of_token_t, z_t)
    with torch.no_grad():
        # One column more than there are experts takes the choices of padding.
        counts = probs_tE.new_zeros(num_sequences, num_experts + 1)
        flat_ids = (sequence_of_token_t[:, None] * (num_experts + 1) + routing.expert_ids_tA).flatten()
        counts.view(-1).index_add_(0, flat_ids, torch.ones_like(flat_ids, dtype=counts.dtype))
    return RouterStatistics(counts[:, :num_experts], probs_BE, z_B)
