"""What the model returns, and the counts it divides by."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast


class BatchCounts(NamedTuple):
    """What losses are divided by, over the whole batch that one optimizer step sees; None: over the call's own."""

    items: Tensor | int | None
    tokens: Tensor | int | None


@dataclass
class GatherMoeModelOutput(MoeModelOutputWithPast):
    """`router_statistics`: per MoE layer, sums over this rank's valid tokens."""

    router_statistics: Any = None


class TokenSums(NamedTuple):
    """Undivided sums over the tokens of one call, detached: what metrics are made of.

    nll []; balance_L and z_L [L_moe], expert_counts [L_moe, E]: over the whole group, empty outside training
    """

    nll: Tensor
    balance_L: Tensor
    z_L: Tensor
    expert_counts: Tensor


@dataclass
class GatherMoeCausalLMOutput(MoeCausalLMOutputWithPast):
    """The stock output, with the parts of the loss.

    loss      what is differentiated: lm_loss + coefficients times the others (in training mode)
    lm_loss   cross-entropy in nats over the targets, without any auxiliary term
    aux_loss  balance loss, mean over MoE layers, without its coefficient
    z_loss    router z-loss, likewise
    sums      TokenSums
    """

    lm_loss: Tensor | None = None
    z_loss: Tensor | None = None
    sums: Any = None
