"""Finds the layout that trains most tokens per second, and keeps for every other one what speaks against it.

Every way in which a model could be laid out on the devices there are is tried, by the trainer's own rules. Of each
layout and strategy the best variant is found: every ZeRO stage, recomputation on and off, gathered tokens kept or
gathered again, transfers beside products or not, and in each of them the most sequences at once that fit, since more
rows make no product slower and fewer micro-batches send no more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple

from modeling.execution import Execution
from modeling.layout import BatchSizes, LayoutRequest, ParallelLayout, allowed_tp, divisors, layout_faults
from modeling.spec import ModelSizes, spec_of
from recipe.plan.hardware import Hardware
from recipe.plan.job import Job
from recipe.plan.memory import MemoryModel, MemoryPlan
from recipe.plan.step_time import TimeModel, TimePlan
from recipe.settings.flags import Arguments
from recipe.settings.model import sizes_of
from recipe.settings.parallel import (
    FAST_ATTENTION,
    ROW_ALIGNMENT,
    GraphFacts,
    WorldInfo,
    attention_reasons,
    can_be_graphed,
    default_attention,
    default_experts_backend,
)
from recipe.settings.resolve import BUCKET_KEY, USUAL_BUCKET, dropout_faults, reserves_bucket, zero_block
from recipe.settings.training import zero_stage_faults
from recipe.shared.units import GIB, size

# What no tensor is in, of each rank. CPU: Python with torch, DeepSpeed and transformers loaded is 0.43 GiB.
RESERVE_BYTES = {"cuda": 2 * GIB, "cpu": GIB // 2}
ZERO_STAGES = (0, 1, 2, 3)
# Of gradients that are summed at once. A tenth of DeepSpeed's own takes a tenth of its memory, 0.2 GB in float32, and
# is ready sooner to travel beside the backward; where the whole fits, its fewer calls may be faster.
MOST_AT_ONCE = USUAL_BUCKET // 10


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is asked for: a model, devices, and the tokens of a step.

    model               keyword arguments of the model's configuration
    gpus                devices, one rank each
    ranks_per_node      of them on each node
    block_size          S, positions of a sequence
    sequences_per_step  of an optimizer step, over all groups and micro-batches
    skew                rows of the busiest rank over the mean where each rank of a group holds whole experts
    max_micro_batch     sequences a group may work on at once; None: any number
    attention           the kernel by the name of a run's flag; "auto" is the fastest, as if its package were installed
    """

    model: Mapping[str, Any]
    hardware: Hardware
    gpus: int
    ranks_per_node: int
    block_size: int
    sequences_per_step: int
    precision: str
    skew: float = 1.0
    max_micro_batch: int | None = None
    attention: str = Arguments().attn_implementation

    @cached_property
    def sizes(self) -> ModelSizes:
        return sizes_of(self.model)

    @cached_property
    def ranks(self) -> WorldInfo:
        return WorldInfo(
            world_size=self.gpus,
            local_world_size=self.ranks_per_node,
            device=self.hardware.device,
            compute_capability=self.hardware.compute_capability,
            # A probe times torch's own.
            attention_kernels=() if self.hardware.measured else tuple(FAST_ATTENTION),
        )

    @cached_property
    def experts_backend(self) -> str:
        """The backend that the trainer takes on this device."""
        return default_experts_backend(self.ranks, precision=self.precision)


class Arrangement(NamedTuple):
    """A layout and how tokens meet their experts in it."""

    layout: ParallelLayout
    strategy: str

    def __str__(self) -> str:
        return str(self.layout) if self.layout.tp == 1 else f"{self.layout} {self.strategy}"


class Rejected(NamedTuple):
    """A layout that cannot be, and why; `lacking_bytes` is 0 where memory is not the reason.

    Where `ep` is None it stands for every layout with groups of `tp`, where `strategy` is None for every strategy.
    """

    layout: str
    reason: str
    tp: int
    ep: int | None = None
    strategy: str | None = None
    lacking_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.layout}: {self.reason}"


def arrangements(request: PlanRequest) -> Iterator[Arrangement | Rejected]:
    """Yield all layouts of the model with every strategy that a layout allows, or with the rule that it breaks.

    Of groups there is every size that the model allows, and that the devices can be cut into.
    """
    for tp in sorted({*divisors(request.gpus), *(tp for tp in allowed_tp(request.sizes) if tp <= request.gpus)}):
        dp = num_groups(request, tp=tp)
        layouts = [ParallelLayout(dp=dp, tp=tp, ep=ep) for ep in divisors(tp)]
        faults = [layout_rules(request, layout) for layout in layouts]
        if of_all := [fault for fault in faults[0] if all(fault in others for others in faults)]:
            yield Rejected(f"tp={tp}", "; ".join(of_all), tp)
            continue
        for layout, broken in zip(layouts, faults, strict=True):
            if broken:
                yield Rejected(str(layout), "; ".join(broken), tp, layout.ep)
            else:
                yield from (Arrangement(layout, strategy) for strategy in _strategies(layout))


def num_groups(request: PlanRequest, *, tp: int) -> int:
    """Return the most groups that get equal shares of a step's sequences; devices may be left idle."""
    return max(d for d in divisors(request.sequences_per_step) if d <= request.gpus // tp)


def micro_batches(request: PlanRequest, layout: ParallelLayout) -> list[int]:
    """Return the numbers of sequences a group can work on at once, rising: what divides its share of a step."""
    most = request.max_micro_batch or request.sequences_per_step
    choices = [b for b in divisors(request.sequences_per_step // layout.dp) if b <= most]
    # Where no number of sequences gives every rank as many tokens, the first says so by `layout_faults`.
    return [b for b in choices if not b * request.block_size % layout.tp] or choices[:1]


def zero_stages(request: PlanRequest) -> list[int]:
    return [stage for stage in ZERO_STAGES if not list(zero_stage_faults(stage, precision=request.precision))]


def make_job(
    request: PlanRequest,
    arrangement: Arrangement,
    *,
    num_sequences: int,
    zero_stage: int,
    recompute: bool = False,
    regather: bool = False,
    overlap: bool,
) -> Job:
    layout = arrangement.layout
    execution = Execution(
        strategy=arrangement.strategy,
        experts_backend=request.experts_backend,
        overlap=overlap,
        regather=regather,
    )
    zero = zero_block({}, stage=zero_stage, sizes=request.sizes, tp=layout.tp, precision=request.precision).block
    if reserves_bucket(zero_stage, precision=request.precision):
        zero[BUCKET_KEY] = min(zero.get(BUCKET_KEY, USUAL_BUCKET), MOST_AT_ONCE)
    dropout = spec_of(request.model).attention_dropout
    facts = GraphFacts(  # from which a run settles "auto"
        ranks=request.ranks,
        sizes=request.sizes,
        layout=layout,
        execution=execution,
        precision=request.precision,
        zero_stage=zero_stage,
        recomputes=recompute,
        attention=request.attention,
        attention_dropout=dropout,
    )
    if request.attention == "auto":
        facts = replace(facts, attention=default_attention(facts))
    return Job(
        model=request.model,
        layout=layout,
        num_sequences=num_sequences,
        block_size=request.block_size,
        accumulation=request.sequences_per_step // (layout.dp * num_sequences),
        execution=replace(execution, cuda_graph=can_be_graphed(facts)),
        zero=zero,
        precision=request.precision,
        recompute=recompute,
        device=request.hardware.device,
        attention=facts.attention,
        rho=skew_of(layout, sizes=request.sizes, skew=request.skew),
    )


def kernel_faults(request: PlanRequest) -> Iterator[str]:
    """Yield what keeps the attention kernel that was asked for from being planned."""
    if request.hardware.measured and request.attention not in ("varlen", "sdpa"):
        yield f"the attention of hardware {request.hardware.name} was measured with torch's own kernels"
    facts = GraphFacts(
        ranks=request.ranks,
        sizes=request.sizes,
        layout=ParallelLayout(),
        execution=Execution(),
        precision=request.precision,
        zero_stage=0,
        recomputes=False,
        attention=request.attention,
        attention_dropout=spec_of(request.model).attention_dropout,
    )
    yield from attention_reasons(facts, kernel=request.attention)


def skew_of(layout: ParallelLayout, *, sizes: ModelSizes, skew: float) -> float:
    """Return the busiest rank's rows over the mean, given that of a group whose ranks hold whole experts (ep=N).

    The busiest of N shares has skew/N of all rows, as far as its experts can get so many, and the others the rest in
    equal parts; with ep < N shares it is one with N/ep - 1 others. Sliced experts (ep=1) are even.
    """
    size, ep = layout.tp, layout.ep
    if ep == 1:
        return 1.0
    busiest = min(skew / size, _most_rows(max(1, sizes.num_experts // size), sizes))
    others = (1 - busiest) / (size - 1)
    return ep * min(busiest + (size // ep - 1) * others, _most_rows(sizes.num_experts // ep, sizes))


def _most_rows(num_experts: int, sizes: ModelSizes) -> float:
    """Return the largest share of all rows that so many experts can get: no token visits one twice."""
    return min(sizes.num_experts_per_tok, num_experts) / sizes.num_experts_per_tok


def _strategies(layout: ParallelLayout) -> Iterator[str]:
    """Yield the strategies that a layout allows; one rank has none to exchange with."""
    yield "gather_tokens"
    if layout.tp > 1 and layout.ep == 1:
        yield "gather_weights"
    if layout.tp > 1 and layout.ep == layout.tp:
        yield "all_to_all"


def layout_rules(request: PlanRequest, layout: ParallelLayout, *, strategy: str = "gather_tokens") -> list[str]:
    """Return the rules of the trainer that a layout breaks, in its words."""
    smallest = BatchSizes(num_sequences=micro_batches(request, layout)[0], block_size=request.block_size)
    rules = LayoutRequest(
        sizes=request.sizes,
        layout=layout,
        world_size=layout.world_size,
        batch=smallest,
        strategy=strategy if layout.tp > 1 else "gather_tokens",
        row_alignment=ROW_ALIGNMENT[request.precision] if request.experts_backend == "grouped" else 1,
    )
    return [*layout_faults(rules), *dropout_faults(spec_of(request.model).attention_dropout, tp=layout.tp)]


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


def search_plans(request: PlanRequest) -> Found:
    """Find all plans of a request. Where nothing fits, `plans` is empty and `rejected` says why for each layout."""
    search = _Search(request)
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    for arrangement in arrangements(request):
        if isinstance(arrangement, Rejected):
            rejected.append(arrangement)
        elif fitting := list(search.fitting(arrangement)):
            plans.append(min(fitting, key=lambda plan: plan.time.step_s))
        else:
            rejected.append(search.too_large(arrangement))
    plans.sort(key=lambda plan: plan.time.step_s)  # all of them train the same tokens in a step
    return Found(request, tuple(plans), tuple(rejected), search.room_bytes)


def room_of(request: PlanRequest) -> int:
    """Return the bytes for a rank's tensors: of its device, or of its part of a node's memory where ranks share it."""
    hardware = request.hardware
    own_bytes = hardware.memory_bytes
    if hardware.device == "cpu":
        own_bytes = own_bytes * hardware.ranks_per_node // max(request.ranks_per_node, hardware.ranks_per_node)
    return own_bytes - RESERVE_BYTES[hardware.device]


class _Search:
    """The variants of one arrangement after the other; what jobs have in common is computed once."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.room_bytes, self.memory = request, room_of(request), MemoryModel()
        self.clock = TimeModel(request.hardware, ranks_per_node=request.ranks_per_node)

    def fitting(self, arrangement: Arrangement) -> Iterator[Plan]:
        """Yield each variant with the most sequences at once that fit; nothing of those that never do.

        Recomputing and gathering again take time and give memory, so that they are only worth it for more sequences;
        but where blocks are recomputed they may be graphs, which take no time to launch.
        """
        choices, switch = micro_batches(self.request, arrangement.layout), _switch(arrangement)
        for stage, overlap in product(zero_stages(self.request), reversed(switch)):
            make = partial(
                make_job, self.request, arrangement, num_sequences=choices[0], zero_stage=stage, overlap=overlap
            )
            # By recomputing, graphs and gathering again, the choice that fits.
            most: dict[tuple[bool, bool, bool], int] = {}
            for recompute, regather in product((False, True), switch):
                job = make(recompute=recompute, regather=regather)
                graphs = job.execution.cuda_graph
                cheaper = [
                    i
                    for (again, as_graphs, gathers), i in most.items()
                    if again <= recompute and as_graphs == graphs and gathers <= regather
                ]
                found = self._most_at_once(job, choices[max(cheaper, default=-1) + 1 :])
                if found is not None:
                    job, memory = found
                    most[recompute, graphs, regather] = choices.index(job.num_sequences)
                    yield Plan(arrangement, job, memory, self.clock.predict(job))
                    for whole in _with_whole_bucket(job):
                        memory = self.memory.predict(whole)
                        if memory.total_bytes <= self.room_bytes:
                            yield Plan(arrangement, whole, memory, self.clock.predict(whole))

    def _most_at_once(self, job: Job, choices: Sequence[int]) -> tuple[Job, MemoryPlan] | None:
        """Return the step with the most sequences at once, of these choices, that fit; None where it never does."""

        def sized(num_sequences: int) -> tuple[Job, MemoryPlan]:
            accumulation = self.request.sequences_per_step // (job.layout.dp * num_sequences)
            changed = replace(job, num_sequences=num_sequences, accumulation=accumulation)
            return changed, self.memory.predict(changed)

        if not choices:
            return None
        # A single micro-batch keeps no gradients of those before it, so that it may fit where smaller ones do not.
        whole = sized(choices[-1])
        if whole[1].total_bytes <= self.room_bytes:
            return whole
        best, low, high = None, 0, len(choices) - 1
        while low < high:  # of several micro-batches larger ones take more
            middle = low if best is None else (low + high) // 2  # most that do not fit never do
            found = sized(choices[middle])
            if found[1].total_bytes <= self.room_bytes:
                best, low = found, middle + 1
            else:
                high = middle
        return best

    def too_large(self, arrangement: Arrangement) -> Rejected:
        """Return the variant that comes nearest to fitting, and what most of its memory is for."""
        request, (layout, strategy) = self.request, arrangement
        choices, switch = micro_batches(request, layout), _switch(arrangement)
        # The least is that of the fewest sequences at once, or of all, which leave nothing for another micro-batch.
        numbers = dict.fromkeys((choices[0], choices[-1]))
        options = product(numbers, zero_stages(request), (False, True), switch, reversed(switch))
        jobs = (
            make_job(request, arrangement, num_sequences=b, zero_stage=z, recompute=rec, regather=reg, overlap=over)
            for b, z, rec, reg, over in options
        )
        sized = ((each, self.memory.predict(each)) for job in jobs for each in (job, *_with_whole_bucket(job)))
        job, least = min(sized, key=lambda pair: pair[1].total_bytes)
        kinds = least.by_kind()
        largest = max(kinds, key=lambda name: kinds[name])
        recomputed = ", recomputed" if job.recompute else ""
        return Rejected(
            str(arrangement),
            f"needs {size(least.total_bytes)} per rank at the least (ZeRO-{job.zero_stage}, {job.num_sequences} at once"
            f"{recomputed}), {size(kinds[largest])} of it {largest}; there are {size(self.room_bytes)}",
            layout.tp,
            layout.ep,
            strategy,
            least.total_bytes - self.room_bytes,
        )


def _with_whole_bucket(job: Job) -> Iterator[Job]:
    """Yield the job with DeepSpeed's own bucket where `make_job` took a smaller one."""
    if job.zero.get(BUCKET_KEY) == MOST_AT_ONCE:
        yield replace(job, zero={**job.zero, BUCKET_KEY: USUAL_BUCKET})


def _switch(arrangement: Arrangement) -> tuple[bool, ...]:
    """Return the values of an option that only a group of several ranks has."""
    return (False, True) if arrangement.layout.tp > 1 else (False,)
