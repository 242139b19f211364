"""Small corpora, tokenizers and blocks that the data tests share."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipe.data.loader import LoaderOptions, StepLoader
from recipe.data.options import DataOptions
from recipe.data.packing import PackedBlocks, all_documents
from recipe.data.prepare import PreparedData, prepare_data
from recipe.shared.ranks import OneRank

EOS_ID = 1
BOS_ID = 2


def word_tokenizer(*, eos: bool = True, bos: bool = False, appends_eos: bool = False) -> Any:
    """Each word is a token: w0 to w199 have the ids 10 to 209, <system>, <user>, <assistant> and <tool> 3 to 6.

    Every other word is <unk>.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    roles = {f"<{role}>": number for number, role in enumerate(("system", "user", "assistant", "tool"), start=3)}
    vocab = {"<unk>": 0, "<eos>": EOS_ID, "<bos>": BOS_ID, **roles, **{f"w{i}": 10 + i for i in range(200)}}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos or appends_eos:
        template = ("<bos> " if bos else "") + "$A" + (" <eos>" if appends_eos else "")
        words.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<eos>", EOS_ID), ("<bos>", BOS_ID)]
        )
    named = {"unk_token": "<unk>"} | ({"eos_token": "<eos>"} if eos else {}) | ({"bos_token": "<bos>"} if bos else {})
    return PreTrainedTokenizerFast(tokenizer_object=words, **named)


def chat_tokenizer(template: str | None) -> Any:
    """A word_tokenizer with a chat template."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def save_words(folder: Path, **kinds: bool) -> str:
    """Save a word_tokenizer and return its path."""
    word_tokenizer(**kinds).save_pretrained(folder)
    return str(folder)


def write_rows(path: Path, texts: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def prepare(tmp_path: Path, *, ranks: Any = None, said: list[str] | None = None, **chosen: Any) -> PreparedData:
    """prepare_data with a cache under tmp_path; a word tokenizer and blocks of 4 unless told otherwise."""
    defaults: dict[str, Any] = {"block_size": 4, "cache_dir": str(tmp_path / "cache")}
    if "tokenizer_name" not in chosen:
        defaults["tokenizer_name"] = save_words(tmp_path / "words")
    options = DataOptions(**(defaults | chosen))
    return prepare_data(options, ranks=ranks or OneRank(), say=(said if said is not None else []).append)


def all_tokens(blocks: PackedBlocks) -> list[int]:
    return [token for index in range(len(blocks)) for token in blocks[index].input_ids.tolist()]


def numbered_blocks(num_blocks: int, *, block_size: int = 4) -> PackedBlocks:
    """Block i holds the token i only, and is one document."""
    tokens = np.repeat(np.arange(num_blocks), block_size).astype(np.uint16)
    ends = np.arange(1, num_blocks + 1, dtype=np.int64) * block_size
    return PackedBlocks(tokens, stretches=all_documents(ends), block_size=block_size)


def take_rows(blocks: PackedBlocks, *, position: int, num_steps: int, **options: Any) -> list[list[int]]:
    """The blocks that each of the next steps consists of on this rank, by the token they are filled with."""
    loader = StepLoader(blocks, options=LoaderOptions(**({"num_sequences": 1, "seed": 7} | options)))
    steps = loader.steps(position)
    rows = [rows_of(next(steps).micro_batches) for _ in range(num_steps)]
    steps.close()  # type: ignore[attr-defined]
    return rows


def rows_of(micro_batches: Sequence[Any]) -> list[int]:
    return [row for batch in micro_batches for row in batch.input_ids[:, 0].tolist()]
