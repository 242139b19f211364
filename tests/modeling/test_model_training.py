"""Training our class without our loop: losses, transformers' Trainer, checkpointing, frozen parameters, precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from modeling import auxiliary as auxiliary_module
from modeling.execution import Execution
from modeling.noise import NoiseOrigin
from modeling.router import GatherMoeRouter
from tests.referee import (
    STOCK_CONFIGS,
    Tensors,
    assert_all_match,
    distance,
    full_state,
    gradients_of,
    mixed_config,
    our_model,
    random_batch,
    referee_model,
    tiny_config,
)
from tests.states import assert_same
from tests.tuning import training_arguments

AUXILIARY = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}


def ids_and_labels(rows: int = 4) -> tuple[Tensor, Tensor]:
    return random_batch(num_sequences=rows)[:2]


@pytest.mark.requirement("R-LOSS-06")
def test_the_auxiliary_loss_needs_no_flag() -> None:
    ids, labels = ids_and_labels()
    config = mixed_config(router_aux_loss_coef=0.5)
    assert config.output_router_logits is False
    router = "model.layers.1.mlp.gate.weight"
    by_coefficient = {}
    for coefficient in (0.0, 0.5, 1.0):
        model = our_model(mixed_config(router_aux_loss_coef=coefficient))
        out = model(input_ids=ids, labels=labels)
        out.loss.backward()
        by_coefficient[coefficient] = (out, gradients_of(model)[router])
        assert out.aux_loss > 1.0
        torch.testing.assert_close(out.loss.detach(), out.lm_loss + coefficient * out.aux_loss)
    plain, half, whole = (by_coefficient[c][1] for c in (0.0, 0.5, 1.0))
    assert (half - plain).abs().max() > 1e-3
    torch.testing.assert_close(whole - plain, 2 * (half - plain), atol=1e-6, rtol=0)
    evaluated = our_model(config).eval()(input_ids=ids, labels=labels)
    assert evaluated.aux_loss is None
    assert torch.equal(evaluated.loss, evaluated.lm_loss)


@pytest.mark.parametrize("options", [{}, {"output_logits": False}], ids=str)
@pytest.mark.requirement("R-LOSS-07")
def test_the_auxiliary_loss_is_added_once(options: dict[str, Any]) -> None:
    ids, labels = ids_and_labels()
    out = our_model(mixed_config(**AUXILIARY))(input_ids=ids, labels=labels, **options)
    torch.testing.assert_close(out.loss.detach(), out.lm_loss + 0.5 * out.aux_loss + 0.1 * out.z_loss)
    assert not out.aux_loss.requires_grad
    assert not out.lm_loss.requires_grad


@pytest.mark.requirement("R-LOSS-09")
def test_two_z_losses_with_two_names() -> None:
    ids, labels = ids_and_labels()
    plain = our_model(tiny_config())(input_ids=ids, labels=labels)
    router = our_model(tiny_config(router_z_loss_coef=0.1))(input_ids=ids, labels=labels)
    torch.testing.assert_close(router.loss.detach(), plain.loss.detach() + 0.1 * plain.z_loss)
    torch.testing.assert_close(router.z_loss, plain.z_loss)
    squares = plain.logits.logsumexp(-1)[:, :-1].square()[labels[:, 1:] != -100].mean().detach()
    for options in ({}, {"output_logits": False}):
        vocabulary = our_model(tiny_config(logits_z_loss_coef=0.1))(input_ids=ids, labels=labels, **options)
        torch.testing.assert_close(vocabulary.loss.detach(), plain.loss.detach() + 0.1 * squares)
        torch.testing.assert_close(vocabulary.lm_loss, plain.lm_loss)


@pytest.mark.requirement("R-LOSS-09")
def test_a_coefficient_of_zero_changes_nothing_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a z-loss that is no number: it is left out, not multiplied by zero."""
    ids, labels = ids_and_labels()
    results = []
    for poison in (0.0, torch.nan):
        original = auxiliary_module.auxiliary_losses

        def poisoned(*args: Any, poison: float = poison, original: Any = original, **options: Any) -> Any:
            losses = original(*args, **options)
            return losses._replace(balance_L=losses.balance_L + poison, z_L=losses.z_L + poison)

        with monkeypatch.context() as patch:
            patch.setattr(auxiliary_module, "auxiliary_losses", poisoned)
            model = our_model(tiny_config(router_z_loss_coef=0.0, router_aux_loss_coef=0.0, logits_z_loss_coef=0.0))
            out = model(input_ids=ids, labels=labels)
        out.loss.backward()
        results.append({"loss": out.loss.detach(), **gradients_of(model)})
    assert out.z_loss.isnan()
    assert_same(*results)


@pytest.mark.parametrize("options", [{}, {"output_logits": False}], ids=str)
@pytest.mark.requirement("R-LOSS-03")
def test_a_batch_without_targets_teaches_nothing(options: dict[str, Any]) -> None:
    ids, labels = ids_and_labels()
    model = our_model(mixed_config(**AUXILIARY, logits_z_loss_coef=0.1))
    out = model(input_ids=ids, labels=torch.full_like(labels, -100), **options)
    out.loss.backward()
    assert (out.loss.item(), out.lm_loss.item()) == (0.0, 0.0)
    found = gradients_of(model)
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert not any(gradient.any() for gradient in found.values())


def test_calls_of_unequal_size_add_up_to_the_whole_batch() -> None:
    ids, labels = ids_and_labels()
    config = mixed_config(**AUXILIARY)
    whole, parts = our_model(config), our_model(config)
    want = whole(input_ids=ids, labels=labels)
    want.loss.backward()
    num_items, num_tokens = int((labels[:, 1:] != -100).sum()), ids.numel()
    total = torch.zeros(())
    for here in (slice(0, 1), slice(1, 4)):
        out = parts(
            input_ids=ids[here], labels=labels[here], num_items_in_batch=num_items, num_tokens_in_batch=num_tokens
        )
        out.loss.backward()
        total += out.loss.detach()
    torch.testing.assert_close(total, want.loss.detach())
    assert_all_match(gradients_of(parts), gradients_of(whole), atol=1e-6)


class Rows(torch.utils.data.Dataset):
    def __init__(self, *, ignored: bool = True) -> None:
        self.ids, self.labels = ids_and_labels(8)
        self.labels = self.labels if ignored else self.ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class WatchedTrainer(Trainer):
    """Keeps what the model returned and what the Trainer made of it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        self.seen = [*getattr(self, "seen", []), (loss.detach().clone(), outputs)]
        return (loss, outputs) if return_outputs else loss


def trainer(model: Any, folder: Path, **options: Any) -> WatchedTrainer:
    extra = {key: options.pop(key) for key in ("compute_metrics",) if key in options}
    arguments = training_arguments(folder, **{"max_steps": 2, **options})
    return WatchedTrainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(), **extra)


@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_checkpointing": True}], ids=str)
@pytest.mark.requirement("R-LOSS-06")
@pytest.mark.requirement("R-LOSS-07")
@pytest.mark.requirement("R-MOE-05")
def test_transformers_trainer_adds_the_auxiliary_loss_once_and_moves_every_parameter(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = our_model(mixed_config(**AUXILIARY))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = trainer(model, tmp_path, **options)
    run.train()
    assert len(run.seen) == 2
    for loss, out in run.seen:
        torch.testing.assert_close(loss, out.lm_loss + 0.5 * out.aux_loss + 0.1 * out.z_loss, atol=1e-5, rtol=0)
        assert out.aux_loss > 0
    for name, parameter in model.named_parameters():
        moved = parameter.detach() != before[name]
        assert moved.flatten(1).any(1).all() if ".experts." in name else moved.any(), name  # every single expert


@pytest.mark.parametrize(
    ("coefficient", "ignored"),
    [(0.0, True), (0.5, False)],  # with both, a call's share of the targets stands for its share of the tokens
)
@pytest.mark.requirement("R-CFG-05")
def test_accumulation_in_transformers_trainer_weights_tokens_alike(
    coefficient: float, ignored: bool, tmp_path: Path
) -> None:
    """One batch of 8 and four of 2 are the same step."""
    weights, losses = [], []
    for size, accumulation in ((8, 1), (2, 4)):
        model = our_model(mixed_config(router_aux_loss_coef=coefficient))
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        run = trainer(model, tmp_path, max_steps=1, optim="sgd", **sizes)
        run.train_dataset = Rows(ignored=ignored)
        run.train()
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        losses.append(run.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert_all_match(weights[0], weights[1], atol=1e-6)
    assert not torch.equal(weights[0]["lm_head.weight"], full_state(mixed_config())["lm_head.weight"])


@pytest.mark.parametrize("with_metrics", [False, True])
def test_evaluating_in_transformers_trainer(tmp_path: Path, with_metrics: bool) -> None:
    shapes = []

    def metrics(prediction: Any) -> dict[str, float]:
        shapes.append((prediction.predictions.shape, prediction.label_ids.shape))
        return {"seen": 1.0}

    model = our_model(mixed_config(**AUXILIARY))
    run = trainer(model, tmp_path, **({"compute_metrics": metrics} if with_metrics else {}))
    result = run.evaluate()
    ids, labels = ids_and_labels(8)
    want = model.eval()(input_ids=ids, labels=labels).lm_loss.item()
    assert result["eval_loss"] == pytest.approx(want, abs=1e-5)
    assert shapes == ([((8, 16, 50), (8, 16))] if with_metrics else [])


def run_once(
    config: Any, *, reentrant: bool | None, frozen: bool = False, zero_router: bool = False, **options: Any
) -> Any:
    """Loss and gradients, with checkpointing unless `reentrant` is None."""
    ids, labels = ids_and_labels()
    model = our_model(config)
    if zero_router:
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.weight.data.zero_()
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert model.is_gradient_checkpointing
        if frozen:
            model.enable_input_require_grads()
    out = model(input_ids=ids, labels=labels, **options)
    out.loss.backward()
    return out.loss.detach(), gradients_of(model)


@pytest.mark.parametrize("zero_router", [False, True], ids=["routed", "exact ties"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"attention_dropout": 0.2}, {}),
        ({"router_jitter_noise": 0.25}, {}),
        ({"router_jitter_noise": 0.25}, {"noise": NoiseOrigin(seed=5, first_token=0)}),
    ],
)
@pytest.mark.requirement("R-GRAPH-03")
def test_checkpointing_changes_no_gradient(
    changes: dict[str, Any], options: dict[str, Any], reentrant: bool, zero_router: bool
) -> None:
    config = mixed_config(**AUXILIARY, **changes)
    results = []
    for mode in (None, reentrant):
        torch.manual_seed(5)
        results.append(run_once(config, reentrant=mode, zero_router=zero_router, **options))
    assert torch.equal(results[0][0], results[1][0])
    assert_same(results[1][1], results[0][1])
    assert set(results[0][1]) == {name for name, _ in our_model(config).named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.requirement("R-FT-05")
def test_checkpointing_with_a_frozen_base_changes_no_gradient(reentrant: bool) -> None:
    config = mixed_config(**AUXILIARY)
    want_loss, want = run_once(config, reentrant=None, frozen=True)
    loss, got = run_once(config, reentrant=reentrant, frozen=True)
    assert torch.equal(loss, want_loss)
    assert_same(got, want)
    assert set(want) == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)}
    assert all(gradient.any() for gradient in want.values())


@pytest.mark.requirement("R-FT-06")
def test_a_frozen_router_stays_bitwise_the_same(tmp_path: Path) -> None:
    model = our_model(mixed_config(**AUXILIARY))
    routers = {name: p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")}
    assert len(routers) == 2
    before = {name: p.detach().clone() for name, p in routers.items()}
    for parameter in routers.values():
        parameter.requires_grad_(False)
    run = trainer(model, tmp_path)
    run.train()
    owned = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    for name, parameter in routers.items():
        assert torch.equal(parameter, before[name])
        assert id(parameter) not in owned
        assert parameter.grad is None
    assert run.seen[0][1].aux_loss > 0


def under_autocast(model: Any, *, enabled: bool = True, **options: Any) -> tuple[Tensor, Tensors]:
    """Loss and float32 gradients of a call in bfloat16, but for what autocast keeps in float32."""
    ids, _ = ids_and_labels()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        loss = model(input_ids=ids, labels=ids, **options).loss
    loss.backward()
    return loss.detach(), {name: gradient.float() for name, gradient in gradients_of(model).items()}


@pytest.mark.parametrize("options", [{}, {"output_logits": False}], ids=str)
@pytest.mark.parametrize("backend", ["loop", "grouped"])
@pytest.mark.parametrize("name", STOCK_CONFIGS)
def test_autocast_is_as_near_to_float32_as_the_stock_model(name: str, backend: str, options: dict[str, Any]) -> None:
    config = STOCK_CONFIGS[name]()
    state = full_state(config)
    want_loss, want = under_autocast(referee_model(config, state), enabled=False)
    _, stock = under_autocast(referee_model(config, state))
    ours = our_model(config, execution=Execution(experts_backend=backend))
    loss, got = under_autocast(ours, **options)
    assert {p.grad.dtype for p in ours.parameters()} == {torch.float32}
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want_loss, atol=1e-2, rtol=0)
    assert 0 < distance(got, want) < 1.5 * distance(stock, want)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.requirement("R-MOE-10")
def test_routing_is_in_float32_in_a_bf16_model_and_under_autocast(autocast: bool) -> None:
    model = our_model(mixed_config())
    if not autocast:
        model.bfloat16()
    routers = [module for module in model.modules() if isinstance(module, GatherMoeRouter)]
    seen: list[tuple[Tensor, Any]] = []
    for router in routers:
        router.register_forward_hook(lambda _, args, out: seen.append((args[0].detach(), out)))
    under_autocast(model, enabled=autocast)
    assert len(seen) == len(routers) == 2
    for router, (x, routing) in zip(routers, seen, strict=True):
        assert routing.logits_tE.dtype == routing.weights_tA.dtype == torch.float32
        exact = x.double() @ router.weight.detach().double().t()
        torch.testing.assert_close(routing.logits_tE.detach().double(), exact, atol=1e-5, rtol=1e-5)
        assert torch.equal(routing.expert_ids_tA, exact.topk(3).indices)


def test_a_bf16_model_generates() -> None:
    ids, _ = ids_and_labels()
    model = our_model(tiny_config()).bfloat16().eval()
    got = model.generate(ids[:, :4], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert got.shape == (4, 12)
    with torch.no_grad():
        assert model(ids).logits.dtype == torch.bfloat16
