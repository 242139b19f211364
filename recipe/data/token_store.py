"""The tokens of a corpus on disk: one flat file, the ends of its documents, a mask of what to train on, and counts."""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = 3
TOKENS, TRAINED, ENDS, COUNTS = "tokens.bin", "trained.bin", "document_ends.npy", "token_counts.npy"
FACTS = "facts.json"
TOKENS_AT_ONCE = 1 << 22


@dataclass(kw_only=True)
class LeftOut:
    """Counts of what a corpus has and its store lacks."""

    num_empty: Counter[str] = field(default_factory=Counter)  # documents without text, by file
    num_untrained: Counter[str] = field(default_factory=Counter)  # rows without a token to train on, by file
    num_invalid: Counter[str] = field(default_factory=Counter)  # what was not UTF-8, skipped on request, by file
    num_eos_in_text: int = 0  # end-of-document tokens that the text itself spelt and that were dropped


@dataclass(kw_only=True)
class StoreFacts(LeftOut):
    """The content of facts.json."""

    num_documents: int
    num_tokens: int
    num_trained_tokens: int  # all of them where there is no mask
    has_mask: bool
    vocab_size: int
    digest: str  # of tokens.bin and, where there is one, trained.bin
    format: int = FORMAT


class TokenWriter:
    """Appends documents to a new store, token by token; the last one can be taken back until it ends.

    with_mask  each token comes with whether it is trained on; without, all are and nothing is stored for it
    """

    def __init__(self, folder: Path, *, vocab_size: int, with_mask: bool = False) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._file = open(folder / TOKENS, "wb")  # noqa: SIM115 - closed by finish() or close()
        self._mask = open(folder / TRAINED, "wb") if with_mask else None  # noqa: SIM115 - closed with the other
        self._ends = array("q")
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        return len(self._ends)

    @property
    def num_pending(self) -> int:
        """Tokens of the document being written."""
        return self.num_tokens - (self._ends[-1] if self._ends else 0)

    def add(self, ids: NDArray[np.int64], *, trained: NDArray[np.bool_] | None = None) -> None:
        """Append ids, [num_ids], to the document being written; `trained` [num_ids] where the store has a mask."""
        self._file.write(ids.astype(self._dtype).tobytes())
        if self._mask is not None:
            assert trained is not None
            assert len(trained) == len(ids), "a store with a mask has an entry for every token"
            self._mask.write(trained.tobytes())
        self.num_tokens += len(ids)

    def end_document(self) -> None:
        self._ends.append(self.num_tokens)

    def cancel_document(self) -> None:
        """Forget what was added since the last document ended."""
        self.num_tokens -= self.num_pending
        self._file.seek(self.num_tokens * self._dtype.itemsize)
        self._file.truncate()
        if self._mask is not None:
            self._mask.seek(self.num_tokens)
            self._mask.truncate()

    def finish(self, left_out: LeftOut) -> Iterator[None]:
        """Count and digest what was written, in steps, and write the facts."""
        self.close()
        counts = np.zeros(self._vocab_size, dtype=np.int64)
        digest = hashlib.blake2b(digest_size=16)
        tokens = _map_file(self._folder / TOKENS, dtype=self._dtype)
        trained = None if self._mask is None else _map_file(self._folder / TRAINED, dtype=np.dtype(np.bool_))
        for piece in _pieces(len(tokens)):
            chosen = tokens[piece] if trained is None else tokens[piece][trained[piece]]
            counts += np.bincount(chosen, minlength=self._vocab_size)
            digest.update(tokens[piece].tobytes())
            if trained is not None:
                digest.update(trained[piece].tobytes())
            yield
        np.save(self._folder / COUNTS, counts)
        np.save(self._folder / ENDS, np.array(self._ends, dtype=np.int64))
        facts = StoreFacts(
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            num_trained_tokens=int(counts.sum()),
            has_mask=self._mask is not None,
            vocab_size=self._vocab_size,
            **vars(left_out),
            digest=digest.hexdigest(),
        )
        (self._folder / FACTS).write_text(json.dumps(vars(facts), indent=1, sort_keys=True))

    def close(self) -> None:
        self._file.close()
        if self._mask is not None:
            self._mask.close()


class TokenStore:
    """A finished store, memory-mapped.

    tokens       [num_tokens]     uint16 or uint32, on disk
    trained      [num_tokens]     bool, on disk: which tokens are trained on; None: all
    ends         [num_documents]  int64, on disk: where each document ends in `tokens`; the next one starts there
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = StoreFacts(**json.loads((folder / FACTS).read_text()))
        dtype = token_dtype(self.facts.vocab_size)
        self.tokens = self._map(TOKENS, dtype=dtype)
        self.trained: NDArray[np.bool_] | None = None
        if self.facts.has_mask:
            self.trained = self._map(TRAINED, dtype=np.dtype(np.bool_))
        self.ends: NDArray[np.int64] = np.load(folder / ENDS, mmap_mode="r")

    def token_counts(self) -> NDArray[np.int64]:
        """Return how often each token is trained on, [vocab_size]."""
        counts: NDArray[np.int64] = np.load(self.folder / COUNTS)
        return counts

    def count_tokens(self, *, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how often each token is trained on in the given stretches of `tokens`, [vocab_size]."""
        counts = np.zeros(self.facts.vocab_size, dtype=np.int64)
        # Every count costs as much as the vocabulary is large, however short the documents are.
        for pieces in _together(starts, ends):
            chosen = np.concatenate([self.tokens[piece] for piece in pieces])
            if self.trained is not None:
                chosen = chosen[np.concatenate([self.trained[piece] for piece in pieces])]
            counts += np.bincount(chosen, minlength=len(counts))
        return counts

    def _map(self, name: str, *, dtype: np.dtype[Any]) -> NDArray[Any]:
        path, want_bytes = self.folder / name, self.facts.num_tokens * dtype.itemsize
        num_bytes = path.stat().st_size
        if num_bytes != want_bytes:
            raise ValueError(
                f"{path} has {num_bytes} bytes and should have {want_bytes}; rebuild it with --overwrite_cache"
            )
        return _map_file(path, dtype=dtype)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the narrowest unsigned type, little-endian, that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def entropy_nats(counts: NDArray[np.int64]) -> float:
    """Return the entropy of the distribution that `counts` is proportional to: the loss of the best constant guess."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _map_file(path: Path, *, dtype: np.dtype[Any]) -> NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _pieces(end: int, *, start: int = 0) -> Iterator[slice]:
    for begin in range(start, end, TOKENS_AT_ONCE):
        yield slice(begin, min(begin + TOKENS_AT_ONCE, end))


def _together(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Iterator[list[slice]]:
    """Yield the stretches in groups of at most TOKENS_AT_ONCE tokens; a longer one is cut."""
    group: list[slice] = []
    num_tokens = 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        for piece in _pieces(end, start=start):
            length = piece.stop - piece.start
            if group and num_tokens + length > TOKENS_AT_ONCE:
                yield group
                group, num_tokens = [], 0
            group.append(piece)
            num_tokens += length
    if group:
        yield group
