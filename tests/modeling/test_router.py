"""Routing: the choice among equals, padding, renormalising, sums for auxiliary losses, and what a capacity drops."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from modeling.execution import Execution
from modeling.init import build_model
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh, one_rank_mesh
from modeling.router import (
    GatherMoeRouter,
    RouterStatistics,
    Routing,
    expert_capacity,
    expert_scores,
    kept_choices,
    route,
    router_statistics,
)
from tests.engine_runs import slow
from tests.ranks import run_ranks
from tests.referee import tiny_config

TOKENS, EXPERTS, ACTIVE = 12, 6, 3
SCORES = ("softmax", "sigmoid")


def logits() -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2


@pytest.mark.parametrize("num_experts", [4, 8, 64, 128])
def test_among_equals_the_lower_expert_wins(num_experts: int) -> None:
    routing = route(torch.zeros(5, num_experts), num_active=4, renormalise=True)
    assert routing.expert_ids_tA.tolist() == [[0, 1, 2, 3]] * 5
    torch.testing.assert_close(routing.weights_tA, torch.full((5, 4), 0.25))
    some = torch.zeros(1, num_experts)
    some[0, num_experts - 1] = 1.0
    assert route(some, num_active=3, renormalise=True).expert_ids_tA.tolist() == [[num_experts - 1, 0, 1]]


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("kind", SCORES)
def test_the_best_experts_are_chosen_in_order(kind: str, renormalise: bool) -> None:
    routing = route(logits(), num_active=ACTIVE, renormalise=renormalise, score_function=kind, scaling_factor=2.5)
    scores = logits().softmax(-1) if kind == "softmax" else logits().sigmoid()
    top = scores.topk(ACTIVE)
    assert torch.equal(routing.expert_ids_tA, top.indices)
    want = top.values / top.values.sum(-1, keepdim=True) if renormalise else top.values
    torch.testing.assert_close(routing.weights_tA, 2.5 * want)
    assert torch.equal(routing.logits_tE, logits())


@pytest.mark.parametrize("renormalise", [False, True])
def test_padding_goes_to_no_expert(renormalise: bool) -> None:
    mask = torch.arange(TOKENS) % 3 > 0
    x = logits().requires_grad_()
    routing = route(x, num_active=ACTIVE, renormalise=renormalise, token_mask_t=mask)
    alone = route(logits()[mask], num_active=ACTIVE, renormalise=renormalise)
    assert (routing.expert_ids_tA[~mask] == EXPERTS).all()
    assert not routing.weights_tA[~mask].any()
    assert torch.equal(routing.expert_ids_tA[mask], alone.expert_ids_tA)
    assert torch.equal(routing.weights_tA[mask], alone.weights_tA)
    factor = torch.randn(TOKENS, ACTIVE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (routing.weights_tA * factor).sum().backward()
    assert x.grad is not None
    assert not x.grad[~mask].any()
    assert x.grad[mask].any()


def test_weights_have_the_gradient_of_the_formula() -> None:
    def weights(x: Tensor) -> Tensor:
        return route(x, num_active=ACTIVE, renormalise=True).weights_tA

    torch.autograd.gradcheck(weights, (logits().requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.requirement("R-MOE-10")
def test_the_router_computes_in_float32_at_least(dtype: torch.dtype) -> None:
    config = tiny_config(num_experts=EXPERTS, num_experts_per_tok=ACTIVE)
    router = GatherMoeRouter(config, mesh=one_rank_mesh()).to(dtype)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(64, 32).to(dtype)
    routing = router(x)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    assert routing.logits_tE.dtype == routing.weights_tA.dtype == exact
    want = F.linear(x.to(exact), router.weight.to(exact))
    torch.testing.assert_close(routing.logits_tE, want)
    assert torch.equal(routing.expert_ids_tA, want.topk(ACTIVE).indices)


def statistics_by_hand(routing: Routing, sequence: list[int], mask: list[bool], *, kind: str) -> RouterStatistics:
    counts = torch.zeros(4, EXPERTS, dtype=torch.float64)
    probs, z = torch.zeros_like(counts), torch.zeros(4, dtype=torch.float64)
    entropy = torch.zeros_like(z)
    for token, (b, valid) in enumerate(zip(sequence, mask, strict=True)):
        if valid:
            logits_E = routing.logits_tE[token]
            scores_E = logits_E.exp() if kind == "softmax" else 1 / (1 + (-logits_E).exp())
            share_E = scores_E / scores_E.sum()
            probs[b] += share_E
            z[b] += logits_E.exp().sum().log() ** 2
            entropy[b] -= (share_E * share_E.log()).sum().detach()
            for expert in routing.expert_ids_tA[token].tolist():
                counts[b, expert] += 1
    return RouterStatistics(counts, probs, z, entropy, torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", SCORES)
def test_statistics_are_sums_over_the_valid_tokens_of_each_sequence(kind: str, padded: bool) -> None:
    # A rank's tokens may begin and end within a sequence, and others of the batch may be on other ranks alone.
    sequence = [1] * 7 + [2] * 5
    mask = [not padded or token % 4 > 0 for token in range(TOKENS)]
    token_mask = torch.tensor(mask) if padded else None
    x = logits().requires_grad_()
    routing = route(x, num_active=ACTIVE, renormalise=True, token_mask_t=token_mask, score_function=kind)
    got = router_statistics(
        routing, sequence_of_token_t=torch.tensor(sequence), num_sequences=4, token_mask_t=token_mask
    )
    counts, probs, z, entropy, _ = statistics_by_hand(routing, sequence, mask, kind=kind)
    assert torch.equal(got.counts_BE, counts)
    torch.testing.assert_close(got.probs_BE, probs)
    torch.testing.assert_close(got.z_B, z)
    torch.testing.assert_close(got.entropy_B, entropy)
    assert not got.counts_BE.requires_grad
    assert not got.entropy_B.requires_grad
    assert not got.dropped_B.any()
    (want,) = torch.autograd.grad(probs.square().sum() + z.square().sum(), x, retain_graph=True)
    (grad,) = torch.autograd.grad(got.probs_BE.square().sum() + got.z_B.square().sum(), x)
    torch.testing.assert_close(grad, want)


def test_sigmoid_routing_is_deepseeks() -> None:
    """transformers' DeepSeek-V3 router, with one group of experts, on the same weights and biases."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    theirs_config = DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=8,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=ACTIVE,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    theirs = DeepseekV3TopkRouter(theirs_config)
    config = tiny_config(
        num_experts=EXPERTS,
        num_experts_per_tok=ACTIVE,
        score_function="sigmoid",
        routed_scaling_factor=2.5,
        router_bias=True,
    )
    ours = GatherMoeRouter(config, mesh=one_rank_mesh())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(EXPERTS, 32, generator=generator) * 0.3)
        theirs.weight.copy_(ours.weight)
        for router in (ours, theirs):
            router.e_score_correction_bias.copy_(torch.linspace(-0.4, 0.4, EXPERTS))
    x = torch.randn(64, 32, generator=generator)
    routing = ours(x)
    _, weights, ids = theirs(x)
    assert torch.equal(routing.expert_ids_tA.sort(-1).values, ids.sort(-1).values)
    order, their_order = routing.expert_ids_tA.argsort(-1), ids.argsort(-1)
    torch.testing.assert_close(routing.weights_tA.gather(1, order), weights.gather(1, their_order))
    assert not torch.equal(routing.expert_ids_tA, route(routing.logits_tE, num_active=ACTIVE, renormalise=True)[1])


@pytest.mark.parametrize("kind", SCORES)
def test_far_out_logits_stay_finite(kind: str) -> None:
    x = torch.tensor([[-200.0, -300.0, -250.0], [200.0, 300.0, -300.0]]).requires_grad_()
    routing = route(x, num_active=2, renormalise=True, score_function=kind)
    assert routing.probs_tE is not None
    torch.testing.assert_close(routing.probs_tE.sum(-1), torch.ones(2))
    (routing.weights_tA.sum() + routing.probs_tE[:, 0].sum()).backward()
    assert x.grad is not None
    assert routing.weights_tA.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", SCORES)
def test_a_bias_moves_the_choice_and_never_the_weights(kind: str) -> None:
    bias = torch.zeros(EXPERTS)
    bias[4] = 10.0
    plain = route(logits(), num_active=ACTIVE, renormalise=False, score_function=kind)
    biased = route(logits(), num_active=ACTIVE, renormalise=False, score_function=kind, bias_E=bias)
    assert (biased.expert_ids_tA[:, 0] == 4).all()
    assert not (plain.expert_ids_tA[:, 0] == 4).all()
    scores, _ = expert_scores(logits(), kind)
    torch.testing.assert_close(biased.weights_tA, scores.gather(1, biased.expert_ids_tA))
    assert plain.probs_tE is not None
    assert biased.probs_tE is not None
    assert torch.equal(biased.probs_tE, plain.probs_tE)


def test_without_a_bias_there_is_no_such_tensor() -> None:
    router = GatherMoeRouter(tiny_config(), mesh=one_rank_mesh())
    assert router.e_score_correction_bias is None
    assert list(router.state_dict()) == ["weight"]


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.to(torch.float16), lambda m: m.half()])
def test_a_bias_stays_in_float32_when_its_router_does_not(cast: Any) -> None:
    router = GatherMoeRouter(tiny_config(router_bias=True), mesh=one_rank_mesh())
    bias = router.e_score_correction_bias
    assert bias is not None
    bias += 0.001 * 1001
    want = bias.clone()
    cast(router)
    assert router.weight.dtype != torch.float32
    assert router.e_score_correction_bias is not None
    assert router.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(router.e_score_correction_bias, want)
    assert "e_score_correction_bias" in router.state_dict()


NUM_TOKENS = 24  # of a layer whose experts have a capacity


def choices(kind: str, num_active: int) -> Tensor:
    """Expert ids [T, A]; every seventh token is padding."""
    generator = torch.Generator().manual_seed(num_active)
    logits = torch.randn(NUM_TOKENS, EXPERTS, generator=generator)
    if kind == "one expert":
        logits[:, 2] += 100.0
    ids = logits.topk(num_active).indices
    ids[::7] = EXPERTS
    return ids


def kept_by_a_loop(ids_TA: Tensor, capacity: int) -> Tensor:
    taken = [0] * EXPERTS
    kept = torch.ones_like(ids_TA, dtype=torch.bool)
    for choice in range(ids_TA.shape[1]):
        for token in range(NUM_TOKENS):
            expert = int(ids_TA[token, choice])
            if expert < EXPERTS:
                kept[token, choice] = taken[expert] < capacity
                taken[expert] += 1
    return kept


LIMITS = list(itertools.product(("random", "one expert"), (1, 2, 6), (0, 1, 3, 100)))


def _kept(rank: int, world_size: int) -> list[Tensor]:
    """Which choices of this rank's tokens are kept, for every one of LIMITS."""
    group = dist.group.WORLD if world_size > 1 else None
    kept = []
    for kind, num_active, capacity in LIMITS:
        ids_tA = choices(kind, num_active).chunk(world_size)[rank]
        kept.append(kept_choices(ids_tA, num_experts=EXPERTS, capacity=capacity, group=group))
    return kept


@pytest.mark.parametrize("world_size", [1, 2, slow(4)])
def test_what_any_number_of_ranks_keeps_is_what_a_loop_keeps(world_size: int) -> None:
    by_rank = run_ranks(_kept, world_size)
    for (kind, num_active, capacity), *parts in zip(LIMITS, *by_rank, strict=True):
        want = kept_by_a_loop(choices(kind, num_active), capacity)
        assert torch.equal(torch.cat(parts), want), (kind, num_active, capacity)


def test_the_capacity_is_a_factor_of_the_even_share() -> None:
    assert expert_capacity(64, num_active=1, num_experts=8, factor=1.0) == 8
    assert expert_capacity(64, num_active=2, num_experts=8, factor=1.25) == 20
    assert expert_capacity(100, num_active=1, num_experts=10, factor=1.1) == 11
    assert expert_capacity(65, num_active=1, num_experts=8, factor=1.0) == 9


def _block(rank: int, world_size: int, strategy: str, ep: int) -> dict[str, Tensor]:
    """Output and gradients for this rank's tokens, of which many are dropped, and what the statistics say."""
    config = tiny_config(num_experts=EXPERTS, capacity_factor=0.5)
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
    nowhere = (routing.expert_ids_tA == EXPERTS).all(1)
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
    capacity = expert_capacity(NUM_TOKENS, num_active=2, num_experts=EXPERTS, factor=0.5)
    assert (alone["ids"] == EXPERTS).all(1).any()
    assert alone["counts"].sum() == NUM_TOKENS * 2, "the balance loss sees dropped choices, too"
    assert alone["dropped"].item() == (alone["counts"] - capacity).clamp(min=0).sum()
    assert alone["ids"].flatten().bincount()[:EXPERTS].max() == capacity
