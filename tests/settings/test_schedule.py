"""The learning rate is a function of the optimizer step alone: peak and end fall on the steps they were given for."""

import pytest

from recipe.settings.training import ScheduleOptions, learning_rate_at, settle_schedule


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
        ({"max_steps": 5, "warmup_steps": 6}, "warmup_steps=6 is longer than the run of max_steps=5"),
        ({"max_steps": 5, "warmup_steps": 2, "kind": "constant"}, "constant has no warm-up, but warmup_steps=2"),
    ],
)
def test_schedules_that_cannot_hold_are_refused(options: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        settle_schedule(ScheduleOptions(**options), num_train_sequences=5, sequences_per_step=16)  # type: ignore[arg-type]
