"""Which rank should hold which experts so that their work is even, from how many rows each was sent.

Without copies an expert's rows are computed where it lives, so the busiest rank decides how long a layer takes. rho is
that rank's load over the mean load. Every rank holds the same number of experts: expert i lives on rank i // (E / ep).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from modeling.execution import check_experts_divide


class Placement(NamedTuple):
    """Where the experts of one layer should live.

    numbers  the new number of every expert: a permutation of range(E)
    rho_now  with the experts where they are
    rho      with the new numbers, never more
    bound    no placement has a rho below it
    """

    numbers: tuple[int, ...]
    rho_now: float
    rho: float
    bound: float


def place_experts(loads: Sequence[float], *, num_ranks: int) -> Placement:
    """Spread one layer's experts over `num_ranks`, the same number on each, from their measured loads (rows routed).

    The heaviest expert first, each to the lightest rank with room (Graham, 1969), then swaps between the busiest rank
    and another as long as one helps. The same loads give the same placement; the experts stay where they are unless
    that is worse.
    """
    _check_loads(loads, num_ranks=num_ranks)
    num_local, mean = len(loads) // num_ranks, math.fsum(loads) / num_ranks
    now = [list(range(rank * num_local, (rank + 1) * num_local)) for rank in range(num_ranks)]
    ranks = _heaviest_first(loads, num_ranks=num_ranks)
    _swap(ranks, loads)
    worst_now, worst = (max(math.fsum(loads[i] for i in rank) for rank in held) for held in (now, ranks))
    if worst >= worst_now:
        ranks, worst = now, worst_now
    ranks = sorted(sorted(rank) for rank in ranks)
    numbers = [0] * len(loads)
    for number, expert in enumerate(expert for rank in ranks for expert in rank):
        numbers[expert] = number
    return Placement(tuple(numbers), worst_now / mean, worst / mean, _placement_bound(loads, num_ranks=num_ranks))


def _check_loads(loads: Sequence[float], *, num_ranks: int) -> None:
    check_experts_divide(len(loads), num_ranks=num_ranks)
    if not all(math.isfinite(load) and load >= 0 for load in loads) or not any(loads):
        raise ValueError(f"the loads {list(loads)[:8]} are no counts of routed rows; none may be negative, nor all 0")


def _heaviest_first(loads: Sequence[float], *, num_ranks: int) -> list[list[int]]:
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    for expert in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        with_room = [rank for rank in range(num_ranks) if len(held[rank]) < len(loads) // num_ranks]
        lightest = min(with_room, key=lambda rank: (sums[rank], rank))
        held[lightest].append(expert)
        sums[lightest] += loads[expert]
    return held


class _Swap(NamedTuple):
    """An expert of the busiest rank for a lighter one of another rank; `worst` is the larger load of the two then."""

    worst: float
    rank: int
    given: int
    taken: int
    shift: float


def _swap(held: list[list[int]], loads: Sequence[float]) -> None:
    """Swap experts in place until no swap makes the busiest rank lighter. Ends: the sorted loads fall every time."""
    sums = [math.fsum(loads[i] for i in rank) for rank in held]
    while True:
        busiest = max(range(len(held)), key=lambda rank: (sums[rank], -rank))
        swap = min(_helpful_swaps(held, sums, loads, busiest=busiest), default=None)
        if swap is None:
            return
        held[busiest][held[busiest].index(swap.given)] = swap.taken
        held[swap.rank][held[swap.rank].index(swap.taken)] = swap.given
        sums[busiest] -= swap.shift
        sums[swap.rank] += swap.shift


def _helpful_swaps(
    held: list[list[int]], sums: list[float], loads: Sequence[float], *, busiest: int
) -> Iterator[_Swap]:
    for rank, experts in enumerate(held):
        if rank == busiest:
            continue
        for given in held[busiest]:
            for taken in experts:
                shift = loads[given] - loads[taken]
                worst = max(sums[busiest] - shift, sums[rank] + shift)
                if worst < sums[busiest]:
                    yield _Swap(worst, rank, given, taken, shift)


def _placement_bound(loads: Sequence[float], *, num_ranks: int) -> float:
    """The mean; and of the k * num_ranks + 1 heaviest experts some rank holds k + 1, beside the lightest of all."""
    num_local, mean = len(loads) // num_ranks, math.fsum(loads) / num_ranks
    falling = sorted(loads, reverse=True)
    return max(
        1.0,
        *(
            math.fsum(falling[k * num_ranks - k : k * num_ranks + 1]) / mean
            + math.fsum(falling[len(loads) - (num_local - k - 1) :]) / mean
            for k in range(num_local)
        ),
    )
