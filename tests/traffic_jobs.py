"""Jobs of small models for the tests of what is sent: planned, in a dry run, and by real ranks."""

from dataclasses import fields, replace
from typing import Any

from modeling.execution import Execution
from modeling.layout import ParallelLayout
from recipe.plan.job import Job
from tests.engine_runs import Case, ds_config
from tests.referee import TINY, Training

EXECUTION = {field.name for field in fields(Execution)}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
MODEL: dict[str, Any] = {**TINY, **HEADS, "num_experts": 8, "moe_intermediate_size": 64, "intermediate_size": 48}


def changed(job: Job, **changes: Any) -> Job:
    """The same job with other values, those of its execution by their own names."""
    execution = {name: changes.pop(name) for name in EXECUTION & changes.keys()}
    return replace(job, execution=replace(job.execution, **execution), **changes)


def small_job(
    dp: int = 1,
    tp: int = 1,
    ep: int = 1,
    *,
    model: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    **changes: Any,
) -> Job:
    """Two sequences of 16 positions, float32, ZeRO-1, on a CPU; with changes."""
    job = Job(
        model={**MODEL, **(model or {})},
        layout=ParallelLayout(dp=dp, tp=tp, ep=ep),
        num_sequences=2,
        block_size=16,
        accumulation=1,
        execution=Execution(experts_backend="loop"),
        zero={"stage": 1, **(zero or {})},
        precision="fp32",
        recompute=False,
        device="cpu",
    )
    return changed(job, **changes)


def engine_config(job: Job) -> dict[str, Any]:
    """What DeepSpeed gets for it."""
    case = Case(
        dp=job.layout.dp,
        stage=job.zero["stage"],
        accumulation=job.accumulation,
        bf16=job.precision == "bf16",
    )
    training = Training(max_grad_norm=1.0 if job.clips_gradients else 0.0, zero=dict(job.zero))
    return ds_config(case, training) | {"train_micro_batch_size_per_gpu": job.num_sequences}
