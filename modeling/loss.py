"""Cross-entropy over a vocabulary split across ranks, chunk by chunk.

Logits of all tokens never exist at once, forward or backward: each chunk's gradient is made in the forward, while its
logits are at hand, and scaled by the incoming gradient later.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import wide
from .cost import HEAD_CHUNK_BYTES, head_rows
from .linear import autocast_inputs
from .scopes import scope
from .transfers import Chunks, GatherInChunks, ScatterInChunks

IGNORED = -100  # transformers' label for "no target here"
CHUNK_BYTES, CHUNK_BYTES_CUDA = HEAD_CHUNK_BYTES["cpu"], HEAD_CHUNK_BYTES["cuda"]


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
    x_tD: Tensor, weight_vD: Tensor, targets_T: Tensor, *, vocabulary: Vocabulary, chunks: Chunks, z_coef: float = 0.0
) -> TokenLosses:
    """Sum of cross-entropies of all ranks' x_tD [t, D] against targets [T] (IGNORED where there is none).

    weight_vD is this rank's rows of the head. Gradients are complete: x's is summed over the group in the forward,
    where it is made. Without any target both losses are 0 and so is every gradient.
    """
    if not torch.is_grad_enabled():
        # A Function is told that a parameter needs its gradient even where none is recorded, as in evaluation.
        x_tD, weight_vD = x_tD.detach(), weight_vD.detach()
    x_tD, weight_vD = autocast_inputs(x_tD, weight_vD)
    targets_T = chunks.to_chunk_order(targets_T)
    return TokenLosses(*_VocabParallelLosses.apply(x_tD, weight_vD, targets_T, vocabulary, chunks, z_coef))


def losses_of_logits(logits: Tensor, targets: Tensor, *, z_coef: float) -> tuple[Tensor, Tensor]:
    """The sum that is differentiated and the sum of negative log-likelihoods, from one process's logits [B, S, V]."""
    exact = wide(logits).flatten(0, 1)
    nll = F.cross_entropy(exact, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    if not z_coef:
        return nll, nll
    squares = exact.logsumexp(-1).square()
    return nll + z_coef * squares.masked_fill(targets.flatten() == IGNORED, 0.0).sum(), nll


def shifted(labels: Tensor) -> Tensor:
    """Labels [B, S] moved to the position before them, where they are predicted; the last has no target."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


class _VocabParallelLosses(torch.autograd.Function):
    @staticmethod
    @scope("head")
    def forward(
        ctx: Any,
        x_tD: Tensor,
        weight_vD: Tensor,
        targets_T: Tensor,
        vocabulary: Vocabulary,
        chunks: Chunks,
        z_coef: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gather = GatherInChunks(x_tD, chunks)
        exact = wide(x_tD[:0]).dtype
        nll, z = x_tD.new_zeros((), dtype=exact), x_tD.new_zeros((), dtype=exact)
        grad_weight_vD = torch.zeros_like(weight_vD, dtype=exact) if any(ctx.needs_input_grad) else None
        scatter = ScatterInChunks(x_tD.new_empty(x_tD.shape), chunks)
        for k in range(chunks.num_chunks):
            x_cD, targets_c = gather.chunk(k), targets_T[chunks.gathered_rows(k)]
            grad_x_cD = None if grad_weight_vD is None else torch.empty_like(x_cD)
            for here in _token_slices(x_cD, weight_vD):
                part = _chunk_losses(x_cD[here], weight_vD, targets_c[here], vocabulary)
                nll += part.nll
                z += part.z
                if grad_x_cD is not None and grad_weight_vD is not None:
                    grad_logits_cv = _chunk_gradient(part, z_coef).to(x_cD.dtype)
                    torch.mm(grad_logits_cv, weight_vD, out=grad_x_cD[here])
                    _add_product(grad_weight_vD, grad_logits_cv.t(), x_cD[here])
                    del grad_logits_cv
                del part  # or these logits would live beside the next ones
            if grad_x_cD is not None:
                scatter.add(k, grad_x_cD)
        ctx.save_for_backward(None if grad_weight_vD is None else scatter.finish(), grad_weight_vD)
        ctx.weight_dtype = weight_vD.dtype
        ctx.mark_non_differentiable(nll, z)
        return nll + z_coef * z, nll, z

    @staticmethod
    @scope("head")
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_tD, grad_weight_vD = ctx.saved_tensors
        grad_x_tD = grad_x_tD * grad.to(grad_x_tD.dtype)
        return grad_x_tD, (grad_weight_vD * grad).to(ctx.weight_dtype), None, None, None, None


def _token_slices(x_cD: Tensor, weight_vD: Tensor) -> Iterator[slice]:
    """Tokens whose logits are made at a time."""
    step = head_rows(weight_vD.shape[0], chunk_bytes=CHUNK_BYTES_CUDA if x_cD.is_cuda else CHUNK_BYTES)
    return (slice(start, start + step) for start in range(0, x_cD.shape[0], step))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, by the product itself where the types allow."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


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
