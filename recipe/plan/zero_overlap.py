"""Which of ZeRO's transfers cost nothing: a micro-batch played through block by block, as DeepSpeed 0.19.8 sends them.

Only with "overlap_comm", stage 3's default, on a GPU's own stream, and only beside computing of the same data-parallel
rank. Weights of stage 3 are ahead by "stage3_prefetch_bucket_size" numbers, which is less than most blocks with experts
have, so that the rest of each block is waited for. Gradients travel beside the backward, bucket by bucket; those of
stage 1 in the last micro-batch only, in low precision after it, as all of stage 0.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from modeling.layout import ModelSizes, ParallelLayout
from recipe.plan.hardware_values import Hardware
from recipe.plan.job import Job
from recipe.plan.lanes import Lanes
from recipe.plan.sent import ring_bytes
from recipe.plan.wire_time import Ring, busy_share, call_seconds
from recipe.plan.zero3_fetches import Thresholds, Way
from recipe.plan.zero_defaults import zero_number
from recipe.plan.zero_traffic import SUM_BYTES, held_fetches, held_modules, way_of

# Buckets of stage 3 that may be under way while another is filled; of the stages below one.
UNDER_WAY = {1: 1, 2: 1, 3: 2}


class PartTimes(NamedTuple):
    """Seconds that a rank computes for one part of the model, what is computed again in the backward included there."""

    forward: float
    backward: float


# By the kind of a part: "embedding", "block", "dense block", "norm", "head".
Parts = Mapping[str, PartTimes]


class Step(NamedTuple):
    """A fetch: numbers gathered now, and ahead for later parts; then, where `work` names a kind of part, its computing.

    waits_for  how many of the gathers ahead must have arrived before
    """

    missing: int
    ahead: int
    waits_for: int
    work: str | None
    is_backward: bool


def hidden_seconds(job: Job, *, hardware: Hardware, ring: Ring, parts: Parts) -> float:
    """Of a step's transfers over dp, those that no rank waits for."""
    if not overlaps(job) or ring.num_ranks == 1:
        return 0.0
    play = _Play(job, hardware, ring)
    if job.zero_stage == 3:
        play.sharded(parts)
        return job.accumulation * play.hidden_s
    play.summed(parts)
    return (job.accumulation if job.zero_stage == 2 else 1) * play.hidden_s


def overlaps(job: Job) -> bool:
    """Whether anything of ZeRO's travels beside computing."""
    if job.device == "cpu" or not job.zero.get("overlap_comm", job.zero_stage == 3):
        return False
    return job.zero_stage >= 2 or (job.zero_stage == 1 and job.precision == "fp32")


def describe_overlap(job: Job) -> Iterator[str]:
    """What is assumed of ZeRO's transfers in this job, for people."""
    if job.layout.dp == 1:
        return
    if not overlaps(job):
        yield "ZeRO's transfers are waited for in full"
    elif job.zero_stage == 3:
        ahead = Thresholds.of(job.zero).prefetch
        yield (
            f"ZeRO's weights are gathered ahead by {ahead:,} numbers (stage3_prefetch_bucket_size), beside the "
            "part before; the rest of a block is waited for; gradients travel beside the backward"
        )
    else:
        yield "ZeRO's sums of gradients travel beside the backward" + (
            " of the last micro-batch" if job.zero_stage == 1 else ""
        )


class _Play:
    """One micro-batch of one job."""

    def __init__(self, job: Job, hardware: Hardware, ring: Ring) -> None:
        self._job, self._hardware, self._ring = job, hardware, ring
        self._lanes = Lanes(busy=busy_share(ring, hardware=hardware))
        self._bucket_size = zero_number(job.zero, "reduce_bucket_size")
        self._filled = 0
        self._sums: list[float] = []  # when each bucket has arrived
        self._seconds: dict[tuple[str, int], float] = {}

    @property
    def hidden_s(self) -> float:
        return self._lanes.sent_s - self._lanes.exposed_s

    def summed(self, parts: Parts) -> None:
        """Stages 1 and 2."""
        modules = held_modules(self._job.sizes, self._job.layout)
        kinds = {name: kind_of(name, self._job.sizes) for name in (module.name for module in modules)}
        self._lanes.work(sum(parts[kind].forward for kind in kinds.values()))
        for module in reversed(modules):
            self._lanes.work(parts[kinds[module.name]].backward)
            self._add_up(tuple(module.parameters.values()), op="all_reduce")
        self._end("all_reduce")

    def sharded(self, parts: Parts) -> None:
        """Stage 3."""
        sizes, layout, lanes = self._job.sizes, self._job.layout, self._lanes
        gradients = _gradients(sizes, layout)
        ahead: list[float] = []
        for step in _schedule(sizes, layout, Thresholds.of(self._job.zero), way=way_of(self._job)):
            if step.missing:
                lanes.wait(lanes.send(self._call_s("all_gather", step.missing)))
            if step.waits_for:
                lanes.wait(ahead[step.waits_for - 1])
            if step.ahead:
                ahead.append(lanes.send(self._call_s("all_gather", step.ahead)))
            if step.work is None:
                continue
            lanes.work(parts[step.work].backward if step.is_backward else parts[step.work].forward)
            if step.is_backward:
                self._add_up(gradients[step.work], op="reduce_scatter")
        self._end("reduce_scatter")

    def _add_up(self, numels: tuple[int, ...], *, op: str) -> None:
        """Gradients of a part into the bucket, which is sent when the next one has no room in it."""
        for numel in numels:
            if self._filled and self._filled + numel > self._bucket_size:
                self._send(op)
            self._filled += numel

    def _send(self, op: str) -> None:
        earlier = len(self._sums) - UNDER_WAY[self._job.zero_stage]
        if earlier >= 0:
            self._lanes.wait(self._sums[earlier])
        self._sums.append(self._lanes.send(self._call_s(op, self._filled)))
        self._filled = 0

    def _end(self, op: str) -> None:
        if self._filled:
            self._send(op)
        self._lanes.wait(self._sums[-1])

    def _call_s(self, op: str, numbers: int) -> float:
        found = self._seconds.get((op, numbers))
        if found is None:
            each = self._job.element_bytes if op == "all_gather" else SUM_BYTES
            sent_bytes = ring_bytes(op, each * numbers, size=self._ring.num_ranks)
            found = call_seconds(op, sent_bytes, ring=self._ring, hardware=self._hardware)
            self._seconds[op, numbers] = found
        return found


def kind_of(module: str, sizes: ModelSizes) -> str:
    """Of a module's name in `held_modules`."""
    if not module.startswith("block"):
        return module
    return "dense block" if int(module.split()[1]) in sizes.dense_layers else "block"


@lru_cache(maxsize=64)
def _gradients(sizes: ModelSizes, layout: ParallelLayout) -> dict[str, tuple[int, ...]]:
    """Numbers that the ranks scatter for each kind of part, parameter by parameter."""
    dp = layout.dp
    return {
        kind_of(module.name, sizes): tuple(-(-numel // dp) * dp for numel in module.parameters.values())
        for module in held_modules(sizes, layout)
    }


@lru_cache(maxsize=64)
def _schedule(sizes: ModelSizes, layout: ParallelLayout, thresholds: Thresholds, *, way: Way) -> tuple[Step, ...]:
    """A micro-batch's fetches. Outputs of a block ask for it one by one in the backward, which follows the last."""
    dp, parts = layout.dp, {module.name: module.parameters for module in held_modules(sizes, layout)}
    numel = {name: -(-n // dp) * dp for held in parts.values() for name, n in held.items()}
    fetches = held_fetches(sizes, layout, thresholds, way=way)
    came_with: dict[str, int] = {}  # which of the gathers ahead a parameter came with
    worked: set[str] = set()
    steps, num_ahead = [], 0
    for i, (name, missing, ahead, _) in enumerate(fetches):
        waits_for = max((came_with.pop(own, 0) for own in parts.get(name, ())), default=0)
        if ahead:
            num_ahead += 1
            came_with.update(dict.fromkeys(ahead, num_ahead))
        is_last = i + 1 == len(fetches) or fetches[i + 1].module != name
        work = kind_of(name, sizes) if name in parts and is_last else None
        now, later = (sum(numel[own] for own in names) for names in (missing, ahead))
        steps.append(Step(now, later, waits_for, work, name in worked))
        if is_last:
            worked.add(name)
    return tuple(steps)
