"""A limit to an expert's tokens: what is dropped is what a plain loop drops, on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from modeling.execution import Execution
from modeling.init import build_model
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh, one_rank_mesh
from modeling.router import expert_capacity, kept_choices, router_statistics
from tests.ranks import run_ranks
from tests.referee import tiny_config

NUM_TOKENS, NUM_EXPERTS = 24, 6


def choices(kind: str, num_active: int) -> Tensor:
    """Expert ids [T, A]; every seventh token is padding."""
    generator = torch.Generator().manual_seed(num_active)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator)
    if kind == "one expert":
        logits[:, 2] += 100.0
    ids = logits.topk(num_active).indices
    ids[::7] = NUM_EXPERTS
    return ids


def kept_by_a_loop(ids_TA: Tensor, capacity: int) -> Tensor:
    taken = [0] * NUM_EXPERTS
    kept = torch.ones_like(ids_TA, dtype=torch.bool)
    for choice in range(ids_TA.shape[1]):
        for token in range(NUM_TOKENS):
            expert = int(ids_TA[token, choice])
            if expert < NUM_EXPERTS:
                kept[token, choice] = taken[expert] < capacity
                taken[expert] += 1
    return kept


def _kept(rank: int, world_size: int, kind: str, num_active: int, capacity: int) -> Tensor:
    ids_tA = choices(kind, num_active).chunk(world_size)[rank]
    group = dist.group.WORLD if world_size > 1 else None
    return kept_choices(ids_tA, num_experts=NUM_EXPERTS, capacity=capacity, group=group)


@pytest.mark.parametrize("capacity", [0, 1, 3, 100])
@pytest.mark.parametrize("num_active", [1, 2, 6])
@pytest.mark.parametrize("kind", ["random", "one expert"])
def test_what_is_kept_is_what_a_loop_keeps(kind: str, num_active: int, capacity: int) -> None:
    want = kept_by_a_loop(choices(kind, num_active), capacity)
    assert torch.equal(_kept(0, 1, kind, num_active, capacity), want)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_active", [1, 2])
def test_any_number_of_ranks_keeps_the_same(num_active: int, world_size: int) -> None:
    for kind in ("random", "one expert"):
        want = kept_by_a_loop(choices(kind, num_active), 3)
        assert not want.all()
        assert torch.equal(torch.cat(run_ranks(_kept, world_size, kind, num_active, 3)), want)


def test_the_capacity_is_a_factor_of_the_even_share() -> None:
    assert expert_capacity(64, num_active=1, num_experts=8, factor=1.0) == 8
    assert expert_capacity(64, num_active=2, num_experts=8, factor=1.25) == 20
    assert expert_capacity(100, num_active=1, num_experts=10, factor=1.1) == 11
    assert expert_capacity(65, num_active=1, num_experts=8, factor=1.0) == 9


def _block(rank: int, world_size: int, strategy: str, ep: int) -> dict[str, Tensor]:
    """Output and gradients for this rank's tokens, of which many are dropped, and what the statistics say."""
    config = tiny_config(num_experts=NUM_EXPERTS, capacity_factor=0.5)
    mesh = one_rank_mesh()
    if world_size > 1:
        mesh = build_mesh(ParallelLayout(tp=world_size, ep=ep), num_key_value_heads=2)
    model = build_model(config, mesh=mesh, execution=Execution(strategy=strategy), seed=5, dtype=torch.float64)
    block = model.model.layers[0].mlp
    x = torch.randn(NUM_TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x_tD = x.chunk(world_size)[rank].clone().requires_grad_()
    out, routing = block(x_tD)
    out.square().sum().backward()
    statistics = router_statistics(
        routing, sequence_of_token_t=torch.zeros(len(x_tD), dtype=torch.int64), num_sequences=1, token_mask_t=None
    )
    nowhere = (routing.expert_ids_tA == NUM_EXPERTS).all(1)
    assert not out[nowhere].any(), "a token without an expert gets nothing: the residual passes by"
    block.eval()
    assert block(x_tD).routing.chosen_ids_tA is None
    gate_gradient = block.gate.weight.grad
    assert gate_gradient is not None
    assert x_tD.grad is not None
    return {
        "out": out.detach(),
        "x": x_tD.grad,
        "gate": gate_gradient,
        "ids": routing.expert_ids_tA,
        "counts": statistics.counts_BE[0],
        "dropped": statistics.dropped_B,
    }


@pytest.mark.parametrize(("strategy", "ep"), [("all_to_all", 2), ("gather_tokens", 2), ("gather_weights", 1)])
def test_every_strategy_drops_what_one_rank_drops(strategy: str, ep: int) -> None:
    alone = _block(0, 1, strategy, 1)
    by_rank = run_ranks(_block, 2, strategy, ep)
    for name in ("out", "x", "ids"):
        torch.testing.assert_close(torch.cat([answer[name] for answer in by_rank]), alone[name])
    for name in ("gate", "counts", "dropped"):
        torch.testing.assert_close(sum(answer[name] for answer in by_rank), alone[name])
    capacity = expert_capacity(NUM_TOKENS, num_active=2, num_experts=NUM_EXPERTS, factor=0.5)
    assert (alone["ids"] == NUM_EXPERTS).all(1).any()
    assert alone["counts"].sum() == NUM_TOKENS * 2, "the balance loss sees dropped choices, too"
    assert alone["dropped"].item() == (alone["counts"] - capacity).clamp(min=0).sum()
    assert alone["ids"].flatten().bincount()[:NUM_EXPERTS].max() == capacity
