"""Seconds that a rank spends on gradients and weights besides computing them: sums, casts, norm, AdamW."""

from collections.abc import Mapping
from typing import NamedTuple

from recipe.plan.job import Job
from recipe.plan.parameters import rank_parameters
from recipe.plan.rates import Rates


class Moves(NamedTuple):
    """How often a number is written, in float32: to a buffer that is there, or scaled in it, which are the refills; to
    a fresh buffer for all parameters, the copies; and to a fresh tensor of each parameter, the casts."""

    refills: int
    copies: int
    casts: int = 0


class Path(NamedTuple):
    """What happens to a gradient per micro-batch and per step, and to what a rank updates."""

    micro_batch: Moves
    step: Moves
    update: Moves


NOTHING = Moves(0, 0)
# By ZeRO stage, as DeepSpeed 0.19.8 does it, with one data-parallel rank, too; counted operator by operator.
FP32: Mapping[int, Path] = {
    0: Path(NOTHING, step=Moves(1, 1), update=Moves(1, 0)),
    1: Path(NOTHING, step=Moves(4, 0), update=Moves(2, 1)),
    2: Path(Moves(4, 0), step=NOTHING, update=Moves(2, 1)),
    3: Path(Moves(4, 1), step=NOTHING, update=Moves(2, 1)),
}
# Each micro-batch's gradients are cast, and stages 1 and 2 add also the first one's to sums.
BF16: Mapping[int, Path] = {
    0: FP32[0],
    1: Path(Moves(0, 0, 1), step=Moves(1, 1), update=Moves(3, 0)),
    2: Path(Moves(4, 1, 1), step=NOTHING, update=Moves(3, 0)),
    3: Path(Moves(3, 1, 1), step=NOTHING, update=Moves(2, 1)),
}


def update_time(job: Job, exact: Rates) -> float:
    """Of one step on one rank, all its micro-batches, at float32's rates; what travels is not in it."""
    held = rank_parameters(job.sizes, job.layout)
    parameters = held.total(job.sizes)
    stage, times, is_bf16 = job.zero_stage, job.accumulation, job.precision == "bf16"
    owned = parameters / job.layout.dp if stage else parameters
    path = (BF16 if is_bf16 else FP32)[stage]
    sums = times if is_bf16 and stage in (1, 2) else times - 1
    gradients_s = times * _moves_s(exact, path.micro_batch, parameters) + _moves_s(exact, path.step, parameters)
    casts = times * path.micro_batch.casts * parameters / held.largest
    gradients_s += exact.pass_s("copy", held.largest, count=casts) + exact.pass_s("sum_up", parameters, count=sums)
    update_s = _moves_s(exact, path.update, owned) + exact.pass_s("squares", owned) + exact.pass_s("adamw", owned)
    return gradients_s + update_s


def _moves_s(exact: Rates, moves: Moves, numbers: float) -> float:
    return exact.pass_s("refill", numbers, count=moves.refills) + exact.pass_s("copy", numbers, count=moves.copies)
