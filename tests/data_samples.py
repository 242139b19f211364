"""Small corpora, tokenizers and blocks that the data tests share."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.data.conversations import RowEncoder
from recipe.data.documents import Corpus, Document, Row
from recipe.data.loader import LoaderOptions, StepLoader
from recipe.data.options import DataFormat
from recipe.data.packing import PackedBlocks, all_documents
from recipe.data.prepare import PreparedData, prepare_data
from recipe.data.tokenizer import load_tokenizer, train_tokenizer
from recipe.settings.flags import Arguments
from recipe.shared.ranks import OneRank

EOS_ID = 1
BOS_ID = 2
# Chat templates that write a word for the role in front of each message, without and with marked responses.
PLAIN = (
    "{% for m in messages %}"
    "{% if m.role == 'oracle' %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{{ '<' + m.role + '> ' + m.content + ' <eos> ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<' + m.role + '> ' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' <eos>' }}{% endgeneration %}{{ ' ' }}"
    "{% else %}{{ m.content + ' ' }}{% endif %}"
    "{% endfor %}"
)
FIVE_TURNS = [
    {"role": "system", "content": "w0"},
    {"role": "user", "content": "w1 w2"},
    {"role": "assistant", "content": "w3 w4"},
    {"role": "user", "content": "w5"},
    {"role": "assistant", "content": "w6"},
]


def word_tokenizer(
    *, template: str | None = None, eos: bool = True, bos: bool = False, appends_eos: bool = False
) -> Any:
    """Each word is a token: w0 to w199 have the ids 10 to 209, <system>, <user>, <assistant> and <tool> 3 to 6.

    Every other word is <unk>. `template` is for chat.
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
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **named)
    tokenizer.chat_template = template
    return tokenizer


def save_words(folder: Path, **kinds: Any) -> str:
    """Save a word_tokenizer and return its path."""
    word_tokenizer(**kinds).save_pretrained(folder)
    return str(folder)


def english() -> str:
    """About 50 kB of text with words, code, numbers and line ends."""
    return "".join(Path(str(module.__file__)).read_text() for module in (random, json, pytest))


def small_bpe(folder: Path, *, vocab_size: int = 1000) -> Any:
    """A byte-level BPE trained on `english`."""
    corpus = Corpus(name="c", files=(), manifest="", read=lambda: iter([Document("c", [english()])]))
    for _ in train_tokenizer(folder, corpus=corpus, vocab_size=vocab_size, eos_token="<e>", skip_invalid_text=False):
        pass
    return load_tokenizer(folder)


def write_json(path: Path, rows: Iterable[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_rows(path: Path, texts: Iterable[object]) -> str:
    return write_json(path, ({"text": text} for text in texts))


def one_turn(user: str, assistant: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def encode_row(
    tokenizer: Any, fields: dict[str, Any], *, name: str, train_on: str = "responses"
) -> tuple[list[int], list[bool]]:
    """The ids of a row of chat data, and which of them are trained on."""
    encoder = RowEncoder(tokenizer, data_format=DataFormat(name, train_on, "whole", ""))
    ids, trained = encoder.encode([encoder.render(Row("rows.jsonl", "rows.jsonl, line 7", lambda: fields))])[0]
    assert ids.dtype == np.int64
    assert trained.dtype == np.bool_
    return ids.tolist(), trained.tolist()


def prepare(
    tmp_path: Path,
    texts: Iterable[object] | None = None,
    *,
    ranks: Any = None,
    said: list[str] | None = None,
    **chosen: Any,
) -> PreparedData:
    """prepare_data with a cache under tmp_path; a word tokenizer, blocks of 4, nothing held out unless told otherwise.

    `texts` are written to a.jsonl and read from it.
    """
    defaults: dict[str, Any] = {
        "block_size": 4,
        "cache_dir": str(tmp_path / "cache"),
        "validation_split_percentage": 0,
    }
    if texts is not None:
        defaults["train_file"] = write_rows(tmp_path / "a.jsonl", texts)
    if "tokenizer_name" not in chosen:
        defaults["tokenizer_name"] = save_words(tmp_path / "words")
    options = Arguments(**(defaults | chosen))
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
