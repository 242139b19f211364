"""Precision, ZeRO stage, optimizer and learning rate schedule, settled from the flags and the DeepSpeed JSON.

Steps are optimizer steps, counted from 1, whatever the number of ranks or of micro-batches: the peak is reached at
step `warmup_steps`, the final value at step `max_steps`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipe.settings.deepspeed_keys import look_up
from recipe.settings.flags import convert
from recipe.settings.sources import Found, Sources

DECAYS = ("linear", "cosine", "cosine_with_min_lr")
WARMED = (*DECAYS, "constant_with_warmup")
# DeepSpeed's scheduler types and the shapes of ours that equal them with a linear warm-up.
SCHEDULERS: Mapping[str, str] = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine_with_min_lr",
}
DEEPSPEED_COS_MIN_RATIO = 0.0001  # what WarmupCosineLR takes where the JSON names none


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW with decoupled weight decay. `max_grad_norm` 0 clips nothing."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Shape and length of the learning rate schedule.

    `max_steps` is None until the data is counted, where the run is given in epochs; `warmup_ratio` is the share of
    the run that warms up, where that was given instead of `warmup_steps`.
    """

    kind: str = "linear"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    max_steps: int | None = None
    num_train_epochs: float = 3.0
    min_lr_ratio: float = 0.0


def settle_precision(sources: Sources) -> str:
    """Settle "fp32" or "bf16"; float16 is refused."""
    bf16 = sources.take("bf16", paths=("bf16.enabled",))
    fp16 = look_up(sources.json, "fp16.enabled")
    if fp16 == "auto":
        sources.notes.append('"fp16.enabled": "auto" became false')
    elif fp16 not in (None, False):
        both = "bf16 and fp16 are both on; " if bf16 else ""
        sources.faults.append(
            f'{both}"fp16.enabled": {fp16!r} in {sources.file} cannot be used: float16 needs loss scaling, which the '
            "router and the losses here do not have; use bf16"
        )
    return "bf16" if bf16 else "fp32"


def settle_zero_stage(sources: Sources, *, precision: str, accumulation: int, dp_crosses_nodes: bool) -> int:
    """Settle the ZeRO stage: by default 2, or 1 where every micro-batch's reduction would cross nodes."""
    stage = look_up(sources.json, "zero_optimization.stage")
    if stage in (None, "auto"):
        stage = 1 if accumulation > 1 and dp_crosses_nodes else 2
        reason = "ZeRO-2 would reduce between nodes once per micro-batch" if stage == 1 else "the default"
        sources.notes.append(f'"zero_optimization.stage" became {stage} ({reason})')
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        sources.faults.append(f'"zero_optimization.stage": {stage!r} is not one of 0, 1, 2, 3')
        return 2
    sources.faults += zero_stage_faults(stage, precision=precision)
    return int(stage)


def zero_stage_faults(stage: int, *, precision: str) -> Iterator[str]:
    """Yield what a stage cannot be used with."""
    if stage == 0 and precision == "bf16":
        yield "bf16 cannot be used with ZeRO stage 0, which clips by a wrong gradient norm there; use stage 1, 2 or 3"


def settle_optimizer(sources: Sources) -> OptimizerOptions:
    """Settle AdamW's numbers."""
    rate = sources.take("learning_rate", paths=("optimizer.params.lr", "scheduler.params.warmup_max_lr"))
    return OptimizerOptions(
        learning_rate=rate,
        betas=_betas(sources),
        eps=sources.take("adam_epsilon", paths=("optimizer.params.eps",)),
        weight_decay=sources.take("weight_decay", paths=("optimizer.params.weight_decay",)),
        max_grad_norm=sources.take("max_grad_norm", paths=("gradient_clipping",)),
    )


def settle_schedule_options(sources: Sources, *, learning_rate: float) -> ScheduleOptions:
    """Settle the schedule, with `max_steps` None where the run is given in epochs."""
    arguments = sources.arguments
    warmup = sources.take("warmup_steps", paths=("scheduler.params.warmup_num_steps",))
    max_steps = sources.take("max_steps", paths=("scheduler.params.total_num_steps",))
    kind = _kind(sources)
    options = ScheduleOptions(
        kind=kind,
        warmup_steps=int(warmup) if warmup >= 1 else 0,
        warmup_ratio=warmup if warmup < 1 else 0.0,
        max_steps=max_steps if max_steps > 0 else None,
        num_train_epochs=arguments.num_train_epochs,
        min_lr_ratio=_min_lr_ratio(sources, kind=kind, learning_rate=learning_rate),
    )
    if warmup > 1 and warmup != int(warmup):
        sources.faults.append(f"warmup_steps={warmup} is neither a whole number of steps nor a share below 1")
    faults = list(schedule_faults(options))
    sources.faults += faults
    return options if faults else settle_schedule(options)


def learning_rate_at(step: int, *, schedule: ScheduleOptions, peak: float) -> float:
    """Return the learning rate of optimizer step `step`, from 1 on; past `max_steps` it keeps the final value."""
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
    """Yield what cannot hold: a warm-up that the shape does not have, or one longer than the run."""
    if options.kind == "constant" and (options.warmup_steps or options.warmup_ratio):
        yield (
            f"lr_scheduler_type constant has no warm-up, but warmup_steps="
            f"{options.warmup_steps or options.warmup_ratio}; use constant_with_warmup"
        )
    if options.max_steps is not None and options.warmup_steps > options.max_steps:
        yield f"warmup_steps={options.warmup_steps} is longer than the run of max_steps={options.max_steps}"


def _betas(sources: Sources) -> tuple[float, float]:
    ours = (sources.arguments.adam_beta1, sources.arguments.adam_beta2)
    theirs = look_up(sources.json, "optimizer.params.betas")
    if theirs is None:
        return ours
    if theirs == "auto":
        sources.notes.append(f'"optimizer.params.betas": "auto" became {list(ours)} (--adam_beta1, --adam_beta2)')
        return ours
    try:
        first, second = (convert(beta, kind=float) for beta in theirs)
    except (TypeError, ValueError):
        sources.faults.append(f'"optimizer.params.betas": {theirs!r} in {sources.file} is not a list of two numbers')
        return ours
    for index, value in enumerate((first, second)):
        there = Found(value, f'"optimizer.params.betas"[{index}] in {sources.file}')
        if not 0 <= value <= 1:
            sources.faults.append(f"{there.origin}: {value} must lie between 0 and 1")
        sources.agree([*sources.given(f"adam_beta{index + 1}"), there])
    return first, second


def _kind(sources: Sources) -> str:
    """Settle the schedule's shape; a "scheduler" block and --lr_scheduler_type must name the same one."""
    ours, theirs = sources.arguments.lr_scheduler_type, look_up(sources.json, "scheduler.type")
    if theirs is None:
        return ours
    if theirs not in SCHEDULERS:
        sources.faults.append(
            f'"scheduler.type": {theirs!r} in {sources.file} is not available; use one of {", ".join(SCHEDULERS)}, '
            "or leave the block out and use --lr_scheduler_type"
        )
        return ours
    kind = SCHEDULERS[theirs]
    sources.agree([*sources.given("lr_scheduler_type"), Found(kind, f'"scheduler.type": "{theirs}" in {sources.file}')])
    sources.notes.append(f'"scheduler.type": "{theirs}" became lr_scheduler_type {kind}, with a linear warm-up')
    return kind


def _min_lr_ratio(sources: Sources, *, kind: str, learning_rate: float) -> float:
    """Settle the final learning rate as a share of the peak, by --lr_scheduler_kwargs or by cos_min_ratio."""
    arguments = sources.arguments
    ratios = []
    for key, value in arguments.lr_scheduler_kwargs.items():
        origin = f"--lr_scheduler_kwargs {key} {arguments.place('lr_scheduler_kwargs')}"
        if key not in ("min_lr_rate", "min_lr"):
            sources.faults.append(f"{origin} is unknown; use min_lr_rate or min_lr")
        else:
            whole = learning_rate if key == "min_lr" else 1.0
            ratios.append(Found(_share(sources, origin=origin, value=value, whole=whole), origin))
    if ratios and kind != "cosine_with_min_lr":
        sources.faults.append(f"{ratios[0].origin} needs --lr_scheduler_type cosine_with_min_lr, not {kind}")
    theirs = look_up(sources.json, "scheduler.params.cos_min_ratio")
    if theirs not in (None, "auto"):
        origin = f'"scheduler.params.cos_min_ratio" in {sources.file}'
        ratios.append(Found(_share(sources, origin=origin, value=theirs), origin))
    elif not ratios and look_up(sources.json, "scheduler.type") == "WarmupCosineLR":
        sources.notes.append(f'"scheduler.params.cos_min_ratio" became DeepSpeed\'s default {DEEPSPEED_COS_MIN_RATIO}')
        return DEEPSPEED_COS_MIN_RATIO
    if not ratios and kind == "cosine_with_min_lr" and not arguments.lr_scheduler_kwargs:
        sources.faults.append(
            "--lr_scheduler_type cosine_with_min_lr needs the final rate: --lr_scheduler_kwargs min_lr_rate=0.1"
        )
    sources.agree(ratios)
    return ratios[0].value if ratios else 0.0


def _share(sources: Sources, *, origin: str, value: Any, whole: float = 1.0) -> float:
    """Read `value` as a share of `whole`."""
    number: float = sources.convert(value, kind=float, origin=origin) or 0.0
    if not 0 <= number <= whole:
        sources.faults.append(f"{origin}: {number} must lie between 0 and {whole:g}")
        return 0.0
    return number / whole if whole else 0.0
