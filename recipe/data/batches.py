"""Blocks stacked into micro-batches, for training and evaluation, and the check that ranks loaded their own."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from recipe.data.packing import IGNORED, Block, PackedBlocks
from recipe.shared.flops import sum_squared_lengths
from recipe.shared.ranks import Ranks


class MicroBatch(NamedTuple):
    """The sequences one group of ranks works on at once; every rank of the group holds the same.

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
        """Sum of length^2 over the documents of this micro-batch, without padding."""
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
    """Yield this dp rank's share of every block once, in order.

    Batch i of dp rank d holds the B blocks from (i*dp + d)*B on. Every rank gets the same number of batches; what is
    missing at the end is padded with whole sequences.
    """
    for first in range(0, len(blocks), dp * num_sequences):
        begin = first + dp_rank * num_sequences
        indices = range(min(begin, len(blocks)), min(begin + num_sequences, len(blocks)))
        chosen = [blocks[index] for index in indices]
        yield stack_blocks(chosen, positions=indices, num_sequences=num_sequences, block_size=blocks.block_size)


class _Held(NamedTuple):
    """A rank's first micro-batches, as compared with other ranks'."""

    checksum: str
    positions: frozenset[int]


def checksum(micro_batches: Sequence[MicroBatch]) -> str:
    """Return a digest of everything the model sees of these micro-batches."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in micro_batches:
        for tensor in (batch.input_ids, batch.labels, batch.token_mask):
            if tensor is not None:
                digest.update(tensor.contiguous().numpy().tobytes())
        digest.update(repr((tuple(batch.input_ids.shape), batch.document_starts, batch.positions)).encode())
    return digest.hexdigest()


def check_batches(micro_batches: Sequence[MicroBatch], *, ranks: Ranks, tp: int) -> None:
    """Check that ranks of one group hold equal micro-batches and groups different ones, or raise on all. Collective.

    `ranks` is the whole world in groups of `tp`, not one group: ranks that found nothing wrong would otherwise go on
    and wait for the others for ever. Groups are told apart by positions in the stream, since a small or repetitive
    corpus may rightly give them equal text.
    """
    held: list[_Held] = ranks.gather(
        _Held(checksum(micro_batches), frozenset(p for batch in micro_batches for p in batch.positions))
    )
    faults = []
    for first in range(0, len(held), tp):
        differing = [rank for rank in range(first, first + tp) if held[rank].checksum != held[first].checksum]
        if differing:
            faults.append(f"ranks {differing} hold other batches than rank {first} of their group (tp={tp})")
    for first in range(0, len(held), tp):
        same = [rank for rank in range(first + tp, len(held), tp) if held[first].positions & held[rank].positions]
        if same:
            faults.append(f"ranks {[first, *same]} of different groups hold the same sequences of the stream")
    if faults:
        raise ValueError(
            "the ranks did not load the batches of their layout; data must depend on dp_rank alone:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
        )
