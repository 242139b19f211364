"""Our class in bfloat16 and under autocast: as near to float32 as the stock models are, with a float32 router."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from modeling.execution import Execution
from modeling.router import GatherMoeRouter
from tests.referee import full_state, mixed_config, referee_model, tiny_config

CONFIGS: dict[str, Any] = {
    "mixtral": lambda **changes: tiny_config(qk_norm="none", **changes),
    "qwen3_moe": lambda **changes: mixed_config(qk_norm="head", **changes),
    "olmoe": lambda **changes: tiny_config(qk_norm="full", norm_topk_prob=False, **changes),
}
IDS = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(0))


def gradients(model: Any, *, autocast: bool, **options: Any) -> dict[str, Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS, labels=IDS, **options).loss
    loss.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **found}


def distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Of all gradients together, relative."""
    square = sum((got[name] - want[name]).square().sum() for name in want if name != "loss")
    norm = sum(want[name].square().sum() for name in want if name != "loss")
    return float((square / norm) ** 0.5)


@pytest.mark.parametrize("options", [{}, {"output_logits": False}], ids=str)
@pytest.mark.parametrize("backend", ["loop", "grouped"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_autocast_is_as_near_to_float32_as_the_stock_model(name: str, backend: str, options: dict[str, Any]) -> None:
    config = CONFIGS[name]()
    state = full_state(config)
    want = gradients(referee_model(config, state), autocast=False)
    stock = gradients(referee_model(config, state), autocast=True)
    ours = referee_model(config, state, own=True, execution=Execution(experts_backend=backend))
    got = gradients(ours, autocast=True, **options)
    assert {p.grad.dtype for p in ours.parameters()} == {torch.float32}
    assert got["loss"].dtype == torch.float32
    torch.testing.assert_close(got["loss"], want["loss"], atol=1e-2, rtol=0)
    assert 0 < distance(got, want) < 1.5 * distance(stock, want)


def _watch_routers(model: Any) -> list[tuple[Tensor, Any]]:
    seen: list[tuple[Tensor, Any]] = []
    for module in model.modules():
        if isinstance(module, GatherMoeRouter):
            module.register_forward_hook(lambda _, args, out: seen.append((args[0].detach(), out)))
    return seen


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.requirement("R-MOE-10")
def test_routing_is_in_float32_in_a_bf16_model_and_under_autocast(autocast: bool) -> None:
    model = referee_model(mixed_config(), full_state(mixed_config()), own=True)
    if not autocast:
        model.bfloat16()
    seen = _watch_routers(model)
    gradients(model, autocast=autocast)
    routers = [module for module in model.modules() if isinstance(module, GatherMoeRouter)]
    assert len(seen) == len(routers) == 2
    for router, (x, routing) in zip(routers, seen, strict=True):
        assert routing.logits_tE.dtype == routing.weights_tA.dtype == torch.float32
        exact = x.double() @ router.weight.detach().double().t()
        torch.testing.assert_close(routing.logits_tE.detach().double(), exact, atol=1e-5, rtol=1e-5)
        assert torch.equal(routing.expert_ids_tA, exact.topk(3).indices)


def test_a_bf16_model_generates() -> None:
    model = referee_model(tiny_config(), full_state(tiny_config()), own=True).bfloat16().eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    got = model.generate(IDS[:, :4], **options)
    assert got.shape == (4, 12)
    with torch.no_grad():
        assert model(IDS).logits.dtype == torch.bfloat16


def test_transformers_trainer_with_bf16_moves_every_parameter(tmp_path: Path) -> None:
    model = referee_model(mixed_config(), full_state(mixed_config()), own=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=2,
        bf16=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
