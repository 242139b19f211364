"""Replayed blocks under DeepSpeed train like eager ones, bit for bit, in every layout, ZeRO stage and accumulation."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from modeling.config import GatherMoeConfig
from recipe.engine.graphs import install_graphs
from tests.emulated_graphs import EmulatedCapture
from tests.engine_runs import ONE_RUN_S, Case, gradient_shards, micro_batches, slow, start_engine, weight_shards
from tests.ranks import run_ranks
from tests.referee import Tensors, Training, full_state, random_batch, split_options, tiny_config

pytestmark = pytest.mark.slow

TRAINING = Training(num_steps=3, max_grad_norm=0.2, balance_coef=0.02, z_coef=0.01)
NUM_SEQUENCES = 12


class Outcome(NamedTuple):
    """Losses and norms per step; this rank's shards of the last step's gradients and of the weights after it."""

    losses: list[float]
    norms: list[float]
    gradients: Tensors
    weights: Tensors


def _train(config: GatherMoeConfig, state: Tensors, case: Case, *, capture: EmulatedCapture | None) -> Outcome:
    engine = start_engine(config, state, case, training=TRAINING)
    if capture is not None:
        install_graphs(engine.model, capture=capture)
    losses, norms, gradients = [], [], {}
    for step in range(TRAINING.num_steps):
        batch = random_batch(seed=step, num_sequences=NUM_SEQUENCES)
        parts = micro_batches(batch, case, dp_rank=engine.mesh.dp_rank)
        counts = engine.count(parts)
        losses.append(engine.accumulate(parts, counts=counts).nll.item())
        gradients = gradient_shards(engine)
        norms.append(engine.update(learning_rate=TRAINING.learning_rate))
        engine.evaluate(parts[:1])
    return Outcome(losses, norms, gradients, weight_shards(engine))


def _differences(
    rank: int, world_size: int, config: GatherMoeConfig, state: Tensors, case: Case
) -> tuple[list[str], int, int]:
    """What is not the same bits with graphs and without, and how much was recorded and replayed."""
    want = _train(config, state, case, capture=None)
    capture = EmulatedCapture()
    got = _train(config, state, case, capture=capture)
    different = [f"{got.losses} {want.losses}"] if got.losses != want.losses else []
    different += [f"{got.norms} {want.norms}"] if got.norms != want.norms else []
    for ours, theirs in ((got.gradients, want.gradients), (got.weights, want.weights)):
        different += [name for name, tensor in theirs.items() if not _same(tensor, ours[name])]
    return different, capture.num_recordings, capture.num_replays


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(a.isfinite().all()) and torch.equal(a, b)


def assert_same_with_graphs(case: Case, **changes: Any) -> None:
    options, execution = split_options({"experts_backend": "grouped"} | changes)
    config, case = tiny_config(**options), case._replace(execution=execution)
    passes = TRAINING.num_steps * case.accumulation
    found = run_ranks(_differences, case.dp * case.tp, config, full_state(config), case, timeout_s=2 * ONE_RUN_S)
    blocks = 2 * config.num_hidden_layers
    assert found == [([], blocks, blocks * (passes - 1))] * (case.dp * case.tp)


LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # dp, tp


@pytest.mark.parametrize(
    ("dp", "tp", "stage", "accumulation"),
    [
        (1, 2, 2, 3),
        (2, 1, 1, 1),
        slow(1, 1, 0, 3),
        *(
            slow(dp, tp, stage, accumulation)
            for dp, tp in LAYOUTS
            for stage in (0, 1, 2)
            for accumulation in (1, 3)
            if (dp, tp, stage, accumulation) not in [(1, 2, 2, 3), (2, 1, 1, 1), (1, 1, 0, 3)]
        ),
    ],
)
def test_layouts_stages_and_accumulation(dp: int, tp: int, stage: int, accumulation: int) -> None:
    assert_same_with_graphs(Case(dp=dp, tp=tp, ep=tp, stage=stage, accumulation=accumulation))


@pytest.mark.parametrize("checkpointing", [False, slow(True)])
@pytest.mark.parametrize(
    ("strategy", "ep", "backend"),
    [
        ("gather_weights", 1, "grouped"),
        slow("gather_tokens", 1, "grouped"),
        slow("gather_tokens", 2, "loop"),
        slow("all_to_all", 2, "grouped"),
    ],
)
def test_strategies_and_backends(strategy: str, ep: int, backend: str, checkpointing: bool) -> None:
    """Those that read numbers on the host can be emulated, though not captured."""
    case = Case(tp=2, ep=ep, stage=1, accumulation=3, checkpointing=checkpointing)
    assert_same_with_graphs(case, strategy=strategy, experts_backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True, "overlap_chunks": 2, "regather": True},
        {"overlap": False, "overlap_chunks": 3},
        {"router_jitter_noise": 0.2, "router_bias": True, "balance_bias_update_rate": 0.05},
        {"qk_norm": "full", "balance_scope": "global_batch"},
    ],
    ids=["overlapped and gathered again", "in chunks", "jitter and biases", "balanced over the batch"],
)
def test_other_blocks(options: dict[str, Any]) -> None:
    """What differs from call to call, a jitter's counters say, is copied in; what is updated in place is seen."""
    assert_same_with_graphs(Case(tp=2, ep=2, stage=1, accumulation=3), **options)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_bfloat16(stage: int) -> None:
    assert_same_with_graphs(Case(tp=2, ep=2, stage=stage, accumulation=3, bf16=True), qk_norm="head")
