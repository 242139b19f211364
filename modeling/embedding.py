"""Token embedding and language-model head, their rows (the vocabulary) split over the group and padded to fit."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import linear
from .loss import Vocabulary, vocab_parallel_losses
from .mesh import ParallelMesh
from .transfers import Chunks, one_chunk


class VocabularyPart(NamedTuple):
    """This rank's rows: `num_rows` in memory from row `first` on, of which `num_real` are not padding."""

    first: int
    num_rows: int
    num_real: int


def vocabulary_part(vocab_size: int, mesh: ParallelMesh) -> VocabularyPart:
    """Cut the vocabulary into equal parts, the last ones padded."""
    num_rows = -(-vocab_size // mesh.layout.tp)
    first = mesh.group_rank * num_rows
    return VocabularyPart(first, num_rows, max(0, min(vocab_size - first, num_rows)))


class VocabularyEmbedding(nn.Embedding):
    """Embeds the tokens whose rows are here, zeros for the others; summed over the group it is the embedding."""

    def __init__(self, vocab_size: int, hidden_size: int, *, mesh: ParallelMesh) -> None:
        self.part = vocabulary_part(vocab_size, mesh)
        super().__init__(self.part.num_rows, hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> [..., D], zero where another rank holds the row."""
        local = ids - self.part.first
        is_here = (local >= 0) & (local < self.part.num_real)
        rows = F.embedding(torch.where(is_here, local, 0), self.weight)
        return torch.where(is_here[..., None], rows, 0.0)


class VocabularyHead(nn.Linear):
    """The rows of the head that are here: logits of one rank's whole vocabulary, or losses over all ranks' parts."""

    def __init__(self, hidden_size: int, vocab_size: int, *, mesh: ParallelMesh) -> None:
        self.part = vocabulary_part(vocab_size, mesh)
        super().__init__(hidden_size, self.part.num_rows, bias=False)
        self.group = mesh.group

    def forward(
        self, x: Tensor, *, targets: Tensor | None = None, z_coef: float = 0.0, chunks: Chunks | None = None
    ) -> Any:
        """x [..., D] -> logits [..., v] of the rows here; with targets [...], the TokenLosses instead.

        For the losses x may be this rank's tokens [t, D] alone, the targets all ranks': `chunks` says how they are cut.
        """
        if targets is None:
            return linear(x, self.weight)
        # On one process transformers may have resized the vocabulary.
        num_real = self.weight.shape[0] if self.group is None else self.part.num_real
        vocabulary = Vocabulary(self.part.first, num_real, self.group)
        x, targets_T = x.flatten(0, -2), targets.flatten()
        chunks = chunks or one_chunk(x.shape[0])
        return vocab_parallel_losses(x, self.weight, targets_T, vocabulary=vocabulary, chunks=chunks, z_coef=z_coef)
