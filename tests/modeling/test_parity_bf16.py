"""In bfloat16 a sharded run is as close to float32 as the stock model is, within a factor of two."""

from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.config import GatherMoeConfig
from tests.engine_runs import Case, join_shards, make_micro_batches, start_engine
from tests.ranks import run_ranks
from tests.referee import full_state, global_batch, mixed_config, referee_loss, referee_model, tiny_config

NUM_BATCHES = 40  # one batch's error is noise; the mean over many is what can be compared


def route_in_float32(gate: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the stock routers do, on float32 inputs."""
    logits = F.linear(hidden_states.reshape(-1, hidden_states.shape[-1]).float(), gate.weight.float())
    weights, ids = logits.softmax(-1).topk(gate.top_k, dim=-1)
    if getattr(gate, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, ids


def referee_in(dtype: torch.dtype, config: GatherMoeConfig, state: dict[str, Tensor]) -> tuple[list[float], Any]:
    """Losses of all batches, and the gradients of the first, of the stock model in `dtype` with float32 routing."""
    model = referee_model(config, state).to(dtype)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.forward = MethodType(route_in_float32, layer.mlp.gate)
    losses = []
    for step in range(NUM_BATCHES):
        loss = referee_loss(model, global_batch(step, vocab_size=config.vocab_size, packed=False))
        losses.append(loss.item())
        if step == 0:
            loss.backward()
    return losses, {name: p.grad.float() for name, p in model.named_parameters()}


def our_run_in_bf16(rank: int, world_size: int, config: GatherMoeConfig, state: dict[str, Tensor], case: Case) -> Any:
    from deepspeed.utils import safe_get_full_grad

    engine = start_engine(config, state, case)
    losses = []
    for step in range(NUM_BATCHES):
        result = engine.evaluate(make_micro_batches(config, case, step=step, dp_rank=engine.mesh.dp_rank))
        losses.append(result.nll / result.num_targets)
    batches = make_micro_batches(config, case, step=0, dp_rank=engine.mesh.dp_rank)
    engine.accumulate(batches, counts=engine.count(batches))
    return losses, {name: safe_get_full_grad(p).float().clone() for name, p in engine.model.named_parameters()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum((one[name] - other[name]).square().sum().item() for name in other) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(dp=2, tp=1, stage=1), Case(dp=1, tp=2, ep=2, stage=2), Case(tp=2, stage=3)])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])
def test_bf16_is_as_close_to_float32_as_the_stock_model(kind: str, case: Case) -> None:
    config = {
        "mixtral": tiny_config(qk_norm="none"),
        "qwen3_moe": mixed_config(qk_norm="head"),
        "olmoe": tiny_config(qk_norm="full", norm_topk_prob=False),
    }[kind]
    # All three start from the numbers that bfloat16 can hold.
    state = {name: tensor.bfloat16().float() for name, tensor in full_state(config).items()}
    exact_losses, exact_grads = referee_in(torch.float32, config, state)
    stock_losses, stock_grads = referee_in(torch.bfloat16, config, state)
    case = case._replace(bf16=True, packed=False)
    by_rank = run_ranks(our_run_in_bf16, case.dp * case.tp, config, state, case)
    ours = join_shards([gradients for _, gradients in by_rank], config, case)
    stock_error = sum(abs(a - b) for a, b in zip(stock_losses, exact_losses, strict=True))
    our_error = sum(abs(a - b) for a, b in zip(by_rank[0][0], exact_losses, strict=True))
    assert our_error <= 2 * stock_error, (our_error, stock_error)
    assert distance(ours, exact_grads) <= 2 * distance(stock_grads, exact_grads)
