"""Ranks gather each other's values, and a meeting names who did not come."""

import time
from pathlib import Path

import pytest

from recipe.ranks import OneRank, Ranks, RanksMissingError, TorchRanks
from tests.ranks import run_ranks


def test_one_rank_is_a_world_of_one() -> None:
    ranks: Ranks = OneRank()
    ranks.barrier()
    ranks.meet("a test", timeout_s=0.0)
    assert (ranks.rank, ranks.world_size, ranks.gather("mine")) == (0, 1, ["mine"])


def _gather(rank: int, world_size: int) -> list[object]:
    ranks: Ranks = TorchRanks()
    ranks.barrier()
    ranks.meet("a test", timeout_s=10.0)
    return ranks.gather({"rank": ranks.rank, "of": ranks.world_size, "bytes": b"x" * rank})


def test_gather_returns_every_value_by_rank_on_every_rank() -> None:
    want = [{"rank": 0, "of": 2, "bytes": b""}, {"rank": 1, "of": 2, "bytes": b"x"}]
    assert run_ranks(_gather, 2) == [want, want]


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
def test_r_ckpt_12_a_one_sided_meeting_names_the_missing_rank_in_time(caller: int, tmp_path: Path) -> None:
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
