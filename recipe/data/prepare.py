"""The user's options to a tokenizer and packed blocks; all ranks get them, or all raise the same error.

Tokenizers and tokens are kept between runs, each in a folder named after everything it depends on.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recipe.data.conversations import RowEncoder
from recipe.data.corpora import open_corpora
from recipe.data.documents import Corpus, CorpusFacts, digest_of
from recipe.data.options import DataFormat, choose_format, format_faults
from recipe.data.packing import Holdout, PackedBlocks, Stretches, all_documents, hold_out
from recipe.data.token_store import FORMAT, TokenStore, entropy_nats
from recipe.data.tokenise import tokenise
from recipe.data.tokenizer import (
    CHUNK_CHARS,
    DEFAULT_EOS,
    TRAINING_CHARS,
    TextEncoder,
    fetch_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from recipe.settings.flags import Arguments
from recipe.shared.build_once import build_once, discard
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


def prepare_data(options: Arguments, *, ranks: Ranks, say: Callable[[str], None]) -> PreparedData:
    """Find, tokenise (once) and pack the corpus. Collective: an error on one rank is raised on all.

    `options` have none of the faults that `option_faults` finds. Without `tokenizer_name` a byte-level BPE of
    `train_vocab_size` entries is trained on the training corpus. One rank of each file system reads the sources; all
    ranks read its cache. `say` is called on every rank with the same lines. A user's mistake is a ValueError, anything
    else a RanksFailedError.
    """
    corpora = functools.cache(partial(open_corpora, options))  # opened on the ranks that read, and once
    facts = on_first(lambda: {part: corpus.facts for part, corpus in corpora().items()}, ranks=ranks)
    data_format = on_first(lambda: choose_format(corpora()["train"], options=options), ranks=ranks)
    say(_sources_line(facts, options=options, ranks=ranks))
    say(_format_line(data_format, options=options))

    def open_corpus(part: str) -> Corpus:
        assert part in corpora(), f"rank 0 found a corpus for {part}, this rank finds none"
        return corpora()[part]

    open_train = partial(open_corpus, "train")
    tokenizer = get_tokenizer(open_train, manifest=facts["train"].manifest, options=options, ranks=ranks)
    encoder = on_every(partial(_make_encoder, tokenizer, data_format=data_format), ranks=ranks)
    stores = {
        part: get_tokens(
            partial(open_corpus, part),
            manifest=facts[part].manifest,
            encoder=encoder,
            max_documents=options.max_train_documents if part == "train" else None,
            options=options,
            ranks=ranks,
        )
        for part in facts
    }
    holdout = _hold_out(stores, options=options)
    pack = partial(_pack, options=options, whole=data_format.packing == "whole")
    train = pack(stores["train"], holdout.train)
    validation = pack(stores.get("validation", stores["train"]), holdout.validation)
    # Every rank sees the same stores, so every rank raises here or none does.
    if not len(train):
        raise ValueError(
            f"the training text has {train.num_tokens} tokens, less than one block of "
            f"block_size={options.block_size}; give more text or choose a smaller --block_size"
        )
    if not len(validation) and ("validation" in stores or options.validation_split_percentage):
        raise ValueError(
            f"the validation text has {validation.num_tokens} tokens, less than one block of "
            f"block_size={options.block_size}; name a --validation_file, choose a larger "
            "--validation_split_percentage, or 0 to train without validation"
        )
    count = partial(_count_trained, stores, holdout=holdout)
    num_train, num_validation, unigram_entropy_nats = on_first(count, ranks=ranks)
    report = {
        "vocab_size": encoder.vocab_size,
        "unigram_entropy_nats": unigram_entropy_nats,
        "format": data_format._asdict(),
        "holdout": holdout.rule,
        "train": _part_report(train, num_trained=num_train),
        "validation": _part_report(validation, num_trained=num_validation),
        "corpora": [_corpus_report(facts[part], store=store) for part, store in stores.items()],
    }
    for line in _result_lines(report):
        say(line)
    return PreparedData(tokenizer, train, validation, report)


def _make_encoder(tokenizer: "PreTrainedTokenizerBase", *, data_format: DataFormat) -> TextEncoder | RowEncoder:
    return TextEncoder(tokenizer) if data_format.name == "text" else RowEncoder(tokenizer, data_format=data_format)


def _hold_out(stores: Mapping[str, TokenStore], *, options: Arguments) -> Holdout:
    train = stores["train"].ends
    if "validation" not in stores:
        return hold_out(train, percentage=options.validation_split_percentage)
    validation = all_documents(stores["validation"].ends)
    return Holdout(all_documents(train), validation, "validation has a corpus of its own")


def _pack(store: TokenStore, stretches: Stretches, *, options: Arguments, whole: bool) -> PackedBlocks:
    return PackedBlocks(
        store.tokens, stretches=stretches, block_size=options.block_size, trained=store.trained, whole=whole
    )


def _count_trained(stores: Mapping[str, TokenStore], *, holdout: Holdout) -> tuple[int, int, float]:
    """Count the tokens trained on in each part, and find the entropy of the first; ValueError if a part has none."""
    counts = stores["train"].token_counts()
    if "validation" in stores:
        num_validation = stores["validation"].facts.num_trained_tokens
    else:
        held_out = stores["train"].count_tokens(starts=holdout.validation.starts, ends=holdout.validation.ends)
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
    return num_train, num_validation, entropy_nats(counts)


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


def _sources_line(facts: Mapping[str, CorpusFacts], *, options: Arguments, ranks: Ranks) -> str:
    num_files = sum(corpus.num_files for corpus in facts.values())
    return (
        f"data: {facts['train'].name} ({num_files} files), read once by 1 of {ranks.world_size} ranks with "
        f"{num_tokenising_workers(options)} workers and shared as a cache; 1 file is enough for any number of ranks "
        "and workers, and neither changes the order"
    )


def _format_line(data_format: DataFormat, *, options: Arguments) -> str:
    """Say how rows are read; ValueError if the format found in the data clashes with the other options."""
    faults = list(format_faults(options, data_format=data_format.name))
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


def cache_folder(options: Arguments) -> Path:
    """Return the folder that the options name, or gather-moe in the user's cache folder."""
    if options.cache_dir is not None:
        return Path(options.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gather-moe"


def num_tokenising_workers(options: Arguments) -> int:
    return options.preprocessing_num_workers or os.cpu_count() or 1


def get_tokenizer(
    open_corpus: Callable[[], Corpus], *, manifest: str, options: Arguments, ranks: Ranks
) -> "PreTrainedTokenizerBase":
    """Return the tokenizer that the options name, or one trained on a corpus, equal on every rank. Collective.

    Only a rank that trains it calls `open_corpus`; `manifest` is that of the corpus.
    """
    if options.tokenizer_name is not None:
        source = fetch_tokenizer(options.tokenizer_name, ranks=ranks)
        load_named = partial(load_tokenizer, source, eos_token=options.eos_token, chat_template=options.chat_template)
        return on_every(load_named, ranks=ranks)
    eos_token = options.eos_token or DEFAULT_EOS
    settings = (options.train_vocab_size, eos_token, options.text_column_name, options.skip_invalid_text)
    key = digest_of(["tokenizer", FORMAT, CHUNK_CHARS, TRAINING_CHARS, manifest, *settings])

    def build(folder: Path) -> Iterator[None]:
        return train_tokenizer(
            folder,
            corpus=open_corpus(),
            vocab_size=options.train_vocab_size,
            eos_token=eos_token,
            skip_invalid_text=options.skip_invalid_text,
        )

    folder = _ensure(f"tokenizer-{key}", build, options=options, ranks=ranks)
    return on_every(partial(load_tokenizer, folder), ranks=ranks)


def get_tokens(
    open_corpus: Callable[[], Corpus],
    *,
    manifest: str,
    encoder: TextEncoder | RowEncoder,
    max_documents: int | None,
    options: Arguments,
    ranks: Ranks,
) -> TokenStore:
    """Return a corpus as tokens, cached before or read now, equal on every rank. Collective.

    Only a rank that reads it calls `open_corpus`; `manifest` is that of the corpus.
    """
    _check_equal(encoder.identity, ranks=ranks, what="tokenizer")
    settings = (max_documents, options.text_column_name, options.skip_invalid_text)
    key = digest_of(["tokens", FORMAT, CHUNK_CHARS, manifest, encoder.identity, *settings])

    def build(folder: Path) -> Iterator[None]:
        return tokenise(
            folder,
            corpus=open_corpus(),
            encoder=encoder,
            num_workers=encoder.max_workers or num_tokenising_workers(options),
            skip_invalid_text=options.skip_invalid_text,
            max_documents=max_documents,
            show_progress=ranks.rank == 0,
        )

    folder = _ensure(f"tokens-{key}", build, options=options, ranks=ranks)
    store = on_every(partial(TokenStore, folder), ranks=ranks)
    _check_equal(store.facts.digest, ranks=ranks, what=f"tokens in {folder}")
    return store


def _ensure(name: str, build: Callable[[Path], Iterator[None]], *, options: Arguments, ranks: Ranks) -> Path:
    folder = cache_folder(options) / name
    if options.overwrite_cache:
        discard(folder, ranks=ranks)
    build_once(folder, build, ranks=ranks)
    return folder


def _check_equal(identity: str, *, ranks: Ranks, what: str) -> None:
    """Raise on all ranks unless they hold the same: hosts may hold different files under one name."""
    identities = ranks.gather(identity)
    differing = [rank for rank, other in enumerate(identities) if other != identities[0]]
    if differing:
        raise ValueError(
            f"ranks {differing} have another {what} than rank 0; make the files equal on all hosts, "
            "then pass --overwrite_cache"
        )
