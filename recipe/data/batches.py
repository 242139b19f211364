"""Blocks stacked into the micro-batches that a group works on, for training and for evaluation."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from recipe.data.packing import IGNORED, Block, PackedBlocks


class MicroBatch(NamedTuple):
    """What one group of ranks works on at once; every rank of the group holds the same.

    input_ids        [B, S]  int64
    labels           [B, S]  int64, as in Block
    document_starts  for each sequence, as in Block
    token_mask       [B, S]  bool, False on padding; None where there is no padding. Padding comes as whole sequences
    num_targets      tokens that the loss predicts: labels[:, 1:] other than -100
    positions        for each sequence, its position in the global stream (in evaluation: its block); -1 for padding
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    document_starts: tuple[tuple[int, ...], ...]
    token_mask: torch.Tensor | None
    num_targets: int
    positions: tuple[int, ...]


def stack_blocks(
    blocks: Sequence[Block], *, positions: Sequence[int], num_sequences: int, block_size: int
) -> MicroBatch:
    """Stack up to `num_sequences` blocks, possibly none, and pad what is missing with whole sequences."""
    num_padded = num_sequences - len(blocks)
    padding = Block(np.zeros(block_size, dtype=np.int64), np.full(block_size, IGNORED, dtype=np.int64), (0,))
    rows = [*blocks, *[padding] * num_padded]
    labels = np.stack([row.labels for row in rows])
    token_mask = None
    if num_padded:
        token_mask = torch.ones(num_sequences, block_size, dtype=torch.bool)
        token_mask[len(blocks) :] = False
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
