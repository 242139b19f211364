"""Tokenised data is kept and found again for the same settings, where the user says, and a damaged cache is named."""

from pathlib import Path

import pytest

from recipe.data.cache import cache_folder
from recipe.data.options import DataOptions
from tests.data_samples import prepare, write_rows


def test_a_second_run_reads_the_cache_and_other_settings_do_not(tmp_path: Path) -> None:
    rows = [f"w{i % 200} w{i % 7}" for i in range(60)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    first = prepare(tmp_path, train_file=str(path))
    cache = first.report["corpora"][0]["cache"]
    mark = Path(cache) / "mark"
    mark.touch()
    assert prepare(tmp_path, train_file=str(path), block_size=8).report["corpora"][0]["cache"] == cache
    assert mark.exists()
    assert prepare(tmp_path, train_file=str(path), overwrite_cache=True).report["corpora"][0]["cache"] == cache
    assert not mark.exists()
    fewer = prepare(tmp_path, train_file=str(path), max_train_documents=9, validation_split_percentage=40)
    assert (fewer.train.num_documents, fewer.validation.num_documents) == (6, 3)
    write_rows(path, [*rows, "w1"])
    changed = prepare(tmp_path, train_file=str(path))
    assert changed.report["corpora"][0]["cache"] != cache
    assert changed.report["corpora"][0]["num_documents"] == 61


def test_the_cache_lies_where_the_user_says_or_in_their_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(DataOptions(block_size=8, cache_dir="here")) == Path("here")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder(DataOptions(block_size=8)) == Path("/elsewhere/gather-moe")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert cache_folder(DataOptions(block_size=8)) == Path("/home/user/.cache/gather-moe")


def test_a_damaged_cache_is_named_and_can_be_rebuilt(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ["w1 w2 w3"] * 40)
    tokens = Path(prepare(tmp_path, train_file=str(path)).report["corpora"][0]["cache"]) / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"tokens.bin has 318 bytes and should have 320; rebuild it with --overwrite"):
        prepare(tmp_path, train_file=str(path))
    assert len(prepare(tmp_path, train_file=str(path), overwrite_cache=True).train) == 38
