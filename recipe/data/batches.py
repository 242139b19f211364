"""Blocks stacked into the micro-batches that a group works on, for training and for evaluation."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from recipe.data.packing import IGNORED, Block, PackedBlocks
from recipe.shared.flops import sum_squared_lengths


class MicroBatch(NamedTuple):
    """What one group of ranks works on at once; every rank of the group holds the same.

    input_ids        [B, S]  int64
    labels           [B, S]  int64, as in Block
    document_starts  for each sequence, as in Block
    token_mask       [B, S]  bool, False on padding, which ends a sequence or is all of it; None where there is none
    num_targets      tokens that the loss predicts: labels[:, 1:] other than -100
    positions        for each sequence, its position in the global stream (in evaluation: its block); -1 for padding
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    document_starts: tuple[tuple[int, ...], ...]
    token_mask: torch.Tensor | None
    num_targets: int
    positions: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of this micro-batch without padding."""
        return self.input_ids.numel() if self.token_mask is None else int(self.token_mask.sum())

    @property
    def squared_lengths(self) -> int:
        """The sum of length^2 over the documents of this micro-batch, without padding."""
        num_sequences, block_size = self.input_ids.shape
        mask = self.token_mask
        lengths = [block_size] * num_sequences if mask is None else mask.sum(dim=1).tolist()
        return sum(
            sum_squared_lengths([starts], block_size=length)
            for starts, length in zip(self.document_starts, lengths, strict=True)
            if length
        )


def stack_blocks(
    blocks: Sequence[Block], *, positions: Sequence[int], num_sequences: int, block_size: int
) -> MicroBatch:
    """Stack up to `num_sequences` blocks, possibly none, and pad what is missing with whole sequences."""
    num_padded = num_sequences - len(blocks)
    padding = Block(np.zeros(block_size, dtype=np.int64), np.full(block_size, IGNORED, dtype=np.int64), (0,), 0)
    rows = [*blocks, *[padding] * num_padded]
    labels = np.stack([row.labels for row in rows])
    token_mask = None
    num_tokens = torch.tensor([row.num_tokens for row in rows])
    if (num_tokens < block_size).any():
        token_mask = torch.arange(block_size) < num_tokens[:, None]
    return MicroBatch(
        input_ids=torch.from_numpy(np.stack([row.input_ids for row in rows])),
        labels=torch.from_numpy(labels),
        document_starts=tuple(row.document_starts for row in rows),
        token_mask=token_mask,
        num_targets=int((labels[:, 1:] != IGNORED).sum()),
        positions=(*positions, *[-1] * num_padded),
    )


def evaluation_batches(blocks: PackedBlocks, *, num_sequences: int, dp: int, dp_rank: int) -> Iterator[MicroBatch]:
    """Every block once, in order, over all dp ranks: batch i of dp rank d holds the B blocks from (i*dp + d)*B on.

    Every rank gets the same number of batches; what is missing at the end is padded with whole sequences.
    """
    for first in range(0, len(blocks), dp * num_sequences):
        begin = first + dp_rank * num_sequences
        indices = range(min(begin, len(blocks)), min(begin + num_sequences, len(blocks)))
        chosen = [blocks[index] for index in indices]
        yield stack_blocks(chosen, positions=indices, num_sequences=num_sequences, block_size=blocks.block_size)
