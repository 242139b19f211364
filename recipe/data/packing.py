"""Documents concatenated into blocks of equal length, cut at block ends or kept whole, and some held out."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # the label that Hugging Face losses leave out


class Stretches(NamedTuple):
    """The parts of a token file to use, in order: part i is tokens[starts[i]:ends[i]], never empty."""

    starts: NDArray[np.int64]  # [num_parts]
    ends: NDArray[np.int64]  # [num_parts]


class Block(NamedTuple):
    """One sequence of a batch.

    input_ids        [S]  int64
    labels           [S]  int64, not shifted (the model shifts); IGNORED at every document start and at position 0, so
                          that nothing is predicted across a boundary, and on tokens that are not trained on
    document_starts  positions in the block where a document starts, ascending; 0 is always one, also where the block
                     goes on with a document that the block before began. Padding counts as a document
    num_tokens       positions from this one on are padding
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    document_starts: tuple[int, ...]
    num_tokens: int


class PackedBlocks:
    """A sequence of blocks over a flat token file.

    whole    a document that does not fit in what is left of a block starts the next one, and what is left, of the last
             block too, is padding; a document longer than a block goes on in the following ones. Without, documents
             are cut at the end of every block, and a last stretch shorter than a block is not used
    tokens   [num_tokens of the file], any integer type; read when a block is asked for
    trained  [num_tokens of the file]  bool, which of them are trained on; None: all
    Memory: 24 bytes for each part. Reading is safe from several threads.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        *,
        stretches: Stretches,
        block_size: int,
        trained: NDArray[np.bool_] | None = None,
        whole: bool = False,
    ) -> None:
        self._tokens = tokens
        self._trained = trained
        self._starts = stretches.starts
        self._ends = stretches.ends
        lengths = stretches.ends - stretches.starts
        self._stream_ends = _whole_ends(lengths, block_size=block_size) if whole else np.cumsum(lengths, dtype=np.int64)
        self._whole = whole
        self.block_size = block_size

    @property
    def num_documents(self) -> int:
        return len(self._starts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts, those of the unused last stretch included and padding left out."""
        return int((self._ends - self._starts).sum())

    @property
    def num_unused_tokens(self) -> int:
        return 0 if self._whole else self.num_tokens % self.block_size

    @property
    def num_padding_tokens(self) -> int:
        return len(self) * self.block_size - self.num_tokens if self._whole else 0

    def __len__(self) -> int:
        length = int(self._stream_ends[-1]) if len(self._stream_ends) else 0
        return -(-length // self.block_size) if self._whole else length // self.block_size

    def first(self, limit: int) -> "PackedBlocks":
        """Return the first `limit` blocks, or all if there are fewer."""
        num_tokens = min(limit, len(self)) * self.block_size
        num_parts = int(np.searchsorted(self._stream_ends, num_tokens, side="left")) + 1
        starts, ends = self._starts[:num_parts], self._ends[:num_parts].copy()
        if len(ends):
            ends[-1] -= max(0, int(self._stream_ends[:num_parts][-1]) - num_tokens)
        kept = ends > starts
        stretches = Stretches(starts[kept], ends[kept])
        return PackedBlocks(
            self._tokens, stretches=stretches, block_size=self.block_size, trained=self._trained, whole=self._whole
        )

    def __getitem__(self, index: int) -> Block:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        begin, end = index * self.block_size, (index + 1) * self.block_size
        input_ids, labels = np.empty((2, self.block_size), dtype=np.int64)
        document_starts = [0]
        part, filled = int(np.searchsorted(self._stream_ends, begin, side="right")), 0
        while filled < self.block_size and part < len(self._ends):
            part_end = int(self._stream_ends[part])
            source = int(self._ends[part]) - (part_end - begin - filled)
            if source < self._starts[part]:  # it starts in a later block, after padding
                break
            count = min(part_end, end) - (begin + filled)
            here, there = slice(filled, filled + count), slice(source, source + count)
            input_ids[here] = labels[here] = self._tokens[there]
            if self._trained is not None:
                labels[here][~self._trained[there]] = IGNORED
            filled, part = filled + count, part + 1
            if filled < self.block_size:
                document_starts.append(filled)
        input_ids[filled:], labels[filled:] = 0, IGNORED
        labels[document_starts] = IGNORED
        return Block(input_ids, labels, tuple(document_starts), filled)


def _whole_ends(lengths: NDArray[np.int64], *, block_size: int) -> NDArray[np.int64]:
    """Return where parts of these lengths end in a stream of blocks, with padding in front of those that do not fit."""
    ends = np.empty(len(lengths), dtype=np.int64)
    position = 0
    for part, length in enumerate(lengths.tolist()):
        left = -position % block_size
        position += length if length <= left else left + length
        ends[part] = position
    return ends


class Holdout(NamedTuple):
    """The documents to train on, and those kept back for validation if the corpus brings no validation set."""

    train: Stretches
    validation: Stretches
    rule: str  # in words, for the log


def all_documents(ends: NDArray[np.int64]) -> Stretches:
    """Return every document of a token store, in order; `ends` [num_documents] is where each ends."""
    starts = np.zeros(len(ends), dtype=np.int64)
    starts[1:] = ends[:-1]
    return Stretches(starts, ends)


def hold_out(ends: NDArray[np.int64], *, percentage: int) -> Holdout:
    """Keep back `percentage` (0 to 99) of a corpus, always the same part of it whatever the seed.

    Documents are taken at even distances, so that both parts hold every region of a sorted corpus. A corpus of fewer
    documents than that needs is cut instead: the last `percentage` of its tokens are kept back.
    """
    documents = all_documents(ends)
    num_documents = len(ends)
    if percentage == 0:
        none = Stretches(documents.starts[:0], documents.ends[:0])
        return Holdout(documents, none, "nothing is held out")
    if num_documents * percentage >= 100:
        # Document i is held out where the running share i * percentage / 100 passes a whole number.
        number = np.arange(num_documents, dtype=np.int64)
        held_out = (number + 1) * percentage // 100 > number * percentage // 100
        rule = f"{int(held_out.sum())} of {num_documents} documents are held out, at even distances"
        return Holdout(_select(documents, ~held_out), _select(documents, held_out), rule)
    num_tokens = int(ends[-1])
    cut = num_tokens - num_tokens * percentage // 100
    rule = (
        f"the last {num_tokens - cut} of {num_tokens} tokens are held out, "
        f"because {num_documents} documents are too few to hold out {percentage} % of them"
    )
    return Holdout(_between(documents, 0, cut), _between(documents, cut, num_tokens), rule)


def _select(documents: Stretches, chosen: NDArray[np.bool_]) -> Stretches:
    return Stretches(documents.starts[chosen], documents.ends[chosen])


def _between(documents: Stretches, begin: int, end: int) -> Stretches:
    starts, ends = documents.starts.clip(begin, end), documents.ends.clip(begin, end)
    return _select(Stretches(starts, ends), starts < ends)
