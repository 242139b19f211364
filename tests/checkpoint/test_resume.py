"""A run that is stopped and resumed goes on bitwise like one that never stopped."""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine_runs import Case, make_micro_batches, slow, start_engine
from tests.ranks import RankError, run_ranks
from tests.referee import full_state, tiny_config
from tests.training import check_resume, read_metrics, train_on_ranks, untimed, write_inputs


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "parallel": {"tp": 2}}


FOUR = {"gradient_accumulation_steps": 2, "router_z_loss_coef": 0.001}
TIED = {"config_overrides": "tie_word_embeddings=true"}


@pytest.mark.parametrize(
    ("world_size", "ds_config", "changes"),
    [
        (1, {}, {}),
        slow(4, zero(1), {**FOUR, "bf16": True}),
        slow(4, zero(2), FOUR),
        slow(4, zero(3), {**FOUR, "bf16": True}),
        slow(2, zero(2), TIED),
        slow(2, zero(3), TIED),
    ],
)
@pytest.mark.requirement("R-CKPT-13")
def test_ranks_resume_bitwise(
    tmp_path: Path, world_size: int, ds_config: dict[str, Any], changes: dict[str, Any]
) -> None:
    # Lines are logged every two steps, so the checkpoint of step 3 lies in the middle of one.
    check_resume(tmp_path, world_size=world_size, ds_config=ds_config, logging_steps=2, **changes)


@pytest.mark.slow
@pytest.mark.requirement("R-DATA-02")
def test_a_second_resume_goes_on_from_the_first(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"save_steps": 2}
    straight, stopped = {"output_dir": tmp_path / "straight"}, {"output_dir": tmp_path / "stopped"}
    run_ranks(train_on_ranks, 2, flags | straight)
    run_ranks(train_on_ranks, 2, flags | stopped)
    for lost in ([4, 6], [6]):
        for step in lost:
            shutil.rmtree(tmp_path / "stopped" / "checkpoints" / f"step-{step}")
        run_ranks(train_on_ranks, 2, flags | stopped | {"resume_from_checkpoint": "auto"})
    want, got = read_metrics(tmp_path / "straight"), read_metrics(tmp_path / "stopped")
    assert {step: untimed(line) for step, line in got.items()} == {step: untimed(line) for step, line in want.items()}


def test_another_set_up_is_refused_with_everything_that_differs(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"save_steps": 3}
    run_ranks(train_on_ranks, 1, flags)
    changed = {"block_size": 8, "seed": 7, "config_overrides": "num_experts_per_tok=1,rms_norm_eps=1e-5"}
    with pytest.raises(RankError, match="saved by another set-up") as caught:
        run_ranks(train_on_ranks, 1, flags | changed | {"resume_from_checkpoint": "auto"})
    for line in (
        "block_size: 16 then, 8 now",
        "seed: 42 then, 7 now",
        "model.num_experts_per_tok: 2 then, 1 now",
        "model.rms_norm_eps: 1e-06 then, 1e-05 now",
    ):
        assert f"  - {line}" in str(caught.value)


@pytest.mark.slow
def test_another_tokenizer_on_the_same_text_is_refused(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path)
    run_ranks(train_on_ranks, 1, flags)
    with pytest.raises(RankError, match=r"  - data: \['tokens-.*'\] then, \['tokens-.*'\] now"):
        run_ranks(train_on_ranks, 1, flags | {"train_vocab_size": 304, "resume_from_checkpoint": "auto"})


def resume_with_other_settings(rank: int, world_size: int, folder: Path, stage: int) -> tuple[Any, float]:
    """Save, build a new engine with other settings, load; what the optimizer then works with."""
    from recipe.checkpoint.native import load_native, save_native

    config, case = tiny_config(), Case(dp=2, stage=stage)
    engine = start_engine(config, full_state(config), case)
    batches = make_micro_batches(config, case, step=0, dp_rank=engine.mesh.dp_rank)
    engine.accumulate(batches, counts=engine.count(batches))
    engine.update(learning_rate=1e-3)
    save_native(engine, folder, rank_state={})
    other = start_engine(config, full_state(config), case, max_grad_norm=0.01)
    for group in other.ds.optimizer.param_groups:
        group.update(betas=(0.5, 0.6), weight_decay=0.7)
    load_native(other, folder)
    groups = [(g["betas"], g["weight_decay"]) for g in other.ds.optimizer.param_groups]
    other.accumulate(batches, counts=other.count(batches))
    return groups, other.update(learning_rate=1.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_settings_of_the_resumed_run_hold_not_those_of_the_saved_one(tmp_path: Path, stage: int) -> None:
    for groups, norm in run_ranks(resume_with_other_settings, 2, tmp_path, stage):
        assert groups == [((0.5, 0.6), 0.7)] * 2
        assert norm > 0.01, "the norm before clipping"


@pytest.mark.slow
@pytest.mark.requirement("R-CKPT-03")
def test_the_learning_rate_goes_on_after_a_resume(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"save_steps": 4, "max_steps": 9, "warmup_steps": 3}
    flags |= {"lr_scheduler_type": "cosine"}
    checkpoints = tmp_path / "run" / "checkpoints"
    run_ranks(train_on_ranks, 1, flags)
    want = {step: line["lr"] for step, line in read_metrics(tmp_path / "run").items()}
    for step in (8, 9):
        shutil.rmtree(checkpoints / f"step-{step}")
    flags |= {"resume_from_checkpoint": "auto"}
    run_ranks(train_on_ranks, 1, flags)
    got = {step: line["lr"] for step, line in read_metrics(tmp_path / "run").items()}
    assert got == want
    assert len(set(want.values())) == 9
    shutil.rmtree(checkpoints / "step-9")
    _, said = run_ranks(train_on_ranks, 1, flags | {"max_steps": 10})[0]
    assert any("had max_steps=9 and now has 10" in line for line in said)


@pytest.mark.requirement("R-CKPT-09")
def test_random_states_are_restored_per_rank(tmp_path: Path) -> None:
    draws = run_ranks(draw_save_draw_restore_draw, 2, tmp_path)
    for before, after in draws:
        assert before == after
    assert draws[0][0] != draws[1][0]


def draw_save_draw_restore_draw(rank: int, world_size: int, folder: Path) -> tuple[list[float], list[float]]:
    from recipe.checkpoint.native import load_native, save_native

    def draw() -> list[float]:
        return [random.random(), float(np.random.random()), torch.rand(1).item()]

    config = tiny_config()
    engine = start_engine(config, full_state(config), Case(dp=2, stage=2))
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    save_native(engine, folder, rank_state={"mark": rank})
    before = draw()
    draw()
    assert load_native(engine, folder) == {"mark": rank}
    return before, draw()
