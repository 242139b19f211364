"""Tokenised data is kept and found again for the same settings, where the user says, and a damaged cache is named."""

from pathlib import Path
from typing import Any

import pytest

from recipe.data.cache import cache_folder
from recipe.data.options import DataOptions
from tests.data_samples import one_turn, prepare, save_chat_words, write_json


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
    assert cache_folder(DataOptions(block_size=8, cache_dir="here")) == Path("here")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder(DataOptions(block_size=8)) == Path("/elsewhere/gather-moe")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert cache_folder(DataOptions(block_size=8)) == Path("/home/user/.cache/gather-moe")


@pytest.mark.parametrize(
    ("name", "cut", "message"),
    [("tokens", 2, "46 bytes and should have 48"), ("trained", 1, "23 bytes and should have 24")],
)
def test_a_damaged_cache_is_named_and_can_be_rebuilt(tmp_path: Path, name: str, cut: int, message: str) -> None:
    chosen: dict[str, Any] = {
        "train_file": write_json(tmp_path / "rows.jsonl", [one_turn("w1", "w2")] * 4),
        "tokenizer_name": save_chat_words(tmp_path / "words"),
    }
    file = Path(prepare(tmp_path, **chosen).report["corpora"][0]["cache"]) / f"{name}.bin"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=rf"{name}.bin has {message}; rebuild it with --overwrite"):
        prepare(tmp_path, **chosen)
    assert len(prepare(tmp_path, overwrite_cache=True, **chosen).train) == 8
