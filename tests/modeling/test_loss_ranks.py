"""Losses over ranks and micro-batches: what users of other trainers found wrong, held against one plain process."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling import vocabulary
from modeling.config import GatherMoeConfig
from modeling.mesh import one_rank_mesh
from tests.engine_runs import (
    Case,
    accumulate,
    gradient_shards,
    join_shards,
    make_mesh,
    model_with,
    optimizer_for,
    slow,
    start_engine,
    train,
    weight_shards,
)
from tests.ranks import run_ranks
from tests.referee import (
    Batch,
    Tensors,
    Training,
    assert_all_match,
    full_state,
    random_batch,
    referee_run,
    tiny_config,
)
from tests.resolving import resolve
from tests.tuning import train_in_trainer


def losses_of_two_and_one() -> tuple[GatherMoeConfig, Tensors, Batch]:
    """Two sequences: one target with a loss of exactly 2, and nine targets with a loss of exactly 1.

    Attention and experts write nothing, so that a token's logits are the head times its own embedding, which has a
    single channel.
    """
    config = tiny_config()
    state = full_state(config)
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "experts.down_proj", "embed_tokens.weight", "lm_head.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    for token, loss in ((0, 2.0), (1, 1.0)):
        state["model.embed_tokens.weight"][token, token] = 1.0
        normed = (1 / 32 + config.rms_norm_eps) ** -0.5
        probability = math.exp(-loss)
        logit = math.log(49 * probability / (1 - probability))  # against 49 logits of 0
        state["lm_head.weight"][token, token] = logit / normed
    ids = torch.tensor([[0] * 16, [1] * 16])
    labels = torch.full_like(ids, -100)
    labels[0, 1], labels[1, 1:10] = 0, 1
    return config, state, Batch(ids, labels)


CUTS = [
    Case(),
    Case(accumulation=2, stage=2),
    Case(dp=2, stage=1),
    Case(tp=2, ep=2, accumulation=2),
    slow(Case(dp=2, tp=2, ep=2, stage=3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CUTS, ids=str)
@pytest.mark.requirement("R-LOSS-01")
def test_every_target_weighs_the_same_however_the_batch_is_cut(case: Case) -> None:
    config, state, batch = losses_of_two_and_one()
    want = referee_run(config, state, batches=[batch])
    assert want.curves.losses == pytest.approx([1.1], abs=1e-5)
    got = train(config, state, case, batches=[batch])
    assert got.curves.losses == pytest.approx([1.1], abs=1e-5), "1.5 is the mean of means"
    assert_all_match(got.gradients, want.gradients)
    assert want.gradients["lm_head.weight"].abs().max() > 0.1


def without_a_language_model(config: GatherMoeConfig) -> Tensors:
    """A head of zeros passes no gradient on, so that all below it learns from the auxiliary losses alone."""
    state = full_state(config)
    state["lm_head.weight"].zero_()
    return state


@pytest.mark.parametrize("accumulation", [1, slow(4)])
@pytest.mark.parametrize(
    "case",
    [Case(), Case(tp=2, ep=2), Case(dp=2), slow(Case(dp=2, tp=2, ep=2))],
    ids=lambda case: f"dp{case.dp}-tp{case.tp}",
)
@pytest.mark.requirement("R-LOSS-02")
def test_the_routers_gradient_does_not_depend_on_the_layout(case: Case, accumulation: int) -> None:
    config = tiny_config()
    state, batches = without_a_language_model(config), [random_batch()]
    training = Training(balance_coef=0.1, z_coef=0.01)
    case = case._replace(accumulation=accumulation, stage=2)
    got = train(config, state, case, batches=batches, training=training)
    want = referee_run(config, state, batches=batches, training=training)
    torch.testing.assert_close(got.curves.balance, want.curves.balance, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.curves.z, want.curves.z, atol=1e-5, rtol=0)
    assert_all_match(got.gradients, want.gradients, atol=1e-6)
    for layer in range(2):
        assert got.gradients[f"model.layers.{layer}.mlp.gate.weight"].abs().max() > 1e-3


@pytest.mark.parametrize("case", [Case(tp=2, ep=2, stage=1), Case(dp=2, accumulation=2, stage=2)], ids=str)
@pytest.mark.requirement("R-LOSS-02")
def test_twice_the_coefficient_is_exactly_twice_the_gradient(case: Case) -> None:
    config = tiny_config()
    state = without_a_language_model(config)
    once, twice, balance_only = (
        train(config, state, case, batches=[random_batch()], training=Training(balance_coef=balance, z_coef=z))
        for balance, z in ((0.1, 0.01), (0.2, 0.02), (0.1, 0.0))
    )
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert torch.equal(twice.gradients[name], 2 * once.gradients[name])
        assert not torch.allclose(balance_only.gradients[name], once.gradients[name], atol=1e-6)


def _empty_step(
    rank: int, world_size: int, config: Any, state: Tensors, case: Case, chunk_bytes: int
) -> tuple[float, float, Tensors, Tensors]:
    training = Training(learning_rate=0.01, balance_coef=0.1, z_coef=0.01, max_grad_norm=1.0)
    batch = random_batch()
    batch.labels.fill_(-100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHUNK_BYTES", chunk_bytes)
        engine = start_engine(config, state, case, training=training)
        sums = accumulate(engine, batch, case)
        gradients = gradient_shards(engine)
        norm = engine.update(learning_rate=training.learning_rate)
    return sums.nll.item(), norm, gradients, weight_shards(engine)


@pytest.mark.parametrize(
    ("case", "chunk_bytes"),
    [
        (Case(), 400),
        *((Case(tp=2, ep=2, stage=stage), 2**24) for stage in (0, 1, 2, 3)),
        slow(Case(tp=2, ep=2, stage=3), 400),
        (Case(dp=2, accumulation=2, stage=2), 400),
    ],
    ids=str,
)
@pytest.mark.requirement("R-LOSS-03")
def test_a_batch_without_a_target_teaches_nothing(case: Case, chunk_bytes: int) -> None:
    config = tiny_config(logits_z_loss_coef=0.1)
    state = full_state(config)
    by_rank = run_ranks(_empty_step, case.dp * case.tp, config, state, case, chunk_bytes)
    assert [result[:2] for result in by_rank] == [(0.0, 0.0)] * len(by_rank)
    gradients, weights = (join_shards([r[part] for r in by_rank], config, case) for part in (2, 3))
    for name, gradient in gradients.items():
        assert not gradient.any(), name
        decay = 1 - 0.01 * 0.1 if gradient.dim() > 1 else 1.0  # AdamW's weight decay, on matrices only
        torch.testing.assert_close(weights[name], state[name] * decay, atol=1e-7, rtol=1e-6)


NUM_MICRO_BATCHES = 1024


def _accumulate_ones(rank: int, world_size: int, config: Any, engine_config: dict[str, Any]) -> list[float]:
    """Add up 1024 gradients of 1/1024 (DeepSpeed has divided by their number) and read their average back."""
    from recipe.engine.engine import Engine

    model = model_with(config, full_state(config), make_mesh(config, Case(dp=world_size)))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: torch.full_like(gradient, 1 / NUM_MICRO_BATCHES))
    optimizer = optimizer_for(model, Training(adam_eps=None))
    engine = Engine(model, ds_config=engine_config, optimizer=optimizer)
    batch = random_batch(num_sequences=NUM_MICRO_BATCHES * world_size, block_size=2)
    accumulate(engine, batch, Case(dp=world_size, accumulation=NUM_MICRO_BATCHES))
    gradients = gradient_shards(engine)
    return [f(g).item() for f in (torch.amin, torch.amax) for g in gradients.values()]


def smallest_model() -> GatherMoeConfig:
    return tiny_config(hidden_size=8, head_dim=4, num_attention_heads=2, num_hidden_layers=1, moe_intermediate_size=8)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")])
@pytest.mark.requirement("R-LOSS-05")
def test_a_thousand_micro_batches_do_not_lose_the_sum(stage: int, precision: str) -> None:
    settings = resolve(
        {"zero_optimization": {"stage": stage}, "bf16": {"enabled": precision == "bf16"}, "parallel": {"tp": 1}},
        "--per_device_train_batch_size=1",
        f"--gradient_accumulation_steps={NUM_MICRO_BATCHES}",
        world=1,
    )
    if precision == "bf16":
        assert settings.engine["data_types"]["grad_accum_dtype"] == "fp32"
        assert settings.engine["communication_data_type"] == "fp32"
        assert any("gradients are summed in float32" in note for note in settings.notes)
    for extremes in run_ranks(_accumulate_ones, 1, smallest_model(), settings.engine):
        assert extremes == pytest.approx([1.0] * len(extremes), abs=1e-3), "0.25 is the sum in bf16"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, 3])
@pytest.mark.requirement("R-CFG-05")
def test_three_micro_batches_equal_one_big_batch(stage: int) -> None:
    config = tiny_config()
    state, batches = full_state(config), [random_batch(num_sequences=6)]
    training = Training(num_steps=2, max_grad_norm=0.2)
    want = referee_run(config, state, batches=batches, training=training)
    for accumulation in (3, 1):
        case = Case(dp=2, stage=stage, accumulation=accumulation)
        got = train(config, state, case, batches=batches, training=training)
        torch.testing.assert_close(got.curves.losses, want.curves.losses, atol=1e-5, rtol=0)
        torch.testing.assert_close(got.curves.norms, want.curves.norms, atol=1e-5, rtol=0)
        assert_all_match(got.gradients, want.gradients)
        assert_all_match(got.weights, want.weights)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.requirement("R-CFG-05")
def test_three_micro_batches_equal_one_big_batch_in_hugging_faces_trainer(uneven: bool, tmp_path: Path) -> None:
    # Trainer tells the model how many targets a step has but not how many tokens, so that the share of an auxiliary
    # loss is a micro-batch's share of the targets.
    config = tiny_config(router_aux_loss_coef=0.0 if uneven else 0.1)
    ids = random_batch(num_sequences=6).ids
    batch = Batch(ids, ids.clone())
    if uneven:
        batch.labels[0, 1:], batch.labels[3, 5:] = -100, -100
    losses, weights = [], []
    for accumulation in (1, 3):
        model = model_with(config, full_state(config), one_rank_mesh())
        options = {"learning_rate": 0.1, "weight_decay": 0.0, "max_grad_norm": 0.2, "optim": "sgd"}
        losses.append(train_in_trainer(model, batch, folder=tmp_path, accumulation=accumulation, **options))
        weights.append({name: parameter.detach() for name, parameter in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert_all_match(weights[1], weights[0])
    assert (weights[0]["lm_head.weight"] - full_state(config)["lm_head.weight"]).abs().max() > 1e-3
