"""The stream of steps: one integer resumes it, and no layout, worker or checkpoint changes it (R-DATA-01 to 05)."""

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from recipe.data.batches import check_batches, checksum
from recipe.data.loader import LoaderOptions, StepLoader, shuffled_item
from recipe.shared.ranks import TorchRanks
from tests.data_samples import numbered_blocks, prepare, rows_of, take_rows, write_rows
from tests.ranks import run_ranks


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.requirement("R-DATA-01")
@pytest.mark.requirement("R-DATA-02")
def test_a_run_resumed_in_every_epoch_sees_the_batches_of_one_uninterrupted_run(num_workers: int) -> None:
    blocks = numbered_blocks(31)
    sizes: dict[str, Any] = {"num_sequences": 2, "accumulation": 3, "seed": 5, "num_workers": num_workers}
    want = take_rows(blocks, position=0, num_steps=16, **sizes)
    rows = [row for step in want for row in step]
    epochs = [rows[first : first + 31] for first in (0, 31, 62)]
    assert all(sorted(epoch) == list(range(31)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    got, position = [], 0
    for _ in range(4):  # at 24, in the first epoch, at 48 and at 72
        steps = StepLoader(blocks, options=LoaderOptions(**sizes)).steps(position)
        for _ in range(4):
            micro_batches, position = next(steps)
            got.append(rows_of(micro_batches))
    assert got == want
    assert position == 16 * 6


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("num_files", [4, 1])
@pytest.mark.requirement("R-DATA-03")
def test_every_dp_rank_gets_its_own_rows(tmp_path: Any, num_files: int, num_workers: int) -> None:
    per_file = 20 // num_files
    for file in range(num_files):
        rows = range(file * per_file, (file + 1) * per_file)
        write_rows(tmp_path / f"part{file}.jsonl", [f"w{row} w{row} w{row}" for row in rows])  # with EOS, one block
    data = prepare(tmp_path, train_file=str(tmp_path / "part*.jsonl"))
    assert len(data.train) == 20
    by_rank = [
        take_rows(data.train, position=0, num_steps=10, dp=2, dp_rank=rank, num_workers=num_workers) for rank in (0, 1)
    ]
    seen = [row for steps in by_rank for step in steps for row in step]
    assert sorted(seen) == list(range(10, 30))


@pytest.mark.parametrize("rows_by_file", [(5,), (3, 0, 5, 2)])
@pytest.mark.requirement("R-DATA-04")
def test_every_rank_takes_the_same_number_of_steps(tmp_path: Any, rows_by_file: tuple[int, ...]) -> None:
    for file, num_rows in enumerate(rows_by_file):
        write_rows(tmp_path / f"part{file}.jsonl", ["w1 w2 w3"] * num_rows)
    said: list[str] = []
    data = prepare(tmp_path, train_file=str(tmp_path / "part*.jsonl"), block_size=3, said=said)
    num_blocks, unused = divmod(4 * sum(rows_by_file), 3)
    assert len(data.train) == num_blocks
    assert any(f"{num_blocks} blocks; {unused} tokens at the end fill no block and are not used" in s for s in said)
    assert any("training wraps to a new epoch, so every rank takes the same number of steps" in s for s in said)
    # Four sequences a step do not divide the blocks of an epoch; both ranks still get every step they ask for.
    for rank in (0, 1):
        steps = take_rows(data.train, position=0, num_steps=9, num_sequences=2, dp=2, dp_rank=rank)
        assert [len(step) for step in steps] == [2] * 9


def test_the_stream_does_not_depend_on_dp_or_accumulation() -> None:
    blocks = numbered_blocks(29)
    want = take_rows(blocks, position=3, num_steps=10, num_sequences=12)
    for num_sequences, dp, accumulation in [(1, 12, 1), (2, 3, 2), (3, 1, 4), (6, 2, 1)]:
        sizes = {"num_sequences": num_sequences, "dp": dp, "accumulation": accumulation}
        by_rank = [take_rows(blocks, position=3, num_steps=10, dp_rank=rank, **sizes) for rank in range(dp)]
        for step in range(10):
            got = [
                row
                for a in range(accumulation)
                for rank in range(dp)
                for row in by_rank[rank][step][a * num_sequences : (a + 1) * num_sequences]
            ]
            assert got == want[step]


def test_micro_batches_carry_what_a_step_needs() -> None:
    options = LoaderOptions(num_sequences=2, accumulation=2, seed=0)
    (_, second), position = next(StepLoader(numbered_blocks(5), options=options).steps(0))
    assert position == 4
    assert second.input_ids.dtype == second.labels.dtype == torch.int64
    assert second.input_ids.shape == (2, 4)
    assert (second.token_mask, second.num_targets, second.positions) == (None, 2 * 3, (2, 3))
    assert take_rows(numbered_blocks(3), position=2, num_steps=4, shuffle=False) == [[2], [0], [1], [2]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_draws_from_no_global_random_state(num_workers: int) -> None:
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    take_rows(numbered_blocks(12), position=0, num_steps=20, num_workers=num_workers)
    after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_each_epoch_is_announced_once() -> None:
    said: list[str] = []
    loader = StepLoader(numbered_blocks(5), options=LoaderOptions(num_sequences=2, seed=0), say=said.append)
    for _, step in zip(range(7), loader.steps(0), strict=False):
        assert step.position <= 14
    assert said == [
        f"data: epoch {epoch} (5 blocks) begins at sequence {epoch * 5} of the stream" for epoch in range(3)
    ]
    said.clear()
    next(loader.steps(6))
    assert said == []  # a resumed run is in the middle of its epoch


def test_an_error_in_a_worker_reaches_the_loop() -> None:
    blocks = numbered_blocks(4)
    blocks._tokens = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        take_rows(blocks, position=0, num_steps=1, num_workers=2)


def _check_batches_of(rank: int, world_size: int, *cases: tuple[list[int], list[int]]) -> list[str]:
    """Two groups of two ranks, for each case with these dp ranks and seeds: the fault, or a digest of the batches."""
    said = []
    for dp_ranks, seeds in cases:
        options = LoaderOptions(num_sequences=2, dp=2, dp_rank=dp_ranks[rank], accumulation=5, seed=seeds[rank])
        batches = next(StepLoader(numbered_blocks(40), options=options).steps(0)).micro_batches
        try:
            check_batches(batches, ranks=TorchRanks(), tp=2)
            said.append(checksum(batches))
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.requirement("R-DATA-05")
def test_ranks_of_a_group_hold_equal_batches_and_groups_different_ones_or_all_ranks_stop() -> None:
    groups, same_seed = [0, 0, 1, 1], [0] * 4
    cases = [(groups, same_seed), (groups, [0, 1, 2, 3]), ([0] * 4, same_seed)]
    checksums, uneven, shared = zip(*run_ranks(_check_batches_of, 4, *cases, timeout_s=60), strict=True)
    assert checksums[0] == checksums[1] != checksums[2] == checksums[3]
    assert len(set(uneven)) == len(set(shared)) == 1
    assert "ranks [1] hold other batches than rank 0 of their group (tp=2)" in uneven[0]
    assert "ranks [3] hold other batches than rank 2 of their group (tp=2)" in uneven[0]
    assert "ranks [0, 2] of different groups hold the same sequences of the stream" in shared[0]


def order(num_items: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    return [shuffled_item(position, num_items=num_items, seed=seed, epoch=epoch) for position in range(num_items)]


@pytest.mark.parametrize("num_items", [1, 2, 3, 4, 5, 12, 64, 65, 1000, 4097])
def test_every_item_comes_once_and_away_from_its_neighbours(num_items: int) -> None:
    shuffled = order(num_items)
    assert sorted(shuffled) == list(range(num_items))
    if num_items > 100:
        assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(shuffled)) < 20
    for position in (num_items, -1):
        with pytest.raises(AssertionError, match=f"position {position} of an epoch of {num_items} items"):
            shuffled_item(position, num_items=num_items, seed=0, epoch=0)


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    first = order(100, seed=3, epoch=1)
    assert first == order(100, seed=3, epoch=1)
    assert first != order(100, seed=4, epoch=1)
    assert first != order(100, seed=3, epoch=2)
    assert order(100, seed=1, epoch=11) != order(100, seed=11, epoch=1)


def test_one_position_of_a_huge_epoch_costs_nothing() -> None:
    num_items = 10**13
    positions = range(0, num_items, num_items // 1000)
    items = [shuffled_item(position, num_items=num_items, seed=0, epoch=0) for position in positions]
    assert len(set(items)) == len(items)
    assert 0.45 < sum(items) / len(items) / num_items < 0.55


def test_all_orders_of_four_items_occur_about_equally_often() -> None:
    counts = Counter(tuple(order(4, seed=seed)) for seed in range(4800))
    assert len(counts) == 24
    # 23 degrees of freedom: chance exceeds 50 once in a thousand times.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 50
