"""Routing: the choice among equals, padding, renormalising, and the sums the auxiliary losses are made of."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.router import GatherMoeRouter, Routing, route, router_statistics
from tests.parity import tiny_config

TOKENS, EXPERTS, ACTIVE = 12, 6, 3


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
def test_the_best_experts_are_chosen_in_order(renormalise: bool) -> None:
    routing = route(logits(), num_active=ACTIVE, renormalise=renormalise)
    top = logits().softmax(-1).topk(ACTIVE)
    assert torch.equal(routing.expert_ids_tA, top.indices)
    want = top.values / top.values.sum(-1, keepdim=True) if renormalise else top.values
    torch.testing.assert_close(routing.weights_tA, want)
    assert torch.equal(routing.logits_tE, logits())


def test_renormalised_weights_are_a_softmax_over_the_chosen() -> None:
    routing = route(logits(), num_active=ACTIVE, renormalise=True)
    kept = logits().gather(1, routing.expert_ids_tA).softmax(-1)
    torch.testing.assert_close(routing.weights_tA, kept)


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
def test_r_moe_10_the_router_computes_in_float32_at_least(dtype: torch.dtype) -> None:
    config = tiny_config(num_experts=EXPERTS, num_experts_per_tok=ACTIVE)
    router = GatherMoeRouter(config).to(dtype)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(64, 32).to(dtype)
    routing = router(x)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    assert routing.logits_tE.dtype == routing.weights_tA.dtype == exact
    want = F.linear(x.to(exact), router.weight.to(exact))
    torch.testing.assert_close(routing.logits_tE, want)
    assert torch.equal(routing.expert_ids_tA, want.topk(ACTIVE).indices)


def statistics_by_hand(routing: Routing, sequence: list[int], mask: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.zeros(2, EXPERTS, dtype=torch.float64)
    probs, z = torch.zeros_like(counts), torch.zeros(2, dtype=torch.float64)
    for token, (b, valid) in enumerate(zip(sequence, mask, strict=True)):
        if valid:
            probs[b] += routing.logits_tE[token].softmax(-1)
            z[b] += routing.logits_tE[token].exp().sum().log() ** 2
            for expert in routing.expert_ids_tA[token].tolist():
                counts[b, expert] += 1
    return counts, probs, z


@pytest.mark.parametrize("padded", [False, True])
def test_statistics_are_sums_over_the_valid_tokens_of_each_sequence(padded: bool) -> None:
    sequence = [0] * 7 + [1] * 5  # a rank's tokens may begin and end within a sequence
    mask = [not padded or token % 4 > 0 for token in range(TOKENS)]
    token_mask = torch.tensor(mask) if padded else None
    x = logits().requires_grad_()
    routing = route(x, num_active=ACTIVE, renormalise=True, token_mask_t=token_mask)
    got = router_statistics(
        routing, sequence_of_token_t=torch.tensor(sequence), num_sequences=2, token_mask_t=token_mask
    )
    counts, probs, z = statistics_by_hand(routing, sequence, mask)
    assert torch.equal(got.counts_BE, counts)
    torch.testing.assert_close(got.probs_BE, probs)
    torch.testing.assert_close(got.z_B, z)
    assert not got.counts_BE.requires_grad
    (want,) = torch.autograd.grad(probs.square().sum() + z.square().sum(), x, retain_graph=True)
    (grad,) = torch.autograd.grad(got.probs_BE.square().sum() + got.z_B.square().sum(), x)
    torch.testing.assert_close(grad, want)


def test_sequences_of_other_ranks_have_empty_sums() -> None:
    routing = route(logits(), num_active=ACTIVE, renormalise=True)
    got = router_statistics(
        routing,
        sequence_of_token_t=torch.full((TOKENS,), 2),
        num_sequences=4,
        token_mask_t=torch.ones(TOKENS, dtype=torch.bool),
    )
    assert got.counts_BE.sum(-1).tolist() == [0, 0, TOKENS * ACTIVE, 0]
    torch.testing.assert_close(got.probs_BE.sum(-1), torch.tensor([0.0, 0.0, TOKENS, 0.0], dtype=torch.float64))
    assert got.z_B[[0, 1, 3]].tolist() == [0.0] * 3
