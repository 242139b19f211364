"""A tokenizer that ends documents: loaded by name, or a byte-level BPE trained on the corpus itself."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recipe.data.chunks import split_text
from recipe.data.documents import Corpus, InvalidTextError, digest_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_EOS = "<|endoftext|>"
TRAINING_CHARS = 32_000_000  # the BPE is trained on the first so many characters: merges settle long before


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
    """The same tokenizer with its end-of-sequence token settled."""
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
        self.prefix = self._find_prefix()

    @property
    def identity(self) -> str:
        """A digest of everything that decides which ids a text gets."""
        rules = self._fast.to_str() if self._fast is not None else sorted(self._tokenizer.get_vocab().items())
        return digest_of([type(self._tokenizer).__name__, rules, self.prefix, self.eos_id])

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """The ids of each text, [num_ids]; none of them begins or ends a document."""
        if self._fast is not None:
            rows = [encoding.ids for encoding in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        else:
            plain = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            rows = self._tokenizer(list(texts), **plain)["input_ids"]
        return [np.asarray(row, dtype=np.int64) for row in rows]

    def _find_prefix(self) -> tuple[int, ...]:
        bos_id = self._tokenizer.bos_token_id
        first = self._tokenizer("a")["input_ids"][:1]
        return (bos_id,) if bos_id is not None and bos_id != self.eos_id and first == [bos_id] else ()


def private_copy(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """The Rust tokenizer inside, copied so that nobody's settings change; None where there is none.

    What it encodes is text, and text that spells a special token is text.
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
