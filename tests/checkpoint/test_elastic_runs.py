"""Whole runs that go on in another layout, by the entry script's own steps: curves, log lines and what is said."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling.auxiliary import TokenSums
from recipe.train.metrics import StepMeter, combine_ranks
from recipe.train.resume import merge_rank_states
from tests.ranks import run_ranks
from tests.training import Flags, read_metrics, train_on_ranks, write_ds_config, write_inputs

EXACT = ("step", "lr", "tokens", "skipped_steps", "rho", "dead_experts")
CLOSE = ("loss", "grad_norm", "aux_loss", "z_loss", "router_entropy")


def layout_flags(folder: Path, *, tp: int, stage: int, accumulation: int = 1, batch: int = 2, **parallel: Any) -> Flags:
    ds_config = {"zero_optimization": {"stage": stage}, "parallel": {"tp": tp, **parallel}}
    sizes = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": batch}
    return write_ds_config(folder, **ds_config) | sizes


def check_curves(run: Path, straight: Path) -> None:
    want, got = read_metrics(straight), read_metrics(run)
    assert got.keys() == want.keys()
    for step, line in want.items():
        for key in EXACT:
            assert got[step][key] == line[key], (step, key)
        for key in CLOSE:
            assert got[step][key] == pytest.approx(line[key], abs=1e-5), (step, key)
    evaluated = [read_metrics(folder, key="eval_loss") for folder in (run, straight)]
    assert {step: line["eval_loss"] for step, line in evaluated[0].items()} == pytest.approx(
        {step: line["eval_loss"] for step, line in evaluated[1].items()}, abs=1e-5
    )


@pytest.mark.slow
@pytest.mark.requirement("R-CKPT-08")
def test_a_run_goes_on_twice_in_other_layouts(tmp_path: Path) -> None:
    """Saved in the middle of a log line both times; the routers' jitter goes on with the stream of tokens."""
    flags = write_inputs(tmp_path) | {"max_steps": 9, "save_steps": 3, "logging_steps": 2, "hf_save": "never"}
    flags |= {"router_jitter_noise": 0.1, "balance_bias_update_rate": 0.01, "learning_rate": 1e-3}
    first = flags | layout_flags(tmp_path, tp=2, stage=2)
    straight, run = {"output_dir": tmp_path / "straight"}, {"output_dir": tmp_path / "run"}
    run_ranks(train_on_ranks, 4, first | straight | {"save_steps": 0})
    run_ranks(train_on_ranks, 4, first | run)
    going_on = flags | run | {"resume_from_checkpoint": "auto"}
    checkpoints = tmp_path / "run" / "checkpoints"
    for lost in (6, 9):
        shutil.rmtree(checkpoints / f"step-{lost}")
    _, said = run_ranks(train_on_ranks, 4, going_on | layout_flags(tmp_path, tp=4, stage=3, accumulation=2))[0]
    assert any("resuming dp=2 tp=2 ep=2 ZeRO-2 fp32 as dp=1 tp=4 ep=4 ZeRO-3 fp32: weights" in line for line in said)
    shutil.rmtree(checkpoints / "step-9")
    _, said = run_ranks(train_on_ranks, 1, going_on | layout_flags(tmp_path, tp=1, stage=0, accumulation=4, batch=1))[0]
    assert any("resuming dp=1 tp=4 ep=4 ZeRO-3 fp32 as dp=1 tp=1 ep=1 ZeRO-0 fp32" in line for line in said)
    check_curves(tmp_path / "run", tmp_path / "straight")


def test_another_number_of_sequences_per_step_is_said_and_the_position_goes_on(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"max_steps": 2, "hf_save": "never", "router_jitter_noise": 0.1}
    run_ranks(train_on_ranks, 1, flags)
    flags |= {"resume_from_checkpoint": "auto", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}
    _, by_deepspeed = run_ranks(train_on_ranks, 1, flags | {"max_steps": 3})[0]
    without_zero = write_ds_config(tmp_path, zero_optimization={"stage": 0})
    _, cut_anew = run_ranks(train_on_ranks, 1, flags | {"max_steps": 4} | without_zero)[0]
    warning = "the run had 2 sequences per step and now has 6; it goes on behind the 4 sequences it has read"
    assert [any(warning in line for line in said) for said in (by_deepspeed, cut_anew)] == [True, False]
    line = "resuming dp=1 tp=1 ep=1 ZeRO-2 fp32 as dp=1 tp=1 ep=1 ZeRO-0 fp32: weights and optimizer state are cut anew"
    assert [any(line in each for each in said) for said in (by_deepspeed, cut_anew)] == [False, True]
    tokens = [line["tokens"] for line in read_metrics(tmp_path / "run").values()]
    assert tokens == [2 * 16, 4 * 16, 10 * 16, 16 * 16]


@pytest.mark.slow
def test_a_run_goes_on_in_another_precision_with_its_experts_placed_anew(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"max_steps": 3, "save_steps": 2, "hf_save": "never"}
    run_ranks(train_on_ranks, 1, flags | {"gradient_accumulation_steps": 2})
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-3")
    changes = {"resume_from_checkpoint": "auto", "bf16": True, "place_experts": True}
    _, said = run_ranks(train_on_ranks, 4, flags | changes | layout_flags(tmp_path, tp=2, stage=3, ep=2))[0]
    assert any("the run had precision=fp32 and now has bf16" in line for line in said)
    assert any("experts placed by the routing of steps 1 to 2" in line for line in said)
    assert read_metrics(tmp_path / "run").keys() == {1, 2, 3}


def sums_of(counts: list[float], *, slowest: list[float] = [], bound: list[float] = []) -> TokenSums:  # noqa: B006
    """Of a model with one MoE layer."""
    one, none = torch.ones(1), torch.zeros(0)
    return TokenSums(
        torch.tensor(2.0), one, one, one, torch.tensor([counts]), none, torch.tensor(slowest), torch.tensor(bound)
    )


def meter_of(*added: TokenSums) -> StepMeter:
    meter = StepMeter()
    for sums in added:
        meter.add(sums, num_targets=2, num_tokens=3, squared_lengths=5)
    return meter


def test_the_first_group_takes_over_the_sums_of_all_and_every_group_the_loads() -> None:
    kept = [meter_of(sums_of([1, 2], slowest=[4])), meter_of(sums_of([5, 0], slowest=[8]))]
    states = [
        {"meter": meter.state(), "elapsed_s": 7.0 + number, "loads": [[1.0 + number, 2.0]]}
        for number, meter in enumerate(kept)
    ]
    want = combine_ranks([meter.take(peak_memory_bytes=1) for meter in kept], tp=1)
    first, second = (merge_rank_states(states, dp_rank=dp_rank) for dp_rank in (0, 1))
    meters = [StepMeter(), StepMeter()]
    for meter, state in zip(meters, (first, second), strict=True):
        meter.restore(state["meter"], device=torch.device("cpu"))
    assert meters[0].take(peak_memory_bytes=1) == want
    with pytest.raises(ValueError, match="nothing was added"):
        meters[1].take(peak_memory_bytes=1)
    assert [(state["elapsed_s"], state["loads"]) for state in (first, second)] == [(7.0, [[3.0, 4.0]])] * 2
    fresh = {"meter": StepMeter().state(), "elapsed_s": 1.0, "loads": None}
    assert merge_rank_states([fresh] * 2, dp_rank=0) == fresh, "of groups that have not begun a line"


@pytest.mark.parametrize(
    ("before", "after", "slowest", "bound"),
    [
        (([], []), ([6], []), [3 + 6], []),  # slices of every expert before: each rank had the mean load
        (([4], []), ([6], [5]), [4 + 6], [4 + 5]),  # without copies nothing else was to be had
        (([], []), ([6], [5]), [3 + 6], [3 + 5]),
        (([4], [3]), ([6], []), [4 + 6], []),
        (([4], [3]), ([], []), [], []),
    ],
)
def test_loads_of_the_ranks_go_on_where_whole_experts_or_copies_begin_or_end(
    before: Any, after: Any, slowest: list[float], bound: list[float]
) -> None:
    sums = [sums_of([1, 2], slowest=loads[0], bound=loads[1]) for loads in (before, after)]
    totals = meter_of(*sums).take(peak_memory_bytes=1)
    assert (totals.slowest, totals.slowest_bound) == (tuple(slowest), tuple(bound))
