"""The files in ds_configs/ that are for GPUs are near the best that the planner knows for such GPUs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from modeling.layout import ParallelLayout
from recipe.plan.search import Arrangement, _Search, search_plans
from tests.plan_hardware import plan_request

FOLDER = Path(__file__).parents[2] / "ds_configs"


@pytest.mark.parametrize(
    ("name", "gpus", "block_size"),
    [("bf16_8gpu", 8, 4096), ("bf16_8gpu", 8, 16384), ("bf16_2node", 16, 16384), ("long_context", 16, 131072)],
)
def test_a_file_for_gpus_is_within_a_tenth_of_the_best_plan(name: str, gpus: int, block_size: int) -> None:
    """In steps of four million tokens, which amortise the optimizer, and with the usual skew."""
    file = json.loads((FOLDER / f"{name}.json").read_text())
    assert file.get("arguments", {}).get("block_size", block_size) == block_size
    sequences = 2**22 // block_size
    shape = {"gpus": gpus, "ranks_per_node": 8, "block_size": block_size, "sequences_per_step": sequences, "skew": 1.3}
    request = plan_request("qwen3-30b-a3b", hardware="h100", **shape)
    request = replace(request, model={**request.model, "max_position_embeddings": 131072})
    best = search_plans(request).plans[0]
    tp, ep, strategy = (file["parallel"][key] for key in ("tp", "ep", "strategy"))
    found = _Search(request).fitting(Arrangement(ParallelLayout(dp=gpus // tp, tp=tp, ep=ep), strategy))
    stage = file["zero_optimization"]["stage"]
    speed = max(plan.tokens_per_s for plan in found if plan.job.zero_stage == stage)
    assert speed >= 0.9 * best.tokens_per_s
