"""A corpus: documents in a fixed order, each a text or a row of fields, and a digest of their content."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class InvalidTextError(ValueError):
    """Bytes that are not UTF-8, with their file and line or row."""


class Document(NamedTuple):
    """A text. `pieces` is read once and may raise InvalidTextError; the corpus goes on to the next document then."""

    source: str  # the file (or data set) that skipped documents are counted under
    pieces: Iterable[str]


class Row(NamedTuple):
    """An entry of a corpus with all its fields, by name. `read` may raise InvalidTextError."""

    source: str
    place: str  # the file and the line or row in it, for messages
    read: Callable[[], Mapping[str, Any]]


class CorpusFacts(NamedTuple):
    """What every rank knows of a corpus; only the ranks that read it hold the corpus itself."""

    name: str
    num_files: int
    manifest: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A finite sequence of documents that reads the same every time it is asked for.

    `read` gives the text of one field of every entry, `rows` the entries with all their fields, none of plain text.
    """

    name: str
    files: tuple[str, ...]
    manifest: str  # a digest: equal for equal content, as far as its kind of source can tell
    read: Callable[[], Iterator[Document]]
    rows: Callable[[], Iterator[Row]] = lambda: iter(())

    @property
    def facts(self) -> CorpusFacts:
        return CorpusFacts(self.name, len(self.files), self.manifest)


def text_documents(rows: Iterable[Row], *, column: str) -> Iterator[Document]:
    """Yield the field `column` of each row as a document."""
    for row in rows:
        yield Document(row.source, _pieces(row, column=column))


def _pieces(row: Row, *, column: str) -> Iterator[str]:
    yield text_of(row.read().get(column), place=row.place)


def digest_of(parts: Iterable[object]) -> str:
    """Return a short digest of a sequence of plain values, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(repr(part).encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


def without_nulls(value: Any) -> Any:
    """Drop fields that are null, at any depth: a table gives every row the fields of all its rows.

    A null in a list was one in the source and stays.
    """
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def decode(raw: bytes, *, place: str) -> str:
    """Decode UTF-8, or raise InvalidTextError with the place."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid_text(place, error) from error


def checked(text: str, *, place: str) -> str:
    """Return a decoded text, or raise InvalidTextError for half of a surrogate pair, which has no UTF-8."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise invalid_text(place, error) from error
    return text


def invalid_text(place: str, error: UnicodeError) -> InvalidTextError:
    return InvalidTextError(f"{place}: the text is not valid UTF-8 ({error}); mend it or pass --skip_invalid_text")


def text_of(value: object, *, place: str) -> str:
    """Return the text in a field: a string or its bytes, a list of strings (its lines), or null (empty)."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        return decode(value, place=place)
    if isinstance(value, str):
        return checked(value, place=place)
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return checked("\n".join(value), place=place)
    raise ValueError(f"{place}: the text must be a string, a list of strings or null, not {type(value).__name__}")
