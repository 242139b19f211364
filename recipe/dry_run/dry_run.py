"""A run that sends nothing: what a rank of any number would send in a step, and keep in memory, and the plan of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from recipe.dry_run.even_routing import even_share
from recipe.dry_run.fake_world import fake_world
from recipe.dry_run.found import Compared, DryRun
from recipe.dry_run.model_trace import on_cpu, trace_micro_batch
from recipe.dry_run.zero_trace import trace_engine
from recipe.plan.job import Job
from recipe.plan.traffic import Sent, add_up, planned_traffic

LAYERS_RUN_AT_ONCE = 4  # a model of more is put together from fewer


def dry_run(
    job: Job,
    *,
    engine_config: Mapping[str, Any],
    rank: int = 0,
    all_layers: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> DryRun:
    """Run a step of the job as `rank`, on fake tensors and, for the engine's own part, on a narrow model.

    engine_config  what DeepSpeed gets in the run itself, with the job's zero block
    all_layers     run all of many layers, instead of a few of each kind for all

    Needs a process without a process group. ValueError for copies of experts, which go by the loads of earlier steps.
    """
    if job.wire.resident_experts:
        raise ValueError(
            f"resident_experts={job.wire.resident_experts} are copied by the loads of the step before, which a dry run "
            "has not; use resident_experts=0"
        )
    all_layers = all_layers or job.sizes.num_hidden_layers <= LAYERS_RUN_AT_ONCE
    with fake_world(job.layout, num_key_value_heads=job.sizes.num_key_value_heads, rank=rank) as mesh:
        trace = trace_micro_batch(job, mesh, all_layers=all_layers, say=say)
        say("the engine with a narrow model")
        engine = trace_engine(job, mesh, engine_config=engine_config)
    rows = [*(_in_a_step(row, job) for row in trace.rows), *engine]
    moment = trace.fullest
    return DryRun(add_up(rows), trace.phases[moment], moment, tuple(_notes(job, all_layers=all_layers)))


def compare(found: DryRun, job: Job, *, rank: int = 0) -> tuple[Compared, ...]:
    """Counted and planned rows side by side. A dense layer's products are counted with attention's, so planned too.

    Calls are those of tensors on a CPU, where the head takes fewer tokens at a time. Rows of an exchange are planned
    for the rank that was run: where they do not divide, it sends a few more or less than the mean.
    """
    planned = planned_traffic(replace(on_cpu(job), rho=even_share(job, rank=rank)))
    as_counted = (row._replace(purpose="attention") if row.purpose == "dense" else row for row in planned)
    ours, theirs = _by_key(found.rows), _by_key(add_up(as_counted))
    return tuple(Compared(*key, ours.get(key), theirs.get(key)) for key in sorted(ours.keys() | theirs.keys()))


def _by_key(rows: Iterable[Sent]) -> dict[tuple[str, str, str], Sent]:
    return {(row.axis, row.op, row.purpose): row for row in rows}


def _in_a_step(row: Sent, job: Job) -> Sent:
    """Of all micro-batches."""
    return row._replace(num_calls=job.accumulation * row.num_calls, sent_bytes=job.accumulation * row.sent_bytes)


def _notes(job: Job, *, all_layers: bool) -> Iterator[str]:
    if not all_layers:
        yield (
            f"of {job.sizes.num_hidden_layers} layers one and two of a kind were run; every further one adds what the "
            "second did"
        )
    if job.moe_strategy == "all_to_all" or not job.static_rows:
        yield "routing is taken to be perfectly even: as many rows for every expert and from every rank"
    if job.device != "cpu":
        yield "calls of the head are those on a CPU, which takes fewer tokens at a time"
    yield (
        "what DeepSpeed sends was seen on a narrow model of all layers and counted with the full sizes; its calls are "
        "those of the narrow one where its buckets are of a fixed size (stage 0, and stage 1 in bf16)"
    )
