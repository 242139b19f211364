"""Cross-entropy over a vocabulary split across ranks, chunk by chunk, and the router's auxiliary losses.

Logits of all tokens never exist at once, forward or backward: each chunk's gradient is made in the forward, while its
logits are at hand, and scaled by the incoming gradient later.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import wide
from .linear import autocast_inputs
from .router import RouterStatistics

IGNORED = -100  # transformers' label for "no target here"
CHUNK_BYTES = 2**24  # of float32 logits at a time on CPU, where caches are small
CHUNK_BYTES_CUDA = 2**28


class TokenLosses(NamedTuple):
    """Sums over the targets, the same on every rank of the group; float32 at least.

    total  nll + z_coef * z, the one with a gradient
    nll    negative log-likelihoods in nats
    z      squared log-partition functions (PaLM, 2204.02311, §5)
    """

    total: Tensor
    nll: Tensor
    z: Tensor


class Vocabulary(NamedTuple):
    """Which rows of the vocabulary this rank's part of the head holds: `first`, and how many real ones there are."""

    first: int
    num_real: int
    group: ProcessGroup | None


def vocab_parallel_losses(
    x_TD: Tensor, weight_vD: Tensor, targets_T: Tensor, *, vocabulary: Vocabulary, z_coef: float = 0.0
) -> TokenLosses:
    """Sum of cross-entropies of x_TD [T, D] against targets [T] (IGNORED where there is none).

    weight_vD is this rank's rows of the head. The gradient for x is this rank's part, to be summed over the group;
    the gradient for the weight is complete. Without any target both losses are 0 and so is every gradient.
    """
    if not torch.is_grad_enabled():
        # A Function is told that a parameter needs its gradient even where none is recorded, as in evaluation.
        x_TD, weight_vD = x_TD.detach(), weight_vD.detach()
    x_TD, weight_vD = autocast_inputs(x_TD, weight_vD)
    return TokenLosses(*_VocabParallelLosses.apply(x_TD, weight_vD, targets_T, vocabulary, z_coef))


class _VocabParallelLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_vD: Tensor, targets_T: Tensor, vocabulary: Vocabulary, z_coef: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        budget = CHUNK_BYTES_CUDA if x_TD.is_cuda else CHUNK_BYTES
        chunk = max(1, budget // (4 * weight_vD.shape[0]))
        needs_grad = any(ctx.needs_input_grad)
        exact = wide(x_TD[:0]).dtype
        nll, z = x_TD.new_zeros((), dtype=exact), x_TD.new_zeros((), dtype=exact)
        grad_x_TD = torch.zeros_like(x_TD) if needs_grad else None
        grad_weight_vD = torch.zeros_like(weight_vD, dtype=exact) if needs_grad else None
        for start in range(0, x_TD.shape[0], chunk):
            here = slice(start, start + chunk)
            part = _chunk_losses(x_TD[here], weight_vD, targets_T[here], vocabulary)
            nll += part.nll
            z += part.z
            if grad_x_TD is not None and grad_weight_vD is not None:
                grad_logits_cv = _chunk_gradient(part, z_coef).to(x_TD.dtype)
                torch.mm(grad_logits_cv, weight_vD, out=grad_x_TD[here])
                grad_weight_vD += grad_logits_cv.t() @ x_TD[here]
        ctx.save_for_backward(grad_x_TD, grad_weight_vD)
        ctx.weight_dtype = weight_vD.dtype
        ctx.mark_non_differentiable(nll, z)
        return nll + z_coef * z, nll, z

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_x_TD, grad_weight_vD = ctx.saved_tensors
        return grad_x_TD * grad.to(grad_x_TD.dtype), (grad_weight_vD * grad).to(ctx.weight_dtype), None, None, None


class _ChunkLosses(NamedTuple):
    """Losses of c tokens, and what their gradient for this rank's logits [c, v] is made of."""

    nll: Tensor
    z: Tensor
    probs_cv: Tensor  # of the tokens that have a target, else 0
    target_c: Tensor  # this rank's column of the target
    is_mine_c: Tensor  # whether the target is among this rank's columns
    log_partition_c: Tensor


def _chunk_losses(x_cD: Tensor, weight_vD: Tensor, targets_c: Tensor, vocabulary: Vocabulary) -> _ChunkLosses:
    logits_cv = wide(x_cD @ weight_vD.t())
    logits_cv[:, vocabulary.num_real :] = -torch.inf  # padding of the vocabulary
    highest_c = logits_cv.amax(dim=-1)
    if vocabulary.group is not None:
        dist.all_reduce(highest_c, op=dist.ReduceOp.MAX, group=vocabulary.group)
    logits_cv -= highest_c[:, None]
    column_c = targets_c - vocabulary.first
    is_mine_c = (column_c >= 0) & (column_c < vocabulary.num_real)
    column_c = torch.where(is_mine_c, column_c, 0)
    target_logit_c = torch.where(is_mine_c, logits_cv.gather(1, column_c[:, None]).squeeze(1), 0.0)
    exp_cv = logits_cv.exp_()
    sums_2c = torch.stack([exp_cv.sum(dim=-1), target_logit_c])
    if vocabulary.group is not None:
        dist.all_reduce(sums_2c, group=vocabulary.group)
    valid_c = targets_c != IGNORED
    shifted_c = sums_2c[0].log()
    log_partition_c = shifted_c + highest_c
    nll = torch.where(valid_c, shifted_c - sums_2c[1], 0.0).sum()
    z = torch.where(valid_c, log_partition_c.square(), 0.0).sum()
    probs_cv = exp_cv.mul_((valid_c / sums_2c[0])[:, None])
    return _ChunkLosses(nll, z, probs_cv, column_c, is_mine_c & valid_c, log_partition_c)


def _chunk_gradient(losses: _ChunkLosses, z_coef: float) -> Tensor:
    """d(nll + z_coef * z) / d(logits) = p * (1 + 2 * z_coef * log Z) - onehot(target), in the probabilities' memory."""
    grad_cv = losses.probs_cv
    if z_coef:
        grad_cv *= (1 + 2 * z_coef * losses.log_partition_c)[:, None]
    return grad_cv.scatter_add_(1, losses.target_c[:, None], -losses.is_mine_c.to(grad_cv.dtype)[:, None])


class AuxiliaryLosses(NamedTuple):
    """Sums over valid tokens, one per MoE layer [L]; divide by the number of valid tokens of the batch for means."""

    balance_L: Tensor
    z_L: Tensor


def auxiliary_losses(statistics: list[RouterStatistics], *, num_active: int, scope: str) -> AuxiliaryLosses:
    """The balance loss and the router's z-loss of every MoE layer, from sums over the whole group.

    Per layer and scope (a sequence, or the micro-batch) the balance loss is E * sum_i f_i * P_i, with f_i the choices
    of expert i per valid token and P_i its mean probability (2101.03961, eq. 4-6; f sums to A here, as transformers
    counts it), weighted by the scope's valid tokens. Only the sequence scope is the same for every dp, group
    size and accumulation: f * P is not linear in the tokens.
    """
    counts_LBE = torch.stack([layer.counts_BE for layer in statistics])
    probs_LBE = torch.stack([layer.probs_BE for layer in statistics])
    if scope == "micro_batch":
        counts_LBE, probs_LBE = counts_LBE.sum(1, keepdim=True), probs_LBE.sum(1, keepdim=True)
    tokens_LB = counts_LBE.sum(-1) / num_active
    num_experts = counts_LBE.shape[-1]
    balance_LB = num_experts * (counts_LBE * probs_LBE).sum(-1) / tokens_LB.clamp(min=1.0)
    z_LB = torch.stack([layer.z_B for layer in statistics])
    return AuxiliaryLosses(balance_LB.sum(1), z_LB.sum(1))
