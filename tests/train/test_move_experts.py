"""Experts that move to other ranks in the middle of training: it goes on as it would have, under other numbers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from modeling.init import join, shard_table, stored_tensors
from modeling.layout import ParallelLayout
from recipe.train.expert_placement import move_experts, renumber
from tests.parity import LEARNING_RATE, Case, full_state, make_micro_batches, mixed_config, start_engine
from tests.ranks import run_ranks

NUMBERS = [[5, 2, 7, 0, 1, 6, 3, 4], [0, 4, 1, 5, 2, 6, 3, 7]]  # in no layer the identity, in the first no expert stays


def train(engine: Any, config: GatherMoeConfig, case: Case, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batches = make_micro_batches(config, case, step=step, dp_rank=engine.mesh.dp_rank)
        counts = engine.count(batches)
        losses.append(engine.accumulate(batches, counts=counts).nll.item() / counts.num_targets)
        engine.update(learning_rate=LEARNING_RATE)
    return losses


class Result(NamedTuple):
    """Of one rank: losses and tensors of the steps after a move, and what `states_of` found just before them."""

    losses: list[float]
    tensors: dict[str, Tensor]
    states: list[dict[str, Tensor]]


def states_of(engine: Any) -> list[dict[str, Tensor]]:
    """By name: what the forward uses, what the optimizer keeps, and both moments."""
    import deepspeed

    from recipe.checkpoint.native import link_moments, read_training_state

    link_moments(engine)
    parameters = dict(engine.model.named_parameters())
    kept = {name: read_training_state(engine, parameter) for name, parameter in parameters.items()}
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=engine.zero_stage == 3):
        used = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
    return [used, *({name: parts[i].float() for name, parts in kept.items()} for i in range(3))]


def trained_on(
    rank: int, world_size: int, folder: Path, config: GatherMoeConfig, state: dict[str, Tensor], case: Case
) -> Any:
    """Two steps and a checkpoint; three steps from it as it is, and three with the experts moved."""
    from recipe.checkpoint.native import full_precision_shard, load_native, save_native

    engine = start_engine(config, state, case)
    train(engine, config, case, range(2))
    save_native(engine, folder, rank_state={})
    loads = engine.loads()
    results = []
    for moves in (False, True):
        engine = start_engine(config, state, case)
        load_native(engine, folder)
        engine.restore_loads(loads)
        if moves:
            move_experts(engine, NUMBERS)
            now = engine.loads()
        states = states_of(engine)
        losses = train(engine, config, case, range(2, 5))
        tensors = {
            name: full_precision_shard(tensor).float().clone() if isinstance(tensor, torch.nn.Parameter) else tensor
            for name, tensor in stored_tensors(engine.model).items()
        }
        results.append(Result(losses, tensors, states))
    return loads, now, results


def whole(by_rank: list[dict[str, Tensor]], config: GatherMoeConfig, case: Case) -> dict[str, Tensor]:
    table = shard_table(config, SimpleNamespace(layout=ParallelLayout(dp=case.dp, tp=case.tp, ep=case.ep)))
    joined = {}
    for name, tensor in full_state(config).items():
        shards = [table.shard(name, tuple(tensor.shape), group_rank=rank) for rank in range(case.tp)]
        joined[name] = join([(by_rank[rank][name], shard) for rank, shard in enumerate(shards)])
    return joined | {name: tensor for name, tensor in by_rank[0].items() if name not in joined}


COPIES = Execution(resident_experts=1)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(tp=2, ep=2, stage=2), {"router_bias": True, "balance_bias_update_rate": 0.01}),
        pytest.param(Case(tp=2, ep=2, stage=0, execution=COPIES), {}, marks=pytest.mark.slow),
        pytest.param(Case(dp=2, tp=2, ep=2, stage=1, accumulation=3), {}, marks=pytest.mark.slow),
        pytest.param(Case(dp=2, tp=2, ep=2, stage=2, execution=COPIES), {}, marks=pytest.mark.slow),
        pytest.param(Case(tp=4, ep=2, stage=1), {}, marks=pytest.mark.slow),
        pytest.param(Case(dp=2, tp=2, ep=2, stage=3, bf16=True), {}, marks=pytest.mark.slow),
        pytest.param(Case(dp=2, tp=2, ep=2, stage=1, bf16=True), {}, marks=pytest.mark.slow),
        pytest.param(Case(dp=2, tp=2, ep=2, stage=2, bf16=True), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_goes_on_as_it_would_have(case: Case, options: dict[str, Any], tmp_path: Path) -> None:
    config = mixed_config(**options)
    by_rank = run_ranks(trained_on, case.dp * case.tp, tmp_path, config, full_state(config), case)
    loads, now, _ = by_rank[0]
    assert now == [
        renumber(torch.tensor(layer), numbers).tolist() for layer, numbers in zip(loads, NUMBERS, strict=True)
    ]
    stayed, moved = ([result[2][which] for result in by_rank] for which in (0, 1))
    for part in range(4):  # what the forward uses, what the optimizer keeps, both moments: to the bit
        one, other = (whole([r.states[part] for r in results], config, case) for results in (stayed, moved))
        check_renumbered(one, other, config, tolerance=0.0)
    tolerance = 2e-3 if case.bf16 else 1e-5
    assert moved[0].losses == pytest.approx(stayed[0].losses, abs=10 * tolerance)
    one, other = (whole([r.tensors for r in results], config, case) for results in (stayed, moved))
    check_renumbered(one, other, config, tolerance=tolerance)


def check_renumbered(
    stayed: dict[str, Tensor], moved: dict[str, Tensor], config: GatherMoeConfig, *, tolerance: float
) -> None:
    assert stayed.keys() == moved.keys()
    layers = [index for index in range(config.num_hidden_layers) if config.is_sparse(index)]
    for name, tensor in stayed.items():
        want = tensor
        if ".experts." in name or ".gate." in name:
            want = renumber(tensor, NUMBERS[layers.index(int(name.split(".")[2]))])
            assert not want.equal(tensor)
        torch.testing.assert_close(moved[name], want, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
