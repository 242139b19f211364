"""Where documents come from: files, a data set of the `datasets` library, or the running Python's own library.

Each .txt file is a document, each line of .jsonl or .json one, each row of .parquet or of a data set one.
"""

import codecs
import glob
import hashlib
import json
import os
import platform
import sysconfig
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
    without_nulls,
)
from recipe.data.options import EMBEDDED
from recipe.settings.flags import Arguments

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, IterableDataset

SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
READ_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 16
ROWS_AT_ONCE = 256
LIBRARY_SUFFIXES = (".py", ".rst", ".txt")
# Test suites and third-party packages are no part of the library; lib2to3's and idlelib's data are mostly neither.
LIBRARY_LEFT_OUT = frozenset(
    {"__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests"}
)


def open_corpora(options: Arguments) -> dict[str, Corpus]:
    """Find the one kind of source that the options name and read as much of it as its manifest needs.

    Return the corpus "train" and, where there is one, "validation".
    """
    if options.dataset_name is not None:
        return hub_corpora(options)
    if options.train_file == EMBEDDED:
        return {"train": embedded_corpus()}
    files = {"train": options.train_file, "validation": options.validation_file}
    return {
        part: file_corpus(pattern, option=f"--{part}_file", column=options.text_column_name)
        for part, pattern in files.items()
        if pattern is not None
    }


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
        read=partial(_documents_of_files, paths, column=column),
        rows=partial(_rows_of_files, paths),
    )


def _documents_of_files(paths: Iterable[Path], *, column: str) -> Iterator[Document]:
    for path in paths:
        if path.suffix == ".txt":
            yield Document(str(path), _text_pieces(path))
        else:
            yield from text_documents(_rows_of_file(path, columns=[column]), column=column)


def _rows_of_files(paths: Iterable[Path]) -> Iterator[Row]:
    for path in paths:
        yield from _rows_of_file(path)


def _rows_of_file(path: Path, *, columns: list[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a file; of a table only the given columns are read."""
    if path.suffix == ".txt":
        yield Row(str(path), str(path), dict)  # a text has no fields
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path, columns=columns)
    else:
        yield from _json_rows(path)


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
        if path.suffix not in SUFFIXES:
            raise ValueError(
                f"{option}={pattern!r}: {path} ends in {path.suffix!r}, which is none of {', '.join(SUFFIXES)}"
            )
    return sorted(found)


def _fingerprint(path: Path) -> tuple[object, ...]:
    status = path.stat()
    with open(path, "rb") as file:
        head = file.read(SAMPLE_BYTES)
        file.seek(max(0, status.st_size - SAMPLE_BYTES))
        tail = file.read(SAMPLE_BYTES)
    return str(path.resolve()), status.st_size, status.st_mtime_ns, head, tail


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


def _parquet_rows(path: Path, *, columns: list[str] | None) -> Iterator[Row]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        for column in columns or ():
            if column not in names:
                raise ValueError(f"{path} has no column {column!r}; --text_column_name must be one of {names}")
        number = 0
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
            for index in range(len(batch)):
                number += 1
                place = f"{path}, row {number}"
                yield Row(str(path), place, partial(_parquet_fields, batch, index=index, place=place))


def _parquet_fields(batch: "pa.RecordBatch", *, index: int, place: str) -> dict[str, Any]:
    try:  # Arrow decodes what is asked for, not before
        fields: dict[str, Any] = without_nulls(batch.slice(index, 1).to_pylist()[0])
    except UnicodeDecodeError as error:
        raise invalid_text(place, error) from error
    return fields


def hub_corpora(options: Arguments) -> dict[str, Corpus]:
    """Load the splits "train" and "validation" of `options.dataset_name`; each row is a document.

    A loaded data set is known by the fingerprint that `datasets` gives it. A stream has none, so it is known by name,
    configuration and split alone: after a change at the source, --overwrite_cache reads it again.
    """
    from datasets import load_dataset

    cache_dir = None if options.cache_dir is None else str(Path(options.cache_dir) / "datasets")
    try:
        splits: Any = load_dataset(
            options.dataset_name, options.dataset_config_name, streaming=options.streaming, cache_dir=cache_dir
        )
    except (OSError, ValueError) as error:  # not found, not reachable, or no such configuration
        raise ValueError(f"dataset_name={options.dataset_name!r} cannot be loaded: {error}") from error
    if "train" not in splits:
        raise ValueError(f"dataset_name={options.dataset_name!r} has no split 'train', only {sorted(splits)}")
    parts = [part for part in ("train", "validation") if part in splits]
    return {part: _hub_corpus(splits[part], split=part, options=options) for part in parts}


def _hub_corpus(rows: "Dataset | IterableDataset", *, split: str, options: Arguments) -> Corpus:
    name = "/".join(part for part in (options.dataset_name, options.dataset_config_name, split) if part)
    version = "a stream" if options.streaming else rows._fingerprint  # `datasets` shows it nowhere in public
    return Corpus(
        name=name,
        files=(name,),
        manifest=digest_of([name, version]),
        read=partial(_hub_documents, rows, name=name, options=options),
        rows=partial(_hub_rows, rows, name=name, fields_of=without_nulls),
    )


def _hub_documents(rows: "Dataset | IterableDataset", *, name: str, options: Arguments) -> Iterator[Document]:
    column, columns = options.text_column_name, rows.column_names
    if columns is not None and column not in columns:  # a stream may not know its columns
        raise ValueError(
            f"dataset_name={options.dataset_name!r} has no column {column!r}; "
            f"--text_column_name must be one of {columns}"
        )
    yield from text_documents(_hub_rows(rows, name=name, fields_of=dict), column=column)


def _hub_rows(
    rows: "Dataset | IterableDataset", *, name: str, fields_of: Callable[[Any], dict[str, Any]]
) -> Iterator[Row]:
    for number, fields in enumerate(rows, start=1):
        yield Row(name, f"{name}, row {number}", partial(fields_of, fields))


def embedded_corpus(root: Path | None = None) -> Corpus:
    """Return the standard library under `root` as a corpus: each file is a document, in sorted order of path.

    The manifest is a digest of every file's name and content; it differs between releases of Python. The few modules
    that declare another encoding than UTF-8 are no part of the corpus.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    texts, contents = [], []
    for path in sorted(_library_files(root)):
        raw = path.read_bytes()
        if _is_utf8(raw):
            texts.append(path)
            contents.append((path.relative_to(root).as_posix(), hashlib.sha256(raw).hexdigest()))
    if not texts:
        raise ValueError(f"there is no standard library in source form under {root}; name a corpus with --train_file")
    return Corpus(
        name=f"the standard library of Python {platform.python_version()}",
        files=tuple(map(str, texts)),
        manifest=digest_of(contents),
        read=lambda: (Document(str(path), _text_pieces(path)) for path in texts),
    )


def _library_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        # os.walk enters what stays in this list.
        subfolders[:] = [name for name in subfolders if name not in LIBRARY_LEFT_OUT]
        yield from (Path(folder) / name for name in names if name.endswith(LIBRARY_SUFFIXES))


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
