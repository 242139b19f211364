"""Finds the layout that trains most tokens per second, and keeps for every other one the number that speaks against it.

Of each layout and strategy the best variant is found: every ZeRO stage, recomputation on and off, gathered tokens kept
or gathered again, transfers beside products or not, and in each of them the most sequences at once that fit, since more
rows make no product slower and fewer micro-batches send no more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from recipe.plan.job import Job
from recipe.plan.memory import MemoryPlan, predict_memory
from recipe.plan.space import (
    Arrangement,
    PlanRequest,
    Rejected,
    arrangements,
    make_job,
    micro_batches,
    zero_stages,
)
from recipe.plan.step_time import TimePlan, predict_time
from recipe.shared.units import GIB, size

# What no tensor is in, of each rank. CPU: Python with torch, DeepSpeed and transformers loaded is 0.43 GiB.
RESERVE_BYTES = {"cuda": 2 * GIB, "cpu": GIB // 2}


class Plan(NamedTuple):
    """A layout with everything settled, and what it is predicted to need."""

    arrangement: Arrangement
    job: Job
    memory: MemoryPlan
    time: TimePlan

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together."""
        return self.job.tokens_per_step / self.time.step_s


class Found(NamedTuple):
    """`plans`, one for each layout and strategy that fits, the fastest first. A rank has `room_bytes` for tensors."""

    request: PlanRequest
    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    room_bytes: int

    def idle(self, plan: Plan) -> int:
        """Devices that have nothing to do."""
        return self.request.gpus - plan.job.layout.world_size


class Sized(NamedTuple):
    job: Job
    memory: MemoryPlan


def search_plans(request: PlanRequest) -> Found:
    """All plans of a request. Where nothing fits, `plans` is empty and `rejected` says why for each layout."""
    room_bytes = room_of(request)
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    for arrangement in arrangements(request):
        if isinstance(arrangement, Rejected):
            rejected.append(arrangement)
            continue
        fitting = [
            plan_of(request, arrangement, sized=sized)
            for sized in _fitting(request, arrangement, room_bytes=room_bytes)
        ]
        if fitting:
            plans.append(min(fitting, key=lambda plan: plan.time.step_s))
        else:
            rejected.append(_too_large(request, arrangement, room_bytes=room_bytes))
    plans.sort(key=lambda plan: plan.time.step_s)  # all of them train the same tokens in a step
    return Found(request, tuple(plans), tuple(rejected), room_bytes)


def room_of(request: PlanRequest) -> int:
    """Bytes for a rank's tensors: of its device, or of its part of a node's memory where the ranks share that."""
    hardware = request.hardware
    own_bytes = hardware.memory_bytes
    if hardware.device == "cpu":
        own_bytes = own_bytes * hardware.ranks_per_node // max(request.ranks_per_node, hardware.ranks_per_node)
    return own_bytes - RESERVE_BYTES[hardware.device]


def plan_of(request: PlanRequest, arrangement: Arrangement, *, sized: Sized) -> Plan:
    time = predict_time(sized.job, hardware=request.hardware, ranks_per_node=request.ranks_per_node)
    return Plan(arrangement, sized.job, sized.memory, time)


def _variants(request: PlanRequest, arrangement: Arrangement, *, num_sequences: int) -> Iterator[Job]:
    """What is searched of a layout with so many sequences at once, the least costly first."""
    shares = arrangement.layout.tp > 1
    for stage, recompute, regather, overlap in product(
        zero_stages(request),
        (False, True),
        (False, True) if shares else (False,),
        (True, False) if shares else (False,),
    ):
        yield make_job(
            request,
            arrangement,
            num_sequences=num_sequences,
            zero_stage=stage,
            recompute=recompute,
            regather=regather,
            overlap=overlap,
        )


def _fitting(request: PlanRequest, arrangement: Arrangement, *, room_bytes: int) -> Iterator[Sized]:
    """Each variant with the most sequences at once that fit; nothing of those that never do."""
    choices = micro_batches(request, arrangement.layout)
    for job in _variants(request, arrangement, num_sequences=choices[0]):
        most = _most_at_once(job, request=request, choices=choices, room_bytes=room_bytes)
        if most is not None:
            yield most


def _most_at_once(job: Job, *, request: PlanRequest, choices: Sequence[int], room_bytes: int) -> Sized | None:
    """The step with the most sequences at once that fit; None where it never does."""

    def sized(num_sequences: int) -> Sized:
        changed = with_micro_batch(job, request=request, num_sequences=num_sequences)
        return Sized(changed, predict_memory(changed))

    # A single micro-batch keeps no gradients of those before it, so that it may fit where smaller ones do not.
    whole = sized(choices[-1])
    if whole.memory.total_bytes <= room_bytes:
        return whole
    best, low, high = None, 0, len(choices) - 1
    while low < high:  # of several micro-batches larger ones take more
        middle = low if best is None else (low + high) // 2  # most that do not fit never do
        found = sized(choices[middle])
        if found.memory.total_bytes <= room_bytes:
            best, low = found, middle + 1
        else:
            high = middle
    return best


def with_micro_batch(job: Job, *, request: PlanRequest, num_sequences: int) -> Job:
    """The same step in micro-batches of another size."""
    return replace(
        job,
        num_sequences=num_sequences,
        accumulation=request.sequences_per_step // (job.layout.dp * num_sequences),
    )


def _too_large(request: PlanRequest, arrangement: Arrangement, *, room_bytes: int) -> Rejected:
    """The variant that comes nearest to fitting, and what most of its memory is for."""
    choices = micro_batches(request, arrangement.layout)
    # The least is that of the fewest sequences at once, or of all, which leave nothing for another micro-batch.
    jobs = [
        job for number in {choices[0], choices[-1]} for job in _variants(request, arrangement, num_sequences=number)
    ]
    job, memory = min((Sized(job, predict_memory(job)) for job in jobs), key=lambda sized: sized.memory.total_bytes)
    kinds = {name: value for name, value in memory._asdict().items() if isinstance(value, int)}
    largest = max(kinds, key=lambda name: kinds[name])
    recomputed = ", recomputed" if job.recompute else ""
    return Rejected(
        str(arrangement),
        f"needs {size(memory.total_bytes)} per rank at the least (ZeRO-{job.zero_stage}, {job.num_sequences} at once"
        f"{recomputed}), {size(kinds[largest])} of it {largest}; there are {size(room_bytes)}",
        arrangement.layout.tp,
        arrangement.layout.ep,
        arrangement.strategy,
        memory.total_bytes - room_bytes,
    )
