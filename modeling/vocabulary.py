"""The vocabulary split over the group: token embedding, language-model head, and cross-entropy chunk by chunk.

Rows of both matrices are padded to a multiple of the ranks. Logits of all tokens never exist at once, forward or
backward: each chunk's gradient is made in the forward, while its logits are at hand, and scaled by the incoming
gradient later.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .comm import Chunks, GatherInChunks, ScatterInChunks, scope, wide
from .cost import HEAD_CHUNK_BYTES, head_rows
from .layers import autocast_inputs, linear
from .mesh import ParallelMesh
from .operators import logit_gradients_, logit_sums_

IGNORED = -100  # transformers' label for "no target here"
CHUNK_BYTES, CHUNK_BYTES_CUDA = HEAD_CHUNK_BYTES["cpu"], HEAD_CHUNK_BYTES["cuda"]


class Vocabulary(NamedTuple):
    """Which rows of the vocabulary this rank holds: from `first` on `num_real`, then padding."""

    first: int
    num_real: int
    group: ProcessGroup | None


def own_vocabulary(vocab_size: int, mesh: ParallelMesh) -> tuple[int, Vocabulary]:
    """Cut the vocabulary into equal parts, the last ones padded: -> this rank's rows in memory, and which they are."""
    num_rows = -(-vocab_size // mesh.layout.tp)
    first = mesh.group_rank * num_rows
    return num_rows, Vocabulary(first, max(0, min(vocab_size - first, num_rows)), mesh.group)


class VocabularyEmbedding(nn.Embedding):
    """Embeds the tokens whose rows are here, zeros for the others; summed over the group it is the embedding."""

    def __init__(self, vocab_size: int, hidden_size: int, *, mesh: ParallelMesh) -> None:
        num_rows, self.part = own_vocabulary(vocab_size, mesh)
        super().__init__(num_rows, hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> [..., D], zero where another rank holds the row."""
        local = ids - self.part.first
        is_here = (local >= 0) & (local < self.part.num_real)
        rows = F.embedding(torch.where(is_here, local, 0), self.weight)
        return torch.where(is_here[..., None], rows, 0.0)


class VocabularyHead(nn.Linear):
    """The rows of the head that are here: logits of one rank's whole vocabulary, or losses over all ranks' parts."""

    def __init__(self, hidden_size: int, vocab_size: int, *, mesh: ParallelMesh) -> None:
        num_rows, self.part = own_vocabulary(vocab_size, mesh)
        super().__init__(hidden_size, num_rows, bias=False)

    def forward(
        self, x: Tensor, *, targets: Tensor | None = None, z_coef: float = 0.0, chunks: Chunks | None = None
    ) -> Any:
        """x [..., D] -> logits [..., v] of the rows here; with targets [...], the TokenLosses instead.

        For the losses x may be this rank's tokens [t, D] alone, the targets all ranks': `chunks` says how they travel.
        """
        if targets is None:
            return linear(x, self.weight)
        # On one process transformers may have resized the vocabulary.
        vocabulary = self.part if self.part.group is not None else Vocabulary(0, self.weight.shape[0], None)
        x, targets_T = x.flatten(0, -2), targets.flatten()
        chunks = chunks or Chunks(x.shape[0])
        return vocab_parallel_losses(x, self.weight, targets_T, vocabulary=vocabulary, chunks=chunks, z_coef=z_coef)


class TokenLosses(NamedTuple):
    """Sums over the targets, the same on every rank of the group; float32 at least.

    total  nll + z_coef * z, the one with a gradient
    nll    negative log-likelihoods in nats
    z      squared log-partition functions (PaLM, 2204.02311, §5)
    """

    total: Tensor
    nll: Tensor
    z: Tensor


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
                nll_here, z_here, grad_cv = _chunk_losses(x_cD[here], weight_vD, targets_c[here], vocabulary, z_coef)
                nll += nll_here
                z += z_here
                if grad_x_cD is not None and grad_weight_vD is not None:
                    torch.mm(grad_cv, weight_vD, out=grad_x_cD[here])
                    _add_product(grad_weight_vD, grad_cv.t(), x_cD[here])
                del grad_cv  # or it would live beside the next logits
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
        # Multiplied in float32 and rounded once: a GPU would round the scalar first.
        return (
            (wide(grad_x_tD) * grad).to(grad_x_tD.dtype),
            (grad_weight_vD * grad).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
        )


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


def _chunk_losses(
    x_cD: Tensor, weight_vD: Tensor, targets_c: Tensor, vocabulary: Vocabulary, z_coef: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of nll and z over c tokens, and the gradient of nll + z_coef * z for this rank's logits [c, v]."""
    logits_cv = x_cD @ weight_vD.t()
    column_c = targets_c - vocabulary.first
    column_c = torch.where((column_c >= 0) & (column_c < vocabulary.num_real), column_c, -1)
    own_highest_c, sum_c, target_logit_c = logit_sums_(logits_cv, column_c, num_real=vocabulary.num_real)
    highest_c = own_highest_c
    if vocabulary.group is not None:
        highest_c = own_highest_c.clone()
        dist.all_reduce(highest_c, op=dist.ReduceOp.MAX, group=vocabulary.group)
        sums_2c = torch.stack([sum_c * (own_highest_c - highest_c).exp(), target_logit_c])
        dist.all_reduce(sums_2c, group=vocabulary.group)
        sum_c, target_logit_c = sums_2c.unbind()
    valid_c = targets_c != IGNORED
    shifted_c = sum_c.log()
    log_partition_c = shifted_c + highest_c
    nll = torch.where(valid_c, shifted_c - (target_logit_c - highest_c), 0.0).sum()
    z = torch.where(valid_c, log_partition_c.square(), 0.0).sum()
    # p * (1 + 2 * z_coef * log Z) - onehot(target), in the logits' memory; 0 where there is no target.
    factor_c = valid_c / sum_c
    if z_coef:
        factor_c = factor_c * (1 + 2 * z_coef * log_partition_c)
    num_real = vocabulary.num_real
    return nll, z, logit_gradients_(logits_cv, column_c, own_highest_c, highest_c, factor_c, num_real=num_real)
