"""The plan of what a dry run counts in memory: one micro-batch of a rank without ZeRO, at the same moment."""

from collections.abc import Sequence
from dataclasses import replace

from modeling.layout import ModelSizes
from recipe.dry_run.found import ComparedMemory, DryRun
from recipe.dry_run.model_trace import on_cpu
from recipe.dry_run.phases import BLOCK_KINDS, HEAD, block_phase
from recipe.plan.job import Job
from recipe.plan.memory import Moment, moments

KINDS = ("weights", "gradients", "activations", "gathered", "logits")


def compare_memory(found: DryRun, job: Job) -> tuple[ComparedMemory, ...]:
    """Counted and planned bytes by kind; planned are those of the fullest moment in the part that was counted."""
    alike = replace(on_cpu(job), layout=replace(job.layout, dp=1), zero={"stage": 0}, accumulation=1)
    planned = max(_in_part(found.moment, moments(alike), sizes=job.sizes), key=_of_a_micro_batch)
    sums = _by_kind(planned)
    return tuple(ComparedMemory(kind, found.memory_bytes.get(kind, 0), round(sums[kind])) for kind in KINDS)


def _in_part(part: str, all_moments: Sequence[Moment], *, sizes: ModelSizes) -> list[Moment]:
    """Moments of the part of a micro-batch that phases.py calls so; of all parts where none is named so."""
    of_micro_batch = [m for m in all_moments if m.name == "loss" or m.name.startswith("backward of layer ")]
    starts = ["loss"] if part == HEAD else []
    for kind, is_dense in BLOCK_KINDS.items():
        layers = [i + 1 for i in range(sizes.num_hidden_layers) if (i in sizes.dense_layers) is is_dense]
        if layers:
            ends = {"first": layers[0], "last": layers[-1]}
            starts += [f"backward of layer {n}," for end, n in ends.items() if part == block_phase(end, kind)]
    return [m for m in of_micro_batch if m.name.startswith(tuple(starts))] or of_micro_batch


def _by_kind(moment: Moment) -> dict[str, float]:
    sums = dict.fromkeys(KINDS, 0.0)
    for row in moment.rows:
        if row.kind in sums:
            sums[row.kind] += row.num_bytes
    return sums


def _of_a_micro_batch(moment: Moment) -> float:
    return sum(_by_kind(moment).values())
