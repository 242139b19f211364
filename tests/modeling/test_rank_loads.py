"""The loads over ranks that are logged: those of the rows that each rank really has, and a bound that they keep."""

from typing import Any

import pytest
import torch

from modeling.auxiliary import RankLoads, rank_loads
from modeling.copies import choose_holders
from modeling.execution import Execution
from modeling.layout import ParallelLayout
from modeling.mesh import ParallelMesh
from tests.engine_runs import Case as TrainingCase
from tests.engine_runs import make_micro_batches, start_engine
from tests.ranks import run_ranks
from tests.referee import full_state, tiny_config


def loads_of(counts: torch.Tensor, *, ep: int, num_tokens: int = 100, **options: Any) -> RankLoads:
    config = tiny_config(num_experts=counts.shape[1], **options)
    mesh = ParallelMesh(layout=ParallelLayout(tp=ep, ep=ep), rank=0, tp_group=None, dp_group=None, kv_group=None)
    return rank_loads(counts, copies=[], config=config, mesh=mesh, num_tokens=num_tokens)


def test_without_copies_the_busiest_rank_has_all_rows_of_its_experts() -> None:
    counts = torch.tensor([[50.0, 10, 5, 5, 10, 10, 5, 5], [0, 0, 0, 0, 0, 0, 0, 7]])
    got = loads_of(counts, ep=4)
    assert got.slowest_L.tolist() == [4 * 60, 4 * 7]
    assert not got.bound_L.numel()
    assert loads_of(counts, ep=2).slowest_L.tolist() == [2 * 70, 2 * 7]


def test_without_copies_any_number_of_ranks_can_share_the_experts() -> None:
    """Sets of 64 ranks are too many to look at, and need not be."""
    assert loads_of(torch.arange(128.0)[None], ep=64).slowest_L.tolist() == [64 * (126 + 127)]


def test_a_capacity_drops_rows_before_ranks_have_them() -> None:
    counts = torch.tensor([[150.0, 10, 10, 10, 5, 5, 5, 5]])
    got = loads_of(counts, ep=4, capacity_factor=2.0, num_tokens=100)  # 2 * 100 * 2 / 8 = 50 an expert
    assert got.slowest_L.tolist() == [4 * 60]


def test_every_rank_is_as_busy_as_the_others_where_all_hold_slices() -> None:
    assert not loads_of(torch.ones(1, 8), ep=1).slowest_L.numel()


def logged_and_counted(rank: int, world_size: int, accumulation: int) -> tuple[Any, ...]:
    """What two steps' sums say, and what the layers' own calls add up to, once one layer's slots stay empty."""
    config = tiny_config()
    case = TrainingCase(tp=2, ep=2, accumulation=accumulation, execution=Execution(resident_experts=1))
    engine = start_engine(config, full_state(config), case)
    layers = engine.model.experts_with_copies
    counted = [0, 0]

    def count_rows(module: Any, args: Any, layer: int) -> None:
        copies_PC = module.copies_PC(torch.device("cpu"))
        holders = choose_holders(args[1], copies_PC, num_experts=4)
        counted[layer] += 2 * int(torch.bincount(holders.rank_TA.flatten(), minlength=2)[:2].amax())

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda m, a, n=number: count_rows(m, a, n))
    engine.restore_loads([[0.0] * 4, [100.0, 1.0, 1.0, 1.0]])
    logged = []
    for step in range(2):
        batches = make_micro_batches(config, case, step=step, dp_rank=0)
        sums = engine.accumulate(batches, counts=engine.count(batches))
        if not step:
            empty = [layer.held is None for layer in layers]
        logged.append((sums.slowest_L.tolist(), sums.bound_L.tolist(), sums.expert_counts.sum(1).tolist()))
        engine.update(learning_rate=1e-3)
    return empty, counted, logged


@pytest.mark.parametrize("accumulation", [1, 3])
def test_steps_log_the_rows_that_the_layers_had(accumulation: int) -> None:
    results = run_ranks(logged_and_counted, 2, accumulation)
    assert results[0] == results[1]
    empty, counted, logged = results[0]
    assert empty == [True, False]
    for layer in range(2):
        assert sum(slowest[layer] for slowest, _, _ in logged) == counted[layer]
        for slowest, bound, rows in logged:
            assert rows[layer] <= bound[layer] <= slowest[layer]
