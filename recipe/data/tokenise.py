"""A corpus to a token store, once: several batches are encoded at a time and written in the order of the corpus."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from recipe.data.conversations import EncodedRow, Rendered, RowEncoder
from recipe.data.documents import Corpus, InvalidTextError
from recipe.data.token_store import LeftOut, TokenWriter
from recipe.data.tokenizer import TextEncoder, split_text

Item = TypeVar("Item")
Result = TypeVar("Result")

BATCH_CHARS = 1 << 18
BATCH_CHUNKS = 1 << 12
BATCH_ROWS = 256
AHEAD = 2  # items for each worker: bounds what is in memory however long the stream is


@dataclass(frozen=True, kw_only=True)
class TokeniseOptions:
    """How to tokenise; the result depends on neither `num_workers` nor `show_progress`."""

    num_workers: int
    skip_invalid_text: bool
    max_documents: int | None = None  # stop after so many documents with text
    show_progress: bool = False


def tokenise(
    folder: Path, *, corpus: Corpus, encoder: TextEncoder | RowEncoder, options: TokeniseOptions
) -> Iterator[None]:
    """Write the tokens of `corpus` into `folder` as a token store, in steps of a batch.

    A document of plain text is the encoder's prefix, the text, and one end-of-document token. A row of another format
    is a document of its own, whose mask is stored unless everything is trained on; one that does not fit the format is
    a ValueError that names its place. Documents without text, and rows without anything to train on, are left out and
    counted by file; so are those that are not UTF-8 if asked, or else they raise InvalidTextError. Memory: two batches
    for each worker, one line or row of the corpus, and 8 bytes a document.
    """
    tokeniser: _Tokeniser = (
        _RowTokeniser(folder, encoder=encoder, options=options)
        if isinstance(encoder, RowEncoder)
        else _TextTokeniser(folder, encoder=encoder, options=options)
    )
    writer = tokeniser.writer
    bar = tqdm(desc="tokenising", unit=" tokens", unit_scale=True, mininterval=1.0, disable=not options.show_progress)
    try:
        batches = tokeniser.batches(corpus)
        for encoded in map_in_order(batches, work=tokeniser.encode, num_workers=options.num_workers, name="tokenise"):
            tokeniser.take(encoded)
            bar.update(writer.num_tokens - bar.n)  # a document taken back counts down
            bar.set_postfix(documents=writer.num_documents, refresh=False)
            yield
            if tokeniser.is_full:
                break
        writer.cancel_document()  # one that was being read when the store was full
        if not writer.num_documents:
            raise ValueError(tokeniser.nothing_left(corpus))
        yield from writer.finish(tokeniser.left_out())
    finally:
        bar.close()
        writer.close()


def map_in_order(
    items: Iterable[Item], *, work: Callable[[Item], Result], num_workers: int, name: str
) -> Iterator[Result]:
    """Yield `work` of each item in order, done by `num_workers` threads a bounded number of items ahead.

    An error of `work` is raised in its item's place.
    """
    with ThreadPoolExecutor(num_workers, thread_name_prefix=name) as pool:
        ahead: deque[Future[Result]] = deque()
        try:
            for item in items:
                ahead.append(pool.submit(work, item))
                if len(ahead) >= AHEAD * num_workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


class _Tokeniser:
    """Steps from a corpus to its token store: batches of it are encoded by threads and written by one of them."""

    def __init__(self, writer: TokenWriter, options: TokeniseOptions) -> None:
        self.writer = writer
        self.options = options
        self.num_empty: Counter[str] = Counter()
        self.num_untrained: Counter[str] = Counter()
        self.num_invalid: Counter[str] = Counter()
        self.num_eos_in_text = 0

    def batches(self, corpus: Corpus) -> Iterator[Any]:
        raise NotImplementedError

    def encode(self, batch: Any) -> Any:
        """Encode a batch; may run in several threads at once."""
        raise NotImplementedError

    def take(self, encoded: Any) -> None:
        """Write what `encode` made of the next batch."""
        raise NotImplementedError

    def nothing_left(self, corpus: Corpus) -> str:
        """Say why no document of the corpus is in the store."""
        raise NotImplementedError

    @property
    def is_full(self) -> bool:
        limit = self.options.max_documents
        return limit is not None and self.writer.num_documents >= limit

    def left_out(self) -> LeftOut:
        return LeftOut(
            num_empty=dict(self.num_empty),
            num_untrained=dict(self.num_untrained),
            num_invalid=dict(self.num_invalid),
            num_eos_in_text=self.num_eos_in_text,
        )

    def sources(self) -> list[str]:
        """Return the first files with something left out, for messages."""
        return sorted({*self.num_empty, *self.num_untrained, *self.num_invalid})[:10]


class _Chunk(NamedTuple):
    """A stretch of a document's text, or (with no text) how the document went."""

    source: str
    text: str
    outcome: Literal["more", "end", "invalid"]


class _TextTokeniser(_Tokeniser):
    """Plain text, encoded in chunks; the chunks that come back are joined to documents."""

    def __init__(self, folder: Path, *, encoder: TextEncoder, options: TokeniseOptions) -> None:
        super().__init__(TokenWriter(folder, vocab_size=encoder.vocab_size), options)
        self._encoder = encoder
        self._num_ids = 0  # of the document being written, its prefix left out
        self._has_text = False

    def batches(self, corpus: Corpus) -> Iterator[list[_Chunk]]:
        batch: list[_Chunk] = []
        num_chars = 0
        for chunk in self._chunks(corpus):
            batch.append(chunk)
            num_chars += len(chunk.text)
            if num_chars >= BATCH_CHARS or len(batch) >= BATCH_CHUNKS:
                yield batch
                batch, num_chars = [], 0
        if batch:
            yield batch

    def _chunks(self, corpus: Corpus) -> Iterator[_Chunk]:
        for document in corpus.read():
            try:
                for text in split_text(document.pieces):
                    yield _Chunk(document.source, text, "more")
            except InvalidTextError:
                if not self.options.skip_invalid_text:
                    raise
                yield _Chunk(document.source, "", "invalid")
            else:
                yield _Chunk(document.source, "", "end")

    def encode(self, batch: list[_Chunk]) -> list[tuple[_Chunk, NDArray[np.int64]]]:
        return list(zip(batch, self._encoder.encode([chunk.text for chunk in batch]), strict=True))

    def take(self, encoded: list[tuple[_Chunk, NDArray[np.int64]]]) -> None:
        for chunk, ids in encoded:
            if self.is_full:
                return
            if chunk.outcome == "more":
                self._add(ids, has_text=not chunk.text.isspace())
            else:
                self._end(chunk)

    def _add(self, ids: NDArray[np.int64], *, has_text: bool) -> None:
        # An end-of-document token inside a document would read as a boundary. The encoder makes none from special
        # tokens; a vocabulary that holds the token as an ordinary word still can.
        kept = ids[ids != self._encoder.eos_id]
        self.num_eos_in_text += len(ids) - len(kept)
        if not self._num_ids and len(kept):
            self.writer.add(np.array(self._encoder.prefix, dtype=np.int64))
        self.writer.add(kept)
        self._num_ids += len(kept)
        self._has_text = self._has_text or has_text

    def _end(self, chunk: _Chunk) -> None:
        if chunk.outcome == "invalid":
            self.num_invalid[chunk.source] += 1
            self.writer.cancel_document()
        elif self._has_text and self._num_ids:
            self.writer.add(np.array([self._encoder.eos_id], dtype=np.int64))
            self.writer.end_document()
        else:
            self.num_empty[chunk.source] += 1
            self.writer.cancel_document()
        self._num_ids, self._has_text = 0, False

    def nothing_left(self, corpus: Corpus) -> str:
        skipped = "; ".join(
            f"{source}: {self.num_empty[source]} empty, {self.num_invalid[source]} invalid" for source in self.sources()
        )
        return (
            f"no document with text is left in {corpus.name} ({skipped or 'there are no documents'}); "
            "check the files and --text_column_name"
        )


class _Entry(NamedTuple):
    """A row as text, or None where it is not UTF-8."""

    source: str
    text: Rendered | None


class _RowTokeniser(_Tokeniser):
    """Rows of chat data, of which each is a document."""

    def __init__(self, folder: Path, *, encoder: RowEncoder, options: TokeniseOptions) -> None:
        with_mask = not encoder.trains_on_all
        super().__init__(TokenWriter(folder, vocab_size=encoder.vocab_size, with_mask=with_mask), options)
        self._encoder = encoder

    def batches(self, corpus: Corpus) -> Iterator[list[_Entry]]:
        entries = self._entries(corpus)
        while batch := list(islice(entries, BATCH_ROWS)):
            yield batch

    def _entries(self, corpus: Corpus) -> Iterator[_Entry]:
        for row in corpus.rows():
            try:
                text = self._encoder.render(row)
            except InvalidTextError:
                if not self.options.skip_invalid_text:
                    raise
                yield _Entry(row.source, None)
            else:
                yield _Entry(row.source, text)

    def encode(self, batch: list[_Entry]) -> list[tuple[str, EncodedRow | None]]:
        documents = iter(self._encoder.encode([entry.text for entry in batch if entry.text is not None]))
        return [(entry.source, None if entry.text is None else next(documents)) for entry in batch]

    def take(self, encoded: list[tuple[str, EncodedRow | None]]) -> None:
        for source, document in encoded:
            if self.is_full:
                return
            if document is None:
                self.num_invalid[source] += 1
            elif not len(document.ids):
                self.num_empty[source] += 1
            elif not document.trained.any():
                self.num_untrained[source] += 1
            else:
                self.writer.add(document.ids, trained=document.trained)
                self.writer.end_document()

    def nothing_left(self, corpus: Corpus) -> str:
        counts = "; ".join(
            f"{source}: {self.num_untrained[source]} rows without a response, {self.num_empty[source]} empty, "
            f"{self.num_invalid[source]} invalid"
            for source in self.sources()
        )
        if not self.num_untrained:
            return f"no row with text is left in {corpus.name} ({counts or 'there are no rows'}); check the files"
        return (
            f"no row of {corpus.name} has a response to train on ({counts}); responses are the messages of the role "
            "'assistant' whose 'weight' is not 0, or the completions; --train_on all trains on every token"
        )
