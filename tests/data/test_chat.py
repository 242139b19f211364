"""Conversations and completions become documents of which the responses alone have labels, and every bad row is named.

The expected ids and labels are written by hand; what transformers and TRL make of the same rows is compared elsewhere.
"""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.data.conversations import RowEncoder
from recipe.data.corpora import file_corpus, hub_corpora
from recipe.data.documents import Corpus
from recipe.data.options import DataFormat
from recipe.data.packing import IGNORED
from recipe.data.prepare import PreparedData
from recipe.data.token_store import LeftOut, TokenStore, TokenWriter
from recipe.settings.flags import Arguments
from tests.data_samples import (
    FIVE_TURNS,
    MARKED,
    PLAIN,
    encode_row,
    one_turn,
    prepare,
    save_words,
    word_tokenizer,
    write_json,
)

USER, ASSISTANT = 4, 5
EOS = 1
PAIR = {"prompt": "w1", "completion": " w2"}


def encode(
    fields: dict[str, Any],
    *,
    name: str = "chat",
    train_on: str = "responses",
    template: str = PLAIN,
    tokenizer: Any = None,
) -> str:
    """The tokens of a row; those that are trained on end in a star."""
    tokenizer = tokenizer or word_tokenizer(template=template)
    ids, trained = encode_row(tokenizer, fields, name=name, train_on=train_on)
    words = tokenizer.convert_ids_to_tokens(ids)
    return " ".join(word + "*" * is_trained for word, is_trained in zip(words, trained, strict=True))


def weighted(*weights: object) -> list[dict[str, Any]]:
    """FIVE_TURNS, in which what the assistant says has these weights."""
    left = iter(weights)
    return [m | ({"weight": next(left)} if m["role"] == "assistant" else {}) for m in FIVE_TURNS]


def spelt(messages: list[dict[str, Any]]) -> dict[str, Any]:
    speakers = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [dict(message) for message in messages]
    return {"conversations": [{"from": speakers[m.pop("role")], "value": m.pop("content"), **m} for m in turns]}


def prepare_rows(
    tmp_path: Path, rows: Sequence[object], *, template: str | None = PLAIN, **chosen: Any
) -> PreparedData:
    defaults = {"tokenizer_name": save_words(tmp_path / "words", template=template)}
    return prepare(tmp_path, train_file=write_json(tmp_path / "rows.jsonl", rows), **(defaults | chosen))


BARE = (
    "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
TOOLS = "{% for t in tools or [] %}{{ t.name + ' ' }}{% endfor %}" + MARKED
SEES_CALLS = "{% for m in messages %}{{ 'w8 ' if 'tool_calls' in m else 'w9 ' }}{% endfor %}"
DOUBLED = MARKED.replace("{% generation %}", "{% generation %}{% endgeneration %}{% generation %}")
SHORTENED = MARKED.replace("m.content + ' <eos>'", "m.content[3:] + ' <eos>'")
FORGETS = PLAIN.replace("m.content", "(m.content if loop.last else 'w9')")
WANTS_TWO = "{% if messages | length == 1 %}{{ raise_exception('no user query') }}{% endif %}" + PLAIN
LOOKS_FIRST = "{% if messages[0].role == 'system' %}{% endif %}" + PLAIN
TURNS, PAIR_OF_TEXTS = {"messages": FIVE_TURNS}, {"prompt": "w1 w2", "completion": " w3"}
ONE, TOOL = one_turn("w1", "w2"), {"name": "w7"}

FIVE = "<system> w0 <eos> <user> w1 w2 <eos> <assistant> w3* w4* <eos>* <user> w5 <eos> <assistant> w6* <eos>*"
LAST = FIVE.replace("w3* w4* <eos>*", "w3 w4 <eos>")
FIRST = FIVE.replace("w6* <eos>*", "w6 <eos>")
FIVE_MARKED = "<system> w0 <user> w1 w2 <assistant> w3* w4* <eos>* <user> w5 <assistant> w6* <eos>*"
LAST_MARKED = FIVE_MARKED.replace("w3* w4* <eos>*", "w3 w4 <eos>")
FIRST_MARKED = FIVE_MARKED.replace("w6* <eos>*", "w6 <eos>")


@pytest.mark.parametrize(
    ("want", "fields", "chosen"),
    [
        (FIVE, TURNS, {}),  # without markers, what follows the generation prompt is trained on
        (FIVE_MARKED, TURNS, {"template": MARKED}),
        # An end is added where there is none, and trained on after a response.
        ("<user> w1 w2 <assistant> w3* w4* <eos>*", {"messages": FIVE_TURNS[1:3]}, {"template": BARE}),
        ("<user> w1 w2 <assistant> w3* w4* <user> w5 <eos>", {"messages": FIVE_TURNS[1:4]}, {"template": BARE}),
        (FIVE, spelt(FIVE_TURNS), {}),
        (FIVE, {"conversations": FIVE_TURNS, "messages": None}, {}),
        ("w7 <user> w1 <assistant> w2* <eos>*", ONE | {"tools": [TOOL]}, {"template": TOOLS}),
        ("w7 <user> w1 <assistant> w2* <eos>*", ONE | {"tools": '[{"name": "w7"}]'}, {"template": TOOLS}),
        ("<user> w1 <assistant> w2* <eos>*", ONE | {"tools": None}, {"template": TOOLS}),
        # Fields that a table filled with null are not there.
        (
            "w9* w9* <eos>*",
            {"messages": [m | {"tool_calls": None} for m in FIVE_TURNS[:2]]},
            {"train_on": "all", "template": SEES_CALLS},
        ),
        # A message of no weight has no labels.
        (LAST, {"messages": weighted(0, 1)}, {}),
        (FIRST, {"messages": weighted(1.0, 0.0)}, {}),
        (LAST, {"messages": weighted(0, None)}, {}),
        (LAST_MARKED, {"messages": weighted(0, 1)}, {"template": MARKED}),
        (FIRST_MARKED, {"messages": weighted(1.0, 0.0)}, {"template": MARKED}),
        (LAST_MARKED, {"messages": weighted(0, None)}, {"template": MARKED}),
        (LAST, spelt(weighted(0, 1)), {}),
        (FIVE_MARKED, {"messages": weighted(1, 1)}, {"template": DOUBLED}),
        (
            FIVE_MARKED.replace("w3* ", "").replace("w6* ", ""),
            {"messages": weighted(1, 1)},
            {"template": SHORTENED},
        ),
        (
            "<assistant> w3 w4 <eos> <user> w5 <eos> <assistant> w6* <eos>*",
            {"messages": weighted(0, 1)[2:]},
            {"template": LOOKS_FIRST},
        ),
        # A completion alone is trained on; a prompt starts where documents start.
        ("w1 w2 w3* <eos>*", PAIR_OF_TEXTS, {}),
        ("w1 w2 w3* <eos>*", PAIR_OF_TEXTS | {"completion": " w3 <eos>"}, {}),
        ("w1* w2* w3* <eos>*", PAIR_OF_TEXTS, {"train_on": "all"}),
        ("<bos> w1 w2* <eos>*", PAIR, {"tokenizer": word_tokenizer(bos=True)}),
        ("<bos> w1 w2* <eos>*", PAIR | {"prompt": "<bos> w1"}, {"tokenizer": word_tokenizer(bos=True)}),
        (LAST, {"prompt": FIVE_TURNS[:4], "completion": FIVE_TURNS[4:]}, {}),
        (LAST, {"prompt": weighted(0, 0)[:4], "completion": weighted(0, 1)[4:]}, {}),
    ],
)
def test_a_row_becomes_tokens_of_which_the_responses_are_trained_on(
    want: str, fields: dict[str, Any], chosen: dict[str, Any]
) -> None:
    assert encode(fields, name="prompt_completion" if "prompt" in fields else "chat", **chosen) == want


@pytest.mark.parametrize("template", [PLAIN, MARKED, FORGETS, WANTS_TWO, LOOKS_FIRST])
def test_any_template_will_do_where_every_token_is_trained_on(template: str) -> None:
    whole = encode({"messages": [FIVE_TURNS[0], *FIVE_TURNS[2:]]}, train_on="all", template=template)
    assert whole.split()[-2:] == ["w6*", "<eos>*"]
    assert whole.count("*") == len(whole.split()) >= 9


def test_blocks_ignore_what_is_not_trained_on_and_cut_long_conversations(tmp_path: Path) -> None:
    rows = [one_turn("w1", "w2"), one_turn("w3 w4", "w5 w6 w7"), one_turn("w8", "w9")]
    said: list[str] = []
    data = prepare_rows(tmp_path, rows, block_size=7, said=said, packing_strategy="wrapped")
    blocks = [data.train[index] for index in range(len(data.train))]
    assert [(block.input_ids.tolist(), block.labels.tolist()) for block in blocks] == [
        ([USER, 11, 1, ASSISTANT, 12, 1, USER], [IGNORED] * 4 + [12, 1, IGNORED]),
        ([13, 14, 1, ASSISTANT, 15, 16, 17], [IGNORED] * 4 + [15, 16, 17]),
        ([1, USER, 18, 1, ASSISTANT, 19, 1], [IGNORED] * 5 + [19, 1]),
    ]
    assert [block.document_starts for block in blocks] == [(0, 6), (0,), (0, 1)]
    assert data.train.first(2)[1].labels.tolist() == blocks[1].labels.tolist()
    reason = "because its first row has 'messages'"
    named = {"name": "chat", "train_on": "responses", "packing": "wrapped", "reason": reason}
    assert data.report["format"] == named
    assert data.report["train"]["num_trained_tokens"] == 2 + 4 + 2
    assert data.report["train"]["num_tokens"] == 21
    assert f"data: read as chat, {reason}; responses are trained on; documents are cut where a block ends" in said
    assert "data: train: 8 tokens (38.1 %) are trained on" in said


def test_conversations_that_fit_in_a_block_are_whole_there(tmp_path: Path) -> None:
    rows = [one_turn("w1", "w2"), one_turn("w3", "w4"), one_turn("w5 w6", "w7 w8 w9 w10 w11 w12 w13 w14 w15")]
    said: list[str] = []
    data = prepare_rows(tmp_path, [*rows, one_turn("w1", "w2")], block_size=10, said=said)
    blocks = [data.train[index] for index in range(len(data.train))]
    assert [block.input_ids.tolist() for block in blocks] == [
        [USER, 11, 1, ASSISTANT, 12, 1, 0, 0, 0, 0],
        [USER, 13, 1, ASSISTANT, 14, 1, 0, 0, 0, 0],
        [USER, 15, 16, 1, ASSISTANT, 17, 18, 19, 20, 21],  # longer than a block
        [22, 23, 24, 25, 1, 0, 0, 0, 0, 0],
        [USER, 11, 1, ASSISTANT, 12, 1, 0, 0, 0, 0],
    ]
    assert blocks[0].labels.tolist() == [IGNORED] * 4 + [12, 1] + [IGNORED] * 4
    assert [block.document_starts for block in blocks] == [(0, 6), (0, 6), (0,), (0, 5), (0, 6)]
    assert [block.num_tokens for block in blocks] == [6, 6, 10, 5, 6]
    counts = data.report["train"]
    assert (counts["num_tokens"], counts["num_padding_tokens"], counts["num_unused_tokens"]) == (33, 17, 0)
    assert "a document that fits in a block is in one, and blocks are padded" in said[1]
    assert "data: train: 17 positions (34.0 %) are padding" in said


def test_a_mask_is_stored_only_where_it_is_needed_and_names_its_own_cache(tmp_path: Path) -> None:
    rows = write_json(tmp_path / "rows.jsonl", [one_turn("w1", "w2"), one_turn("w3", "w4")])
    plain, marked = (save_words(tmp_path / name, template=value) for name, value in (("p", PLAIN), ("m", MARKED)))
    caches = []
    for tokenizer, train_on, data_format in (
        (plain, "auto", "auto"),
        (plain, "all", "auto"),
        (marked, "auto", "auto"),
        (plain, "responses", "chat"),
    ):
        chosen: dict[str, Any] = {"tokenizer_name": tokenizer, "train_on": train_on, "data_format": data_format}
        caches.append(Path(prepare(tmp_path, train_file=rows, **chosen).report["corpora"][0]["cache"]))
        assert (caches[-1] / "trained.bin").exists() == (train_on != "all")
    assert len(set(caches)) == 3
    assert caches[3] == caches[0]
    report = prepare(tmp_path, ["w1 w2 w3"] * 30).report
    assert not (Path(report["corpora"][0]["cache"]) / "trained.bin").exists()
    assert report["format"]["name"] == "text"
    assert report["train"]["num_trained_tokens"] == report["train"]["num_tokens"]


def test_a_store_with_another_mask_has_another_digest(tmp_path: Path) -> None:
    ids, digests = np.array([3, 4, 5]), []
    for name, trained in (("one", [True, False, True]), ("two", [True, True, False])):
        (tmp_path / name).mkdir()
        writer = TokenWriter(tmp_path / name, vocab_size=10, with_mask=True)
        writer.add(ids, trained=np.array(trained))
        writer.end_document()
        writer.add(ids, trained=np.array(trained))
        writer.cancel_document()
        assert list(writer.finish(LeftOut())) == [None]
        store = TokenStore(tmp_path / name)
        assert store.trained is not None
        assert store.trained.tolist() == trained
        assert store.tokens.tolist() == ids.tolist()
        assert store.token_counts().tolist() == np.bincount(ids[trained], minlength=10).tolist()
        digests.append(store.facts.digest)
    assert digests[0] != digests[1]


def test_held_out_rows_are_treated_alike_and_do_not_count_in_the_entropy(tmp_path: Path) -> None:
    rows = [one_turn("w1", "w5"), one_turn("w1", "w6")] * 5
    data = prepare_rows(tmp_path, rows, block_size=6, validation_split_percentage=50)
    # Every other row is held out: what is left has the responses w5 <eos> alone.
    assert data.report["unigram_entropy_nats"] == pytest.approx(math.log(2))
    assert data.report["train"]["num_trained_tokens"] == data.report["validation"]["num_trained_tokens"] == 10
    assert data.validation[0].labels.tolist() == [IGNORED] * 4 + [16, 1]
    validation = write_json(tmp_path / "validation.jsonl", [one_turn("w1 w2", "w9")])
    data = prepare_rows(tmp_path, rows, validation_file=validation)
    assert data.validation[0].labels.tolist() == [IGNORED] * 4
    assert data.report["validation"]["num_trained_tokens"] == 2


def test_rows_without_a_response_are_left_out_and_counted(tmp_path: Path) -> None:
    silent = {"messages": FIVE_TURNS[:2]}
    said: list[str] = []
    data = prepare_rows(tmp_path, [silent, one_turn("w1", "w2"), silent], said=said)
    path = str(tmp_path / "rows.jsonl")
    assert data.report["corpora"][0]["num_documents"] == 1
    assert data.report["corpora"][0]["skipped"] == {path: {"empty": 0, "untrained": 2, "invalid": 0}}
    assert f"data: {path}: skipped 0 empty and 0 invalid documents, 2 rows without a response" in said
    assert prepare_rows(tmp_path, [silent, one_turn("w1", "w2")], train_on="all").train.num_documents == 2
    with pytest.raises(ValueError, match=r"no row of .*rows.jsonl has a response .*rows.jsonl: 2 rows without a resp"):
        prepare_rows(tmp_path, [silent, silent])
    empty = [{"prompt": "w1", "completion": ""}, {"prompt": "", "completion": ""}]
    with pytest.raises(ValueError, match="1 rows without a response, 1 empty, 0 invalid"):
        prepare_rows(tmp_path, empty)


@pytest.mark.parametrize("train_on", ["all", "responses"])
def test_rows_without_text_are_empty(tmp_path: Path, train_on: str) -> None:
    nothing, path = {"prompt": "", "completion": ""}, str(tmp_path / "rows.jsonl")
    said: list[str] = []
    data = prepare_rows(tmp_path, [nothing, PAIR], train_on=train_on, said=said)
    assert data.report["corpora"][0]["skipped"] == {path: {"empty": 1, "untrained": 0, "invalid": 0}}
    assert f"data: {path}: skipped 1 empty and 0 invalid documents" in said
    with pytest.raises(ValueError, match=r"no row with text is left in .*: 0 rows .* 2 empty, 0 invalid\); check"):
        prepare_rows(tmp_path, [nothing] * 2, train_on=train_on)
    with pytest.raises(ValueError, match=r"no row with text is left in .*rows.jsonl \(there are no rows\); check"):
        prepare_rows(tmp_path, [], data_format="chat")


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([*FIVE_TURNS[1:3], {"role": "user", "content": "w1 " * 20}], r"validation .* response \(the last 10 of"),
        ([{"role": "user", "content": "w1 " * 20}, FIVE_TURNS[2]], "training part belongs to a response"),
    ],
)
def test_a_part_without_a_response_is_an_error(tmp_path: Path, messages: list[Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"no token of the {fault}"):
        prepare_rows(tmp_path, [{"messages": messages}], validation_split_percentage=34)


def test_invalid_utf_8_stops_or_is_skipped_and_counted(tmp_path: Path) -> None:
    good = json.dumps(one_turn("w1", "w2")).encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(good.replace(b"w1", b"\xff") + b"\n" + good + b"\n" + good.replace(b"w1", b"\\ud800") + b"\n")
    read = partial(
        prepare, tmp_path, train_file=str(path), tokenizer_name=save_words(tmp_path / "words", template=PLAIN)
    )
    for data_format in ("auto", "chat"):
        with pytest.raises(ValueError, match=r"rows.jsonl, line 1: the text is not valid UTF-8"):
            read(data_format=data_format)
    data = read(skip_invalid_text=True)
    assert data.report["format"]["name"] == "chat"
    assert data.report["corpora"][0]["skipped"] == {str(path): {"empty": 0, "untrained": 0, "invalid": 2}}
    assert data.train.num_documents == 1


def write_parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    """A folder that is a data set; its one file is train.parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return str(folder)


def test_a_row_of_a_table_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.array([b"fine", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"prompt": column, "completion": column}), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"bad.parquet, row 2: the text is not valid UTF-8"):
        prepare(tmp_path, train_file=str(tmp_path / "bad.parquet"))


def calling(name: str, arguments: object, parameters: object) -> dict[str, Any]:
    """A conversation that calls one tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [FIVE_TURNS[1], {"role": "assistant", "content": "w2", "tool_calls": [call]}]
    return {"messages": messages, "tools": [{"name": name, "parameters": parameters}]}


def test_tables_and_data_sets_give_the_rows_of_lines_and_no_nulls_of_their_own(tmp_path: Path) -> None:
    rows = [
        calling("w1", {"a": 1}, {"x": {"type": "w3"}}),
        calling("w2", {"b": {"c": ["w4", None]}}, {"y": {"type": "w5", "enum": ["w6"]}}),
        calling("w3", {}, {}),
        *(one_turn("w1", f"w{number}") for number in range(300)),
    ]
    template = PLAIN.replace("m.content", "m.content + ' ' + (m.tool_calls | tojson if m.tool_calls else '')")
    tokenizer = word_tokenizer(template="{{ tools | tojson }} " + template)
    encoder = RowEncoder(tokenizer, data_format=DataFormat("chat", "responses", "whole", ""))

    def texts(corpus: Corpus) -> list[str]:
        return [encoder.render(row).text for row in corpus.rows()]

    def texts_in(file: str) -> list[str]:
        return texts(file_corpus(file, option="--train_file", column="text"))

    *want, with_null = texts_in(write_json(tmp_path / "rows.jsonl", [*rows, calling("w1", {"a": None}, {})]))
    assert '"arguments": {"a": null}' in with_null
    folder = write_parquet(tmp_path / "set", rows)
    assert texts_in(f"{folder}/train.parquet") == want
    cache = str(tmp_path / "cache")
    assert texts(hub_corpora(Arguments(dataset_name=folder, cache_dir=cache))["train"]) == want
    data = prepare(
        tmp_path, dataset_name=folder, tokenizer_name=save_words(tmp_path / "words", template=PLAIN), block_size=6
    )
    assert data.report["corpora"][0]["num_documents"] == 303
    assert data.report["format"]["name"] == "chat"


def test_the_first_rows_columns_choose_the_format(tmp_path: Path) -> None:
    assert prepare_rows(tmp_path, [PAIR | {"text": None}] * 2).report["format"]["name"] == "prompt_completion"
    assert prepare_rows(tmp_path, [{"body": "w1 w2 w3"}], text_column_name="body").report["format"]["name"] == "text"
    both = one_turn("w1", "w2") | {"text": "w1 w2 w3"}
    with pytest.raises(ValueError, match=r"\['messages', 'text'\], which can be read as text or chat; say which by -"):
        prepare_rows(tmp_path, [both])
    assert prepare_rows(tmp_path, [both], data_format="chat").report["format"]["reason"] == "as --data_format says"
    assert prepare_rows(tmp_path, [both], data_format="text").train.num_tokens == 4


PLACE = "message 1 of 'messages': it must"
ALONE = (
    "the chat template refuses the first {} messages by themselves \\({}\\), so responses cannot be found in it; give "
)
ALONE += "another template by --chat_template FILE .* or --train_on all"


@pytest.mark.parametrize(
    ("row", "chosen", "message"),
    [
        ({"text": "w1"}, {}, r"must have 'messages' \(or 'conversations'\), .* has \['text'\]; rows of another kind"),
        ({"messages": []}, {}, "'messages' must be a list of one or more messages, not an empty list"),
        ({"messages": "w1"}, {}, "'messages' must be a list of one or more messages, not str"),
        ({"messages": ["w1"]}, {}, f"{PLACE} be an object with 'role' and 'content', not str"),
        ({"messages": [{"content": "w1"}]}, {}, f"{PLACE} have a 'role' that is a text"),
        ({"conversations": [{"from": "bing"}]}, {}, "message 1 of 'conversations': 'from' is 'bing', .* none of human"),
        ({"messages": [{"role": "oracle", "content": "w1"}]}, {}, "the chat template refuses this row: no role oracle"),
        ({"messages": [{"role": "user"}]}, {}, "the chat template refuses this row: .*content"),
        (ONE | {"tools": "{"}, {}, "'tools' is a text that is not JSON"),
        (ONE | {"tools": {"name": "w1"}}, {}, "'tools' must be a list of schemas, not dict"),
        ({"prompt": "w1"}, {}, r"every row must have 'prompt' and 'completion', and this one has \['prompt'\]"),
        (
            {"prompt": "w1", "completion": FIVE_TURNS},
            {},
            "must be two texts or two lists of messages, not str and list",
        ),
        ({"prompt": [], "completion": FIVE_TURNS}, {}, "'prompt' must be a list of one or more .* not an empty list"),
        ({"messages": weighted(0.5, 1)}, {}, r"message 3 of 'messages': 'weight' must be 0 \(do not .* not 0.5"),
        ({"messages": weighted(0, 1)}, {"template": DOUBLED}, r"a message is 0, .* the 2 .*\(4 stretches are"),
        ({"messages": weighted(0, 1)}, {"template": SHORTENED}, r"a message is 0, .* the 2 .*\(2 stretches are"),
        (
            {"messages": weighted(0, 1)},
            {"train_on": "all"},
            "is 0, but --train_on all trains on every token; leave the weight",
        ),
        (
            {"prompt": weighted(0, 0)[:4], "completion": weighted(1, 0)[4:]},
            {},
            "is 0, but a completion is trained on as a whole; leave the",
        ),
        (TURNS, {"template": FORGETS}, "the chat template writes the first 2 messages .*generation"),
        ({"messages": FIVE_TURNS[2:]}, {"template": LOOKS_FIRST}, ALONE.format(0, "list object has no element 0")),
        ({"messages": [FIVE_TURNS[0], *FIVE_TURNS[2:]]}, {"template": WANTS_TWO}, ALONE.format(1, "no user query")),
    ],
)
def test_a_row_that_cannot_be_used_names_its_place(row: dict[str, Any], chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 7\b.*{message}"):
        encode(row, name="prompt_completion" if "prompt" in row else "chat", **chosen)


def test_rows_of_mixed_kinds_are_an_error(tmp_path: Path) -> None:
    chat = one_turn("w1", "w2")
    for rows, needed in (
        ([chat, PAIR], r"'messages' .*\['prompt', 'completion"),
        ([PAIR, chat], r"'prompt' and .*\['messages'\]"),
    ):
        with pytest.raises(ValueError, match=rf"rows.jsonl, line 2: every row must have {needed}"):
            prepare_rows(tmp_path, rows)


def test_a_text_file_has_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3")
    read = partial(prepare, tmp_path, train_file=str(tmp_path / "a.txt"))
    assert read().report["format"]["name"] == "text"
    with pytest.raises(ValueError, match=r"a.txt: every row must have 'messages' .* and this one has \[\]"):
        read(data_format="chat", tokenizer_name=save_words(tmp_path / "words", template=PLAIN))


def test_a_template_may_be_given_instead_of_the_tokenizers_own(tmp_path: Path) -> None:
    (tmp_path / "marked.jinja").write_text(MARKED)
    data = prepare_rows(tmp_path, [TURNS], template=FORGETS, chat_template=str(tmp_path / "marked.jinja"))
    assert data.tokenizer.chat_template == MARKED
    assert data.report["train"]["num_trained_tokens"] == 5


def test_templates_that_are_missing_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"words' has no chat template .*; give one by --chat_template FILE"):
        prepare_rows(tmp_path, [one_turn("w1", "w2")], template=None)
    with pytest.raises(ValueError, match=r"--chat_template .*none.jinja cannot be read: .*No such file"):
        prepare_rows(tmp_path, [one_turn("w1", "w2")], chat_template=str(tmp_path / "none.jinja"))
    fields = {"prompt": FIVE_TURNS[:2], "completion": FIVE_TURNS[2:]}
    with pytest.raises(ValueError, match="has no chat template"):
        encode(fields, name="prompt_completion", tokenizer=word_tokenizer())


def test_a_tokenizer_without_places_is_refused() -> None:
    from transformers import ByT5Tokenizer

    with pytest.raises(ValueError, match=r"chat data needs a fast tokenizer, .*; ByT5Tokenizer is none"):
        encode(one_turn("w1", "w2"), tokenizer=ByT5Tokenizer())


def test_options_that_do_not_go_with_the_format_that_is_found_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)read as chat, because its first row has 'messages', .* tokenizer_name"):
        prepare_rows(tmp_path, [one_turn("w1", "w2")], tokenizer_name=None)
    with pytest.raises(ValueError, match=r"(?s)read as text, .* and the options do not .*train_on=responses clashes"):
        prepare(tmp_path, ["w1"], tokenizer_name=save_words(tmp_path / "plain"), train_on="responses")
