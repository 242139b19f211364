"""Every way a model could be laid out on the devices there are, and what rules out the others.

The rules are the trainer's own. What is left open of a layout is searched in search.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from modeling.execution import Execution
from modeling.layout import BatchSizes, LayoutRequest, ParallelLayout, allowed_tp, divisors, layout_faults
from modeling.spec import ModelSizes, spec_of
from recipe.plan.hardware_values import Hardware
from recipe.plan.job import Job
from recipe.settings.execution import GraphFacts, WorldInfo, can_be_graphed, default_experts_backend
from recipe.settings.flags import Arguments
from recipe.settings.layout import ROW_ALIGNMENT
from recipe.settings.model import sizes_of
from recipe.settings.resolve import BUCKET_KEY, USUAL_BUCKET, dropout_faults, reserves_bucket, zero_block
from recipe.settings.training import zero_stage_faults

ZERO_STAGES = (0, 1, 2, 3)
# Of gradients that are summed at once. A tenth of DeepSpeed's own takes a tenth of its memory, 0.2 GB in float32, is
# ready sooner to travel beside the backward, and still far too large for the start of a transfer to count.
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
        )

    @cached_property
    def experts_backend(self) -> str:
        """The backend that the trainer takes on this device."""
        return default_experts_backend(self.ranks, precision=self.precision)

    @cached_property
    def attention(self) -> str:
        """The attention kernel of a run that names none."""
        return Arguments().attn_implementation


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


def group_sizes(request: PlanRequest) -> list[int]:
    """Return every size of group to tell about: what the model allows, and what the devices can be cut into."""
    return sorted(
        {*divisors(request.gpus), *(tp for tp in allowed_tp(request.sizes) if tp <= request.gpus)},
    )


def arrangements(request: PlanRequest) -> Iterator[Arrangement | Rejected]:
    """Yield all layouts of the model with every strategy that a layout allows, or with the rule that it breaks."""
    for tp in group_sizes(request):
        dp = num_groups(request, tp=tp)
        faults = _group_faults(request, ParallelLayout(dp=dp, tp=tp, ep=1))
        if faults:
            yield Rejected(f"tp={tp}", "; ".join(faults), tp)
            continue
        for ep in divisors(tp):
            layout = ParallelLayout(dp=dp, tp=tp, ep=ep)
            faults = layout_rules(request, layout)
            if faults:
                yield Rejected(str(layout), "; ".join(faults), tp, ep)
                continue
            for strategy in _strategies(layout):
                yield Arrangement(layout, strategy)


def num_groups(request: PlanRequest, *, tp: int) -> int:
    """Return the most groups that get equal shares of a step's sequences; devices may be left idle."""
    return max(d for d in divisors(request.sequences_per_step) if d <= request.gpus // tp)


def alone_faults(request: PlanRequest) -> list[str]:
    """Return what is wrong with the model or its sequences in every layout: a rank alone breaks no rule of layouts."""
    return layout_rules(request, ParallelLayout())


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
    wire = Execution(
        strategy=arrangement.strategy,
        experts_backend=request.experts_backend,
        overlap=overlap,
        regather=regather,
    )
    return Job(
        model=request.model,
        layout=layout,
        num_sequences=num_sequences,
        block_size=request.block_size,
        accumulation=request.sequences_per_step // (layout.dp * num_sequences),
        strategy=arrangement.strategy,
        wire=wire,
        experts_backend=request.experts_backend,
        zero=_zero(request, stage=zero_stage, tp=layout.tp),
        precision=request.precision,
        recompute=recompute,
        device=request.hardware.device,
        rho=skew_of(layout, sizes=request.sizes, skew=request.skew),
        cuda_graph=_is_graphed(request, arrangement, wire=wire, zero_stage=zero_stage),
    )


def _is_graphed(request: PlanRequest, arrangement: Arrangement, *, wire: Execution, zero_stage: int) -> bool:
    """Settle "auto" as a run would."""
    facts = GraphFacts(
        ranks=request.ranks,
        sizes=request.sizes,
        layout=arrangement.layout,
        execution=wire,
        precision=request.precision,
        zero_stage=zero_stage,
        attention_dropout=spec_of(request.model).attention_dropout,
    )
    return can_be_graphed(facts, attention=request.attention)


def _zero(request: PlanRequest, *, stage: int, tp: int) -> dict[str, Any]:
    """Return DeepSpeed's block, with the trainer's bucket or a smaller one."""
    block = zero_block({}, stage=stage, sizes=request.sizes, tp=tp, precision=request.precision).block
    if reserves_bucket(stage, precision=request.precision) and block.get(BUCKET_KEY, USUAL_BUCKET) > MOST_AT_ONCE:
        block[BUCKET_KEY] = MOST_AT_ONCE
    return block


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


def _group_faults(request: PlanRequest, layout: ParallelLayout) -> list[str]:
    """Return what is wrong with the group's size, whatever the experts' shares."""
    faults = layout_rules(request, layout)
    for ep in divisors(layout.tp):
        others = layout_rules(request, ParallelLayout(dp=layout.dp, tp=layout.tp, ep=ep))
        faults = [fault for fault in faults if fault in others]
    return faults


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
