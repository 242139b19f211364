"""What the model returns, and the counts it divides by."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast


class BatchCounts(NamedTuple):
    """What losses are divided by, over the whole batch that one optimizer step sees; None: over the call's own.

    earlier_choices  [L_moe, E] of each expert in the batch's earlier calls, of all groups; None in the first one
    """

    items: Tensor | int | None
    tokens: Tensor | int | None
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
