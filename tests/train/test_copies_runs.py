"""Whole runs: what they log of copies, that a resume goes on bitwise, and that `place` reads what they leave."""

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from modeling.execution import Execution
from recipe.checkpoint.expert_counts import NAME, read_expert_counts
from recipe.cli import main
from tests.ranks import run_ranks
from tests.referee import FP32_ATOL, mixed_config
from tests.training import Flags, check_resume, read_metrics, train_on_ranks, write_ds_config, write_inputs

WITH_COPIES = {"parallel": {"tp": 2, "ep": 2, "resident_experts": 1}}


def run_with_copies(folder: Path, *, world_size: int = 2, **changes: Any) -> Path:
    """Six steps with a checkpoint after each second one; routers that start far from even."""
    flags = write_inputs(folder) | write_ds_config(folder, **WITH_COPIES) | {"save_steps": 2, "hf_save": "last"}
    run_ranks(train_on_ranks, world_size, flags | {"router_aux_loss_coef": 0.0} | changes)
    return folder / "run"


@pytest.mark.slow
def test_a_run_with_copies_resumes_bitwise(tmp_path: Path) -> None:
    check_resume(tmp_path, world_size=2, ds_config=WITH_COPIES, logging_steps=2, router_aux_loss_coef=0.0)


@pytest.mark.slow
def test_place_reads_what_a_run_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with_copies(tmp_path, world_size=4)
    lines = read_metrics(run)
    first, *others = lines.values()
    assert first["rank_rho"] != first["rank_rho_bound"]
    for line in lines.values():
        for bound, rho in zip(line["rank_rho_bound"], line["rank_rho"], strict=True):
            assert 1 <= bound <= rho <= 2
    # From the second step on ranks are more even than without copies, which the first step had none of.
    assert sum(sum(line["rank_rho"]) for line in others) < len(others) * sum(first["rank_rho"])

    counts = [read_expert_counts(run / "checkpoints" / f"step-{step}" / NAME) for step in (2, 4, 6)]
    assert [(found.first_step, found.last_step) for found in counts] == [(1, 2), (3, 4), (5, 6)]
    pairs_per_step = first["tokens"] * 2
    for found in counts:
        assert [sum(layer) for layer in found.counts] == [2 * pairs_per_step] * 2
    rho_of_two = [max(layer) * 4 / sum(layer) for layer in counts[0].counts]
    assert rho_of_two == pytest.approx([(lines[1]["rho"][i] + lines[2]["rho"][i]) / 2 for i in range(2)], rel=0.2)

    placed = tmp_path / "placed"
    assert main(["place", str(run), "--out", str(placed)]) == 0
    said = capsys.readouterr().out
    assert "4 experts over ep=2 ranks, by the routing of steps 5 to 6" in said
    assert json.loads((placed / "placement.json").read_text())["counts"] == [list(c) for c in counts[2].counts]
    ids = torch.arange(24).view(2, 12)
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (run / "checkpoints/latest/hf", placed)
    )
    torch.testing.assert_close(after, before)


@pytest.mark.slow
def test_a_resumed_run_can_place_its_experts_anew(tmp_path: Path) -> None:
    """Lines are logged every two steps, so the checkpoint of step 3 lies in the middle of one."""
    flags = write_inputs(tmp_path, num_experts=8) | write_ds_config(tmp_path, parallel={"tp": 2, "ep": 2})
    flags |= {"save_steps": 3, "logging_steps": 2, "router_aux_loss_coef": 0.0}
    straight = read_metrics(run_to(tmp_path / "straight", flags))
    placed = run_to(tmp_path / "placed", flags)
    shutil.rmtree(placed / "checkpoints" / "step-6")
    resume = {"resume_from_checkpoint": "auto", "place_experts": True, "output_dir": placed}
    [(_, said), *_] = run_ranks(train_on_ranks, 2, flags | resume)
    [line] = [line for line in said if "experts placed" in line]
    before, after = re.search(r"steps 1 to 3: .* over the mean goes from (.*) to (.*)", line).groups()  # type: ignore[union-attr]
    assert float(before) > float(after) >= 1.0
    for step, line in read_metrics(placed).items():
        assert line["loss"] == pytest.approx(straight[step]["loss"], abs=FP32_ATOL)
        assert line["rho"] == straight[step]["rho"]
        assert line["dead_experts"] == straight[step]["dead_experts"]


def run_to(folder: Path, flags: Flags) -> Path:
    run_ranks(train_on_ranks, 2, flags | {"output_dir": folder})
    return folder


@pytest.mark.slow
def test_without_whole_experts_nothing_is_said_of_ranks(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": 2, "ep": 1}) | {"max_steps": 1}
    run_ranks(train_on_ranks, 2, flags)
    [line] = read_metrics(tmp_path / "run").values()
    assert "rho" in line
    assert not {"rank_rho", "rank_rho_bound"} & set(line)


def test_a_native_folder_says_nothing_of_how_it_was_trained() -> None:
    from recipe.hf.config import NATIVE, SpecialTokens, config_dict

    config = mixed_config(qk_norm="none")
    values = config_dict(config, model_type=NATIVE, dtype="float32", tokens=SpecialTokens(None, None, None))
    assert not {option.name for option in fields(Execution)} & set(values)
