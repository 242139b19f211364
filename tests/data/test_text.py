"""Text is read whole and encoded, one end to each document, by a tokenizer that all ranks share (R-DATA-06 and 09)."""

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants, errors

from recipe.data.corpora import READ_BYTES, embedded_corpus, file_corpus
from recipe.data.documents import Corpus, InvalidTextError
from recipe.data.tokenizer import TextEncoder, fetch_tokenizer, load_tokenizer, split_text, with_eos
from recipe.shared.ranks import OneRank, Ranks
from tests.data_samples import (
    BOS_ID,
    EOS_ID,
    all_tokens,
    english,
    prepare,
    save_words,
    small_bpe,
    word_tokenizer,
    write_rows,
)
from tests.hub_samples import COMMIT, http_error, put_in_cache
from tests.thread_ranks import on_threads


def texts_of(corpus: Corpus) -> list[str]:
    return ["".join(document.pieces) for document in corpus.read()]


def corpus_of(pattern: object, *, column: str = "text") -> Corpus:
    return file_corpus(str(pattern), option="--train_file", column=column)


@pytest.mark.parametrize("piece_chars", [1, 7, 100, 10**6])
def test_chunks_join_to_the_text_however_it_arrives(piece_chars: int) -> None:
    text = english()[:5000]
    chunks = list(split_text((text[i : i + piece_chars] for i in range(0, 5000, piece_chars)), chunk_chars=64))
    assert "".join(chunks) == text
    assert chunks == list(split_text([text], chunk_chars=64))
    assert max(map(len, chunks)) <= 64


def test_chunks_are_cut_in_front_of_a_word() -> None:
    assert list(split_text(["one two three four"], chunk_chars=10)) == ["one two", " three", " four"]
    assert list(split_text(["abcdef, (ghi)\njklmno"], chunk_chars=12)) == ["abcdef,", " (ghi)", "\njklmno"]
    assert list(split_text(["x" * 25], chunk_chars=10)) == ["x" * 10, "x" * 10, "x" * 5]
    assert list(split_text(["", ""])) == []


@pytest.mark.requirement("R-DATA-09")
def test_chunks_give_the_tokens_of_the_whole_text(tmp_path: Path) -> None:
    text = english()
    encoder = TextEncoder(small_bpe(tmp_path))
    sample = (text * 3)[:50_000]
    whole = encoder.encode([sample])[0]
    for chunk_chars in (500, 16_384):
        chunks = list(split_text([sample], chunk_chars=chunk_chars))
        assert len(chunks) > 3
        assert np.array_equal(np.concatenate(encoder.encode(chunks)), whole)


@pytest.mark.requirement("R-DATA-09")
def test_a_huge_document_without_line_breaks_is_quick(tmp_path: Path, capfd: Any) -> None:
    letters = "".join(random.Random(0).choices("abcdefghij", k=50_000))
    small_bpe(tmp_path / "bpe", vocab_size=300)
    texts = [letters * 100, *["a short document"] * 10]  # 5 MB with no white space at all
    data = prepare(tmp_path, texts, tokenizer_name=str(tmp_path / "bpe"))
    assert data.report["corpora"][0]["num_documents"] == 11
    assert "tokens/s" in capfd.readouterr().err
    assert str(data.tokenizer.decode(data.train[1].input_ids)) in letters


def test_text_files_are_one_document_each_in_order_of_path(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\nfile\n")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst file")
    for pattern in (tmp_path / "*.txt", f"{tmp_path}/b.txt, {tmp_path}/a.txt"):
        assert texts_of(corpus_of(pattern)) == ["first file", "second\nfile\n"]
    text = "x" * (READ_BYTES - 1) + "é" * 10  # a letter is cut between two reads
    (tmp_path / "a.txt").write_text(text)
    assert texts_of(corpus_of(tmp_path / "a.txt")) == [text]


def test_json_lines_skip_blank_lines_and_take_the_named_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"body": "one"}\n\n{"body": ["two", "lines"]}\n')
    assert texts_of(corpus_of(tmp_path / "a.jsonl", column="body")) == ["one", "two\nlines"]


def test_parquet_rows_are_documents_and_invalid_ones_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [f"row {i}" for i in range(600)]
    pq.write_table(pa.table({"id": range(601), "text": [*rows, None]}), tmp_path / "a.parquet")
    assert texts_of(corpus_of(tmp_path / "a.parquet")) == [*rows, ""]
    with pytest.raises(ValueError, match=r"a.parquet has no column 'body'; --text_column_name must be one of \['id'"):
        texts_of(corpus_of(tmp_path / "a.parquet", column="body"))
    column = pa.array([b"good", b"\xfb\xff", b"fine"]).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    documents = list(corpus_of(tmp_path / "a.parquet").read())
    with pytest.raises(InvalidTextError, match=r"a.parquet, row 2: the text is not valid UTF-8"):
        list(documents[1].pieces)
    assert list(documents[2].pieces) == ["fine"]


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("a.txt", b"one\ntwo\nthr\xffee\n", InvalidTextError, "line 3: the text is not valid UTF-8"),
        ("a.txt", b"cut off\n\xc3", InvalidTextError, "line 2: the text is not valid UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}', InvalidTextError, "line 1: the text is not valid UTF-8 .*surrogates"),
        ("a.jsonl", b"{text: 1}", ValueError, "line 1: not a line of JSON"),
        ("a.jsonl", b'["text"]', ValueError, "line 1: each line must be a JSON object, not list"),
        (
            "a.jsonl",
            b'{"text": 3}',
            ValueError,
            "line 1: the text must be a string, a list of strings or null, not int",
        ),
    ],
)
def test_text_that_cannot_be_read_names_the_line(
    tmp_path: Path, name: str, content: bytes, kind: type[ValueError], message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(kind, match=f"{name}, {message}"):
        texts_of(corpus_of(tmp_path / name))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--train_file='.*none.txt': there is no file '.*none.txt'"):
        corpus_of(tmp_path / "none.txt")
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"a.csv ends in '.csv', which is none of .txt, .jsonl, .json, .parquet"):
        corpus_of(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"is a folder; name its files, as in .*\*.jsonl"):
        corpus_of(tmp_path)


def test_the_embedded_corpus_is_the_standard_library_without_other_encodings(tmp_path: Path) -> None:
    corpus = embedded_corpus()
    assert corpus.manifest == embedded_corpus().manifest
    assert list(corpus.files) == sorted(corpus.files)
    assert len(corpus.files) > 300
    assert not any("site-packages" in file or "/test/" in file for file in corpus.files)
    assert "".join(next(corpus.read()).pieces) == Path(corpus.files[0]).read_text("utf-8")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(ValueError, match=r"no standard library in source form under .*; name a corpus with"):
        embedded_corpus(tmp_path)
    (tmp_path / "good.py").write_text("pass\n")
    small = embedded_corpus(tmp_path)
    assert small.files == (str(tmp_path / "good.py"),)
    assert small.manifest != corpus.manifest


def test_a_trained_tokenizer_reads_back_any_text(tmp_path: Path) -> None:
    tokenizer = small_bpe(tmp_path)
    text = "naïve \x00 日本 🎉\r\n\t end"
    assert len(tokenizer) == 1000
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == "<e>"
    # Text that spells the end of a document stays text where it is encoded for a store.
    assert tokenizer("a<e>b")["input_ids"].count(tokenizer.eos_token_id) == 1
    ids = TextEncoder(tokenizer).encode(["a<e>b"])[0]
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == "a<e>b"


@pytest.mark.parametrize(
    ("kinds", "prefix"),
    [
        ({}, []),  # an end of document, no padding token, adds nothing
        ({"appends_eos": True}, []),
        ({"appends_eos": True, "bos": True}, [BOS_ID]),
        ({"bos": True}, [BOS_ID]),
    ],
)
@pytest.mark.requirement("R-DATA-06")
def test_exactly_one_eos_after_each_document(tmp_path: Path, kinds: dict[str, bool], prefix: list[int]) -> None:
    words = save_words(tmp_path / "words", **kinds)
    data = prepare(tmp_path, ["w0 w1 w2", "w3 <eos> w4 w5", "w6 w7"], tokenizer_name=words, block_size=2)
    stored = np.fromfile(Path(data.report["corpora"][0]["cache"]) / "tokens.bin", dtype="<u2").tolist()
    ids = [[10, 11, 12], [13, 14, 15], [16, 17]]
    assert stored == [token for body in ids for token in [*prefix, *body, EOS_ID]]
    assert data.report["corpora"][0]["num_eos_in_text"] == 1  # the word "<eos>" of the second row
    assert all_tokens(data.train) == stored[: len(stored) // 2 * 2]
    assert data.tokenizer.pad_token is None


@pytest.mark.requirement("R-DATA-06")
def test_a_tokenizer_without_eos_names_the_option(tmp_path: Path) -> None:
    words = save_words(tmp_path / "words", eos=False)
    read = partial(prepare, tmp_path, ["w0 w1 w2 w3"], tokenizer_name=words)
    with pytest.raises(ValueError, match=r"has no end-of-sequence token .* name one of its tokens with --eos_token"):
        read()
    with pytest.raises(ValueError, match="--eos_token '<end>' is not in the vocabulary of"):
        read(eos_token="<end>")
    with pytest.raises(ValueError, match=r"the tokenizer '.*nowhere' cannot be loaded"):
        load_tokenizer(tmp_path / "nowhere")
    data = read(eos_token="<bos>")
    assert all_tokens(data.train) == [10, 11, 12, 13]
    assert data.tokenizer.eos_token_id == BOS_ID


@pytest.mark.requirement("R-DATA-06")
def test_a_tokenizer_in_python_that_appends_eos_itself() -> None:
    from transformers import ByT5Tokenizer

    encoder = TextEncoder(with_eos(ByT5Tokenizer(), eos_token=None))
    assert encoder.max_workers == 1
    assert [row.tolist() for row in encoder.encode(["ab", "</s>"])] == [[100, 101], [63, 50, 118, 65]]
    assert encoder.prefix == ()


def test_an_encoder_leaves_the_tokenizer_as_it_was() -> None:
    tokenizer = word_tokenizer()
    before = tokenizer.backend_tokenizer.to_str(), tokenizer("w1 <eos> w2")["input_ids"]
    encoder = TextEncoder(tokenizer)
    encoder.encode(["w1 <eos> w2"])
    assert (tokenizer.backend_tokenizer.to_str(), tokenizer("w1 <eos> w2")["input_ids"]) == before
    assert encoder.identity == TextEncoder(word_tokenizer()).identity
    assert encoder.identity != TextEncoder(word_tokenizer(bos=True)).identity


NAME = "someone/words"


class Hub:
    """A hub with one repository, whose main branch moves on after each look at it; two ranks share a host's cache."""

    def __init__(self, folder: Path, *, caches: Path) -> None:
        self.requests: list[tuple[int, str | None]] = []  # rank and revision
        self._folder, self._caches, self._here = folder, caches, threading.local()
        self._commits = iter([COMMIT, "d" * 40])
        self._snapshot, self._cached = huggingface_hub.snapshot_download, huggingface_hub.try_to_load_from_cache

    def cache_of(self, rank: int) -> Path:
        return self._caches / f"host{rank // 2}"

    def snapshot_download(self, name: str, *, local_files_only: bool, revision: str | None, **options: Any) -> str:
        rank: int = self._here.rank
        cache = self.cache_of(rank)
        if local_files_only:
            return self._snapshot(name, revision=revision, cache_dir=cache, local_files_only=True, **options)
        self.requests.append((rank, revision))
        return str(put_in_cache(cache, name=name, folder=self._folder, commit=revision or next(self._commits)))

    def try_to_load_from_cache(self, name: str, file: str, *, revision: str) -> Any:
        return self._cached(name, file, revision=revision, cache_dir=self.cache_of(self._here.rank))

    def on_ranks(self, world_size: int, run: Callable[[Ranks], Any]) -> list[Any]:
        def run_here(ranks: Ranks) -> Any:
            self._here.rank = ranks.rank
            return run(ranks)

        return on_threads(world_size, run_here)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(Path(save_words(tmp_path / "words")), caches=tmp_path / "caches")
    for name in ("snapshot_download", "try_to_load_from_cache"):
        monkeypatch.setattr(huggingface_hub, name, getattr(hub, name))
    return hub


def fetch(ranks: Ranks) -> str:
    return fetch_tokenizer(NAME, ranks=ranks, host=f"host{ranks.rank // 2}")


def test_one_rank_asks_the_hub_and_all_load_what_it_got(hub: Hub, tmp_path: Path) -> None:
    path, words = write_rows(tmp_path / "a.jsonl", ["w1 w2 w3"] * 30), str(tmp_path / "words")
    assert fetch_tokenizer(words, ranks=OneRank()) == words  # what is here wins and asks nobody
    assert hub.requests == []

    def run(ranks: Ranks) -> Any:
        data = prepare(tmp_path, ranks=ranks, train_file=path, tokenizer_name=NAME)
        return all_tokens(data.train)[:4], Path(data.tokenizer.name_or_path).name

    assert hub.on_ranks(2, run) == [([11, 12, 13, 1], COMMIT)] * 2
    assert hub.requests == [(0, None)]


def test_each_host_whose_cache_lacks_a_part_asks_for_the_same_commit(hub: Hub) -> None:
    snapshots = [hub.cache_of(rank) / "models--someone--words" / "snapshots" / COMMIT for rank in range(6)]
    snapshots[2].mkdir(parents=True)
    (snapshots[2] / "tokenizer_config.json").write_text("{}")  # a download that was cut off
    assert hub.on_ranks(6, fetch) == [str(snapshot) for snapshot in snapshots]
    assert hub.requests[:2] == [(0, None), (2, COMMIT)]
    assert hub.requests[2:] == [(4, COMMIT)]
    assert (snapshots[2] / "tokenizer.json").is_file()


def test_a_tokenizer_that_the_hub_does_not_give_is_named_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    start = f"the tokenizer '{NAME}' cannot be loaded: "
    offline = f"HF_HUB_OFFLINE is set and the cache {tmp_path / 'hub'} does not hold tokenizer of {NAME}"
    errors_by_rank = on_threads(2, fetch)
    assert [(type(error), str(error)) for error in errors_by_rank] == [(ValueError, start + offline)] * 2
    snapshot = put_in_cache(tmp_path / "hub", name=NAME, folder=Path(save_words(tmp_path / "words")))
    assert on_threads(2, fetch) == [str(snapshot)] * 2

    def refuse(*args: Any, **options: Any) -> str:
        raise http_error(errors.RepositoryNotFoundError)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=f"{start}{NAME} on the hub has no tokenizer"):
        fetch(OneRank())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match=f"{start}the hub https://huggingface.co has no model {NAME}; if it is"):
        fetch(OneRank())
