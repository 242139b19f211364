"""From options to blocks: every kind of source and bad input, the cache, the ranks in step (R-DATA-07, 08 and 10)."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.data import token_store
from recipe.data.options import EMBEDDED, option_faults
from recipe.data.prepare import cache_folder
from recipe.data.token_store import LeftOut, TokenStore, TokenWriter
from recipe.settings.flags import Arguments
from recipe.shared.ranks import Ranks, TorchRanks
from tests.data_samples import PLAIN, all_tokens, one_turn, prepare, save_words, write_json, write_rows
from tests.ranks import run_ranks
from tests.thread_ranks import on_threads


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.requirement("R-DATA-07")
def test_the_number_of_workers_changes_nothing(tmp_path: Path, num_files: int) -> None:
    for file in range(num_files):
        write_rows(tmp_path / f"part{file}.jsonl", [f"w{(file * 50 + i) % 200} w{i}" for i in range(50)])
    files, words = str(tmp_path / "part*.jsonl"), save_words(tmp_path / "words")
    read = partial(prepare, tmp_path, train_file=files, tokenizer_name=words, overwrite_cache=True)

    def run(ranks: Ranks, *, num_workers: int, said: list[str]) -> list[int]:
        told = said if ranks.rank == 0 else None
        return all_tokens(read(ranks=ranks, said=told, preprocessing_num_workers=num_workers).train)

    seen = []
    for num_workers in (1, 2, 4):
        said: list[str] = []
        seen += on_threads(2, partial(run, num_workers=num_workers, said=said))
        (line,) = (line for line in said if f"({num_files} files)" in line)
        assert f"read once by 1 of 2 ranks with {num_workers} workers" in line
        assert "1 file is enough for any number of ranks and workers" in line
    assert all(tokens == seen[0] for tokens in seen)
    assert len(seen[0]) > 100 * num_files


@pytest.mark.requirement("R-DATA-08")
def test_documents_without_text_are_skipped_and_counted(tmp_path: Path) -> None:
    rows = [{"text": ""}, {"text": "   "}, {"text": None}, {"other": 1}, {"text": [""]}, {"text": "w1 w2 w3"}]
    path = write_json(tmp_path / "a.jsonl", rows)
    said: list[str] = []
    data = prepare(tmp_path, train_file=path, said=said)
    assert all_tokens(data.train) == [11, 12, 13, 1]
    assert data.report["corpora"][0]["skipped"] == {path: {"empty": 5, "untrained": 0, "invalid": 0}}
    assert f"data: {path}: skipped 5 empty and 0 invalid documents" in said


@pytest.mark.parametrize(
    ("texts", "counts"),
    [(["", "  ", None], ".*a.jsonl: 3 empty, 0 invalid.*text_column"), ([], "there are no documents")],
)
@pytest.mark.requirement("R-DATA-08")
def test_nothing_left_stops_at_start(tmp_path: Path, texts: list[Any], counts: str) -> None:
    with pytest.raises(ValueError, match=rf"no document with text is left in .*a.jsonl \({counts}"):
        prepare(tmp_path, texts)


def test_only_the_first_files_with_skipped_documents_are_listed(tmp_path: Path) -> None:
    for file in range(25):
        write_rows(tmp_path / f"part{file:02}.jsonl", ["", "w1 w2 w3 w4"])
    said: list[str] = []
    data = prepare(tmp_path, train_file=str(tmp_path / "part*.jsonl"), said=said)
    assert sum("skipped 1 empty" in line for line in said) == 20
    assert "data: 5 more files with skipped documents are in the report" in said
    assert len(data.report["corpora"][0]["skipped"]) == 25


def _read_invalid(rank: int, world_size: int, folder: Path) -> tuple[str, Any]:
    """The message without --skip_invalid_text, and what is left with it."""
    chosen: dict[str, Any] = {"train_file": str(folder / "a.jsonl"), "tokenizer_name": str(folder / "words")}
    with pytest.raises(ValueError) as caught:
        prepare(folder, ranks=TorchRanks(), **chosen)
    data = prepare(folder, ranks=TorchRanks(), skip_invalid_text=True, **chosen)
    return str(caught.value), (all_tokens(data.train), data.report["corpora"][0]["skipped"])


@pytest.mark.requirement("R-DATA-10")
def test_invalid_utf_8_stops_every_rank_or_is_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text":"w1 w2 w3"}\n{"text":"\xfb\xff"}\n{"text":"w4 w5 w6"}\n')
    save_words(tmp_path / "words")
    messages, read = zip(*run_ranks(_read_invalid, 2, tmp_path), strict=True)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{path}, line 2: the text is not valid UTF-8")
    assert "--skip_invalid_text" in messages[0]
    want = ([11, 12, 13, 1, 14, 15, 16, 1], {str(path): {"empty": 0, "untrained": 0, "invalid": 1}})
    assert read == (want, want)


def test_a_document_that_turns_out_invalid_leaves_no_token(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"w1 " * 500_000 + b"\xff")  # its first pieces are written before the fault is met
    (tmp_path / "b.txt").write_text("w2 w3 w4")
    files = str(tmp_path / "*.txt")
    assert all_tokens(prepare(tmp_path, train_file=files, skip_invalid_text=True).train) == [12, 13, 14, 1]
    with pytest.raises(ValueError, match=r"a.txt, line 1: the text is not valid UTF-8"):
        prepare(tmp_path, train_file=files)


def test_a_validation_file_leaves_the_training_documents_alone(tmp_path: Path) -> None:
    validation = write_rows(tmp_path / "validation.jsonl", ["w4 w5 w6"] * 2)
    data = prepare(tmp_path, ["w1 w2 w3"] * 30, validation_file=validation, validation_split_percentage=5)
    assert all_tokens(data.train) == [11, 12, 13, 1] * 30
    assert all_tokens(data.validation) == [14, 15, 16, 1] * 2
    assert [corpus["num_documents"] for corpus in data.report["corpora"]] == [30, 2]
    assert data.report["unigram_entropy_nats"] == pytest.approx(math.log(4))


def test_a_split_of_the_corpus_and_the_entropy_of_its_training_part(tmp_path: Path) -> None:
    data = prepare(tmp_path, [f"w{i} w{i % 5} w{i % 3}" for i in range(100)], validation_split_percentage=10)
    assert (len(data.train), len(data.validation)) == (90, 10)
    train, validation = (np.reshape(all_tokens(part), (-1, 4))[:, 0] for part in (data.train, data.validation))
    assert not set(train) & {first for first in validation if first >= 20}
    shares = np.unique(all_tokens(data.train), return_counts=True)[1] / (90 * 4)
    assert data.report["unigram_entropy_nats"] == pytest.approx(-(shares * np.log(shares)).sum())
    assert data.report["vocab_size"] == 210


def test_a_folder_is_read_as_a_data_set_whole_or_as_a_stream(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    read = partial(prepare, tmp_path, dataset_name=str(folder))
    write_rows(folder / "validation.jsonl", ["w4 w5 w6"])
    with pytest.raises(ValueError, match=r"has no split 'train', only \['validation'\]"):
        read()
    write_rows(folder / "train.jsonl", ["w1 w2 w3"] * 30)
    caches = []
    for streaming in (False, True, False):
        data = read(streaming=streaming)
        assert all_tokens(data.train) == [11, 12, 13, 1] * 30
        assert all_tokens(data.validation) == [14, 15, 16, 1]
        caches.append(data.report["corpora"][0]["cache"])
    assert caches[0] == caches[2] != caches[1]
    write_rows(folder / "train.jsonl", ["w7 w8 w9"] * 30)
    assert all_tokens(read().train) == [17, 18, 19, 1] * 30
    with pytest.raises(ValueError, match=r"has no column 'body'; --text_column_name must be one of \['text'\]"):
        read(text_column_name="body")
    with pytest.raises(ValueError, match=r"dataset_name='.*nowhere' cannot be loaded"):
        prepare(tmp_path, dataset_name=str(tmp_path / "nowhere"))


def test_a_tokenizer_is_trained_where_none_is_named(tmp_path: Path) -> None:
    path = Path(write_rows(tmp_path / "a.jsonl", ["the quick brown fox", "jumps over the lazy dog"] * 20))
    path.write_bytes(path.read_bytes() + b'{"text": "\xff"}\n')
    train = partial(prepare, tmp_path, train_file=str(path), tokenizer_name=None, train_vocab_size=300)
    data = train(skip_invalid_text=True)
    assert len(data.tokenizer) == data.report["vocab_size"] <= 300
    assert "the quick brown fox<|endoftext|>jumps" in data.tokenizer.decode(all_tokens(data.train))
    assert train(skip_invalid_text=True, eos_token="<end>").tokenizer.eos_token == "<end>"
    with pytest.raises(ValueError, match="line 41: the text is not valid UTF-8"):
        train()


@pytest.mark.slow
def test_the_embedded_corpus_is_ready_in_seconds(tmp_path: Path) -> None:
    data = prepare(tmp_path, train_file=EMBEDDED, block_size=512, tokenizer_name=None, validation_split_percentage=5)
    assert len(data.tokenizer) == 8192
    assert len(data.train) > 1000
    assert len(data.validation) > 50
    assert 5 < data.report["unigram_entropy_nats"] < 8


NO_DATA = (
    "there is nothing to train on: name files with --train_file or a dataset with --dataset_name; to try things out, "
    "--train_file stdlib is the source code of this Python"
)


@pytest.mark.parametrize(
    ("chosen", "faults"),
    [
        ({}, [NO_DATA]),
        ({"train_file": "stdlib"}, []),
        (
            {"dataset_name": "name", "train_file": "a.txt", "eos_token": ""},
            [
                "eos_token='' names no token",
                "dataset_name='name' clashes with train_file='a.txt' validation_file=None; give one kind of source",
            ],
        ),
        (
            {"validation_file": "b.txt", "dataset_config_name": "c", "streaming": True},
            [
                NO_DATA,
                "validation_file='b.txt' needs a train_file",
                "dataset_config_name='c' needs a dataset_name",
                "streaming=True needs a dataset_name; files are read as a stream in any case",
            ],
        ),
        (
            {"train_file": "a.txt", "data_format": "text", "train_on": "responses", "chat_template": "x.jinja"},
            [
                "train_on=responses clashes with data_format=text: a text has no responses",
                "chat_template='x.jinja' clashes with data_format=text; it is for chat and prompt_completion",
            ],
        ),
        (
            {"train_file": "stdlib", "data_format": "chat"},
            [
                "data_format=chat clashes with train_file=stdlib, which is text",
                "data_format=chat needs a tokenizer_name, or a model_name_or_path that brings a tokenizer along: one "
                "is trained on text alone",
            ],
        ),
    ],
)
def test_options_that_do_not_hold_are_listed_together(chosen: dict[str, Any], faults: list[str]) -> None:
    assert list(option_faults(Arguments(**chosen))) == faults
    assert list(option_faults(Arguments(train_file="a.txt", validation_file="b.txt"))) == []


def test_too_little_text_for_a_block_is_an_error(tmp_path: Path) -> None:
    read = partial(prepare, tmp_path, ["w1 w2 w3"] * 30)
    with pytest.raises(ValueError, match="the training text has 116 tokens, less than one block of block_size=500"):
        read(block_size=500, validation_split_percentage=5)
    with pytest.raises(
        ValueError, match="the validation text has 4 tokens, less than one block of block_size=8; name a"
    ):
        read(block_size=8, validation_split_percentage=5)
    assert len(read(block_size=8).validation) == 0


def test_ranks_with_different_tokenizers_stop_together(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ["w1 w2 w3"] * 30)
    folders = [save_words(tmp_path / "a"), save_words(tmp_path / "b", bos=True)]
    errors = on_threads(
        2, lambda ranks: prepare(tmp_path, ranks=ranks, train_file=path, tokenizer_name=folders[ranks.rank])
    )
    assert str(errors[0]) == str(errors[1])
    assert "ranks [1] have another tokenizer than rank 0; make the files equal on all hosts" in str(errors[0])


@pytest.mark.parametrize("with_mask", [False, True])
def test_counting_tokens_costs_a_count_for_many_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_mask: bool
) -> None:
    ids = np.random.default_rng(0).integers(0, 50, 400)
    trained = ids % 3 > 0 if with_mask else None
    writer = TokenWriter(tmp_path, vocab_size=50, with_mask=with_mask)
    writer.add(ids, trained=trained)
    writer.end_document()
    assert list(writer.finish(LeftOut())) == [None]
    ends = np.array([7, 9, 60, 61, 80, 300, 301, 400])
    starts = np.array([4, 7, 20, 60, 70, 90, 300, 302])
    here = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
    want = np.bincount(ids[here] if trained is None else ids[here][trained[here]], minlength=50).tolist()
    num_counts = []
    bincount = np.bincount

    def counting(chosen: Any, minlength: int) -> Any:
        num_counts.append(len(chosen))
        return bincount(chosen, minlength=minlength)

    monkeypatch.setattr(np, "bincount", counting)
    store = TokenStore(tmp_path)
    assert store.count_tokens(starts=starts, ends=ends).tolist() == want
    assert num_counts == [sum(want)]
    monkeypatch.setattr(token_store, "TOKENS_AT_ONCE", 50)
    assert store.count_tokens(starts=starts, ends=ends).tolist() == want
    assert max(num_counts[1:]) <= 50
    assert store.count_tokens(starts=starts[:0], ends=ends[:0]).tolist() == [0] * 50


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0, "far": 70_000}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path / "big")
    data = prepare(tmp_path, ["far far far"], tokenizer_name=str(tmp_path / "big"))
    assert all_tokens(data.train) == [70_000, 70_000, 70_000, 0]


def test_a_second_run_reads_the_cache_and_other_settings_do_not(tmp_path: Path) -> None:
    rows = [f"w{i % 200} w{i % 7}" for i in range(60)]
    path = str(tmp_path / "a.jsonl")
    cache = prepare(tmp_path, rows).report["corpora"][0]["cache"]
    mark = Path(cache) / "mark"
    mark.touch()
    assert prepare(tmp_path, train_file=path, block_size=8).report["corpora"][0]["cache"] == cache
    assert mark.exists()
    assert prepare(tmp_path, train_file=path, overwrite_cache=True).report["corpora"][0]["cache"] == cache
    assert not mark.exists()
    fewer = prepare(tmp_path, train_file=path, max_train_documents=9, validation_split_percentage=40)
    assert (fewer.train.num_documents, fewer.validation.num_documents) == (6, 3)
    changed = prepare(tmp_path, [*rows, "w1"]).report["corpora"][0]
    assert changed["cache"] != cache
    assert changed["num_documents"] == 61


def test_the_cache_lies_where_the_user_says_or_in_their_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(Arguments(cache_dir="here")) == Path("here")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder(Arguments()) == Path("/elsewhere/gather-moe")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert cache_folder(Arguments()) == Path("/home/user/.cache/gather-moe")


@pytest.mark.parametrize(
    ("name", "cut", "message"),
    [("tokens", 2, "46 bytes and should have 48"), ("trained", 1, "23 bytes and should have 24")],
)
def test_a_damaged_cache_is_named_and_can_be_rebuilt(tmp_path: Path, name: str, cut: int, message: str) -> None:
    chosen: dict[str, Any] = {
        "train_file": write_json(tmp_path / "rows.jsonl", [one_turn("w1", "w2")] * 4),
        "tokenizer_name": save_words(tmp_path / "words", template=PLAIN),
    }
    file = Path(prepare(tmp_path, **chosen).report["corpora"][0]["cache"]) / f"{name}.bin"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=rf"{name}.bin has {message}; rebuild it with --overwrite"):
        prepare(tmp_path, **chosen)
    assert len(prepare(tmp_path, overwrite_cache=True, **chosen).train) == 8
