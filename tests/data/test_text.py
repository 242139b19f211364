"""Text is read whole, cut where it costs nothing, and encoded with exactly one end to each document (R-DATA-06, 09)."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.data.corpora import embedded_corpus
from recipe.data.documents import Corpus, InvalidTextError
from recipe.data.files import READ_BYTES, file_corpus
from recipe.data.tokenizer import TextEncoder, load_tokenizer, split_text, with_eos
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
    ("name", "content", "message"),
    [
        ("a.txt", b"one\ntwo\nthr\xffee\n", "line 3: the text is not valid UTF-8"),
        ("a.txt", b"cut off\n\xc3", "line 2: the text is not valid UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: the text is not valid UTF-8 .*surrogates"),
    ],
)
def test_invalid_text_names_the_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidTextError, match=f"{name}, {message}"):
        texts_of(corpus_of(tmp_path / name))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{text: 1}", "a.jsonl, line 1: not a line of JSON"),
        ('["text"]', "a.jsonl, line 1: each line must be a JSON object, not list"),
        ('{"text": 3}', "a.jsonl, line 1: the text must be a string, a list of strings or null, not int"),
    ],
)
def test_a_line_that_is_no_document_names_its_place(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        texts_of(corpus_of(tmp_path / "a.jsonl"))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--train_file='.*none.txt': there is no file '.*none.txt'"):
        corpus_of(tmp_path / "none.txt")
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"a.csv ends in '.csv', which is none of .txt, .jsonl, .json, .parquet"):
        corpus_of(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"is a folder; name its files, as in .*\*.jsonl"):
        corpus_of(tmp_path)


def test_the_manifest_follows_the_content(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ["one"])
    before = corpus_of(path).manifest
    assert corpus_of(path).manifest == before
    write_rows(tmp_path / "a.jsonl", ["two"])
    assert corpus_of(path).manifest != before


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
