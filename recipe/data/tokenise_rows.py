"""Rows of chat data to a token store, once: several batches of rows are encoded at a time and written in order."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from recipe.data.documents import Corpus, InvalidTextError
from recipe.data.in_order import map_in_order
from recipe.data.row_encoder import EncodedRow, Rendered, RowEncoder
from recipe.data.token_store import LeftOut, TokenWriter
from recipe.data.tokenise import TokeniseOptions

ROWS_AT_ONCE = 256


class _Rendered(NamedTuple):
    """A row as text, or None where it is not UTF-8."""

    source: str
    text: Rendered | None


class _Encoded(NamedTuple):
    """A row as a document, or None where it is not UTF-8."""

    source: str
    document: EncodedRow | None


def tokenise_rows(folder: Path, *, corpus: Corpus, encoder: RowEncoder, options: TokeniseOptions) -> Iterator[None]:
    """Write the rows of `corpus` into `folder` as a token store, in steps of a batch.

    Each row is a document; its mask is stored unless everything is trained on. Rows without text, and those of which
    nothing would be trained on, are left out and counted by file; so are those that are not UTF-8, if asked, or else
    they raise InvalidTextError. A row that does not fit the format is a ValueError that names its place.
    """
    writer = TokenWriter(folder, vocab_size=encoder.vocab_size, with_mask=not encoder.trains_on_all)
    empty: Counter[str] = Counter()
    untrained: Counter[str] = Counter()
    invalid: Counter[str] = Counter()
    bar = tqdm(desc="tokenising", unit=" tokens", unit_scale=True, mininterval=1.0, disable=not options.show_progress)
    rows = _render(corpus, encoder=encoder, skip_invalid_text=options.skip_invalid_text)
    work = partial(_encode, encoder=encoder)
    try:
        for batch in map_in_order(_batches(rows), work=work, num_workers=options.num_workers):
            for source, document in batch:
                if writer.num_documents == options.max_documents:
                    break
                if document is None:
                    invalid[source] += 1
                elif not len(document.ids):
                    empty[source] += 1
                elif not document.trained.any():
                    untrained[source] += 1
                else:
                    writer.add(document.ids, trained=document.trained)
                    writer.end_document()
            bar.update(writer.num_tokens - bar.n)
            bar.set_postfix(documents=writer.num_documents, refresh=False)
            yield
            if writer.num_documents == options.max_documents:
                break
        if not writer.num_documents:
            raise ValueError(_nothing_left(corpus, empty=empty, untrained=untrained, invalid=invalid))
        left_out = LeftOut(num_empty=dict(empty), num_untrained=dict(untrained), num_invalid=dict(invalid))
        yield from writer.finish(left_out)
    finally:
        bar.close()
        writer.close()


def _render(corpus: Corpus, *, encoder: RowEncoder, skip_invalid_text: bool) -> Iterator[_Rendered]:
    for row in corpus.rows():
        try:
            text = encoder.render(row)
        except InvalidTextError:
            if not skip_invalid_text:
                raise
            yield _Rendered(row.source, None)
        else:
            yield _Rendered(row.source, text)


def _batches(rows: Iterable[_Rendered]) -> Iterator[list[_Rendered]]:
    rest = iter(rows)
    while batch := list(islice(rest, ROWS_AT_ONCE)):
        yield batch


def _encode(rows: list[_Rendered], *, encoder: RowEncoder) -> list[_Encoded]:
    documents = iter(encoder.encode([row.text for row in rows if row.text is not None]))
    return [_Encoded(row.source, None if row.text is None else next(documents)) for row in rows]


def _nothing_left(corpus: Corpus, *, empty: Counter[str], untrained: Counter[str], invalid: Counter[str]) -> str:
    counts = "; ".join(
        f"{source}: {untrained[source]} rows without a response, {empty[source]} empty, {invalid[source]} invalid"
        for source in sorted({*empty, *untrained, *invalid})[:10]
    )
    if not untrained:
        return f"no row with text is left in {corpus.name} ({counts or 'there are no rows'}); check the files"
    return (
        f"no row of {corpus.name} has a response to train on ({counts}); responses are the messages of the role "
        "'assistant' whose 'weight' is not 0, or the completions; --train_on all trains on every token"
    )
