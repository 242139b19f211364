"""Replayed blocks under DeepSpeed train like eager ones, bit for bit, in every layout, ZeRO stage and accumulation."""

from typing import Any

import pytest
import torch

from modeling.config import GatherMoeConfig
from recipe.engine.graphs import install_graphs
from tests.emulated_graphs import EmulatedCapture
from tests.engine_runs import ONE_RUN_S, Case, train_on_rank
from tests.ranks import run_ranks
from tests.referee import Tensors, Training, full_state, random_batch, split_options, tiny_config

pytestmark = pytest.mark.slow

TRAINING = Training(num_steps=3, max_grad_norm=0.2, balance_coef=0.02, z_coef=0.01)
NUM_SEQUENCES = 12


def _train_twice(rank: int, world_size: int, config: GatherMoeConfig, state: Tensors, case: Case) -> tuple[int, int]:
    """Check that graphs change no bit; how much was recorded and replayed."""
    capture = EmulatedCapture()
    batches = [random_batch(seed=step, num_sequences=NUM_SEQUENCES) for step in range(TRAINING.num_steps)]
    want, got = (
        train_on_rank(rank, world_size, config, state, case, batches, TRAINING, change)
        for change in (None, lambda engine: install_graphs(engine.model, capture=capture))
    )
    assert got.curves == want.curves
    for ours, theirs in ((got.gradients, want.gradients), (got.weights, want.weights)):
        for name, tensor in theirs.items():
            assert tensor.isfinite().all(), name
            assert torch.equal(ours[name], tensor), name
    return capture.num_recordings, capture.num_replays


def assert_same_with_graphs(case: Case, **changes: Any) -> None:
    options, execution = split_options({"experts_backend": "grouped"} | changes)
    config, case = tiny_config(**options), case._replace(execution=execution)
    passes = TRAINING.num_steps * case.accumulation
    found = run_ranks(_train_twice, case.num_ranks, config, full_state(config), case, timeout_s=2 * ONE_RUN_S)
    blocks = 2 * config.num_hidden_layers
    assert found == [(blocks, blocks * (passes - 1))] * case.num_ranks


LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # dp, tp


@pytest.mark.parametrize(
    ("dp", "tp", "stage", "accumulation"),
    # Every two of layout, stage and accumulation meet.
    [(*layout, stage, (1, 3)[(i + stage) % 2]) for i, layout in enumerate(LAYOUTS) for stage in (0, 1, 2)],
)
def test_layouts_stages_and_accumulation(dp: int, tp: int, stage: int, accumulation: int) -> None:
    assert_same_with_graphs(Case(dp=dp, tp=tp, ep=tp, stage=stage, accumulation=accumulation))


@pytest.mark.parametrize(
    ("strategy", "ep", "backend", "checkpointing"),
    [
        ("gather_weights", 1, "grouped", False),
        ("gather_tokens", 1, "grouped", True),
        ("gather_tokens", 2, "loop", False),
        ("all_to_all", 2, "grouped", True),
    ],
)
def test_strategies_and_backends(strategy: str, ep: int, backend: str, checkpointing: bool) -> None:
    """Those that read numbers on the host can be emulated, though not captured."""
    case = Case(tp=2, ep=ep, stage=1, accumulation=2, checkpointing=checkpointing)
    assert_same_with_graphs(case, strategy=strategy, experts_backend=backend)


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
    assert_same_with_graphs(Case(tp=2, ep=2, stage=1, accumulation=2), **options)


@pytest.mark.parametrize("stage", [1, 2])
def test_bfloat16(stage: int) -> None:
    assert_same_with_graphs(Case(tp=2, ep=2, stage=stage, accumulation=2, bf16=True), qk_norm="head")
