"""Training with copies of hot experts equals one plain process, and the loads over ranks that are logged are real."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from modeling.auxiliary import RankLoads, rank_loads
from modeling.config import GatherMoeConfig
from modeling.copies import HeldCopies, choose_holders
from modeling.execution import Execution
from modeling.layout import ParallelLayout
from tests.engine_runs import (
    Case,
    gradient_shards,
    join_ranks,
    join_shards,
    make_micro_batches,
    mesh_without_groups,
    start_engine,
    three_steps,
    train_on_rank,
)
from tests.ranks import run_ranks
from tests.referee import (
    CLIPPED,
    Tensors,
    assert_runs_match,
    distance,
    full_state,
    mixed_config,
    referee_run,
    tiny_config,
)

Loads = list[list[float]]
COPIES = Execution(resident_experts=1)


@contextmanager
def counted_rows() -> Iterator[list[int]]:
    """The number of rows that copies are given here, call by call."""
    counts: list[int] = []
    original = HeldCopies.slots

    def slots(held: HeldCopies, ids_TA: Tensor, *, num_experts: int) -> Tensor:
        found = original(held, ids_TA, num_experts=num_experts)
        num_ranks, num_copies = held.copies_PC.shape
        first = num_experts // num_ranks
        counts.append(int(((found >= first) & (found < first + num_copies)).sum()))
        return found

    with patch.object(HeldCopies, "slots", slots):
        yield counts


def two_steps(config: GatherMoeConfig, case: Case) -> dict[str, Any]:
    """The first has the copies of given loads, the second those of what the first saw."""
    return three_steps(config, case) | {"training": CLIPPED._replace(num_steps=2)}


def watched_run(rank: int, world_size: int, config: GatherMoeConfig, state: Tensors, case: Case, loads: Loads) -> Any:
    """Train as if a step with `loads` had gone before."""
    with counted_rows() as rows:
        run = two_steps(config, case)
        result = train_on_rank(
            rank, world_size, config, state, case, **run, change=lambda engine: engine.restore_loads(loads)
        )
    return result, sum(rows)


def all_to_the_first(config: GatherMoeConfig) -> Tensors:
    """Every token goes to the first experts, which live on one rank: a channel that all share decides."""
    state = full_state(config)
    state["model.embed_tokens.weight"][:, 0] = 1.0
    for name, tensor in state.items():
        if name.endswith("mlp.gate.weight"):
            tensor[:, 0] = -0.5 * torch.arange(config.num_experts)
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "case", "options", "to_the_first"),
    [
        (
            tiny_config,
            Case(tp=2, ep=2, stage=2, accumulation=3, checkpointing=True),
            {"overlap": True, "overlap_chunks": 2},
            False,
        ),
        (tiny_config, Case(tp=2, ep=2), {}, True),
        (
            mixed_config,
            Case(dp=2, tp=2, ep=2, stage=2, accumulation=3),
            {"regather": True, "overlap": True, "overlap_chunks": 3},
            True,
        ),
        (
            mixed_config,
            Case(dp=2, tp=2, ep=2, stage=1, checkpointing=True),
            {"experts_backend": "grouped"},
            False,
        ),
        (
            mixed_config,
            Case(tp=4, ep=2, stage=2, accumulation=3, checkpointing=True),
            {"resident_experts": 2},
            True,
        ),
        (mixed_config, Case(tp=4, ep=4, stage=0), {"experts_backend": "grouped"}, False),
    ],
    ids=str,
)
def test_training_with_copies_matches_one_plain_process(
    make: Callable[[], GatherMoeConfig], case: Case, options: dict[str, Any], to_the_first: bool
) -> None:
    """The first step's copies are those of expert 0 in every slot of the other ranks."""
    config, case = make(), case._replace(execution=replace(COPIES, **options))
    state = all_to_the_first(config) if to_the_first else full_state(config)
    loads = [[100.0] + [1.0] * (config.num_experts - 1)] * config.sizes.num_moe_layers
    by_rank = run_ranks(watched_run, case.num_ranks, config, state, case, loads)
    got = join_ranks([result for result, _ in by_rank], config, case)
    assert sum(num_rows for _, num_rows in by_rank) > 100
    assert_runs_match(got, referee_run(config, state, **two_steps(config, case), own=True))


def bf16_gradients(
    rank: int, world_size: int, config: GatherMoeConfig, state: Tensors, case: Case, loads: Loads
) -> tuple[Tensors, int]:
    with counted_rows() as rows:
        engine = start_engine(config, state, case)
        engine.restore_loads(loads)
        batches = make_micro_batches(config, case, step=0, dp_rank=engine.mesh.dp_rank)
        engine.accumulate(batches, counts=engine.count(batches))
    held = [experts.held for experts in engine.model.experts_with_copies]
    assert all(weight.dtype == torch.bfloat16 for copies in held for weight in copies.weights)
    return gradient_shards(engine), sum(rows)


@pytest.mark.slow
def test_copies_are_as_exact_in_bf16() -> None:
    """The gradients' distance from float32's is hardly larger with copies than without."""
    config = tiny_config()
    state = {name: tensor.bfloat16().float() for name, tensor in all_to_the_first(config).items()}
    case, loads = Case(tp=2, ep=2, stage=2, bf16=True, packed=False), [[100.0, 1.0, 1.0, 1.0]] * 2
    exact = referee_run(config, state, **three_steps(config, case._replace(bf16=False)), own=True).gradients
    distances = []
    for execution, fewest in ((Execution(), 0), (COPIES, 50)):
        results = run_ranks(bf16_gradients, 2, config, state, case._replace(execution=execution), loads)
        by_rank, rows = zip(*results, strict=True)
        assert sum(rows) >= fewest
        got = join_shards(list(by_rank), config, case)
        distances.append(distance(got, exact))
    assert distances[0] > 0
    assert distances[1] < 1.2 * distances[0]


def steps_of_copies(rank: int, world_size: int, config: GatherMoeConfig, state: Tensors) -> list[Any]:
    """Whether copies are held in the forwards of three steps and of the evaluations after them, and what is known."""
    case = Case(tp=2, ep=2, execution=COPIES)
    engine = start_engine(config, state, case)
    first, *_ = engine.model.experts_with_copies
    found: list[Any] = []
    first.register_forward_pre_hook(lambda *_: found.append(first.held is not None))
    for step in range(3):
        found.append(engine.loads() is not None)
        batches = make_micro_batches(config, case, step=step, dp_rank=0)
        counts = engine.count(batches)
        engine.accumulate(batches, counts=counts)
        engine.update(learning_rate=1e-3)
        engine.evaluate(batches)
    return found


def test_copies_begin_with_the_second_step_and_serve_training_alone() -> None:
    config = tiny_config()
    [found, other] = run_ranks(steps_of_copies, 2, config, full_state(config))
    assert found == other
    # Loads known before the step, then copies held in its forward and in the evaluation's.
    assert found == [False, False, False, True, True, False, True, True, False]


def with_zero_3(rank: int, world_size: int) -> str:
    config = tiny_config()
    with pytest.raises(ValueError, match="resident_experts=1 cannot be used with ZeRO-3") as caught:
        start_engine(config, full_state(config), Case(tp=2, ep=2, stage=3, execution=COPIES))
    return str(caught.value)


def test_zero_3_has_no_whole_experts_to_copy() -> None:
    assert "use stage 0, 1 or 2, or resident_experts=0" in run_ranks(with_zero_3, 2)[0]


def loads_of(counts: Tensor, *, ep: int, num_tokens: int = 100, **options: Any) -> RankLoads:
    config = tiny_config(num_experts=counts.shape[1], **options)
    mesh = mesh_without_groups(ParallelLayout(tp=ep, ep=ep))
    return rank_loads(counts, copies=[], config=config, mesh=mesh, num_tokens=num_tokens)


def test_without_copies_the_busiest_rank_has_all_rows_of_its_experts() -> None:
    counts = torch.tensor([[50.0, 10, 5, 5, 10, 10, 5, 5], [0, 0, 0, 0, 0, 0, 0, 7]])
    got = loads_of(counts, ep=4)
    assert got.slowest_L.tolist() == [4 * 60, 4 * 7]
    assert not got.bound_L.numel()
    assert loads_of(counts, ep=2).slowest_L.tolist() == [2 * 70, 2 * 7]
    # Sets of 64 ranks are too many to look at, and need not be.
    assert loads_of(torch.arange(128.0)[None], ep=64).slowest_L.tolist() == [64 * (126 + 127)]
    # Where all hold slices, every rank is as busy as the others.
    assert not loads_of(torch.ones(1, 8), ep=1).slowest_L.numel()


def test_a_capacity_drops_rows_before_ranks_have_them() -> None:
    counts = torch.tensor([[150.0, 10, 10, 10, 5, 5, 5, 5]])
    got = loads_of(counts, ep=4, capacity_factor=2.0, num_tokens=100)  # 2 * 100 * 2 / 8 = 50 an expert
    assert got.slowest_L.tolist() == [4 * 60]


def logged_and_counted(rank: int, world_size: int) -> tuple[Any, ...]:
    """What two steps' sums say, and what the layers' own calls add up to, once one layer's slots stay empty."""
    config = tiny_config()
    case = Case(tp=2, ep=2, accumulation=3, execution=COPIES)
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


def test_steps_log_the_rows_that_the_layers_had() -> None:
    results = run_ranks(logged_and_counted, 2)
    assert results[0] == results[1]
    empty, counted, logged = results[0]
    assert empty == [True, False]
    for layer in range(2):
        assert sum(slowest[layer] for slowest, _, _ in logged) == counted[layer]
        for slowest, bound, rows in logged:
            assert rows[layer] <= bound[layer] <= slowest[layer]
