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
from recipe.plan.memory import MemoryModel, MemoryPlan
from recipe.plan.space import (
    Arrangement,
    PlanRequest,
    Rejected,
    arrangements,
    make_job,
    micro_batches,
    zero_stages,
)
from recipe.plan.step_time import TimeModel, TimePlan
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
        """Tokens per second over all devices."""
        return self.job.tokens_per_step / self.time.step_s


class Found(NamedTuple):
    """`plans`, one for each layout and strategy that fits, the fastest first. A rank has `room_bytes` for tensors."""

    request: PlanRequest
    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    room_bytes: int

    def idle(self, plan: Plan) -> int:
        """Count the devices that have nothing to do."""
        return self.request.gpus - plan.job.layout.world_size


class Sized(NamedTuple):
    job: Job
    memory: MemoryPlan


def search_plans(request: PlanRequest) -> Found:
    """Find all plans of a request. Where nothing fits, `plans` is empty and `rejected` says why for each layout."""
    room_bytes = room_of(request)
    memory, clock = MemoryModel(), TimeModel(request.hardware, ranks_per_node=request.ranks_per_node)
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    for arrangement in arrangements(request):
        if isinstance(arrangement, Rejected):
            rejected.append(arrangement)
            continue
        fitting = [
            Plan(arrangement, sized.job, sized.memory, clock.predict(sized.job))
            for sized in _fitting(request, arrangement, memory=memory, room_bytes=room_bytes)
        ]
        if fitting:
            plans.append(min(fitting, key=lambda plan: plan.time.step_s))
        else:
            rejected.append(_too_large(request, arrangement, memory=memory, room_bytes=room_bytes))
    plans.sort(key=lambda plan: plan.time.step_s)  # all of them train the same tokens in a step
    return Found(request, tuple(plans), tuple(rejected), room_bytes)


def room_of(request: PlanRequest) -> int:
    """Return the bytes for a rank's tensors: of its device, or of its part of a node's memory where ranks share it."""
    hardware = request.hardware
    own_bytes = hardware.memory_bytes
    if hardware.device == "cpu":
        own_bytes = own_bytes * hardware.ranks_per_node // max(request.ranks_per_node, hardware.ranks_per_node)
    return own_bytes - RESERVE_BYTES[hardware.device]


def _fitting(
    request: PlanRequest, arrangement: Arrangement, *, memory: MemoryModel, room_bytes: int
) -> Iterator[Sized]:
    """Yield each variant with the most sequences at once that fit; nothing of those that never do.

    Recomputing and gathering again take time and give memory, so that they are only worth it for more sequences.
    """
    choices, switch = micro_batches(request, arrangement.layout), _switch(arrangement)
    for stage, overlap in product(zero_stages(request), reversed(switch)):
        first = make_job(request, arrangement, num_sequences=choices[0], zero_stage=stage, overlap=overlap)
        most: dict[tuple[bool, bool], int] = {}  # by recomputing and gathering again, the choice that fits
        for recompute, regather in product((False, True), switch):
            cheaper = [i for (again, gathers), i in most.items() if again <= recompute and gathers <= regather]
            job = replace(first, recompute=recompute, wire=replace(first.wire, regather=regather))
            above = max(cheaper, default=-1) + 1
            found = _most_at_once(job, choices[above:], request=request, memory=memory, room_bytes=room_bytes)
            if found is not None:
                most[recompute, regather] = choices.index(found.job.num_sequences)
                yield found


def _switch(arrangement: Arrangement) -> tuple[bool, ...]:
    """Return the values of an option that only a group of several ranks has."""
    return (False, True) if arrangement.layout.tp > 1 else (False,)


def _most_at_once(
    job: Job, choices: Sequence[int], *, request: PlanRequest, memory: MemoryModel, room_bytes: int
) -> Sized | None:
    """Return the step with the most sequences at once, of these choices, that fit; None where it never does."""

    def sized(num_sequences: int) -> Sized:
        accumulation = request.sequences_per_step // (job.layout.dp * num_sequences)
        changed = replace(job, num_sequences=num_sequences, accumulation=accumulation)
        return Sized(changed, memory.predict(changed))

    if not choices:
        return None
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


def _too_large(request: PlanRequest, arrangement: Arrangement, *, memory: MemoryModel, room_bytes: int) -> Rejected:
    """Return the variant that comes nearest to fitting, and what most of its memory is for."""
    choices, switch = micro_batches(request, arrangement.layout), _switch(arrangement)
    # The least is that of the fewest sequences at once, or of all, which leave nothing for another micro-batch.
    numbers = dict.fromkeys((choices[0], choices[-1]))
    options = product(numbers, zero_stages(request), (False, True), switch, reversed(switch))
    jobs = (
        make_job(request, arrangement, num_sequences=b, zero_stage=z, recompute=again, regather=gathers, overlap=beside)
        for b, z, again, gathers, beside in options
    )
    job, least = min((Sized(job, memory.predict(job)) for job in jobs), key=lambda sized: sized.memory.total_bytes)
    kinds = {name: value for name, value in least._asdict().items() if isinstance(value, int)}
    largest = max(kinds, key=lambda name: kinds[name])
    recomputed = ", recomputed" if job.recompute else ""
    return Rejected(
        str(arrangement),
        f"needs {size(least.total_bytes)} per rank at the least (ZeRO-{job.zero_stage}, {job.num_sequences} at once"
        f"{recomputed}), {size(kinds[largest])} of it {largest}; there are {size(room_bytes)}",
        arrangement.layout.tp,
        arrangement.layout.ep,
        arrangement.strategy,
        least.total_bytes - room_bytes,
    )
