"""Optimizer and schedule as they are asked for, and a learning rate that is a function of the optimizer step alone."""

from typing import Any

import pytest

from recipe.settings.training import ScheduleOptions, learning_rate_at, settle_schedule
from tests.resolving import faults_of, resolve

SHARE = "--lr_scheduler_kwargs=min_lr_rate=0.1"


def _rates(peak: float = 1e-3, **options: object) -> list[float]:
    schedule = ScheduleOptions(**{"max_steps": 100, "warmup_steps": 10, **options})  # type: ignore[arg-type]
    return [learning_rate_at(step, schedule=schedule, peak=peak) for step in range(1, 121)]


@pytest.mark.parametrize(
    ("kind", "half_way", "last"),
    [
        ("linear", 0.5e-3, 0.0),
        ("cosine", 0.5e-3, 0.0),
        ("cosine_with_min_lr", 0.55e-3, 0.1e-3),
        ("constant_with_warmup", 1e-3, 1e-3),
    ],
)
def test_warm_up_is_linear_and_the_end_is_reached_at_max_steps(kind: str, half_way: float, last: float) -> None:
    rates = _rates(kind=kind, min_lr_ratio=0.1 if kind == "cosine_with_min_lr" else 0.0)
    assert rates[0] == pytest.approx(1e-4)
    assert rates[9] == 1e-3
    assert rates[54] == pytest.approx(half_way)
    assert rates[99] == pytest.approx(last, abs=1e-12)
    assert rates[119] == rates[99]


def test_constant_never_changes() -> None:
    assert set(_rates(kind="constant", warmup_steps=0)) == {1e-3}


def test_steps_between_warm_up_and_end_equal_pytorch_s_own_schedule() -> None:
    import torch
    from transformers import get_cosine_schedule_with_warmup

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    theirs = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=100)
    ours = _rates(kind="cosine")
    for step in range(1, 100):
        optimizer.step()
        theirs.step()
        assert ours[step - 1] == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)


def test_epochs_become_steps_once_the_data_is_counted() -> None:
    options = ScheduleOptions(kind="linear", warmup_ratio=0.1, num_train_epochs=2.0)
    assert settle_schedule(options) is options
    settled = settle_schedule(options, num_train_sequences=1000, sequences_per_step=16)
    assert (settled.max_steps, settled.warmup_steps) == (125, 13)
    assert settle_schedule(settled, num_train_sequences=5, sequences_per_step=16) == settled


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (
            {"num_train_epochs": 1.0},
            r"1\.0 epochs of 5 sequences are fewer than the 16 sequences of one optimizer step",
        ),
        ({"max_steps": 5, "warmup_steps": 2, "kind": "constant"}, "constant has no warm-up, but warmup_steps=2"),
    ],
)
def test_schedules_that_cannot_hold_are_refused(options: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        settle_schedule(ScheduleOptions(**options), num_train_sequences=5, sequences_per_step=16)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "flags", "fault"),
    [
        (
            {"zero_optimization": {"stage": 0}},
            ["--bf16"],
            "bf16 cannot be used with ZeRO stage 0, which clips by a wrong",
        ),
        ({"zero_optimization": {"stage": 4}}, [], '"zero_optimization.stage": 4 is not one of 0, 1, 2, 3'),
        (
            {"optimizer": {"type": "Lion"}},
            [],
            "\"optimizer.type\": 'Lion' cannot be used: it must be 'AdamW', since the optimizer is AdamW",
        ),
        ({"optimizer": {"params": {"betas": 1}}}, [], '"optimizer.params.betas": 1 in .* is not a list of two numbers'),
        ({"optimizer": {"params": {"betas": [0.9, 2]}}}, [], r'betas"\[1\] in .*: 2.0 must lie between 0 and 1'),
        ({"optimizer": {"params": {"lr": "fast"}}}, [], "\"optimizer.params.lr\" in .*: 'fast' is not a number"),
        ({"scheduler": {"type": "OneCycle"}}, [], "\"scheduler.type\": 'OneCycle' in .* is not available; use one of"),
        (
            {"scheduler": {"params": {"warmup_type": "log"}}},
            [],
            "\"scheduler.params.warmup_type\": 'log' cannot be used: it must be 'linear', since the warm-up is linear",
        ),
        ({}, ["--warmup_steps=3.5"], r"warmup_steps=3\.5 is neither a whole number of steps nor a share below 1"),
        ({}, ["--warmup_steps=9", "--max_steps=8"], "warmup_steps=9 is longer than the run of max_steps=8"),
        ({}, ["--lr_scheduler_type=cosine_with_min_lr"], "cosine_with_min_lr needs the final rate"),
        (
            {},
            ["--lr_scheduler_kwargs=num_cycles=2"],
            "num_cycles on the command line is unknown; use min_lr_rate or min_lr",
        ),
        ({}, ["--lr_scheduler_kwargs=min_lr_rate=0.1"], "needs --lr_scheduler_type cosine_with_min_lr, not linear"),
        ({}, ["--lr_scheduler_kwargs=min_lr=1"], r"min_lr on the command line: 1\.0 must lie between 0 and 5e-05"),
        ({}, ["--lr_scheduler_kwargs=min_lr=low"], "min_lr on the command line: 'low' is not a number"),
    ],
)
def test_training_settings_that_cannot_hold_are_refused(config: dict[str, Any], flags: list[str], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        resolve(config, *flags)


def test_the_final_learning_rate_may_be_a_share_or_absolute() -> None:
    kind = "--lr_scheduler_type=cosine_with_min_lr"
    assert resolve(None, kind, SHARE).schedule.min_lr_ratio == 0.1
    got = resolve(None, kind, "--lr_scheduler_kwargs=min_lr=1e-5", "--learning_rate=1e-4")
    assert got.schedule.min_lr_ratio == pytest.approx(0.1)
    got = resolve({"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.2}}})
    assert (got.schedule.kind, got.schedule.min_lr_ratio) == ("cosine_with_min_lr", 0.2)
    assert resolve({"scheduler": {"type": "WarmupCosineLR"}}).schedule.min_lr_ratio == 0.0001
    text = faults_of({"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.2}}}, kind, SHARE)
    assert 'min_lr_rate on the command line is 0.1, but "scheduler.params.cos_min_ratio" in' in text
