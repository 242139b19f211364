"""Documents in files: each .txt file is one, each line of .jsonl or .json one, each row of .parquet one."""

import codecs
import glob
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.data.documents import (
    Corpus,
    Document,
    Row,
    decode,
    digest_of,
    invalid_text,
    text_documents,
    text_of,
    without_nulls,
)

if TYPE_CHECKING:
    import pyarrow as pa

READ_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 16
ROWS_AT_ONCE = 256

Reader = Callable[..., Iterator[Document]]
RowReader = Callable[[Path], Iterator[Row]]


def file_corpus(pattern: str, *, option: str, column: str) -> Corpus:
    """Return every file that `pattern` names, in sorted order of path, as a corpus.

    pattern  a path or glob pattern, or several separated by commas
    option   the flag the pattern came from, for messages
    column   the field of a JSON line or parquet row that holds the text

    The manifest knows each file by path, size, time of change, and its first and last 64 KiB: reading everything would
    cost more than it protects from.
    """
    paths = _find(pattern, option=option)
    return Corpus(
        name=pattern,
        files=tuple(map(str, paths)),
        manifest=digest_of(map(_fingerprint, paths)),
        read=partial(_read_files, paths, column=column),
        rows=partial(_rows_of_files, paths),
    )


def read_text_files(paths: Iterable[Path]) -> Iterator[Document]:
    """Yield each file as one document, whatever its name ends in."""
    for path in paths:
        yield Document(str(path), _text_pieces(path))


def _read_files(paths: Iterable[Path], *, column: str) -> Iterator[Document]:
    for path in paths:
        yield from _READERS[path.suffix](path, column=column)


def _rows_of_files(paths: Iterable[Path]) -> Iterator[Row]:
    for path in paths:
        yield from _ROW_READERS[path.suffix](path)


def _find(pattern: str, *, option: str) -> list[Path]:
    found: set[Path] = set()
    for part in [pattern] if Path(pattern).exists() else pattern.split(","):
        literal = Path(part.strip())
        matches = [literal] if literal.exists() else [Path(name) for name in glob.glob(part.strip(), recursive=True)]
        if not matches:
            raise ValueError(f"{option}={pattern!r}: there is no file {part.strip()!r}")
        found.update(matches)
    for path in found:
        if path.is_dir():
            raise ValueError(f"{option}={pattern!r}: {path} is a folder; name its files, as in {path}/*.jsonl")
        if path.suffix not in _READERS:
            raise ValueError(
                f"{option}={pattern!r}: {path} ends in {path.suffix!r}, which is none of {', '.join(_READERS)}"
            )
    return sorted(found)


def _fingerprint(path: Path) -> tuple[object, ...]:
    status = path.stat()
    with open(path, "rb") as file:
        head = file.read(SAMPLE_BYTES)
        file.seek(max(0, status.st_size - SAMPLE_BYTES))
        tail = file.read(SAMPLE_BYTES)
    return str(path.resolve()), status.st_size, status.st_mtime_ns, head, tail


def _read_text(path: Path, *, column: str) -> Iterator[Document]:
    yield from read_text_files([path])


def _text_rows(path: Path) -> Iterator[Row]:
    yield Row(str(path), str(path), dict)  # a text has no fields


def _text_pieces(path: Path) -> Iterator[str]:
    """Yield a text file in pieces of at most READ_BYTES, so that neither its size nor its line length costs memory."""
    decoder, num_lines = codecs.getincrementaldecoder("utf-8-sig")(), 0
    with open(path, "rb") as file:
        while True:
            raw = file.read(READ_BYTES)
            try:
                piece = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                line = 1 + num_lines + error.object[: error.start].count(b"\n")
                raise invalid_text(f"{path}, line {line}", error) from error
            if not raw:
                return
            num_lines += piece.count("\n")
            yield piece


def _read_json_lines(path: Path, *, column: str) -> Iterator[Document]:
    yield from text_documents(_json_rows(path), column=column)


def _json_rows(path: Path) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if line.strip():
                place = f"{path}, line {number}"
                yield Row(str(path), place, partial(_json_fields, line, place=place))


def _json_fields(raw: bytes, *, place: str) -> dict[str, Any]:
    line = decode(raw, place=place)
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not a line of JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: each line must be a JSON object, not {type(row).__name__}")
    return row


def _read_parquet(path: Path, *, column: str) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise ValueError(f"{path} has no column {column!r}; --text_column_name must be one of {names}")
        number = 0
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=[column]):
            values = batch.column(0)
            # Arrow decodes lazily and names no row when it fails, so take the bytes and decode them here.
            is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
            for value in (values.cast(pa.large_binary()) if is_text else values).to_pylist():
                number += 1
                yield Document(str(path), _parquet_pieces(value, place=f"{path}, row {number}"))


def _parquet_pieces(value: object, *, place: str) -> Iterator[str]:
    yield decode(value, place=place) if isinstance(value, bytes) else text_of(value, place=place)


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        number = 0
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
            for index in range(len(batch)):
                number += 1
                place = f"{path}, row {number}"
                yield Row(str(path), place, partial(_parquet_fields, batch, index=index, place=place))


def _parquet_fields(batch: "pa.RecordBatch", *, index: int, place: str) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = without_nulls(batch.slice(index, 1).to_pylist()[0])
    except UnicodeDecodeError as error:
        raise invalid_text(place, error) from error
    return fields


_READERS: dict[str, Reader] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".parquet": _read_parquet,
}
_ROW_READERS: dict[str, RowReader] = {
    ".txt": _text_rows,
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}
