"""A file or folder that others read is whole or absent, whoever writes it and however that ends."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipe.shared.build_once import build_once, discard, once_per_file_system
from recipe.shared.errors import RanksFailedError
from recipe.shared.json_files import read_json_object, write_json
from recipe.shared.ranks import OneRank, Ranks
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
        assert isinstance(error, RanksFailedError)
        assert list(error.failures) == [2, 3]
        assert "rank 2: does not see " in str(error)


def test_a_rank_that_cannot_look_stops_all(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> None:
        def is_present() -> bool:
            if ranks.rank == 1:
                raise PermissionError("no entry")
            return True

        once_per_file_system(lambda: writing("x")(tmp_path), is_present=is_present, what="it", ranks=ranks)

    assert [str(error) for error in on_threads(3, run)] == ["rank 1: PermissionError: no entry"] * 3


def test_a_failed_build_leaves_nothing_and_raises_on_every_rank(tmp_path: Path) -> None:
    def build(folder: Path) -> Iterator[None]:
        (folder / "file").write_text("half")
        yield
        raise OSError("disk full")

    errors = on_threads(2, lambda ranks: build_once(tmp_path / "f", build, ranks=ranks))
    assert [str(error) for error in errors] == ["rank 0: OSError: disk full"] * 2
    assert isinstance(errors[0].__cause__, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["f.lock"]


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
    (folder / "other").write_text("half")
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
    assert [path.name for path in (tmp_path / ".f.unfinished").iterdir()] == ["other"]
    build_once(tmp_path / "f", writing("whole"), ranks=OneRank())
    assert [path.read_text() for path in (tmp_path / "f").iterdir()] == ["whole"]


def test_a_discarded_folder_stays_readable_where_it_is_open(tmp_path: Path) -> None:
    build_once(tmp_path / "f", writing("old"), ranks=OneRank())
    with open(tmp_path / "f" / "file") as file:
        on_threads(3, lambda ranks: discard(tmp_path / "f", ranks=ranks))
        assert file.read() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f.lock"]


def test_a_file_is_replaced_whole_and_its_numbers_are_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"layout": (1, 2), "loss": math.inf, "rho": [math.nan, 1.0]})
    assert read_json_object(path) == {"layout": [1, 2], "loss": None, "rho": [None, 1.0]}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"layout": "new"})
    assert json.loads(path.read_text())["layout"] == [1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{"seed": 1, "seed": 2}', 'the key "seed" is given twice: 1 and 2'),
        (b"[1]", "holds a list; it must hold one JSON object"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe\xfa", "cannot be read: 'utf-8' codec"),
        (None, r"does not exist \(looked from"),
    ],
)
def test_a_file_is_read_strictly(content: bytes | None, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"args\.json:? {fault}"):
        read_json_object(path)
