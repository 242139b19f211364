"""How uneven whole experts are over simulated routings, and how many copies of hot experts make them even."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from claims import case
from claims.table import Column, Row, Table
from recipe.train.placement import place_experts

if TYPE_CHECKING:
    import numpy as np

DRAWS = 20
SEED = 0


class Routing(NamedTuple):
    """`popularity` draws how likely each expert is chosen, from a generator and the number of experts."""

    experts: int
    active: int
    ranks: int
    name: str
    popularity: Callable[["np.random.Generator", int], "np.ndarray[Any, Any]"]


class Copies(NamedTuple):
    """num_copies of experts on other ranks, and the busiest rank's load over the mean with them."""

    num_copies: int
    rho: float


def zipf(exponent: float) -> Callable[["np.random.Generator", int], "np.ndarray[Any, Any]"]:
    """Popularity falls as 1 / place ** exponent; which expert has which place is drawn."""

    def draw(generator: "np.random.Generator", experts: int) -> "np.ndarray[Any, Any]":
        places = generator.random(experts).argsort() + 1
        return 1 / places**exponent

    return draw


def dirichlet(generator: "np.random.Generator", experts: int) -> "np.ndarray[Any, Any]":
    """Any popularity is as likely as any other."""
    import numpy as np

    return -np.log(1 - generator.random(experts))


def routings() -> tuple[Routing, ...]:
    return (
        Routing(8, 2, 4, "even", zipf(0.0)),
        Routing(8, 2, 4, "Zipf 0.5", zipf(0.5)),
        Routing(8, 2, 4, "Zipf 1", zipf(1.0)),
        Routing(64, 8, 4, "Zipf 1", zipf(1.0)),
        Routing(128, 8, 8, "Zipf 1", zipf(1.0)),
        Routing(128, 8, 8, "Dirichlet", dirichlet),
    )


def draw_loads(routing: Routing, generator: "np.random.Generator") -> list[float]:
    """Rows of each expert: every token draws its experts by popularity, none twice.

    Of independent waiting times -log(u) / popularity the shortest are such a draw. Equal ones, a few in a million, all
    count. Only the generator's uniform numbers are used, which are the same in every release of numpy.
    """
    import numpy as np

    popularity = routing.popularity(generator, routing.experts).astype(np.float32)
    uniform_TE = generator.random((case.LENGTH, routing.experts), dtype=np.float32)
    keys_TE = np.log(1 - uniform_TE) / popularity
    place = routing.experts - routing.active
    last_T1 = np.partition(keys_TE, place, axis=1)[:, place : place + 1]
    loads: list[float] = (keys_TE >= last_T1).sum(axis=0).astype(float).tolist()
    return loads


def share_surplus(loads: Sequence[float], *, num_ranks: int, max_copies: int | None = None) -> Copies:
    """Ranks above the mean, the busiest first, hand rows of their hottest experts to the idlest rank until it is even.

    With copies placed so, rows are shared as evenly as these copies allow.
    """
    num_local = len(loads) // num_ranks
    home = [expert // num_local for expert in range(len(loads))]
    holders = [1 << rank for rank in home]
    busy = [sum(loads[rank * num_local : (rank + 1) * num_local]) for rank in range(num_ranks)]
    mean, num_copies = sum(busy) / num_ranks, 0
    close = 1e-9 * mean
    for giver in sorted(range(num_ranks), key=lambda rank: -busy[rank]):
        own = range(giver * num_local, (giver + 1) * num_local)
        for expert in sorted(own, key=lambda e: -loads[e]):
            left = loads[expert]
            while busy[giver] > mean + close and left > close and num_copies != max_copies:
                taker = min(range(num_ranks), key=lambda rank: busy[rank])
                moved = min(busy[giver] - mean, left, mean - busy[taker])
                busy[giver] -= moved
                busy[taker] += moved
                left -= moved
                holders[expert] |= 1 << taker
                num_copies += 1
    return Copies(num_copies, optimal_load(loads, holders=holders, num_ranks=num_ranks) / mean)


@cache
def shadowing_rows() -> tuple[Row, ...]:
    import numpy as np

    rows = []
    for routing in routings():
        generator = np.random.Generator(np.random.PCG64(SEED))
        draws = [draw_loads(routing, generator) for _ in range(DRAWS)]
        placed = [place_experts(loads, num_ranks=routing.ranks) for loads in draws]
        few, full = (
            [share_surplus(loads, num_ranks=routing.ranks, max_copies=most) for loads in draws]
            for most in (routing.ranks // 2, None)
        )
        now = [placement.rho_now for placement in placed]
        counts = [copies.num_copies for copies in full]
        rows.append(
            {
                "experts": routing.experts,
                "active": routing.active,
                "ranks": routing.ranks,
                "routing": routing.name,
                "rho": sum(now) / DRAWS,
                "rho_error": stdev(now) / DRAWS**0.5,
                "rho_max": max(now),
                "placed": sum(placement.rho for placement in placed) / DRAWS,
                "few_copies": sum(copies.rho for copies in few) / DRAWS,
                "full_rho": max(copies.rho for copies in full),
                "copies": sum(counts) / DRAWS,
                "copies_max": max(counts),
            }
        )
    return tuple(rows)


SHADOWING = Table(
    key="shadowing",
    title="What it takes to make whole experts even",
    intro=(
        f"rho, the busiest rank's rows over the mean, over {DRAWS} simulated micro-batches of 16,384 tokens (seed "
        f"{SEED}), the same for gathered and exchanged tokens. Placed: experts moved to other ranks for the load they "
        "have, equally many on each (`gather-moe place`). Copies: after the gather any rank that holds a copy of an "
        "expert can take any of its rows. Slices of every expert have rho = 1 without any of this."
    ),
    columns=(
        Column("experts", "E"),
        Column("active", "k"),
        Column("ranks", "N"),
        Column("routing", "popularity of experts"),
        Column("rho", "rho", None, 2),
        Column("rho_error", "standard error", None, 2),
        Column("rho_max", "largest rho", None, 2),
        Column("placed", "placed", None, 2),
        Column("few_copies", "with at most N/2 copies", None, 2),
        Column("full_rho", "with enough copies", None, 2),
        Column("copies", "copies for that", None, 1),
        Column("copies_max", "at most"),
    ),
    rows=shadowing_rows,
    notes=(
        "With few, large experts no placement helps against a hot one; with many, placing is nearly enough as long "
        "as the loads stay what they were. Copies are N-1 where each overloaded rank's hottest expert covers its "
        "surplus, else more.",
    ),
)


def optimal_load(loads: Sequence[float], *, holders: Sequence[int], num_ranks: int) -> float:
    """The smallest possible load of the busiest rank, where any holder of an expert may take a share of its rows.

    `holders` has a bit for every rank that holds the expert. A set of ranks must do by itself what no rank outside it
    can do; the densest set decides, and its density can be reached (Hall, 1935, for shares: max-flow min-cut).
    """
    return max(
        math.fsum(load for load, held in zip(loads, holders, strict=True) if not held & ~ranks) / ranks.bit_count()
        for ranks in range(1, 2**num_ranks)
    )
