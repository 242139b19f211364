"""Documents laid end to end and cut into blocks of equal length, which remember where the documents start."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # the label that Hugging Face losses leave out


class Stretches(NamedTuple):
    """Which parts of a token file to use, in order: part i is tokens[starts[i]:ends[i]], never empty."""

    starts: NDArray[np.int64]  # [num_parts]
    ends: NDArray[np.int64]  # [num_parts]


class Block(NamedTuple):
    """One sequence of a batch.

    input_ids        [S]  int64
    labels           [S]  int64, not shifted (the model shifts); IGNORED at every document start and at position 0, so
                          that nothing is predicted across a boundary
    document_starts  positions in the block where a document starts, ascending; 0 is always one, also where the block
                     goes on with a document that the block before began
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    document_starts: tuple[int, ...]


class PackedBlocks:
    """A sequence of blocks over a flat token file; a last stretch shorter than a block is not used.

    tokens   [num_tokens of the file], any integer type; read when a block is asked for
    Memory: 24 bytes for each part. Reading is safe from several threads.
    """

    def __init__(self, tokens: NDArray[Any], *, stretches: Stretches, block_size: int) -> None:
        self._tokens = tokens
        self._starts = stretches.starts
        self._ends = stretches.ends
        self._stream_ends: NDArray[np.int64] = np.cumsum(stretches.ends - stretches.starts, dtype=np.int64)
        self.block_size = block_size

    @property
    def num_documents(self) -> int:
        return len(self._starts)

    @property
    def num_tokens(self) -> int:
        """All tokens, those of the unused last stretch included."""
        return int(self._stream_ends[-1]) if len(self._stream_ends) else 0

    @property
    def num_unused_tokens(self) -> int:
        return self.num_tokens % self.block_size

    def __len__(self) -> int:
        return self.num_tokens // self.block_size

    def first(self, limit: int) -> "PackedBlocks":
        """The first `limit` blocks, or all where there are fewer."""
        num_tokens = min(limit, len(self)) * self.block_size
        num_parts = int(np.searchsorted(self._stream_ends, num_tokens, side="left")) + 1
        starts, ends = self._starts[:num_parts], self._ends[:num_parts].copy()
        if len(ends):
            ends[-1] -= max(0, int(self._stream_ends[:num_parts][-1]) - num_tokens)
        kept = ends > starts
        return PackedBlocks(self._tokens, stretches=Stretches(starts[kept], ends[kept]), block_size=self.block_size)

    def __getitem__(self, index: int) -> Block:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        begin, end = index * self.block_size, (index + 1) * self.block_size
        input_ids = np.empty(self.block_size, dtype=np.int64)
        document_starts = [0]
        part, filled = int(np.searchsorted(self._stream_ends, begin, side="right")), 0
        while filled < self.block_size:
            part_end = int(self._stream_ends[part])
            count = min(part_end, end) - (begin + filled)
            source = int(self._ends[part]) - (part_end - begin - filled)
            input_ids[filled : filled + count] = self._tokens[source : source + count]
            filled, part = filled + count, part + 1
            if filled < self.block_size:
                document_starts.append(filled)
        labels = input_ids.copy()
        labels[document_starts] = IGNORED
        return Block(input_ids, labels, tuple(document_starts))
