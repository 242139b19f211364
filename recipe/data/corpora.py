"""Where the documents come from: files, a data set of the `datasets` library, or the running Python's own library."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recipe.data.documents import Corpus, Document, Row, digest_of, text_documents, without_nulls
from recipe.data.files import file_corpus, read_text_files
from recipe.data.options import DataFormat, DataOptions, choose_format

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

LIBRARY_SUFFIXES = (".py", ".rst", ".txt")
# Test suites and third-party packages are no part of the library; lib2to3's and idlelib's data are mostly neither.
LIBRARY_LEFT_OUT = frozenset(
    {"__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests"}
)


class CorpusFacts(NamedTuple):
    """What every rank knows of a corpus; only the ranks that read it hold the corpus itself."""

    name: str
    num_files: int
    manifest: str


class Corpora(NamedTuple):
    """The corpora as the ranks that read them hold them."""

    train: Corpus
    validation: Corpus | None  # None: hold some of the training documents out


class CorporaFacts(NamedTuple):
    """What every rank knows of both corpora."""

    train: CorpusFacts
    validation: CorpusFacts | None
    data_format: DataFormat  # of both


def open_corpora(options: DataOptions) -> Corpora:
    """Find the one kind of source that the options name and read as much of it as its manifest needs."""
    if options.dataset_name is not None:
        return hub_corpora(options)
    if options.train_file is None:
        return Corpora(embedded_corpus(), None)
    column = options.text_column_name
    train = file_corpus(options.train_file, option="--train_file", column=column)
    if options.validation_file is None:
        return Corpora(train, None)
    return Corpora(train, file_corpus(options.validation_file, option="--validation_file", column=column))


def facts_of(corpora: Corpora, *, options: DataOptions) -> CorporaFacts:
    """Return what a rank that has opened the corpora tells the others."""
    validation = None if corpora.validation is None else _facts(corpora.validation)
    return CorporaFacts(_facts(corpora.train), validation, choose_format(corpora.train, options=options))


def _facts(corpus: Corpus) -> CorpusFacts:
    return CorpusFacts(corpus.name, len(corpus.files), corpus.manifest)


def hub_corpora(options: DataOptions) -> Corpora:
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
    validation = (
        _hub_corpus(splits["validation"], split="validation", options=options) if "validation" in splits else None
    )
    return Corpora(_hub_corpus(splits["train"], split="train", options=options), validation)


def _hub_corpus(rows: "Dataset | IterableDataset", *, split: str, options: DataOptions) -> Corpus:
    name = "/".join(part for part in (options.dataset_name, options.dataset_config_name, split) if part)
    version = "a stream" if options.streaming else rows._fingerprint  # `datasets` shows it nowhere in public
    return Corpus(
        name=name,
        files=(name,),
        manifest=digest_of([name, version]),
        read=partial(_hub_documents, rows, name=name, options=options),
        rows=partial(_hub_rows, rows, name=name, fields_of=without_nulls),
    )


def _hub_documents(rows: "Dataset | IterableDataset", *, name: str, options: DataOptions) -> Iterator[Document]:
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
        read=partial(read_text_files, texts),
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
