"""What one rank does, or all do, ends in its result on every rank or in one and the same error on every rank."""

import time
from collections.abc import Generator
from pathlib import Path
from unittest.mock import patch

import pytest

from recipe.shared.errors import (
    EXIT_CODES,
    CheckpointBrokenError,
    RanksFailedError,
    RunError,
    UploadError,
)
from recipe.shared.ranks import Ranks
from recipe.shared.together import check_all_see, on_every, on_first, run_in_steps
from tests.thread_ranks import on_threads

ERRORS = [
    (CheckpointBrokenError(Path("a-file"), "missing"), (CheckpointBrokenError, "a-file: missing")),
    (ValueError("no such file"), (ValueError, "no such file")),
    (
        UnicodeDecodeError("utf-8", b"x", 0, 1, "odd"),
        (ValueError, "'utf-8' codec can't decode byte 0x78 in position 0: odd"),
    ),
    (OSError("a full disk"), (RanksFailedError, "rank 0: OSError: a full disk")),
    (KeyError("text"), (RanksFailedError, "rank 0: KeyError: 'text'")),
]


@pytest.mark.parametrize(("error", "want"), ERRORS, ids=lambda value: type(value).__name__)
def test_what_one_rank_does_comes_from_it_alone(error: Exception, want: tuple[type, str]) -> None:
    """A gather would give every rank as many copies of the largest value as there are ranks."""

    def ask(ranks: Ranks, *, fails: bool) -> str:
        def act() -> str:
            assert ranks.rank == 0, "another rank acted"
            if fails:
                raise error
            return "done"

        with patch.object(ranks, "gather", side_effect=AssertionError("gathered")):
            return on_first(act, ranks=ranks)

    assert on_threads(3, lambda ranks: ask(ranks, fails=False)) == ["done"] * 3
    outcomes = on_threads(3, lambda ranks: ask(ranks, fails=True))
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [want] * 3
    assert outcomes[0] is error or outcomes[0].__cause__ is error


@pytest.mark.parametrize(("error", "want"), ERRORS, ids=lambda value: type(value).__name__)
def test_one_ranks_error_stops_every_rank(error: Exception, want: tuple[type, str]) -> None:
    def work(rank: int, *, failing: int) -> int:
        if rank == failing:
            raise error
        return rank

    assert on_threads(2, lambda ranks: on_every(lambda: work(ranks.rank, failing=9), ranks=ranks)) == [0, 1]
    outcomes = on_threads(3, lambda ranks: on_every(lambda: work(ranks.rank, failing=1), ranks=ranks))
    kind, text = want
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(kind, text.replace("rank 0", "rank 1"))] * 3


def test_every_rank_that_fails_is_named_unless_the_user_can_mend_one_of_them() -> None:
    errors = [OSError("full"), KeyError("x"), ValueError("mend this")]

    def fail(ranks: Ranks) -> None:
        raise errors[ranks.rank]

    outcomes = on_threads(2, lambda ranks: on_every(lambda: fail(ranks), ranks=ranks))
    assert [str(outcome) for outcome in outcomes] == ["rank 0: OSError: full; rank 1: KeyError: 'x'"] * 2
    outcomes = on_threads(3, lambda ranks: on_every(lambda: fail(ranks), ranks=ranks))
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(ValueError, "mend this")] * 3


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


def test_a_folder_that_a_rank_does_not_see_is_named(tmp_path: Path) -> None:
    def look(ranks: Ranks) -> None:
        check_all_see(tmp_path if ranks.rank == 0 else tmp_path / "elsewhere", ranks=ranks)

    for outcome in on_threads(2, look):
        assert isinstance(outcome, RanksFailedError)
        assert "elsewhere, made by rank 0, is not there on host" in str(outcome)


def test_every_error_that_ends_a_run_has_an_exit_code_in_the_table() -> None:
    def kinds(base: type[RunError]) -> list[type[RunError]]:
        return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]

    codes = [kind.exit_code for kind in kinds(RunError)]
    assert set(codes) <= set(EXIT_CODES)
    assert {10, 11, 12, 13, 14, 15, 16, 17, 19} == set(codes) - {RunError.exit_code}
    assert UploadError.exit_code == 19
