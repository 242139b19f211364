"""The computed shuffle is a permutation, differs between seeds and epochs, and looks like chance."""

import itertools

import pytest

from recipe.data.order import EpochOrder


def order(num_items: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    permutation = EpochOrder(num_items, seed=seed, epoch=epoch)
    return [permutation[position] for position in range(num_items)]


@pytest.mark.parametrize("num_items", [1, 2, 3, 4, 5, 12, 64, 65, 1000, 4097])
def test_every_item_comes_once(num_items: int) -> None:
    assert sorted(order(num_items)) == list(range(num_items))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    first = order(100, seed=3, epoch=1)
    assert first == order(100, seed=3, epoch=1)
    assert first != order(100, seed=4, epoch=1)
    assert first != order(100, seed=3, epoch=2)
    assert order(100, seed=1, epoch=11) != order(100, seed=11, epoch=1)


def test_one_position_of_a_huge_epoch_costs_nothing() -> None:
    num_items = 10**13
    huge = EpochOrder(num_items, seed=0, epoch=0)
    items = [huge[position] for position in range(0, num_items, num_items // 1000)]
    assert len(set(items)) == len(items)
    assert 0.45 < sum(items) / len(items) / num_items < 0.55


def test_all_orders_of_four_items_occur_about_equally_often() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        found = tuple(order(4, seed=seed))
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 24
    # 23 degrees of freedom: chance exceeds 50 once in a thousand times.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 50


def test_neighbours_do_not_stay_neighbours() -> None:
    shuffled = order(4096)
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(shuffled)) < 20


@pytest.mark.parametrize("position", [5, -1])
def test_a_position_outside_the_epoch_is_an_error(position: int) -> None:
    with pytest.raises(IndexError, match=f"position {position} of an epoch of 5 items"):
        EpochOrder(5, seed=0, epoch=0)[position]
