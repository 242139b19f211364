"""Copies of hot experts: the loads reached against the exact optimum, and every row computed by exactly one holder."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from modeling.copies import Holders, choose_copies, choose_holders, largest_loads, least_loads, share_rows
from tests.moe_layers import count
from tests.static_shapes import static_shapes

TOKENS = 16384


def zipf_routing(
    seed: int, *, num_experts: int = 8, num_active: int = 2, skew: float = 1.0, num_tokens: int = TOKENS
) -> Tensor:
    """Experts drawn without replacement with probabilities that fall as a power of a shuffled rank: ids [T, A]."""
    generator = torch.Generator().manual_seed(seed)
    logits = -skew * torch.arange(1, num_experts + 1, dtype=torch.float64).log()
    logits = logits[torch.randperm(num_experts, generator=generator)]
    uniform = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    return (logits - (-uniform.log()).log()).topk(num_active).indices


def rho(largest: float, counts: Tensor, num_ranks: int) -> float:
    return float(largest) * num_ranks / counts.sum().item()


def copies_bound(loads: Sequence[float], *, num_ranks: int, num_copies: int) -> float:
    """No choice of `num_copies` copies on every rank lets the busiest rank have a load below this.

    Out of a set of ranks at most `num_copies` experts for every rank outside it can be copied; what the others were
    sent stays inside.
    """
    num_local = len(loads) // num_ranks

    def stays_in(ranks: int) -> float:
        inside = sorted((load for i, load in enumerate(loads) if ranks >> i // num_local & 1), reverse=True)
        return math.fsum(inside[num_copies * (num_ranks - ranks.bit_count()) :])

    return max(stays_in(ranks) / ranks.bit_count() for ranks in range(1, 2**num_ranks))


def holder_sets(copies: Sequence[Sequence[int]], *, num_experts: int) -> list[int]:
    held = [1 << expert // (num_experts // len(copies)) for expert in range(num_experts)]
    for rank, slots in enumerate(copies):
        for expert in slots:
            held[expert] |= 1 << rank
    return held


def optimum(counts: Tensor, copies: Tensor) -> float:
    """The least possible largest load for these copies, in fractions of rows.

    A set of ranks must do by itself what no rank outside it can do; the densest set decides, and its density can be
    reached (Hall, 1935, for shares: max-flow min-cut).
    """
    held = holder_sets(copies.tolist(), num_experts=len(counts))
    return max(
        sum(load for load, ranks in zip(counts.tolist(), held, strict=True) if not ranks & ~inside) / inside.bit_count()
        for inside in range(1, 2 ** len(copies))
    )


def best_of_all_choices(counts: Tensor, *, num_ranks: int) -> float:
    """The optimum over every way to fill one slot on each rank, by trying them all."""
    num_experts = len(counts)
    sets = torch.arange(1, 2**num_ranks)
    size = torch.tensor([int(s).bit_count() for s in sets])
    choices = torch.cartesian_prod(*[torch.arange(num_experts)] * num_ranks)
    held = (1 << torch.arange(num_experts) // (num_experts // num_ranks)).repeat(len(choices), 1)
    for rank in range(num_ranks):
        slot = choices[:, rank, None]
        held.scatter_(1, slot, held.gather(1, slot) | 1 << rank)
    demand = ((held[..., None] & ~sets == 0) * counts[:, None]).sum(1)
    return (demand / size).amax(1).min().item()


def rows_by_hand(ids: Tensor, holders: Holders, copies: Tensor, *, num_experts: int) -> list[int]:
    """Each rank's rows, after checking pair for pair that the rank holds the expert, under the number it says."""
    num_ranks, num_local = len(copies), num_experts // len(copies)
    loads = [0] * num_ranks
    for expert, rank, local in zip(
        *(x.flatten().tolist() for x in (ids, holders.rank_TA, holders.local_TA)), strict=True
    ):
        if expert == num_experts:
            assert (rank, local) == (num_ranks, num_local + copies.shape[1])
            continue
        own = list(range(rank * num_local, (rank + 1) * num_local))
        assert [*own, *copies[rank].tolist()][local] == expert
        loads[rank] += 1
    return loads


def test_one_copy_a_rank_balances_zipf_routings_of_eight_experts() -> None:
    """Each of 20 routings, beside the optimum over all 4096 choices of copies; what is reached is the optimum."""
    without, reached, best = [], [], []
    for seed in range(20):
        ids = zipf_routing(seed)
        counts = count(ids, 8)
        [copies] = choose_copies(counts[None], num_ranks=4, num_copies=1)
        shares = choose_holders(ids, copies, num_experts=8).shares
        without.append(rho(counts.view(4, 2).sum(1).max().item(), counts, 4))
        reached.append(rho(shares.largest_load.item(), counts, 4))
        best.append(rho(best_of_all_choices(counts, num_ranks=4), counts, 4))
    assert sum(without) / 20 > 1.55
    assert max(reached) <= 1.05
    assert reached == pytest.approx(best, abs=4 / (2 * TOKENS))


@pytest.mark.parametrize(
    ("num_experts", "num_active", "num_ranks", "num_copies", "skew", "limit"),
    [
        (8, 2, 2, 1, 1.0, 1.01),
        (8, 2, 8, 1, 1.0, 1.01),
        (8, 1, 4, 1, 2.0, 1.01),
        (8, 2, 4, 1, 2.5, 1.01),
        (16, 4, 8, 1, 1.0, 1.01),
        (32, 4, 8, 1, 1.2, 1.03),
        (60, 4, 5, 1, 1.0, 1.07),
        (64, 8, 4, 1, 1.0, 1.06),
        (64, 8, 8, 1, 1.5, 1.06),
        (64, 8, 8, 2, 1.5, 1.01),
        (128, 8, 8, 1, 1.0, 1.06),
    ],
)
def test_copies_come_close_to_the_bound_in_other_sizes(
    num_experts: int, num_active: int, num_ranks: int, num_copies: int, skew: float, limit: float
) -> None:
    options = {"num_experts": num_experts, "num_active": num_active, "skew": skew, "num_tokens": 4096}
    counts_LE = torch.stack([count(zipf_routing(seed, **options), num_experts) for seed in range(12)])
    chosen = choose_copies(counts_LE, num_ranks=num_ranks, num_copies=num_copies)
    for counts, copies in zip(counts_LE, chosen, strict=True):
        bound = copies_bound(counts.tolist(), num_ranks=num_ranks, num_copies=num_copies)
        largest = share_rows(counts, copies).largest_load.item()
        assert bound * (1 - 1e-12) <= largest <= bound * limit + 1
        assert choose_copies(counts[None], num_ranks=num_ranks, num_copies=num_copies).equal(copies[None])


def test_copies_still_help_when_the_load_has_moved() -> None:
    """Copies are chosen from the step before: every expert's load has changed by a quarter since."""
    worst = 0.0
    for seed in range(20):
        counts = count(zipf_routing(seed, num_tokens=2048), 8)
        [copies] = choose_copies(counts[None], num_ranks=4, num_copies=1)
        factor = (0.25 * torch.randn(8, generator=torch.Generator().manual_seed(seed))).exp()
        moved = (counts * factor).long()
        worst = max(worst, rho(share_rows(moved, copies).largest_load.item(), moved, 4))
    assert worst < 1.15


def random_case(seed: int, *, num_experts: int, num_ranks: int, num_copies: int) -> tuple[Tensor, Tensor]:
    """Counts of all sizes, some 0, and copies at random: twice on one rank, or of a rank's own expert."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 60, (num_experts,), generator=generator).square()
    counts[torch.rand(num_experts, generator=generator) < 0.2] = 0
    return counts, torch.randint(0, num_experts, (num_ranks, num_copies), generator=generator)


@pytest.mark.parametrize(("num_experts", "num_ranks", "num_copies"), [(4, 2, 1), (8, 4, 1), (12, 4, 3), (6, 6, 2)])
def test_shares_reach_the_optimum_for_any_copies_in_whole_rows(
    num_experts: int, num_ranks: int, num_copies: int
) -> None:
    for seed in range(25):
        counts, copies = random_case(seed, num_experts=num_experts, num_ranks=num_ranks, num_copies=num_copies)
        shares = share_rows(counts, copies)
        home = torch.arange(num_experts) // (num_experts // num_ranks)
        loads = torch.zeros(num_ranks, dtype=torch.long).index_add(0, home, shares.home_rows_E)
        loads += shares.copy_rows_PC.sum(1)
        taken = torch.zeros(num_experts, dtype=torch.long).index_add(0, copies.flatten(), shares.copy_rows_PC.flatten())
        assert (shares.home_rows_E + taken).equal(counts)
        assert min(shares.home_rows_E.min(), shares.copy_rows_PC.min()) >= 0
        assert loads.max() <= shares.largest_load
        assert shares.largest_load == -(-optimum(counts, copies) // 1 - 1e-9).__ceil__() or counts.sum() == 0


ADVERSARIES = {
    "one expert": torch.zeros(40, 1, dtype=torch.long),
    "two experts of one rank": torch.tensor([[0, 1]]).repeat(40, 1),
    "a rank without rows": torch.tensor([[0, 2], [3, 1]]).repeat(20, 1),
    "even": torch.arange(80).view(40, 2) % 8,
    "padding": torch.where(torch.arange(40)[:, None] % 3 == 0, 8, torch.arange(80).view(40, 2) % 3),
    "nothing but padding": torch.full((40, 2), 8),
    "one token": torch.tensor([[7, 6]]),
}


@pytest.mark.parametrize("name", ADVERSARIES)
@pytest.mark.parametrize("num_copies", [0, 1, 3])
def test_every_row_has_one_holder_and_the_buffers_are_large_enough(name: str, num_copies: int) -> None:
    ids = ADVERSARIES[name]
    counts = count(ids, 8)
    [chosen] = choose_copies(counts[None], num_ranks=4, num_copies=num_copies)
    for copies in (chosen, random_case(3, num_experts=8, num_ranks=4, num_copies=num_copies)[1]):
        holders = choose_holders(ids, copies, num_experts=8)
        loads = rows_by_hand(ids, holders, copies, num_experts=8)
        assert sum(loads) == counts.sum()
        assert max(loads) == pytest.approx(holders.shares.largest_load.item())
        assert max(loads) <= ids.shape[0] * min(ids.shape[1], 2 + num_copies)
        if not num_copies:
            assert loads == counts.view(4, 2).sum(1).tolist()


def test_loads_of_many_layers_are_those_of_one() -> None:
    """What the log says of a layer: the busiest rank that the holders give, and a bound to it, from counts alone."""
    counts_LE = torch.stack([count(zipf_routing(seed, num_tokens=500), 8) for seed in range(6)])
    for num_copies in (0, 1, 2):
        copies_LPC = choose_copies(counts_LE, num_ranks=4, num_copies=num_copies)
        copies_LPC[0] = torch.randint(0, 8, (4, num_copies), generator=torch.Generator().manual_seed(1))
        reached = largest_loads(counts_LE, copies_LPC=copies_LPC).tolist()
        bounds = least_loads(counts_LE, num_ranks=4, num_copies=num_copies).tolist()
        for layer, (counts, copies) in enumerate(zip(counts_LE, copies_LPC, strict=True)):
            ids = torch.repeat_interleave(torch.arange(8), counts)[:, None]
            rank = choose_holders(ids, copies, num_experts=8).rank_TA
            assert torch.bincount(rank.flatten(), minlength=4).amax() == reached[layer]
            bound = copies_bound(counts.tolist(), num_ranks=4, num_copies=num_copies)
            assert bounds[layer] == math.ceil(bound - 1e-9) <= reached[layer]
            if not num_copies:
                assert bounds[layer] == reached[layer] == counts.view(4, 2).sum(1).amax()


def test_the_first_rows_of_an_expert_stay_at_home_and_the_next_go_to_the_slots_in_order() -> None:
    ids = torch.zeros(12, 1, dtype=torch.long)
    holders = choose_holders(ids, torch.tensor([[0], [0], [0]]), num_experts=3)
    assert holders.rank_TA.flatten().tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert holders.local_TA.flatten().tolist() == [0] * 4 + [1] * 8
    assert holders.shares.home_rows_E.tolist() == [4, 0, 0]
    assert holders.shares.copy_rows_PC.tolist() == [[0], [4], [4]]


def test_slots_that_would_not_help_stay_empty() -> None:
    nothing, one = torch.zeros(8), torch.zeros(8)
    one[5] = 100
    chosen = choose_copies(torch.stack([nothing, one]), num_ranks=4, num_copies=2)
    assert chosen.tolist() == [[[0, 0], [2, 2], [4, 4], [6, 6]], [[5, 0], [5, 2], [4, 4], [5, 6]]]


def test_the_hottest_expert_may_be_copied_to_all_ranks() -> None:
    counts = torch.tensor([[1000, 10, 10, 10, 10, 10, 10, 10]])
    [copies] = choose_copies(counts, num_ranks=4, num_copies=1)
    assert copies.tolist() == [[0], [0], [0], [0]]
    assert share_rows(counts[0], copies).largest_load == -(-1070 // 4)


def test_neither_the_choice_nor_the_shares_show_the_host_a_number() -> None:
    ids = zipf_routing(0, num_tokens=64)
    counts = count(ids, 8)
    want = choose_copies(counts[None], num_ranks=4, num_copies=1)
    with static_shapes():
        chosen = choose_copies(counts[None].double(), num_ranks=4, num_copies=1)
        holders = choose_holders(ids, chosen[0], num_experts=8)
    assert chosen.equal(want)
    assert holders.rank_TA.equal(choose_holders(ids, want[0], num_experts=8).rank_TA)


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_copies", "message"),
    [
        (8, 3, 1, r"8 experts cannot be spread over ep=3; ep must be one of \[1, 2, 4, 8\]"),
        (8, 4, 7, r"7 copies do not fit: of num_experts=8 over ep=4 a rank can copy 0 to 6"),
        (8, 4, -1, r"-1 copies do not fit"),
        (8, 1, 1, r"1 copies do not fit: .* a rank can copy 0 to 0"),
        (64, 32, 1, r"ep=32 ranks would take .* 2 \*\* 32 sets of ranks; use ep of at most 12"),
    ],
)
def test_copies_that_do_not_fit_are_refused(num_experts: int, num_ranks: int, num_copies: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_copies(torch.ones(1, num_experts), num_ranks=num_ranks, num_copies=num_copies)


def test_the_bound_holds_for_every_choice_of_copies() -> None:
    """Six experts on three ranks, one slot each, all 216 choices; somewhere the bound is above the mean."""
    above = 0
    for seed in range(20):
        counts, _ = random_case(seed, num_experts=6, num_ranks=3, num_copies=1)
        if seed % 2:
            counts = torch.cat([10 + counts[:4] % 4, torch.zeros(2, dtype=torch.long)])
        bound = copies_bound(counts.tolist(), num_ranks=3, num_copies=1)
        best = min(optimum(counts, torch.tensor(copies)[:, None]) for copies in itertools.product(range(6), repeat=3))
        assert best >= bound * (1 - 1e-12)
        above += bound > counts.sum().item() / 3 * (1 + 1e-9)
    assert above >= 10
