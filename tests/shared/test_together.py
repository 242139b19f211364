"""Ranks gather each other's values, meet in time, and end in one result or in one and the same error."""

import time
from collections.abc import Generator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from recipe.shared.errors import EXIT_CODES, CheckpointBrokenError, RanksFailedError, RunError
from recipe.shared.ranks import OneRank, Ranks, RanksMissingError, TorchRanks
from recipe.shared.together import check_all_see, on_every, on_first, run_in_steps
from tests.ranks import run_ranks
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


def test_one_rank_is_a_world_of_one() -> None:
    ranks: Ranks = OneRank()
    ranks.barrier()
    ranks.meet("a test", timeout_s=0.0)
    assert (ranks.rank, ranks.world_size, ranks.gather("mine"), ranks.first("mine")) == (0, 1, ["mine"], "mine")
    assert (ranks.any(True), ranks.any_later(True)(), ranks.any_later(False)()) == (True, True, False)


def _echo(rank: int, world_size: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors


def test_tensors_travel_to_the_ranks_and_back_as_they_are() -> None:
    tensors = {
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "a number": torch.tensor(1.5, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 3, dtype=torch.int64),
        "bits": torch.tensor([True, False]),
        "asks for a gradient": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.float64)),
        "sparse": torch.eye(3).to_sparse(),
    }
    for found in run_ranks(_echo, 2, tensors):
        for name, tensor in tensors.items():
            got = found[name]
            assert (type(got), got.dtype, got.requires_grad) == (type(tensor), tensor.dtype, tensor.requires_grad), name
            torch.testing.assert_close(got, tensor, atol=0, rtol=0)


def _ask(ranks: Ranks) -> list[object]:
    asked = [ranks.any_later(told == ranks.rank) for told in (0, 1, 2)]  # nobody is rank 2
    found = [ranks.first({"rank": ranks.rank, "bytes": b"x" * ranks.rank}), ranks.gather(ranks.rank)]
    return [*found, *(answer() for answer in asked), ranks.any(ranks.rank == 1), ranks.any(False)]


def _as_processes(rank: int, world_size: int) -> tuple[list[object], tuple[int, int], str]:
    """What a process is told, who it is in a group of its own, and what another's group says to it."""
    import torch.distributed as dist

    first, second = TorchRanks(), TorchRanks()
    for view in (first, second, first):  # which share the group's count of meetings
        view.meet("a test", timeout_s=10.0)
    groups = [dist.new_group([member]) for member in range(world_size)]
    mine = TorchRanks(groups[rank])
    with pytest.raises(ValueError) as caught:
        TorchRanks(groups[1 - rank])
    return _ask(second), (mine.rank, mine.world_size), str(caught.value)


def test_the_first_rank_speaks_and_any_rank_is_heard_later() -> None:
    want = [{"rank": 0, "bytes": b""}, [0, 1], True, True, False, True, False]
    assert run_ranks(_as_processes, 2) == [(want, (0, 1), "TorchRanks needs a group that this process belongs to")] * 2
    assert on_threads(2, _ask) == [want, want]


def _wait_an_hour(rank: int, world_size: int, released: str) -> tuple[list[float], list[int]] | None:
    """Rank 0 waits alone by a clock of its own; how long its pauses are, and how many keys it asks for at a time."""
    ranks = TorchRanks()
    waited: tuple[list[float], list[int]] | None = None
    if rank == 0:
        pauses: list[float] = []
        store = Mock(wraps=ranks._store)
        with patch("recipe.shared.ranks.time") as clock, patch.object(ranks, "_store", store):
            clock.monotonic = lambda: sum(pauses)
            clock.sleep = pauses.append
            with pytest.raises(RanksMissingError, match=r"waited 3600 s, but ranks \[1\] of 2 did not come"):
                ranks.meet("a test", timeout_s=3600.0)
        waited = pauses, [len(call.args[0]) for call in store.check.call_args_list]
        Path(released).touch()
    else:
        while not Path(released).exists():
            time.sleep(0.01)
        ranks.meet("catching up", timeout_s=5.0)
    ranks.barrier()
    return waited


def test_who_waits_asks_for_one_key_and_ever_less_often(tmp_path: Path) -> None:
    (pauses, num_keys), _ = run_ranks(_wait_an_hour, 2, str(tmp_path / "released"))
    assert pauses[:6] == [0.01, 0.02, 0.04, 0.08, 0.16, 0.25]
    assert set(pauses[6:-1]) == {0.25}
    assert sum(pauses) == pytest.approx(3600.0)
    assert set(num_keys) == {1}


def test_torch_ranks_needs_torch_distributed() -> None:
    with pytest.raises(ValueError, match=r"needs torch.distributed to be initialised; for one process use OneRank\(\)"):
        TorchRanks()
