"""The tokens of a corpus on disk: one flat file, where each document ends in it, and what was left out."""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = 1
TOKENS, ENDS, COUNTS, FACTS = "tokens.bin", "document_ends.npy", "token_counts.npy", "facts.json"
TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """What facts.json holds."""

    num_documents: int
    num_tokens: int
    vocab_size: int
    num_empty: Mapping[str, int]  # documents without text, by file
    num_invalid: Mapping[str, int]  # documents that were not UTF-8 and were skipped on request, by file
    num_eos_in_text: int  # end-of-document tokens that the text itself spelt and that were dropped
    digest: str  # of tokens.bin
    format: int = FORMAT


class TokenWriter:
    """Appends documents to a new store, token by token; the last one can be taken back until it ends."""

    def __init__(self, folder: Path, *, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._file = open(folder / TOKENS, "wb")  # noqa: SIM115 - closed by finish() or close()
        self._ends = array("q")
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        return len(self._ends)

    def add(self, ids: NDArray[np.int64]) -> None:
        """Append ids, [num_ids], to the document being written."""
        self._file.write(ids.astype(self._dtype).tobytes())
        self.num_tokens += len(ids)

    def end_document(self) -> None:
        self._ends.append(self.num_tokens)

    def cancel_document(self) -> None:
        """Forget what was added since the last document ended."""
        self.num_tokens = self._ends[-1] if self._ends else 0
        self._file.seek(self.num_tokens * self._dtype.itemsize)
        self._file.truncate()

    def finish(
        self, *, num_empty: Mapping[str, int], num_invalid: Mapping[str, int], num_eos_in_text: int
    ) -> Iterator[None]:
        """Count and digest what was written, in steps, and write the facts."""
        self.close()
        counts = np.zeros(self._vocab_size, dtype=np.int64)
        digest = hashlib.blake2b(digest_size=16)
        for tokens in _pieces(_map_tokens(self._folder / TOKENS, dtype=self._dtype)):
            counts += np.bincount(tokens, minlength=self._vocab_size)
            digest.update(tokens.tobytes())
            yield
        np.save(self._folder / COUNTS, counts)
        np.save(self._folder / ENDS, np.array(self._ends, dtype=np.int64))
        facts = StoreFacts(
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            vocab_size=self._vocab_size,
            num_empty=num_empty,
            num_invalid=num_invalid,
            num_eos_in_text=num_eos_in_text,
            digest=digest.hexdigest(),
        )
        (self._folder / FACTS).write_text(json.dumps(asdict(facts), indent=1, sort_keys=True))

    def close(self) -> None:
        self._file.close()


class TokenStore:
    """A finished store, memory-mapped.

    tokens       [num_tokens]     uint16 or uint32, on disk
    ends         [num_documents]  int64, on disk: where each document ends in `tokens`; the next one starts there
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = StoreFacts(**_read_facts(folder))
        dtype = token_dtype(self.facts.vocab_size)
        num_bytes, want_bytes = (folder / TOKENS).stat().st_size, self.facts.num_tokens * dtype.itemsize
        if num_bytes != want_bytes:
            raise ValueError(
                f"{folder / TOKENS} has {num_bytes} bytes and should have {want_bytes}; "
                "rebuild it with --overwrite_cache"
            )
        self.tokens = _map_tokens(folder / TOKENS, dtype=dtype)
        self.ends: NDArray[np.int64] = np.load(folder / ENDS, mmap_mode="r")

    def token_counts(self) -> NDArray[np.int64]:
        """How often each token occurs, [vocab_size]."""
        counts: NDArray[np.int64] = np.load(self.folder / COUNTS)
        return counts


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest unsigned type, little-endian, that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def count_tokens(
    tokens: NDArray[Any], *, starts: NDArray[np.int64], ends: NDArray[np.int64], vocab_size: int
) -> NDArray[np.int64]:
    """How often each token occurs in the given stretches of `tokens`, [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        for piece in _pieces(tokens[start:end]):
            counts += np.bincount(piece, minlength=vocab_size)
    return counts


def entropy_nats(counts: NDArray[np.int64]) -> float:
    """The entropy of the distribution that `counts` is proportional to: the loss of the best constant guess."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _read_facts(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / FACTS).read_text())
    return facts


def _map_tokens(path: Path, *, dtype: np.dtype[Any]) -> NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _pieces(tokens: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        yield tokens[start : start + TOKENS_AT_ONCE]
