"""The script for two GPUs, its parts on two ranks of a CPU with emulated graphs."""

from typing import Any

import gpu_pair_check
import pytest
import torch
from gpu_cases import Row

from tests.emulated_graphs import EmulatedCapture
from tests.ranks import run_ranks
from tests.referee import TINY


def pair() -> gpu_pair_check.Pair:
    sizes = dict(TINY)
    device = torch.device("cpu")
    return gpu_pair_check.Pair(device, sizes, sizes, (2, 16), "sdpa", EmulatedCapture, num_timed=2)


def on_a_rank(rank: int, world_size: int, broken: bool) -> list[Row]:
    """What one rank finds; with a capture that leaves numbers where a graph would have made others."""
    given = pair()
    return gpu_pair_check.run_pair(given._replace(capture=Forgetful) if broken else given)


class Forgetful(EmulatedCapture):
    """Captures, and replays nothing."""

    def __call__(self, work: Any) -> Any:
        super().__call__(work)
        return lambda: None


@pytest.mark.slow
def test_all_cases_run_on_two_ranks_and_are_within_bounds() -> None:
    for rows in run_ranks(on_a_rank, 2, False):
        assert [row for row in rows if not row.is_good] == []
        assert [row.section for row in rows] == ["graphs", "graphs", "waits"] * 2 + ["overlap"] * 6
        assert all(row.value > 0 for row in rows if row.unit == "ms")


@pytest.mark.slow
def test_graphs_that_do_not_replay_are_found() -> None:
    for rows in run_ranks(on_a_rank, 2, True):
        assert {row.what for row in rows if not row.is_good} == {"loss: graphed", "gradients: graphed"}


def test_without_two_gpus_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_pair_check.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "gpu_pair_check: torch finds 0 GPUs here and needs two\n"
