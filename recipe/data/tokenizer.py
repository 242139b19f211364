"""A tokenizer that ends documents: loaded by name, fetched from the hub, or a BPE trained on the corpus itself."""

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipe.data.documents import Corpus, InvalidTextError, digest_of
from recipe.settings.model_source import HubModel, MissingFilesError, explain, hub_errors, is_on_hub
from recipe.shared.build_once import once_per_file_system
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_every, on_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_EOS = "<|endoftext|>"
TRAINING_CHARS = 32_000_000  # the BPE is trained on the first so many characters: merges settle long before
CHUNK_CHARS = 16_384  # a text is encoded in chunks of at most so many characters, see `split_text`
HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]  # what tokenizers are made of, their templates too

_WORD_GAP = re.compile(r"(?<=[^\W_]) (?=[^\W_])")
_ANY_GAP = re.compile(r"(?<=\S)\s")


class _Found(NamedTuple):
    """The tokenizer that the first rank downloaded."""

    source: HubModel  # its revision is a commit
    files: tuple[str, ...]


def fetch_tokenizer(name: str, *, ranks: Ranks, host: str | None = None) -> str:
    """Return the folder to load the tokenizer `name` from, downloaded once per file system if it is on the hub.

    Collective. Rank 0 asks the hub for the commit and for what its cache (HF_HOME) lacks; then one rank of each host
    whose cache lacks that commit downloads it, and all others read. `host` is this machine's name. ValueError on all
    ranks alike if the hub does not give it.
    """
    found = on_first(lambda: _find(name) if is_on_hub(name) else None, ranks=ranks)
    if found is None:
        return name
    once_per_file_system(
        lambda: _download(found.source),
        is_present=lambda: _is_present(found),
        what=f"the tokenizer {found.source}",
        ranks=ranks,
        host=host,
    )
    return on_every(lambda: str(_snapshot(found.source, local_files_only=True)), ranks=ranks)


def _find(name: str) -> _Found:
    folder = _snapshot(HubModel(name), local_files_only=False)
    here = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = tuple(file for file in here if any(fnmatch(file, pattern) for pattern in HUB_FILES))
    if not files:
        raise ValueError(_refusal(MissingFilesError(), HubModel(name)))
    return _Found(HubModel(name, folder.name), files)


def _download(source: HubModel) -> Generator[None, None, None]:
    _snapshot(source, local_files_only=False)
    yield


def _snapshot(source: HubModel, *, local_files_only: bool) -> Path:
    """Return the folder in the cache that is named after the commit."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source.name, revision=source.revision, allow_patterns=HUB_FILES, local_files_only=local_files_only
            )
        )
    except hub_errors() as error:
        raise ValueError(_refusal(error, source)) from error


def _is_present(found: _Found) -> bool:
    from huggingface_hub import try_to_load_from_cache

    name, commit = found.source
    return all(isinstance(try_to_load_from_cache(name, file, revision=commit), str) for file in found.files)


def _refusal(error: Exception, source: HubModel) -> str:
    return f"the tokenizer {source.name!r} cannot be loaded: {explain(error, model=source, wanted='tokenizer')}"


def load_tokenizer(
    name: str | Path, *, eos_token: str | None = None, chat_template: str | None = None
) -> "PreTrainedTokenizerBase":
    """Load with AutoTokenizer. It must have an end-of-sequence token, its own or `eos_token` from its vocabulary.

    chat_template  a file whose text replaces the tokenizer's own chat template
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise ValueError(f"the tokenizer {str(name)!r} cannot be loaded: {error}") from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat_template {chat_template} cannot be read: {error}") from error
    return with_eos(tokenizer, eos_token=eos_token)


def with_eos(tokenizer: "PreTrainedTokenizerBase", *, eos_token: str | None) -> "PreTrainedTokenizerBase":
    """Return the tokenizer with its end-of-sequence token settled."""
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            raise ValueError(f"--eos_token {eos_token!r} is not in the vocabulary of {tokenizer.name_or_path!r}")
        tokenizer.eos_token = eos_token
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token to put after each document; "
            "name one of its tokens with --eos_token"
        )
    return tokenizer


def train_tokenizer(
    folder: Path, *, corpus: Corpus, vocab_size: int, eos_token: str, skip_invalid_text: bool
) -> Iterator[None]:
    """Train a byte-level BPE on the first TRAINING_CHARS characters of `corpus` and save it into `folder`, in steps.

    A small corpus may give fewer than `vocab_size` entries.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos_token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    yield
    bpe.train_from_iterator(_sample(corpus, skip_invalid_text=skip_invalid_text), trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos_token).save_pretrained(folder)


def _sample(corpus: Corpus, *, skip_invalid_text: bool) -> Iterator[str]:
    num_chars = 0
    for document in corpus.read():
        try:
            for chunk in split_text(document.pieces):
                yield chunk
                num_chars += len(chunk)
                if num_chars >= TRAINING_CHARS:
                    return
        except InvalidTextError:
            if not skip_invalid_text:
                raise


def split_text(pieces: Iterable[str], *, chunk_chars: int = CHUNK_CHARS) -> Iterator[str]:
    """Cut a text that arrives in pieces into chunks of at most `chunk_chars` (at least 2) characters.

    A tokenizer's time and memory grow faster than its input. The chunks do not depend on how the pieces were cut; one
    piece and one chunk are in memory at a time. The cut goes in front of the last single space, in the second half of
    the chunk, that stands between two letters or digits; where there is none, in front of the last white space of that
    half; where there is none either, after `chunk_chars`. Byte-level BPE tokenizers in the manner of GPT-2 start a word
    at such a space anyway, so there the first kind of cut changes no token. Tokenizers that mark the start of a text,
    and text without spaces, may get a token more or less at a cut.
    """
    rest = ""
    for piece in pieces:
        text, start = rest + piece, 0
        # One character more than a chunk must be known: whether a cut at the very end is good depends on it.
        while len(text) - start > chunk_chars:
            end = start + _cut(text[start : start + chunk_chars + 1], chunk_chars=chunk_chars)
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        yield rest


def _cut(window: str, *, chunk_chars: int) -> int:
    """Return where to cut a window of chunk_chars + 1 characters: between half of chunk_chars and chunk_chars."""
    for gap in (_WORD_GAP, _ANY_GAP):
        found = [match.start() for match in gap.finditer(window, chunk_chars // 2)]
        fitting = [position for position in found if 0 < position <= chunk_chars]
        if fitting:
            return fitting[-1]
    return chunk_chars


class TextEncoder:
    """Encodes plain text to ids, without special tokens: text that spells one is text.

    Safe to call from several threads where `max_workers` is None; a tokenizer written in Python is not (`max_workers`
    is 1). `prefix` are the ids that start a document, and `eos_id` is the one that ends it: the tokenizer's
    beginning-of-sequence token stays where it puts one itself, unless that is also its end-of-sequence token; whatever
    it appends is replaced by exactly one `eos_id`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._fast = private_copy(tokenizer)
        self.max_workers = None if self._fast is not None else 1
        self.eos_id: int = tokenizer.eos_token_id
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        bos_id, first = tokenizer.bos_token_id, tokenizer("a")["input_ids"][:1]
        starts_with_bos = bos_id is not None and bos_id != self.eos_id and first == [bos_id]
        self.prefix: tuple[int, ...] = (bos_id,) if starts_with_bos else ()

    @property
    def identity(self) -> str:
        """Return a digest of everything that decides which ids a text gets."""
        rules = self._fast.to_str() if self._fast is not None else sorted(self._tokenizer.get_vocab().items())
        return digest_of([type(self._tokenizer).__name__, rules, self.prefix, self.eos_id])

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the ids of each text, [num_ids]; none of them begins or ends a document."""
        if self._fast is not None:
            rows = [encoding.ids for encoding in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        else:
            plain = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            rows = self._tokenizer(list(texts), **plain)["input_ids"]
        return [np.asarray(row, dtype=np.int64) for row in rows]


def private_copy(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """Return a copy of the Rust tokenizer inside, whose settings may be changed; None where there is none.

    It encodes text that spells a special token as text.
    """
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return None
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = True
    return copy
