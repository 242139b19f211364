"""Replayed blocks under DeepSpeed train like eager ones, bit for bit, in every layout, ZeRO stage and accumulation."""

from typing import Any

import pytest
import torch

from modeling.config import GatherMoeConfig
from recipe.engine.graphs import install_graphs
from tests.emulated_graphs import EmulatedCapture
from tests.engine_runs import ONE_RUN_S, Case, train_on_rank
from tests.ranks import run_ranks
from tests.referee import NUM_SEQUENCES, Tensors, Training, full_state, random_batch, split_options, tiny_config

pytestmark = pytest.mark.slow

TRAINING = Training(num_steps=3, max_grad_norm=0.2, balance_coef=0.02, z_coef=0.01)


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


JITTER_AND_BIASES = {"router_jitter_noise": 0.2, "router_bias": True, "balance_bias_update_rate": 0.05}
# Every two of layout, stage and accumulation meet; blocks of a group that is split are of every kind. Those that read
# numbers on the host can be emulated, though not captured.
RUNS: list[tuple[Case, dict[str, Any]]] = [
    (Case(stage=0), {}),
    (Case(stage=1, accumulation=3), {}),
    (Case(stage=2), {}),
    (Case(dp=2, stage=0, accumulation=3), {}),
    (Case(dp=2, stage=1), {}),
    (Case(dp=2, stage=2, accumulation=3), {}),
    (Case(tp=2, ep=1, stage=0), {"strategy": "gather_weights"}),
    (Case(tp=2, ep=2, stage=1, accumulation=3), {"overlap": True, "overlap_chunks": 2, "regather": True}),
    (Case(tp=2, ep=2, stage=2, checkpointing=True), {"strategy": "all_to_all"}),
    (Case(dp=2, tp=2, ep=2, stage=0, accumulation=3), JITTER_AND_BIASES),
    (Case(dp=2, tp=2, ep=1, stage=1, checkpointing=True), {}),
    (Case(dp=2, tp=2, ep=2, stage=2, accumulation=3, bf16=True), {"overlap_chunks": 3, "qk_norm": "head"}),
    (Case(tp=2, ep=2, stage=1, accumulation=2, bf16=True), {"experts_backend": "loop", "qk_norm": "head"}),
    (Case(tp=2, ep=2, stage=1, accumulation=2), {"qk_norm": "full", "balance_scope": "global_batch"}),
]


@pytest.mark.parametrize(("case", "changes"), RUNS, ids=str)
def test_a_run_with_graphs_is_the_run_without(case: Case, changes: dict[str, Any]) -> None:
    """What differs from call to call, a jitter's counters say, is copied in; what is updated in place is seen."""
    options, execution = split_options({"experts_backend": "grouped"} | changes)
    config, case = tiny_config(**options), case._replace(execution=execution)
    passes = TRAINING.num_steps * case.accumulation
    found = run_ranks(_train_twice, case.num_ranks, config, full_state(config), case, timeout_s=2 * ONE_RUN_S)
    blocks = 2 * config.num_hidden_layers
    assert found == [(blocks, blocks * (passes - 1))] * case.num_ranks
