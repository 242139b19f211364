"""Where the documents come from: the one kind of source that the options name."""

from typing import NamedTuple

from recipe.data.documents import Corpus
from recipe.data.embedded import embedded_corpus
from recipe.data.files import file_corpus
from recipe.data.formats import DataFormat, choose_format
from recipe.data.hub import hub_corpora
from recipe.data.options import DataOptions


class CorpusFacts(NamedTuple):
    """What every rank knows of a corpus; only the ranks that read it hold the corpus itself."""

    name: str
    num_files: int
    manifest: str


class Corpora(NamedTuple):
    train: Corpus
    validation: Corpus | None  # None: hold some of the training documents out


class CorporaFacts(NamedTuple):
    train: CorpusFacts
    validation: CorpusFacts | None
    data_format: DataFormat  # of both


def open_corpora(options: DataOptions) -> Corpora:
    """Find the sources and look at their content as far as the manifest needs; nothing is tokenised yet."""
    if options.dataset_name is not None:
        hub = hub_corpora(options)
        return Corpora(hub.train, hub.validation)
    if options.train_file is None:
        return Corpora(embedded_corpus(), None)
    column = options.text_column_name
    train = file_corpus(options.train_file, option="--train_file", column=column)
    if options.validation_file is None:
        return Corpora(train, None)
    return Corpora(train, file_corpus(options.validation_file, option="--validation_file", column=column))


def facts_of(corpora: Corpora, *, options: DataOptions) -> CorporaFacts:
    validation = None if corpora.validation is None else _facts(corpora.validation)
    return CorporaFacts(_facts(corpora.train), validation, choose_format(corpora.train, options=options))


def _facts(corpus: Corpus) -> CorpusFacts:
    return CorpusFacts(corpus.name, len(corpus.files), corpus.manifest)
