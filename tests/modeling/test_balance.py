"""The auxiliary losses of the router: their formulas, their scopes, and what each scope promises."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.auxiliary import auxiliary_losses, counts_so_far
from modeling.router import route, router_statistics
from tests.engine_runs import Case, train
from tests.ranks import run_ranks
from tests.referee import (
    Batch,
    Training,
    assert_runs_match,
    full_state,
    our_model,
    random_batch,
    referee_run,
    tiny_config,
)


def statistics(logits: Tensor, *, num_active: int, mask: Tensor | None = None, num_sequences: int = 1) -> Any:
    routing = route(logits, num_active=num_active, renormalise=True, token_mask_t=mask)
    sequence = torch.arange(logits.shape[0]) // (logits.shape[0] // num_sequences)
    return router_statistics(routing, sequence_of_token_t=sequence, num_sequences=num_sequences, token_mask_t=mask)


@pytest.mark.requirement("R-LOSS-08")
def test_layers_are_balanced_one_by_one() -> None:
    tokens = 16
    layers = []
    for expert in range(2):
        logits = torch.full((tokens, 2), -10.0)
        logits[:, expert] = 10.0
        layers.append(statistics(logits, num_active=1))
    losses = auxiliary_losses(layers, num_active=1, scope="sequence")
    torch.testing.assert_close(losses.balance_L / tokens, torch.tensor([2.0, 2.0]))


@pytest.mark.parametrize("height", [0.0, 3.0])
@pytest.mark.requirement("R-LOSS-09")
def test_the_router_z_loss_is_the_mean_squared_log_sum_exp(height: float) -> None:
    tokens = 12
    mask = torch.arange(tokens) % 3 > 0
    for token_mask in (None, mask):
        layers = [statistics(torch.full((tokens, 4), height), num_active=2, mask=token_mask) for _ in range(3)]
        valid = tokens if token_mask is None else int(token_mask.sum())
        mean = (auxiliary_losses(layers, num_active=2, scope="sequence").z_L / valid).mean()
        assert mean.item() == pytest.approx((height + math.log(4)) ** 2, rel=1e-6)


def balance_by_hand(logits: Tensor, *, num_active: int) -> Tensor:
    """E * sum_i f_i * P_i of one layer and one scope, the choices of each token adding to `num_active`."""
    probs = logits.softmax(-1)
    chosen = torch.zeros_like(probs).scatter(1, probs.topk(num_active).indices, 1.0)
    return logits.shape[1] * (chosen.mean(0) * probs.mean(0)).sum()


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_balance_losses_are_weighted_by_valid_tokens(scope: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 6, generator=generator, dtype=torch.float64).requires_grad_()
    mask = torch.ones(24, dtype=torch.bool)
    mask[[3, 4, 5, 6, 20]] = False  # the first sequence of 8 is half padding
    layer = statistics(logits, num_active=2, mask=mask, num_sequences=3)
    got = auxiliary_losses([layer], num_active=2, scope=scope).balance_L[0]
    if scope == "micro_batch":
        want = balance_by_hand(logits[mask], num_active=2) * mask.sum()
    else:
        scopes = [logits[i : i + 8][mask[i : i + 8]] for i in (0, 8, 16)]
        want = torch.stack([balance_by_hand(part, num_active=2) * part.shape[0] for part in scopes]).sum()
    torch.testing.assert_close(got, want)
    (want_grad,) = torch.autograd.grad(want, logits)
    (grad,) = torch.autograd.grad(got, logits)
    torch.testing.assert_close(grad, want_grad)


def test_the_global_batch_has_the_frequencies_of_all_and_the_probabilities_of_the_micro_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    earlier = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    logits = torch.randn(24, 6, generator=generator, dtype=torch.float64).requires_grad_()
    mask = torch.arange(24) % 5 > 0
    layer = statistics(logits, num_active=2, mask=mask, num_sequences=3)
    seen_E = statistics(earlier, num_active=2).counts_BE.sum(0) + layer.counts_BE.sum(0)
    got = auxiliary_losses([layer], num_active=2, scope="global_batch", batch_counts_LE=seen_E[None]).balance_L[0]
    whole = torch.cat([earlier, logits[mask]])
    frequency_E = torch.zeros_like(whole).scatter(1, whole.topk(2).indices, 1.0).mean(0)
    want = 6 * (frequency_E * logits[mask].softmax(-1).sum(0)).sum()
    torch.testing.assert_close(got, want)
    (want_grad,) = torch.autograd.grad(want, logits)
    (grad,) = torch.autograd.grad(got, logits)
    torch.testing.assert_close(grad, want_grad)
    alone = auxiliary_losses([layer], num_active=2, scope="micro_batch").balance_L[0]
    assert not torch.allclose(got, alone)


def test_a_sequence_of_padding_has_no_auxiliary_loss() -> None:
    layer = statistics(torch.randn(8, 4), num_active=2, mask=torch.zeros(8, dtype=torch.bool))
    losses = auxiliary_losses([layer], num_active=2, scope="sequence")
    assert (losses.balance_L.item(), losses.z_L.item()) == (0.0, 0.0)


def _uneven_counts(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    from modeling.layout import ParallelLayout
    from modeling.mesh import build_mesh

    mesh = build_mesh(ParallelLayout(dp=2), num_key_value_heads=2)
    first = torch.tensor([[2.0**24, 1.0]]) if mesh.dp_rank else torch.tensor([[1.0, 2.0]])
    seen = counts_so_far(first, earlier_LE=None, mesh=mesh)
    return seen, counts_so_far(torch.tensor([[1.0, 0.0]]), earlier_LE=seen, mesh=mesh)


def test_counts_so_far_are_exact_over_groups_and_calls() -> None:
    for first, second in run_ranks(_uneven_counts, 2):
        assert first.tolist() == [[2**24 + 1, 3]]
        assert second.tolist() == [[2**24 + 3, 3]]


def losses_of(case: Case) -> Callable[[Any, Batch, int], tuple[Tensor, Tensor, Tensor]]:
    """Cross-entropy and the global-batch balance loss, mean over layers, from a stock model's router logits.

    Micro-batch by micro-batch: f of all groups' tokens up to it, P of a group's own, weighted by its tokens.
    """

    def losses(model: Any, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor]:
        output = model(input_ids=batch.ids, use_cache=False, output_router_logits=True)
        loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=-100)
        size = len(batch.ids) // (case.dp * case.accumulation)
        layers = []
        for logits in output.router_logits:
            num_experts = logits.shape[-1]
            probs_BSE = logits.view(len(batch.ids), -1, num_experts).softmax(-1)
            chosen = probs_BSE.topk(model.config.num_experts_per_tok).indices
            chosen_BSE = torch.zeros_like(probs_BSE).scatter(-1, chosen, 1.0)
            parts = []
            for a in range(case.accumulation):
                seen = chosen_BSE[: (a + 1) * case.dp * size]
                for d in range(case.dp):
                    first = (a * case.dp + d) * size
                    own = probs_BSE[first : first + size]
                    parts.append(num_experts * (seen.mean((0, 1)) * own.sum((0, 1))).sum())
            layers.append(torch.stack(parts).sum() / batch.ids.numel())
        return loss, torch.stack(layers).mean(), torch.full((), torch.nan)

    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, stage=2, accumulation=3),
        Case(tp=2, ep=2, stage=1, accumulation=3, checkpointing=True),
        Case(dp=2, tp=2, ep=1, stage=3),
    ],
    ids=str,
)
def test_the_global_batch_scope_follows_its_formula_in_every_layout(case: Case) -> None:
    """Over two steps, so that choices of the first would be seen in the second's loss."""
    config = tiny_config(balance_scope="global_batch")
    state = full_state(config)
    training = Training(adam_eps=None, learning_rate=0.1, weight_decay=0.0, num_steps=2, balance_coef=0.5)
    batches = [random_batch(seed=seed, num_sequences=12) for seed in (7, 8)]
    want = referee_run(config, state, batches=batches, training=training, losses=losses_of(case))
    assert_runs_match(train(config, state, case, batches=batches, training=training), want)


def test_choices_are_counted_in_training_only_and_handed_from_call_to_call() -> None:
    config = tiny_config(balance_scope="global_batch", router_aux_loss_coef=0.5)
    model = our_model(config)
    ids = torch.arange(32).view(2, 16)
    first = model(ids, labels=ids)
    assert torch.equal(first.choices, first.sums.expert_counts.double())
    second = model(ids, labels=ids, earlier_choices=first.choices)
    assert torch.equal(second.choices, 2 * first.choices)
    torch.testing.assert_close(second.aux_loss, first.aux_loss)
    skewed = first.choices * torch.tensor([100.0, 1.0, 1.0, 1.0])
    assert not torch.allclose(model(ids, labels=ids, earlier_choices=skewed).aux_loss, first.aux_loss)
    model.eval()
    assert model(ids, labels=ids).choices is None
    config.balance_scope = "sequence"
    model.train()
    assert model(ids, labels=ids).choices is None
