"""What a corpus is to the rest of the data code: documents one after the other, and a name for their content."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class InvalidTextError(ValueError):
    """Bytes that are not UTF-8, with their file and line or row."""


class Document(NamedTuple):
    """One text. `pieces` is read once and may raise InvalidTextError; the corpus goes on to the next document then."""

    source: str  # the file (or data set) that skipped documents are counted under
    pieces: Iterable[str]


class Row(NamedTuple):
    """One entry of a corpus with all its fields, by name. `read` may raise InvalidTextError, as a document may."""

    source: str
    place: str  # the file and the line or row in it, for messages
    read: Callable[[], Mapping[str, Any]]


def no_rows() -> Iterator[Row]:
    """The rows of a corpus that is text and nothing else."""
    return iter(())


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A finite sequence of documents that reads the same every time it is asked for.

    `read` gives the text of one field of every entry, `rows` the entries with all their fields.
    """

    name: str
    files: tuple[str, ...]
    manifest: str  # a digest: equal for equal content, as far as its kind of source can tell
    read: Callable[[], Iterator[Document]]
    rows: Callable[[], Iterator[Row]] = no_rows


def text_documents(rows: Iterable[Row], *, column: str) -> Iterator[Document]:
    """The field `column` of each row as a document."""
    for row in rows:
        yield Document(row.source, _pieces(row, column=column))


def _pieces(row: Row, *, column: str) -> Iterator[str]:
    yield text_of(row.read().get(column), place=row.place)


def digest_of(parts: Iterable[object]) -> str:
    """A short digest of a sequence of plain values, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(repr(part).encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


def without_nulls(value: Any) -> Any:
    """The same without fields that are null, at any depth: a table gives every row the fields of all its rows.

    What is null in a list was so in the source and stays.
    """
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def decode(raw: bytes, *, place: str) -> str:
    """UTF-8 to text, or InvalidTextError with the place."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid_text(place, error) from error


def checked(text: str, *, place: str) -> str:
    """A text that came decoded: half of a surrogate pair (JSON can spell one) has no UTF-8 and no tokens."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise invalid_text(place, error) from error
    return text


def invalid_text(place: str, error: UnicodeError) -> InvalidTextError:
    return InvalidTextError(f"{place}: the text is not valid UTF-8 ({error}); mend it or pass --skip_invalid_text")


def text_of(value: object, *, place: str) -> str:
    """The text in a field: a string, nothing at all (empty), or a list of strings (its lines)."""
    if value is None:
        return ""
    if isinstance(value, str):
        return checked(value, place=place)
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return checked("\n".join(value), place=place)
    raise ValueError(f"{place}: the text must be a string, a list of strings or null, not {type(value).__name__}")
