"""Documents of a data set that the `datasets` library loads by name or from a folder."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recipe.data.documents import Corpus, Document, Row, digest_of, text_documents, without_nulls
from recipe.data.options import DataOptions

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


class HubCorpora(NamedTuple):
    train: Corpus
    validation: Corpus | None  # None where the data set has no split of that name


def hub_corpora(options: DataOptions) -> HubCorpora:
    """The splits "train" and "validation" of `options.dataset_name`; each row is a document.

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
    validation = _corpus(splits["validation"], split="validation", options=options) if "validation" in splits else None
    return HubCorpora(_corpus(splits["train"], split="train", options=options), validation)


def _corpus(rows: "Dataset | IterableDataset", *, split: str, options: DataOptions) -> Corpus:
    name = "/".join(part for part in (options.dataset_name, options.dataset_config_name, split) if part)
    version = "a stream" if options.streaming else rows._fingerprint  # `datasets` shows it nowhere in public
    return Corpus(
        name=name,
        files=(name,),
        manifest=digest_of([name, version]),
        read=partial(_read, rows, name=name, options=options),
        rows=partial(_rows, rows, name=name, fields_of=without_nulls),
    )


def _read(rows: "Dataset | IterableDataset", *, name: str, options: DataOptions) -> Iterator[Document]:
    column, columns = options.text_column_name, rows.column_names
    if columns is not None and column not in columns:  # a stream may not know its columns
        raise ValueError(
            f"dataset_name={options.dataset_name!r} has no column {column!r}; "
            f"--text_column_name must be one of {columns}"
        )
    yield from text_documents(_rows(rows, name=name, fields_of=dict), column=column)


def _rows(rows: "Dataset | IterableDataset", *, name: str, fields_of: Callable[[Any], dict[str, Any]]) -> Iterator[Row]:
    for number, fields in enumerate(rows, start=1):
        yield Row(name, f"{name}, row {number}", partial(fields_of, fields))
