"""A cached folder is whole or absent, whoever builds it and however that ends, and errors reach every rank alike."""

import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from recipe.data.cache import cache_folder
from recipe.data.options import DataOptions
from recipe.shared.build_once import build_once, discard, once_per_file_system
from recipe.shared.ranks import OneRank, Ranks
from recipe.shared.together import on_every_rank, on_first_rank, run_in_steps
from tests.data_samples import prepare, write_rows
from tests.thread_ranks import on_threads


def writing(text: str, *, built: list[str] | None = None) -> Any:
    def build(folder: Path) -> Iterator[None]:
        if built is not None:
            built.append(text)
        (folder / "file").write_text(text)
        yield

    return build


def test_one_rank_builds_and_all_see_it(tmp_path: Path) -> None:
    built: list[str] = []

    def run(ranks: Ranks) -> str:
        build_once(tmp_path / "f", writing(str(ranks.rank), built=built), ranks=ranks)
        build_once(tmp_path / "f", writing("again", built=built), ranks=ranks)
        return (tmp_path / "f" / "file").read_text()

    assert on_threads(3, run) == ["0", "0", "0"]
    assert built == ["0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "f.lock"]


def test_hosts_without_a_common_file_system_build_their_own(tmp_path: Path) -> None:
    built: list[str] = []

    def run(ranks: Ranks) -> bool:
        host = f"host{ranks.rank // 2}"
        build_once(tmp_path / host / "f", writing(str(ranks.rank), built=built), ranks=ranks, host=host)
        return (tmp_path / host / "f" / "file").exists()

    assert on_threads(6, run) == [True] * 6
    assert built[0] == "0"
    assert sorted(built) == ["0", "2", "4"]


def test_a_rank_that_does_not_see_the_folder_is_named(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> None:
        build_once(tmp_path / str(min(ranks.rank, 1)) / "f", writing("x"), ranks=ranks, host="one")

    errors = on_threads(4, run)
    assert [str(error) for error in errors] == ["None"] * 4  # rank 1 builds in its own place, ranks 2 and 3 see that

    def run_apart(ranks: Ranks) -> None:
        build_once(tmp_path / "apart" / str(ranks.rank) / "f", writing("x"), ranks=ranks, host="one")

    for error in on_threads(4, run_apart):
        assert isinstance(error, RuntimeError)
        assert "ranks [2, 3] do not see" in str(error)


def test_a_rank_that_cannot_look_stops_all(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> None:
        def is_present() -> bool:
            if ranks.rank == 1:
                raise PermissionError("no entry")
            return True

        once_per_file_system(lambda: writing("x")(tmp_path), is_present=is_present, what="it", ranks=ranks)

    assert [str(error) for error in on_threads(3, run)] == ["rank 1 failed: PermissionError: no entry"] * 3


def test_a_failed_build_leaves_nothing_and_raises_on_every_rank(tmp_path: Path) -> None:
    def build(folder: Path) -> Iterator[None]:
        (folder / "file").write_text("half")
        yield
        raise OSError("disk full")

    errors = on_threads(2, lambda ranks: build_once(tmp_path / "f", build, ranks=ranks))
    assert [str(error) for error in errors] == ["rank 0 failed: OSError: disk full"] * 2
    assert isinstance(errors[0].__cause__, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["f.lock"]


def test_what_a_dead_builder_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".f.unfinished").mkdir()
    (tmp_path / ".f.unfinished" / "other").write_text("half")
    build_once(tmp_path / "f", writing("whole"), ranks=OneRank())
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["file"]


def test_two_programs_do_not_build_the_same_folder_twice(tmp_path: Path) -> None:
    built: list[str] = []

    def slow(folder: Path) -> Iterator[None]:
        built.append("x")
        for _ in range(5):
            time.sleep(0.02)
            yield
        (folder / "file").write_text("whole")

    programs = [
        threading.Thread(target=build_once, args=(tmp_path / "f", slow), kwargs={"ranks": OneRank()}) for _ in range(3)
    ]
    for program in programs:
        program.start()
    for program in programs:
        program.join()
    assert built == ["x"]
    assert (tmp_path / "f" / "file").read_text() == "whole"


KILLED = """
import pathlib, sys, time
from recipe.shared.build_once import build_once
from recipe.shared.ranks import OneRank

def build(folder):
    (folder / "file").write_text("half")
    print("building", flush=True)
    time.sleep(60)
    yield

build_once(pathlib.Path(sys.argv[1]), build, ranks=OneRank())
"""


def test_a_killed_builder_neither_blocks_nor_corrupts(tmp_path: Path) -> None:
    program = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "f")], stdout=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stdout.readline() == b"building\n"
    assert not (tmp_path / "f").exists()
    program.kill()
    program.wait()
    program.stdout.close()
    build_once(tmp_path / "f", writing("whole"), ranks=OneRank())
    assert (tmp_path / "f" / "file").read_text() == "whole"


def test_a_discarded_folder_stays_readable_where_it_is_open(tmp_path: Path) -> None:
    build_once(tmp_path / "f", writing("old"), ranks=OneRank())
    with open(tmp_path / "f" / "file") as file:
        on_threads(3, lambda ranks: discard(tmp_path / "f", ranks=ranks))
        assert file.read() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f.lock"]


def test_the_first_ranks_result_and_errors_reach_all() -> None:
    assert on_threads(3, lambda ranks: on_first_rank(lambda: ranks.rank + 10, ranks=ranks)) == [10, 10, 10]

    def fail() -> None:
        raise ValueError("no such file")

    errors = on_threads(3, lambda ranks: on_first_rank(fail, ranks=ranks))
    assert [(type(error), str(error)) for error in errors] == [(ValueError, "no such file")] * 3


def test_one_ranks_error_stops_every_rank() -> None:
    def work(rank: int) -> int:
        if rank == 1:
            raise KeyError("text")
        return rank

    assert on_threads(2, lambda ranks: on_every_rank(lambda: work(0), ranks=ranks)) == [0, 0]
    errors = on_threads(3, lambda ranks: on_every_rank(lambda: work(ranks.rank), ranks=ranks))
    assert [(type(error), str(error)) for error in errors] == [(RuntimeError, "rank 1 failed: KeyError: 'text'")] * 3


def test_ranks_meet_while_one_works_and_end_its_work_if_another_fails() -> None:
    meetings, ended = [], []

    def work(rank: int) -> Generator[None, None, None]:
        try:
            for step in range(100):
                time.sleep(0.002)
                yield
                if rank == 1 and step == 9:
                    raise ValueError("rank 1 gives up")
        finally:
            ended.append(rank)

    def run(ranks: Ranks) -> None:
        gather = ranks.gather
        ranks.gather = lambda value: meetings.append(ranks.rank) or gather(value)  # type: ignore[method-assign, func-returns-value]
        run_in_steps(work(ranks.rank) if ranks.rank < 2 else None, ranks=ranks, heartbeat_s=0.005)

    errors = on_threads(3, run)
    assert [str(error) for error in errors] == ["rank 1 gives up"] * 3
    assert sorted(ended) == [0, 1]
    assert meetings.count(2) > 3


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
