"""Layouts, ZeRO stages, strategies and options against one plain process: losses, gradients, norms, weights."""

import itertools
from functools import cache
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from tests.engine_runs import (
    Case,
    gradient_shards,
    join_shards,
    make_micro_batches,
    slow,
    start_engine,
    three_steps,
    train,
)
from tests.ranks import run_ranks
from tests.referee import (
    CLIPPED,
    STOCK_CONFIGS,
    Tensors,
    assert_runs_match,
    distance,
    full_state,
    global_batch,
    mixed_config,
    referee_loss,
    referee_model,
    referee_run,
    tiny_config,
)

CONFIGS = {
    "mixtral": lambda: tiny_config(qk_norm="none"),
    "qwen3_moe": lambda: mixed_config(qk_norm="head"),
    "olmoe": lambda: tiny_config(qk_norm="full", norm_topk_prob=False, clip_qkv=0.5, vocab_size=51),
    "dense first, no norm": lambda: mixed_config(qk_norm="none", norm_topk_prob=True),
    "odd vocabulary, tied": lambda: tiny_config(qk_norm="head", vocab_size=51, tie_word_embeddings=True),
}
# With four ranks of a group there are more than the two key-value heads.
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1), (2, 4)]
FACTORS: dict[str, list[Any]] = {
    "layout": LAYOUTS,
    "config": list(CONFIGS),
    "stage": [0, 1, 2, 3],
    # The strategy, and whether each rank of a group has whole experts.
    "experts": [("gather_tokens", True), ("gather_tokens", False), ("gather_weights", False), ("all_to_all", True)],
    "accumulation": [1, 3],
    "checkpointing": [False, True],
    "auxiliary": [False, True],
    "overlap": [False, True],
    "overlap_comm": [False, True],
}


def covering_set(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Few combinations in which every pair of values of any two factors occurs: greedy, the same on every run."""
    bits: dict[Any, int] = {}

    def pairs(row: tuple[Any, ...]) -> int:
        """A bit for each pair of values."""
        found = itertools.combinations(zip(factors, row, strict=True), 2)
        return sum(1 << bits.setdefault(pair, len(bits)) for pair in found)

    combinations = {row: pairs(row) for row in itertools.product(*factors.values())}
    still_open, rows = (1 << len(bits)) - 1, []
    while still_open:
        best = max(combinations, key=lambda row: (combinations[row] & still_open).bit_count())
        still_open &= ~combinations[best]
        rows.append(dict(zip(factors, best, strict=True)))
    return rows


ROWS = covering_set(FACTORS)


def test_the_covering_set_meets_every_pair() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        assert {(row[a], row[b]) for row in ROWS} == set(itertools.product(FACTORS[a], FACTORS[b]))


@pytest.mark.parametrize(
    "row",
    [row if row["layout"] in ((2, 1), (1, 2)) else slow(row) for row in ROWS],
    ids=lambda row: "-".join(map(str, row.values())),
)
@pytest.mark.requirement("R-CFG-05")
@pytest.mark.requirement("R-MOE-02")
@pytest.mark.requirement("R-MOE-08")
@pytest.mark.requirement("R-TP-01")
@pytest.mark.requirement("R-TP-04")
@pytest.mark.requirement("R-TP-05")
@pytest.mark.requirement("R-TP-06")
def test_every_pair_of_options_matches_one_plain_process(row: dict[str, Any]) -> None:
    """Three clipped steps, on packed documents or with both auxiliary losses."""
    (dp, tp), (strategy, whole_experts) = row["layout"], row["experts"]
    case = Case(
        dp=dp,
        tp=tp,
        ep=tp if whole_experts else 1,
        stage=row["stage"],
        accumulation=row["accumulation"],
        checkpointing=row["checkpointing"],
        packed=not row["auxiliary"],
        execution=Execution(strategy=strategy, overlap=row["overlap"], overlap_chunks=2),
    )
    training = CLIPPED._replace(zero={"overlap_comm": row["overlap_comm"]} if case.stage else {})
    if row["auxiliary"]:
        training = training._replace(balance_coef=0.1, z_coef=0.01)
    config = CONFIGS[row["config"]]()
    state, batches = full_state(config), three_steps(config, case)["batches"]
    want = referee_run(config, state, batches=batches, training=training)
    got = train(config, state, case, batches=batches, training=training)
    assert_runs_match(got, want)
    assert min(want.curves.norms) > CLIPPED.max_grad_norm, "clipping is active"
    if config.vocab_size == 51:
        assert got.gradients["model.embed_tokens.weight"][-2:].any(1).all(), "the last tokens have rows of their own"
    for name, gradient in got.gradients.items():
        assert gradient.abs().max() > (1e-3 if ".experts." in name else 0), f"{name} is trained"
        assert (got.weights[name] - state[name]).abs().max() > 1e-4, f"{name} moves"


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(tp=2, ep=2, stage=2), Case(dp=2, tp=2, ep=1, stage=1)], ids=str)
def test_exact_router_ties_are_broken_alike_in_every_layout(case: Case) -> None:
    """All router weights zero: every expert ties for every token, and the lowest ids win everywhere."""
    config = tiny_config()
    state = full_state(config)
    for name in state:
        if name.endswith("mlp.gate.weight"):
            state[name] = torch.zeros_like(state[name])
    run = three_steps(config, case) | {"training": CLIPPED._replace(num_steps=1)}
    got = train(config, state, case, **run)
    assert_runs_match(got, referee_run(config, state, **run, own=True))
    first, last = (got.gradients["model.layers.0.mlp.experts.down_proj"][e].abs().max() for e in (0, 3))
    assert first > 0
    assert last == 0, "no token may have gone to the last expert"


NUM_BATCHES = 40  # one batch's error is noise; the mean over many is what can be compared


def bf16_state(config: GatherMoeConfig) -> Tensors:
    """Weights that bfloat16 can hold, from which all start."""
    return {name: tensor.bfloat16().float() for name, tensor in full_state(config).items()}


def route_in_float32(gate: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the stock routers do, on float32 inputs."""
    logits = F.linear(hidden_states.reshape(-1, hidden_states.shape[-1]).float(), gate.weight.float())
    weights, ids = logits.softmax(-1).topk(gate.top_k, dim=-1)
    if getattr(gate, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, ids


@cache
def referee_in(dtype: torch.dtype, kind: str) -> tuple[list[float], Tensors]:
    """Losses of all batches, and the gradients of the first, of the stock model in `dtype` with float32 routing."""
    config = STOCK_CONFIGS[kind]()
    model: Any = referee_model(config, bf16_state(config)).to(dtype)
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


def our_run_in_bf16(
    rank: int, world_size: int, config: GatherMoeConfig, state: Tensors, case: Case
) -> tuple[list[float], Tensors]:
    engine = start_engine(config, state, case)
    losses = []
    for step in range(NUM_BATCHES):
        result = engine.evaluate(make_micro_batches(config, case, step=step, dp_rank=engine.mesh.dp_rank))
        losses.append(result.nll / result.num_targets)
    batches = make_micro_batches(config, case, step=0, dp_rank=engine.mesh.dp_rank)
    engine.accumulate(batches, counts=engine.count(batches))
    return losses, gradient_shards(engine)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(dp=2, stage=1), Case(tp=2, ep=2, stage=2), Case(tp=2, stage=3)], ids=str)
@pytest.mark.parametrize("kind", STOCK_CONFIGS)
def test_bf16_is_as_close_to_float32_as_the_stock_model_within_a_factor_of_two(kind: str, case: Case) -> None:
    config = STOCK_CONFIGS[kind]()
    exact_losses, exact_grads = referee_in(torch.float32, kind)
    stock_losses, stock_grads = referee_in(torch.bfloat16, kind)
    case = case._replace(bf16=True, packed=False)
    by_rank = run_ranks(our_run_in_bf16, case.num_ranks, config, bf16_state(config), case)
    ours = join_shards([gradients for _, gradients in by_rank], config, case)
    stock_error = sum(abs(a - b) for a, b in zip(stock_losses, exact_losses, strict=True))
    our_error = sum(abs(a - b) for a, b in zip(by_rank[0][0], exact_losses, strict=True))
    assert our_error <= 2 * stock_error, (our_error, stock_error)
    assert distance(ours, exact_grads) <= 2 * distance(stock_grads, exact_grads)
