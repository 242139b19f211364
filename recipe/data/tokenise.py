"""Documents to tokens, once: several batches of text are encoded at a time and written in the order of the corpus."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from recipe.data.chunks import split_text
from recipe.data.documents import Corpus, InvalidTextError
from recipe.data.in_order import map_in_order
from recipe.data.token_store import LeftOut, TokenWriter
from recipe.data.tokenizer import TextEncoder

BATCH_CHARS = 1 << 18
BATCH_CHUNKS = 1 << 12


@dataclass(frozen=True, kw_only=True)
class TokeniseOptions:
    num_workers: int
    skip_invalid_text: bool
    max_documents: int | None = None  # stop after so many documents with text
    show_progress: bool = False


class _Chunk(NamedTuple):
    """A stretch of a document's text, or (with no text) how the document went."""

    source: str
    text: str
    outcome: Literal["more", "end", "invalid"]


class _Encoded(NamedTuple):
    chunk: _Chunk
    ids: NDArray[np.int64]


def tokenise(folder: Path, *, corpus: Corpus, encoder: TextEncoder, options: TokeniseOptions) -> Iterator[None]:
    """Write the tokens of `corpus` into `folder` as a token store, in steps of a batch.

    Every document is the encoder's prefix, its text, and one end-of-document token. Documents without text are left
    out and counted by file; so are those that are not UTF-8, if asked, or else they raise InvalidTextError. The result
    does not depend on `num_workers`. Memory: two batches for each worker, one line or row of the corpus, and
    8 bytes a document.
    """
    writer = TokenWriter(folder, vocab_size=encoder.vocab_size)
    filling = _Filling(writer=writer, encoder=encoder, max_documents=options.max_documents)
    bar = tqdm(desc="tokenising", unit=" tokens", unit_scale=True, mininterval=1.0, disable=not options.show_progress)
    chunks = _read_chunks(corpus, skip_invalid_text=options.skip_invalid_text)
    try:
        for encoded in _encode_in_order(_batches(chunks), encode=encoder.encode, num_workers=options.num_workers):
            filling.take(encoded)
            bar.update(writer.num_tokens - bar.n)  # a document taken back counts down
            bar.set_postfix(documents=writer.num_documents, refresh=False)
            yield
            if filling.is_full:
                break
        filling.close_last_document()
        if not writer.num_documents:
            raise ValueError(filling.nothing_left(corpus))
        yield from writer.finish(
            LeftOut(
                num_empty=dict(filling.num_empty),
                num_invalid=dict(filling.num_invalid),
                num_eos_in_text=filling.num_eos_in_text,
            )
        )
    finally:
        bar.close()
        writer.close()


@dataclass(kw_only=True)
class _Filling:
    """Turns the chunks that come back into documents of the store."""

    writer: TokenWriter
    encoder: TextEncoder
    max_documents: int | None
    num_empty: Counter[str] = field(default_factory=Counter)
    num_invalid: Counter[str] = field(default_factory=Counter)
    num_eos_in_text: int = 0
    _num_ids: int = 0  # of the document being written, its prefix left out
    _has_text: bool = False

    @property
    def is_full(self) -> bool:
        return self.max_documents is not None and self.writer.num_documents >= self.max_documents

    def take(self, encoded: list[_Encoded]) -> None:
        for chunk, ids in encoded:
            if self.is_full:
                return
            if chunk.outcome == "more":
                self._add(ids, has_text=not chunk.text.isspace())
            else:
                self._end(chunk)

    def close_last_document(self) -> None:
        """Leave nothing of a document that was being read when the store was full."""
        self.writer.cancel_document()

    def nothing_left(self, corpus: Corpus) -> str:
        skipped = "; ".join(
            f"{source}: {self.num_empty[source]} empty, {self.num_invalid[source]} invalid"
            for source in sorted({*self.num_empty, *self.num_invalid})[:10]
        )
        return (
            f"no document with text is left in {corpus.name} ({skipped or 'there are no documents'}); "
            "check the files and --text_column_name"
        )

    def _add(self, ids: NDArray[np.int64], *, has_text: bool) -> None:
        # An end-of-document token inside a document would read as a boundary. The encoder makes none from special
        # tokens; a vocabulary that holds the token as an ordinary word still can.
        kept = ids[ids != self.encoder.eos_id]
        self.num_eos_in_text += len(ids) - len(kept)
        if not self._num_ids and len(kept):
            self.writer.add(np.array(self.encoder.prefix, dtype=np.int64))
        self.writer.add(kept)
        self._num_ids += len(kept)
        self._has_text = self._has_text or has_text

    def _end(self, chunk: _Chunk) -> None:
        if chunk.outcome == "invalid":
            self.num_invalid[chunk.source] += 1
            self.writer.cancel_document()
        elif self._has_text and self._num_ids:
            self.writer.add(np.array([self.encoder.eos_id], dtype=np.int64))
            self.writer.end_document()
        else:
            self.num_empty[chunk.source] += 1
            self.writer.cancel_document()
        self._num_ids, self._has_text = 0, False


def _read_chunks(corpus: Corpus, *, skip_invalid_text: bool) -> Iterator[_Chunk]:
    for document in corpus.read():
        try:
            for text in split_text(document.pieces):
                yield _Chunk(document.source, text, "more")
        except InvalidTextError:
            if not skip_invalid_text:
                raise
            yield _Chunk(document.source, "", "invalid")
        else:
            yield _Chunk(document.source, "", "end")


def _batches(chunks: Iterator[_Chunk]) -> Iterator[list[_Chunk]]:
    batch: list[_Chunk] = []
    num_chars = 0
    for chunk in chunks:
        batch.append(chunk)
        num_chars += len(chunk.text)
        if num_chars >= BATCH_CHARS or len(batch) >= BATCH_CHUNKS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _encode_in_order(
    batches: Iterator[list[_Chunk]], *, encode: Callable[[list[str]], list[NDArray[np.int64]]], num_workers: int
) -> Iterator[list[_Encoded]]:
    def work(batch: list[_Chunk]) -> list[_Encoded]:
        return [_Encoded(*pair) for pair in zip(batch, encode([chunk.text for chunk in batch]), strict=True)]

    return map_in_order(batches, work=work, num_workers=num_workers)
