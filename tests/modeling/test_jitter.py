"""The noise on a router's input: a function of place and time alone, in training alone, the same when recomputed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.mesh import one_rank_mesh
from modeling.noise import NoiseOrigin, jitter, token_counters
from modeling.router import GatherMoeRouter
from tests.engine_runs import Case, slow, train
from tests.referee import (
    Batch,
    Training,
    assert_all_match,
    full_state,
    mixed_config,
    our_model,
    random_batch,
    referee_run,
    tiny_config,
)
from tests.static_shapes import static_shapes

WIDTH = 0.25
ORIGIN = NoiseOrigin(seed=5, first_token=0)


def factors(*, tokens: int = 64, channels: int = 96, origin: NoiseOrigin = ORIGIN, layer_idx: int = 0) -> Tensor:
    counters = token_counters(torch.arange(tokens), origin=origin, layer_idx=layer_idx)
    return jitter(torch.ones(tokens, channels, dtype=torch.float64), counters, width=WIDTH)


def test_factors_are_uniform_around_one() -> None:
    drawn = factors(tokens=400, channels=500).flatten()
    assert (drawn.min() >= 1 - WIDTH) & (drawn.max() < 1 + WIDTH)
    # Of 200,000 uniform numbers; four standard deviations of each.
    assert abs(drawn.mean().item() - 1) < 4 * WIDTH / (3 * 200_000) ** 0.5
    shares = torch.histc(drawn, bins=20, min=1 - WIDTH, max=1 + WIDTH) / 200_000
    assert (shares - 0.05).abs().max() < 4 * (0.05 / 200_000) ** 0.5


def test_every_seed_layer_token_and_channel_has_its_own_noise() -> None:
    drawn = factors()
    assert drawn.unique().numel() > 0.999 * drawn.numel()
    for other in (
        factors(origin=ORIGIN._replace(seed=6)),
        factors(layer_idx=1),
        factors(origin=ORIGIN._replace(first_token=1000)),
    ):
        assert not torch.isin(other, drawn).float().mean() > 0.01
    centred = drawn - 1
    between_tokens = (centred[1:] * centred[:-1]).mean() / centred.square().mean()
    between_channels = (centred[:, 1:] * centred[:, :-1]).mean() / centred.square().mean()
    assert between_tokens.abs() < 4 / drawn.numel() ** 0.5
    assert between_channels.abs() < 4 / drawn.numel() ** 0.5


def test_noise_belongs_to_the_token_however_the_stream_is_cut() -> None:
    whole = factors(tokens=48)
    for size in (4, 16):
        parts = [factors(tokens=size, origin=ORIGIN._replace(first_token=i)) for i in range(0, 48, size)]
        assert torch.equal(torch.cat(parts), whole)
    shifted = token_counters(torch.arange(10, 20), origin=ORIGIN, layer_idx=0)
    assert torch.equal(jitter(torch.ones(10, 96, dtype=torch.float64), shifted, width=WIDTH), whole[10:20])
    far = NoiseOrigin(seed=2**40, first_token=2**62)
    assert factors(origin=far).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_keeps_the_type_and_shows_the_host_nothing(dtype: torch.dtype) -> None:
    x = torch.randn(6, 96, dtype=dtype).requires_grad_()
    with static_shapes():
        counters = token_counters(torch.arange(6), origin=ORIGIN, layer_idx=2)
        out = jitter(x, counters, width=WIDTH)
        out.sum().backward()
    assert out.dtype == dtype
    torch.testing.assert_close(x.grad.double(), factors(tokens=6, layer_idx=2), atol=1e-7, rtol=0)


def test_only_the_logits_see_the_noise() -> None:
    router = GatherMoeRouter(tiny_config(router_jitter_noise=WIDTH), mesh=one_rank_mesh())
    torch.nn.init.normal_(router.weight)
    x = torch.randn(16, 32)
    counters = token_counters(torch.arange(16), origin=ORIGIN, layer_idx=0)
    noisy = router(x, noise_t=counters)
    want = router(jitter(x, counters, width=WIDTH))
    assert torch.equal(noisy.logits_tE, want.logits_tE)
    assert not torch.allclose(noisy.logits_tE, router(x).logits_tE)


def noisy_config(**changes: Any) -> GatherMoeConfig:
    return mixed_config(router_jitter_noise=WIDTH, router_aux_loss_coef=0.5, router_z_loss_coef=0.1, **changes)


def test_without_an_origin_the_noise_follows_torchs_seed() -> None:
    model, ids, losses = our_model(noisy_config()), torch.arange(48).view(3, 16), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        losses.append(model(ids, labels=ids).loss.item())
    assert losses[0] == losses[1] != losses[2]


def test_every_layer_draws_its_own_noise() -> None:
    model = our_model(noisy_config())
    seen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, GatherMoeRouter):
            module.register_forward_pre_hook(
                lambda module, args, kwargs: seen.append(kwargs["noise_t"]), with_kwargs=True
            )
    ids = torch.arange(16).view(1, 16)
    model(ids, labels=ids, noise=ORIGIN)
    assert len(seen) == 2
    for layer_idx, counters in zip((1, 2), seen, strict=True):
        assert torch.equal(counters, token_counters(torch.arange(16), origin=ORIGIN, layer_idx=layer_idx))


def test_evaluation_has_no_noise() -> None:
    ids = torch.arange(16).view(1, 16)
    noisy, plain = our_model(noisy_config()), our_model(mixed_config())
    assert not torch.allclose(noisy(ids).logits, plain(ids).logits)
    assert torch.equal(noisy.eval()(ids).logits, plain.eval()(ids).logits)


def noisy_losses(model: Any, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Our model's own loss, auxiliary one included, with the noise of where the stream is."""
    noise = NoiseOrigin(0, step * batch.ids.numel())
    loss = model(input_ids=batch.ids, labels=batch.labels, noise=noise).loss
    return loss, torch.zeros(()), torch.zeros(())


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, stage=2, accumulation=3),
        slow(Case(tp=2, ep=2, stage=1, checkpointing=True)),
        slow(Case(dp=2, tp=2, ep=1, stage=3, accumulation=3, checkpointing=True)),
    ],
    ids=str,
)
@pytest.mark.requirement("R-GRAPH-03")
def test_every_layout_trains_with_the_same_noise(case: Case) -> None:
    config = tiny_config(router_jitter_noise=WIDTH)
    state = full_state(config)
    training = Training(adam_eps=None, learning_rate=0.1, weight_decay=0.0, num_steps=2, balance_coef=0.1)
    batches = [random_batch(seed=seed, num_sequences=12) for seed in (7, 8)]
    want = referee_run(config, state, batches=batches, training=training, own=True, losses=noisy_losses)
    got = train(config, state, case, batches=batches, training=training)
    assert_all_match(got.gradients, want.gradients)
    assert_all_match(got.weights, want.weights)
