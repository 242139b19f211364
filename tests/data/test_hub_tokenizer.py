"""A tokenizer of the hub is asked for once by each cache, and every rank reads the same commit of it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from recipe.data.tokenizer import fetch_tokenizer
from recipe.shared.errors import RanksFailedError
from recipe.shared.ranks import OneRank, Ranks
from tests.data_samples import all_tokens, prepare, save_words, write_rows
from tests.hub_samples import COMMIT, http_error, put_in_cache
from tests.thread_ranks import on_threads

NAME = "someone/words"


class Hub:
    """A hub with one repository, whose main branch moves on after each look at it; two ranks share a host's cache."""

    def __init__(self, folder: Path, *, caches: Path) -> None:
        self.requests: list[tuple[int, str | None]] = []  # rank and revision
        self.is_lossy = False  # for all but rank 0
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
        into = self._caches / "elsewhere" if self.is_lossy and rank else cache
        return str(put_in_cache(into, name=name, folder=self._folder, commit=revision or next(self._commits)))

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
    path = write_rows(tmp_path / "a.jsonl", ["w1 w2 w3"] * 30)

    def run(ranks: Ranks) -> Any:
        data = prepare(tmp_path, ranks=ranks, train_file=path, tokenizer_name=NAME)
        return all_tokens(data.train)[:4], Path(data.tokenizer.name_or_path).name

    assert hub.on_ranks(2, run) == [([11, 12, 13, 1], COMMIT)] * 2
    assert hub.requests == [(0, None)]


def test_each_host_with_a_cache_of_its_own_asks_for_the_same_commit(hub: Hub) -> None:
    snapshots = [hub.cache_of(rank) / "models--someone--words" / "snapshots" / COMMIT for rank in range(6)]
    assert hub.on_ranks(6, fetch) == [str(snapshot) for snapshot in snapshots]
    assert hub.requests[:2] == [(0, None), (2, COMMIT)]
    assert hub.requests[2:] == [(4, COMMIT)]


def test_a_cache_that_holds_a_part_of_it_is_completed(hub: Hub) -> None:
    snapshot = hub.cache_of(2) / "models--someone--words" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer_config.json").write_text("{}")  # a download that was cut off
    assert hub.on_ranks(4, fetch)[2:] == [str(snapshot)] * 2
    assert hub.requests == [(0, None), (2, COMMIT)]
    assert (snapshot / "tokenizer.json").is_file()


def test_a_cache_that_the_download_missed_is_named_on_all_ranks(hub: Hub) -> None:
    hub.is_lossy = True
    for error in hub.on_ranks(4, fetch):
        assert isinstance(error, RanksFailedError)
        assert f"rank 2: does not see the tokenizer {NAME} at revision {COMMIT} although a rank of" in str(error)
        assert list(error.failures) == [2, 3]


def test_what_is_here_wins_and_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    words = str(tmp_path / "words")
    assert fetch_tokenizer(words, ranks=OneRank()) == words
    assert hub.requests == []


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
