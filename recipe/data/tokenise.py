"""A corpus to a token store, once: several batches are encoded at a time and written in the order of the corpus."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
BATCH_TEXTS = 1 << 12
AHEAD = 2  # items for each worker: bounds what is in memory however long the stream is


def tokenise(
    folder: Path,
    *,
    corpus: Corpus,
    encoder: TextEncoder | RowEncoder,
    num_workers: int,
    skip_invalid_text: bool,
    max_documents: int | None = None,
    show_progress: bool = False,
) -> Iterator[None]:
    """Write the tokens of `corpus` into `folder` as a token store, in steps of a batch; `num_workers` changes nothing.

    A document of plain text is the encoder's prefix, the text, and one end-of-document token. A row of another format
    is a document of its own, whose mask is stored unless everything is trained on; one that does not fit the format is
    a ValueError that names its place. Documents without text, and rows without anything to train on, are left out and
    counted by file; so are those that are not UTF-8 if asked, or else they raise InvalidTextError. The store is full
    with `max_documents`. Memory: two batches for each worker, one line or row of the corpus, and 8 bytes a document.
    """
    with_mask = isinstance(encoder, RowEncoder) and not encoder.trains_on_all
    writer = TokenWriter(folder, vocab_size=encoder.vocab_size, with_mask=with_mask)
    tokeniser: _TextTokeniser | _RowTokeniser = (
        _RowTokeniser(encoder, writer) if isinstance(encoder, RowEncoder) else _TextTokeniser(encoder, writer)
    )
    batches = _batches(tokeniser.read(corpus, skip_invalid_text=skip_invalid_text))
    bar = tqdm(desc="tokenising", unit=" tokens", unit_scale=True, mininterval=1.0, disable=not show_progress)
    try:
        for batch in map_in_order(batches, work=tokeniser.encode, num_workers=num_workers, name="tokenise"):
            for text, encoded in batch:
                if writer.num_documents != max_documents:
                    tokeniser.take(text, encoded)
            bar.update(writer.num_tokens - bar.n)  # a document taken back counts down
            bar.set_postfix(documents=writer.num_documents, refresh=False)
            yield
            if writer.num_documents == max_documents:
                break
        writer.cancel_document()  # one that was being read when the store was full
        if not writer.num_documents:
            raise ValueError(tokeniser.nothing_left(corpus))
        yield from writer.finish(tokeniser.left_out)
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


class _Text(NamedTuple):
    """A part of a document.

    content  a chunk of plain text or a rendered row; None where there is nothing to encode
    outcome  "more" if other parts follow; "end" of the document, or that it turned out to be "empty" or "invalid"
    """

    source: str
    content: str | Rendered | None
    outcome: Literal["more", "end", "empty", "invalid"]

    @property
    def num_chars(self) -> int:
        text = self.content.text if isinstance(self.content, Rendered) else self.content
        return len(text or "")


def _batches(texts: Iterator[_Text]) -> Iterator[list[_Text]]:
    batch: list[_Text] = []
    num_chars = 0
    for text in texts:
        batch.append(text)
        num_chars += text.num_chars
        if num_chars >= BATCH_CHARS or len(batch) >= BATCH_TEXTS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


class _Tokeniser:
    """Steps from a corpus to its token store: texts are read, encoded by threads and taken in order by one of them."""

    def __init__(self, encoder: Any, writer: TokenWriter) -> None:
        self.encoder = encoder
        self.writer = writer
        self.left_out = LeftOut()

    def encode(self, batch: list[_Text]) -> list[tuple[_Text, Any]]:
        """Encode the texts that have content; may run in several threads at once."""
        encoded = iter(self.encoder.encode([text.content for text in batch if text.content is not None]))
        return [(text, None if text.content is None else next(encoded)) for text in batch]

    def leave_out(self, text: _Text, counts: Counter[str]) -> None:
        counts[text.source] += 1
        self.writer.cancel_document()

    def sources(self) -> list[str]:
        """Return the first files with something left out, for messages."""
        counts = self.left_out
        return sorted({*counts.num_empty, *counts.num_untrained, *counts.num_invalid})[:10]


class _TextTokeniser(_Tokeniser):
    """Plain text, encoded in chunks, of which several make a document."""

    def read(self, corpus: Corpus, *, skip_invalid_text: bool) -> Iterator[_Text]:
        for document in corpus.read():
            has_text = False
            try:
                for chunk in split_text(document.pieces):
                    has_text = has_text or not chunk.isspace()
                    yield _Text(document.source, chunk, "more")
            except InvalidTextError:
                if not skip_invalid_text:
                    raise
                yield _Text(document.source, None, "invalid")
            else:
                yield _Text(document.source, None, "end" if has_text else "empty")

    def take(self, text: _Text, ids: NDArray[np.int64] | None) -> None:
        """Write a chunk, or end or take back the document that the chunks before it make."""
        encoder, writer = self.encoder, self.writer
        if ids is not None:
            if not writer.num_pending:
                writer.add(np.array(encoder.prefix, dtype=np.int64))
            # An end-of-document token inside a document would read as a boundary. The encoder makes none from special
            # tokens; a vocabulary that holds the token as an ordinary word still can.
            kept = ids[ids != encoder.eos_id]
            self.left_out.num_eos_in_text += len(ids) - len(kept)
            writer.add(kept)
        elif text.outcome == "invalid":
            self.leave_out(text, self.left_out.num_invalid)
        elif text.outcome == "empty" or writer.num_pending <= len(encoder.prefix):
            self.leave_out(text, self.left_out.num_empty)
        else:
            writer.add(np.array([encoder.eos_id], dtype=np.int64))
            writer.end_document()

    def nothing_left(self, corpus: Corpus) -> str:
        """Say why no document of the corpus is in the store."""
        counts = self.left_out
        skipped = "; ".join(
            f"{source}: {counts.num_empty[source]} empty, {counts.num_invalid[source]} invalid"
            for source in self.sources()
        )
        return (
            f"no document with text is left in {corpus.name} ({skipped or 'there are no documents'}); "
            "check the files and --text_column_name"
        )


class _RowTokeniser(_Tokeniser):
    """Rows of chat data, of which each is a document."""

    def read(self, corpus: Corpus, *, skip_invalid_text: bool) -> Iterator[_Text]:
        for row in corpus.rows():
            try:
                yield _Text(row.source, self.encoder.render(row), "end")
            except InvalidTextError:
                if not skip_invalid_text:
                    raise
                yield _Text(row.source, None, "invalid")

    def take(self, text: _Text, document: EncodedRow | None) -> None:
        if document is None:
            self.leave_out(text, self.left_out.num_invalid)
        elif not len(document.ids):
            self.leave_out(text, self.left_out.num_empty)
        elif not document.trained.any():
            self.leave_out(text, self.left_out.num_untrained)
        else:
            self.writer.add(document.ids, trained=document.trained)
            self.writer.end_document()

    def nothing_left(self, corpus: Corpus) -> str:
        """Say why no row of the corpus is in the store."""
        left_out = self.left_out
        counts = "; ".join(
            f"{source}: {left_out.num_untrained[source]} rows without a response, {left_out.num_empty[source]} empty, "
            f"{left_out.num_invalid[source]} invalid"
            for source in self.sources()
        )
        if not left_out.num_untrained:
            return f"no row with text is left in {corpus.name} ({counts or 'there are no rows'}); check the files"
        return (
            f"no row of {corpus.name} has a response to train on ({counts}); responses are the messages of the role "
            "'assistant' whose 'weight' is not 0, or the completions; --train_on all trains on every token"
        )
