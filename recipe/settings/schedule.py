"""The learning rate of every optimizer step, as a pure function of the step.

Steps are optimizer steps, counted from 1, whatever the number of ranks or of micro-batches: the peak is reached at
step `warmup_steps`, the final value at step `max_steps`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

DECAYS = ("linear", "cosine", "cosine_with_min_lr")
WARMED = (*DECAYS, "constant_with_warmup")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Shape and length of the schedule.

    `max_steps` is None until the data is counted, where the run is given in epochs; `warmup_ratio` is the share of
    the run that warms up, where that was given instead of `warmup_steps`.
    """

    kind: str = "linear"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    max_steps: int | None = None
    num_train_epochs: float = 3.0
    min_lr_ratio: float = 0.0


def learning_rate_at(step: int, *, schedule: ScheduleOptions, peak: float) -> float:
    """The learning rate that optimizer step `step` (1 is the first) uses. Past `max_steps` the final value holds."""
    assert schedule.max_steps is not None, "settle_schedule comes first: the run is given in epochs"
    assert step >= 1, f"optimizer steps count from 1, got {step}"
    warmup = schedule.warmup_steps if schedule.kind in WARMED else 0
    if step <= warmup:
        return peak * step / warmup
    if schedule.kind not in DECAYS:
        return peak
    done = min(1.0, (step - warmup) / max(1, schedule.max_steps - warmup))
    if schedule.kind == "linear":
        return peak * (1.0 - done)
    floor = schedule.min_lr_ratio
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done)))


def settle_schedule(
    options: ScheduleOptions, *, num_train_sequences: int | None = None, sequences_per_step: int | None = None
) -> ScheduleOptions:
    """Fill in the number of steps from the data where the run was given in epochs, and the steps of a warm-up share.

    Without the two counts, options that lack `max_steps` come back as they are. ValueError where the run would have
    no step or the warm-up does not fit into it.
    """
    max_steps = options.max_steps
    if max_steps is None:
        if num_train_sequences is None or sequences_per_step is None:
            return options
        max_steps = math.floor(options.num_train_epochs * num_train_sequences / sequences_per_step)
        if max_steps < 1:
            raise ValueError(
                f"{options.num_train_epochs} epochs of {num_train_sequences} sequences are fewer than the "
                f"{sequences_per_step} sequences of one optimizer step; give more data, smaller batches or --max_steps"
            )
    warmup_steps = math.ceil(options.warmup_ratio * max_steps) if options.warmup_ratio else options.warmup_steps
    settled = replace(options, max_steps=max_steps, warmup_steps=warmup_steps, warmup_ratio=0.0)
    faults = list(schedule_faults(settled))
    if faults:
        raise ValueError("; ".join(faults))
    return settled


def schedule_faults(options: ScheduleOptions) -> Iterator[str]:
    """What cannot hold: a warm-up that the shape does not have, or one longer than the run."""
    if options.kind == "constant" and (options.warmup_steps or options.warmup_ratio):
        yield (
            f"lr_scheduler_type constant has no warm-up, but warmup_steps="
            f"{options.warmup_steps or options.warmup_ratio}; use constant_with_warmup"
        )
    if options.max_steps is not None and options.warmup_steps > options.max_steps:
        yield f"warmup_steps={options.warmup_steps} is longer than the run of max_steps={options.max_steps}"
