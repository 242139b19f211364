"""Experts that move to other ranks in the middle of training: it goes on as it would have, under other numbers."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from modeling.init import stored_tensors
from recipe.train.expert_placement import move_experts, renumber
from tests.engine_runs import Case, join_shards, slow, start_engine, train_steps
from tests.ranks import run_ranks
from tests.referee import FP32_ATOL, Tensors, full_state, mixed_config
from tests.resuming import held_by

NUMBERS = [[5, 2, 7, 0, 1, 6, 3, 4], [0, 4, 1, 5, 2, 6, 3, 7]]  # in no layer the identity, in the first no expert stays


class Result(NamedTuple):
    """Of one rank: losses and tensors of the steps after a move, and what `held_by` found just before them, by kind."""

    losses: list[float]
    tensors: Tensors
    held: dict[str, Tensors]


def trained_on(
    rank: int, world_size: int, folder: Path, config: GatherMoeConfig, state: Tensors, case: Case
) -> tuple[Any, Any, list[Result]]:
    """Two steps and a checkpoint; three steps from it as it is, and three with the experts moved."""
    from recipe.checkpoint.native import full_precision_shard, load_native, save_native

    engine = start_engine(config, state, case)
    train_steps(engine, config, case, range(2))
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
        held = held_by(engine)
        losses, _ = train_steps(engine, config, case, range(2, 5))
        tensors = {
            name: full_precision_shard(tensor).float().clone() if isinstance(tensor, torch.nn.Parameter) else tensor
            for name, tensor in stored_tensors(engine.model).items()
        }
        results.append(Result(losses, tensors, held))
    return loads, now, results


COPIES = Execution(resident_experts=1)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(tp=2, ep=2, stage=2), {"router_bias": True, "balance_bias_update_rate": 0.01}),
        slow(Case(tp=2, ep=2, stage=0, execution=COPIES), {}),
        slow(Case(dp=2, tp=2, ep=2, stage=1, accumulation=3), {}),
        slow(Case(dp=2, tp=2, ep=2, stage=2, execution=COPIES), {}),
        slow(Case(tp=4, ep=2, stage=1), {}),
        slow(Case(dp=2, tp=2, ep=2, stage=3, bf16=True), {}),
        slow(Case(dp=2, tp=2, ep=2, stage=1, bf16=True), {}),
        slow(Case(dp=2, tp=2, ep=2, stage=2, bf16=True), {}),
    ],
    ids=str,
)
def test_training_goes_on_as_it_would_have(case: Case, options: dict[str, Any], tmp_path: Path) -> None:
    config = mixed_config(**options)
    by_rank = run_ranks(trained_on, case.num_ranks, tmp_path, config, full_state(config), case)
    loads, now, _ = by_rank[0]
    assert now == [
        renumber(torch.tensor(layer), numbers).tolist() for layer, numbers in zip(loads, NUMBERS, strict=True)
    ]
    stayed, moved = ([result[2][which] for result in by_rank] for which in (0, 1))
    for kind in stayed[0].held:  # what the optimizer keeps, which the forward uses, and both moments: to the bit
        one, other = (join_shards([r.held[kind] for r in results], config, case) for results in (stayed, moved))
        check_renumbered(one, other, config, tolerance=0.0)
    # In bf16 a rounded weight moves by 2**-9 of its size, which is below 1.
    tolerance = 2**-9 if case.bf16 else FP32_ATOL
    assert moved[0].losses == pytest.approx(stayed[0].losses, abs=10 * tolerance)
    one, other = (join_shards([r.tensors for r in results], config, case) for results in (stayed, moved))
    check_renumbered(one, other, config, tolerance=tolerance)


def check_renumbered(stayed: Tensors, moved: Tensors, config: GatherMoeConfig, *, tolerance: float) -> None:
    assert stayed.keys() == moved.keys()
    layers = [index for index in range(config.num_hidden_layers) if config.is_sparse(index)]
    for name, tensor in stayed.items():
        want = tensor
        if ".experts." in name or ".gate." in name:
            want = renumber(tensor, NUMBERS[layers.index(int(name.split(".")[2]))])
            assert not want.equal(tensor)
        torch.testing.assert_close(moved[name], want, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
