"""The auxiliary losses against their formulas on a stock model's router logits, and routing where all experts tie."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine_runs import Case, three_steps, train
from tests.referee import (
    assert_runs_match,
    full_state,
    global_batch,
    mixed_config,
    referee_model,
    referee_run,
    tiny_config,
)

AUX, Z = 0.1, 0.01


def stock_gradients(config: Any, state: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Cross-entropy plus both auxiliary losses, computed per layer and sequence from what the stock router says."""
    model = referee_model(config, state)
    ids, labels, *_ = global_batch(0, vocab_size=config.vocab_size, packed=False)
    output = model(input_ids=ids, use_cache=False, output_router_logits=True)
    targets = labels[:, 1:].flatten()
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets, ignore_index=-100)
    num_sequences, num_experts = ids.shape[0], config.num_experts
    balance, z = [], []
    for layer_logits in output.router_logits:
        z.append(layer_logits.logsumexp(-1).square().mean())
        per_sequence = []
        for logits in layer_logits.view(num_sequences, -1, num_experts):
            probs = logits.softmax(-1)
            chosen = probs.topk(config.num_experts_per_tok).indices
            counts = torch.stack([(chosen == expert).sum() for expert in range(num_experts)])
            per_sequence.append(num_experts * (counts / len(logits) * probs.mean(0)).sum())
        balance.append(torch.stack(per_sequence).mean())
    total = loss + AUX * torch.stack(balance).mean() + Z * torch.stack(z).mean()
    total.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


CASES = [
    Case(dp=1, tp=1, packed=False),
    Case(dp=2, tp=2, ep=2, stage=2, accumulation=3, packed=False),
    Case(dp=1, tp=4, ep=1, stage=1, checkpointing=True, packed=False),
    Case(dp=4, tp=1, stage=3, accumulation=3, packed=False),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_auxiliary_losses_follow_their_formulas_in_every_layout(kind: str, case: Case) -> None:
    coefficients = {"router_aux_loss_coef": AUX, "router_z_loss_coef": Z}
    config = tiny_config(**coefficients) if kind == "mixtral" else mixed_config(**coefficients)
    state = full_state(config)
    lm_loss, gradients = stock_gradients(config, state)
    got = train(config, state, case, **three_steps(config, case))
    assert abs(got.curves.losses[0] - lm_loss) < 1e-5
    for name, gradient in got.gradients.items():
        torch.testing.assert_close(gradient, gradients[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(tp=2, ep=2, stage=2), Case(dp=2, tp=2, ep=1, stage=1)], ids=str)
def test_exact_router_ties_are_broken_alike_in_every_layout(case: Case) -> None:
    """All router weights zero: every expert ties for every token, and the lowest ids win everywhere."""
    config = tiny_config()
    state = full_state(config)
    for name in state:
        if name.endswith("mlp.gate.weight"):
            state[name] = torch.zeros_like(state[name])
    want = referee_run(config, state, **three_steps(config, case), own=True)
    got = train(config, state, case, **three_steps(config, case))
    assert_runs_match(got, want, steps=1)
    first, last = (got.gradients["model.layers.0.mlp.experts.down_proj"][e].abs().max() for e in (0, 3))
    assert first > 0
    assert last == 0, "no token may have gone to the last expert"
