"""Ranks gather each other's values, and a meeting names who did not come."""

import time
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from recipe.shared.ranks import OneRank, Ranks, RanksMissingError, TorchRanks
from tests.ranks import run_ranks
from tests.thread_ranks import on_threads


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


def _gather(rank: int, world_size: int) -> list[object]:
    ranks: Ranks = TorchRanks()
    ranks.barrier()
    ranks.meet("a test", timeout_s=10.0)
    return ranks.gather({"rank": ranks.rank, "of": ranks.world_size, "bytes": b"x" * rank})


def test_gather_returns_every_value_by_rank_on_every_rank() -> None:
    want = [{"rank": 0, "of": 2, "bytes": b""}, {"rank": 1, "of": 2, "bytes": b"x"}]
    assert run_ranks(_gather, 2) == [want, want]


def _ask(ranks: Ranks) -> list[object]:
    asked = [ranks.any_later(told == ranks.rank) for told in (0, 1, 2)]  # nobody is rank 2
    found = [ranks.first({"rank": ranks.rank, "bytes": b"x" * ranks.rank}), ranks.gather(ranks.rank)]
    return [*found, *(answer() for answer in asked), ranks.any(ranks.rank == 1), ranks.any(False)]


def _ask_as_a_process(rank: int, world_size: int) -> list[object]:
    return _ask(TorchRanks())


def test_the_first_rank_speaks_and_any_rank_is_heard_later() -> None:
    want = [{"rank": 0, "bytes": b""}, [0, 1], True, True, False, True, False]
    assert run_ranks(_ask_as_a_process, 2) == [want, want]
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


def _meet_alone(rank: int, world_size: int, caller: int, released: str) -> tuple[str, float] | None:
    import torch.distributed as dist

    message = None
    if rank == caller:
        start_s = time.monotonic()
        with pytest.raises(RanksMissingError) as caught:
            TorchRanks().meet("saving step-3", timeout_s=0.3)
        message = str(caught.value), time.monotonic() - start_s
        Path(released).touch()
    else:
        while not Path(released).exists():
            time.sleep(0.01)
        # Come to the meeting that was missed, so that both ranks have held equally many when the next test starts.
        TorchRanks().meet("catching up", timeout_s=5.0)
    dist.barrier()  # the group still works
    return message


@pytest.mark.parametrize("caller", [0, 1])
@pytest.mark.requirement("R-CKPT-12")
def test_a_one_sided_meeting_names_the_missing_rank_in_time(caller: int, tmp_path: Path) -> None:
    answer = run_ranks(_meet_alone, 2, caller, str(tmp_path / "released"))[caller]
    message, waited_s = answer
    assert f"saving step-3: rank {caller} waited 0.3 s, but ranks [{1 - caller}] of 2 did not come" in message
    assert 0.3 <= waited_s < 2.0


def _two_views_of_one_group(rank: int, world_size: int) -> list[int]:
    first, second = TorchRanks(), TorchRanks()
    for view in (first, second, first):
        view.meet("a test", timeout_s=10.0)
    return first.gather(rank)


def test_views_of_one_group_share_its_count_of_meetings() -> None:
    assert run_ranks(_two_views_of_one_group, 2) == [[0, 1], [0, 1]]


def _groups_of_one(rank: int, world_size: int) -> tuple[int, int, str]:
    import torch.distributed as dist

    groups = [dist.new_group([member]) for member in range(world_size)]
    mine = TorchRanks(groups[rank])
    with pytest.raises(ValueError) as caught:
        TorchRanks(groups[1 - rank])
    return mine.rank, mine.world_size, str(caught.value)


def test_ranks_count_within_their_group() -> None:
    message = "TorchRanks needs a group that this process belongs to"
    assert run_ranks(_groups_of_one, 2) == [(0, 1, message), (0, 1, message)]


def test_torch_ranks_needs_torch_distributed() -> None:
    with pytest.raises(ValueError, match=r"needs torch.distributed to be initialised; for one process use OneRank\(\)"):
        TorchRanks()
