"""The cache of tokenizers and tokens between runs, each in a folder named after everything it depends on."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.data.conversations import RowEncoder
from recipe.data.corpora import CorpusFacts
from recipe.data.documents import Corpus, digest_of
from recipe.data.options import DataOptions
from recipe.data.token_store import FORMAT, TokenStore
from recipe.data.tokenise import TokeniseOptions, tokenise
from recipe.data.tokenizer import (
    CHUNK_CHARS,
    DEFAULT_EOS,
    TRAINING_CHARS,
    TextEncoder,
    fetch_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from recipe.shared.build_once import build_once, discard
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_every

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class CachedCorpus:
    """A corpus to be cached. `open` finds its documents; only a rank that reads them calls it."""

    facts: CorpusFacts
    open: Callable[[], Corpus]
    max_documents: int | None = None


def cache_folder(options: DataOptions) -> Path:
    """Return the folder that the options name, or gather-moe in the user's cache folder."""
    if options.cache_dir is not None:
        return Path(options.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gather-moe"


def num_tokenising_workers(options: DataOptions) -> int:
    return options.preprocessing_num_workers or os.cpu_count() or 1


def get_tokenizer(corpus: CachedCorpus, *, options: DataOptions, ranks: Ranks) -> "PreTrainedTokenizerBase":
    """Return the tokenizer that the options name, or one trained on the corpus, equal on every rank. Collective."""
    if options.tokenizer_name is not None:
        source = fetch_tokenizer(options.tokenizer_name, ranks=ranks)
        load_named = partial(load_tokenizer, source, eos_token=options.eos_token, chat_template=options.chat_template)
        return on_every(load_named, ranks=ranks)
    eos_token = options.eos_token or DEFAULT_EOS
    settings = (options.train_vocab_size, eos_token, options.text_column_name, options.skip_invalid_text)
    key = digest_of(["tokenizer", FORMAT, CHUNK_CHARS, TRAINING_CHARS, corpus.facts.manifest, *settings])

    def build(folder: Path) -> Iterator[None]:
        return train_tokenizer(
            folder,
            corpus=corpus.open(),
            vocab_size=options.train_vocab_size,
            eos_token=eos_token,
            skip_invalid_text=options.skip_invalid_text,
        )

    folder = _ensure(f"tokenizer-{key}", build, options=options, ranks=ranks)
    return on_every(partial(load_tokenizer, folder), ranks=ranks)


def get_tokens(
    corpus: CachedCorpus, *, encoder: TextEncoder | RowEncoder, options: DataOptions, ranks: Ranks
) -> TokenStore:
    """Return the corpus as tokens, cached before or read now, equal on every rank. Collective."""
    _check_equal(encoder.identity, ranks=ranks, what="tokenizer")
    settings = (corpus.max_documents, options.text_column_name, options.skip_invalid_text)
    key = digest_of(["tokens", FORMAT, CHUNK_CHARS, corpus.facts.manifest, encoder.identity, *settings])
    tokenise_options = TokeniseOptions(
        num_workers=encoder.max_workers or num_tokenising_workers(options),
        skip_invalid_text=options.skip_invalid_text,
        max_documents=corpus.max_documents,
        show_progress=ranks.rank == 0,
    )

    def build(folder: Path) -> Iterator[None]:
        return tokenise(folder, corpus=corpus.open(), encoder=encoder, options=tokenise_options)

    folder = _ensure(f"tokens-{key}", build, options=options, ranks=ranks)
    store = on_every(partial(TokenStore, folder), ranks=ranks)
    _check_equal(store.facts.digest, ranks=ranks, what=f"tokens in {folder}")
    return store


def _ensure(name: str, build: Callable[[Path], Iterator[None]], *, options: DataOptions, ranks: Ranks) -> Path:
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
