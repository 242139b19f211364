"""The user's options to a tokenizer and packed blocks; all ranks get them, or all raise the same error."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from recipe.data.cache import CachedCorpus, get_tokenizer, get_tokens, num_tokenising_workers
from recipe.data.conversations import RowEncoder
from recipe.data.corpora import CorporaFacts, CorpusFacts, facts_of, open_corpora
from recipe.data.documents import Corpus
from recipe.data.options import DataFormat, DataOptions, check_options, format_faults
from recipe.data.packing import Holdout, PackedBlocks, all_documents, hold_out
from recipe.data.token_store import TokenStore, entropy_nats
from recipe.data.tokenizer import TextEncoder
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_every, on_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SKIPPED_FILES_SHOWN = 20


class PreparedData(NamedTuple):
    """The tokenizer and both parts; `validation` has no blocks if the user asked for none, `report` is plain JSON."""

    tokenizer: "PreTrainedTokenizerBase"
    train: PackedBlocks
    validation: PackedBlocks
    report: dict[str, Any]


class _Stores(NamedTuple):
    train: TokenStore
    validation: TokenStore | None  # None: part of the training store is held out


class _Blocks(NamedTuple):
    train: PackedBlocks
    validation: PackedBlocks


class _Counts(NamedTuple):
    """Tokens trained on in each part, and the entropy of those in the training part."""

    train: int
    validation: int
    entropy_nats: float


def prepare_data(options: DataOptions, *, ranks: Ranks, say: Callable[[str], None]) -> PreparedData:
    """Find, tokenise (once) and pack the corpus. Collective: an error on one rank is raised on all.

    One rank of each file system reads the sources; all ranks read its cache. `say` is called on every rank with the
    same lines. A user's mistake is a ValueError, anything else a RanksFailedError.
    """
    check_options(options)
    corpora = functools.cache(partial(open_corpora, options))  # opened on the ranks that read, and once
    facts = on_first(lambda: facts_of(corpora(), options=options), ranks=ranks)
    say(_sources_line(facts, options=options, ranks=ranks))
    say(_format_line(facts.data_format, options=options))

    def open_validation() -> Corpus:
        validation = corpora().validation
        assert validation is not None, "rank 0 found a validation corpus, this rank finds none"
        return validation

    train = CachedCorpus(facts=facts.train, open=lambda: corpora().train, max_documents=options.max_train_documents)
    tokenizer = get_tokenizer(train, options=options, ranks=ranks)
    encoder = on_every(partial(_make_encoder, tokenizer, data_format=facts.data_format), ranks=ranks)
    get = partial(get_tokens, encoder=encoder, options=options, ranks=ranks)
    stores = _Stores(
        get(train),
        None if facts.validation is None else get(CachedCorpus(facts=facts.validation, open=open_validation)),
    )
    holdout = _hold_out(stores, options=options)
    blocks = _pack(stores, holdout=holdout, options=options, whole=facts.data_format.packing == "whole")
    counts = on_first(partial(_count_trained, stores, holdout=holdout), ranks=ranks)
    corpora_reports = [_corpus_report(facts.train, store=stores.train)]
    if facts.validation is not None and stores.validation is not None:
        corpora_reports.append(_corpus_report(facts.validation, store=stores.validation))
    report = {
        "vocab_size": encoder.vocab_size,
        "unigram_entropy_nats": counts.entropy_nats,
        "format": facts.data_format._asdict(),
        "holdout": holdout.rule,
        "train": _part_report(blocks.train, num_trained=counts.train),
        "validation": _part_report(blocks.validation, num_trained=counts.validation),
        "corpora": corpora_reports,
    }
    for line in _result_lines(report):
        say(line)
    return PreparedData(tokenizer, blocks.train, blocks.validation, report)


def _make_encoder(tokenizer: "PreTrainedTokenizerBase", *, data_format: DataFormat) -> TextEncoder | RowEncoder:
    return TextEncoder(tokenizer) if data_format.name == "text" else RowEncoder(tokenizer, data_format=data_format)


def _hold_out(stores: _Stores, *, options: DataOptions) -> Holdout:
    if stores.validation is None:
        return hold_out(stores.train.ends, percentage=options.validation_split_percentage)
    return Holdout(
        all_documents(stores.train.ends), all_documents(stores.validation.ends), "validation has a corpus of its own"
    )


def _pack(stores: _Stores, *, holdout: Holdout, options: DataOptions, whole: bool) -> _Blocks:
    """Pack both parts. Every rank sees the same stores, so every rank raises here or none does."""
    size, train, validation = options.block_size, stores.train, stores.validation or stores.train
    blocks = _Blocks(
        PackedBlocks(train.tokens, stretches=holdout.train, block_size=size, trained=train.trained, whole=whole),
        PackedBlocks(
            validation.tokens, stretches=holdout.validation, block_size=size, trained=validation.trained, whole=whole
        ),
    )
    if not len(blocks.train):
        raise ValueError(
            f"the training text has {blocks.train.num_tokens} tokens, less than one block of "
            f"block_size={options.block_size}; give more text or choose a smaller --block_size"
        )
    if not len(blocks.validation) and (stores.validation is not None or options.validation_split_percentage):
        raise ValueError(
            f"the validation text has {blocks.validation.num_tokens} tokens, less than one block of "
            f"block_size={options.block_size}; name a --validation_file, choose a larger "
            "--validation_split_percentage, or 0 to train without validation"
        )
    return blocks


def _count_trained(stores: _Stores, *, holdout: Holdout) -> _Counts:
    """Count the tokens trained on in each part; ValueError if a part has none."""
    counts = stores.train.token_counts()
    if stores.validation is not None:
        num_validation = stores.validation.facts.num_trained_tokens
    else:
        held_out = stores.train.count_tokens(starts=holdout.validation.starts, ends=holdout.validation.ends)
        counts, num_validation = counts - held_out, int(held_out.sum())
    num_train = int(counts.sum())
    for part, num_trained, stretches in (
        ("training", num_train, holdout.train),
        ("validation", num_validation, holdout.validation),
    ):
        if not num_trained and len(stretches.starts):
            raise ValueError(
                f"no token of the {part} part belongs to a response ({holdout.rule}); give more rows, a "
                "--validation_file, or --validation_split_percentage 0"
            )
    return _Counts(num_train, num_validation, entropy_nats(counts))


def _part_report(blocks: PackedBlocks, *, num_trained: int) -> dict[str, int]:
    return {
        "num_documents": blocks.num_documents,
        "num_tokens": blocks.num_tokens,
        "num_trained_tokens": num_trained,
        "num_blocks": len(blocks),
        "num_unused_tokens": blocks.num_unused_tokens,
        "num_padding_tokens": blocks.num_padding_tokens,
    }


def _corpus_report(facts: CorpusFacts, *, store: TokenStore) -> dict[str, Any]:
    facts_by_kind = {
        "empty": store.facts.num_empty,
        "untrained": store.facts.num_untrained,
        "invalid": store.facts.num_invalid,
    }
    skipped = sorted({file for by_file in facts_by_kind.values() for file in by_file})
    return {
        "name": facts.name,
        "num_files": facts.num_files,
        "manifest": facts.manifest,
        "cache": str(store.folder),
        "num_documents": store.facts.num_documents,
        "num_tokens": store.facts.num_tokens,
        "num_eos_in_text": store.facts.num_eos_in_text,
        "skipped": {file: {kind: by_file.get(file, 0) for kind, by_file in facts_by_kind.items()} for file in skipped},
    }


def _sources_line(facts: CorporaFacts, *, options: DataOptions, ranks: Ranks) -> str:
    num_files = facts.train.num_files + (facts.validation.num_files if facts.validation is not None else 0)
    return (
        f"data: {facts.train.name} ({num_files} files), read once by 1 of {ranks.world_size} ranks with "
        f"{num_tokenising_workers(options)} workers and shared as a cache; 1 file is enough for any number of ranks "
        "and workers, and neither changes the order"
    )


def _format_line(data_format: DataFormat, *, options: DataOptions) -> str:
    """Say how rows are read; ValueError if the format found in the data clashes with the other options."""
    faults = format_faults(options, data_format=data_format.name)
    if faults:
        raise ValueError(
            f"the data is read as {data_format.name}, {data_format.reason}, and the options do not go with that:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
        )
    what = {"responses": "responses are", "all": "every token is"}[data_format.train_on]
    how = {
        "wrapped": "documents are cut where a block ends",
        "whole": "a document that fits in a block is in one, and blocks are padded",
    }[data_format.packing]
    return f"data: read as {data_format.name}, {data_format.reason}; {what} trained on; {how}"


def _result_lines(report: dict[str, Any]) -> Iterator[str]:
    for corpus in report["corpora"]:
        yield f"data: {corpus['name']}: {corpus['num_documents']:,} documents, {corpus['num_tokens']:,} tokens"
        skipped = list(corpus["skipped"].items())
        for file, count in skipped[:SKIPPED_FILES_SHOWN]:
            untrained = f", {count['untrained']} rows without a response" if count["untrained"] else ""
            yield f"data: {file}: skipped {count['empty']} empty and {count['invalid']} invalid documents{untrained}"
        if len(skipped) > SKIPPED_FILES_SHOWN:
            yield f"data: {len(skipped) - SKIPPED_FILES_SHOWN} more files with skipped documents are in the report"
        if corpus["num_eos_in_text"]:
            yield f"data: {corpus['num_eos_in_text']} end-of-document tokens spelt by the text itself were dropped"
    for name in ("train", "validation"):
        part = report[name]
        yield (
            f"data: {name}: {part['num_blocks']:,} blocks; {part['num_unused_tokens']:,} tokens at the end "
            "fill no block and are not used"
        )
        if part["num_trained_tokens"] < part["num_tokens"]:
            share = 100 * part["num_trained_tokens"] / part["num_tokens"]
            yield f"data: {name}: {part['num_trained_tokens']:,} tokens ({share:.1f} %) are trained on"
        if part["num_padding_tokens"]:
            share = 100 * part["num_padding_tokens"] / (part["num_tokens"] + part["num_padding_tokens"])
            yield f"data: {name}: {part['num_padding_tokens']:,} positions ({share:.1f} %) are padding"
    yield f"data: {report['holdout']}; training wraps to a new epoch, so every rank takes the same number of steps"
    yield f"data: a guess from token frequencies alone has a loss of {report['unigram_entropy_nats']:.4f}"
