"""How the ranks are arranged, and every rule a model must meet to be arranged so.

Standard library only: the planner and the trainer share this file, and the planner never imports torch.

World = dp x tp. Rank = dp_rank * tp + group_rank. Inside the group of tp ranks attention is split by heads and
the experts by ep (whole experts) x etp (slices of each expert), ep * etp = tp.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from .spec import ModelSizes, experts_per_token_faults


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """dp groups of tp ranks; in each group ep shares of whole experts, every expert cut into etp slices."""

    dp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def etp(self) -> int:
        """Slices of each expert; 0 for an ep that cannot be, which is then a fault of its own."""
        return self.tp // self.ep if self.ep > 0 else 0

    @property
    def world_size(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"dp={self.dp} tp={self.tp} ep={self.ep} etp={self.etp}"


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """What one group works on at once: `num_sequences` (B) blocks of `block_size` (S) positions."""

    num_sequences: int
    block_size: int


# How tokens meet the experts that several ranks share; moe.py has them, cost.py decides for "auto".
STRATEGIES = ("gather_tokens", "gather_weights", "all_to_all", "auto")


def divisors(number: int) -> list[int]:
    """All positive divisors in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def kv_heads_fit(num_key_value_heads: int, tp: int) -> bool:
    """Each rank gets whole key-value heads, or several ranks share a replicated one."""
    return num_key_value_heads % tp == 0 or tp % num_key_value_heads == 0


def allowed_tp(sizes: ModelSizes) -> list[int]:
    """Every group size that attention and the dense layers can be split over."""
    return [
        tp
        for tp in divisors(sizes.num_attention_heads)
        if kv_heads_fit(sizes.num_key_value_heads, tp) and (not sizes.dense_layers or sizes.intermediate_size % tp == 0)
    ]


def allowed_ep(sizes: ModelSizes, tp: int) -> list[int]:
    """Every number of expert shares a group of tp ranks can hold."""
    return [
        ep
        for ep in divisors(tp)
        if not sizes.num_moe_layers or (sizes.num_experts % ep == 0 and sizes.moe_intermediate_size % (tp // ep) == 0)
    ]


def _ep_choices(sizes: ModelSizes, tp: int) -> str:
    """What a message says about the expert shares that a group of tp ranks allows."""
    allowed = allowed_ep(sizes, tp)
    return f"ep must be one of {allowed} for tp={tp}" if allowed else f"no ep fits tp={tp}, choose another tp"


@dataclass(frozen=True, kw_only=True)
class LayoutRequest:
    """Everything the rules look at, so that one call can list every rule that is broken."""

    sizes: ModelSizes
    layout: ParallelLayout
    world_size: int
    batch: BatchSizes | None = None
    strategy: str = "gather_tokens"
    row_alignment: int = 1  # elements; 8 for bf16 and 4 for fp32 in torch's grouped product


def layout_faults(request: LayoutRequest) -> list[str]:
    """Every broken rule in words, each with the values given and the nearest legal choice; empty if it fits."""
    counts = {name: getattr(request.layout, name) for name in ("dp", "tp", "ep")}
    if min(counts.values()) < 1:
        return [f"{name}={n} must be a whole number of at least 1" for name, n in counts.items() if n < 1]
    return [
        *_world_faults(request),
        *_attention_faults(request),
        *_expert_faults(request),
        *_batch_faults(request),
    ]


def fitting_layouts(
    sizes: ModelSizes, *, world_size: int, max_tp: int, ep: int | None = None, row_alignment: int = 1
) -> Iterator[ParallelLayout]:
    """Every layout of `world_size` ranks that breaks no rule of the model, the widest group (at most `max_tp`) first.

    One for each group size: with `ep` shares of experts, or with as many whole experts per rank as fit. A batch adds
    rules of its own, so it is the caller's to skip what does not suit it.
    """
    for tp in reversed(divisors(world_size)):
        shares = [share for share in allowed_ep(sizes, tp) if ep in (None, share)]
        if tp > max_tp or not shares:
            continue
        layout = ParallelLayout(dp=world_size // tp, tp=tp, ep=max(shares))
        if not layout_faults(
            LayoutRequest(sizes=sizes, layout=layout, world_size=world_size, row_alignment=row_alignment)
        ):
            yield layout


def check_layout(request: LayoutRequest) -> None:
    """Raise one ValueError that lists every broken rule."""
    faults = layout_faults(request)
    if faults:
        raise ValueError(f"the layout {request.layout} does not fit:\n" + "\n".join(f"  - {f}" for f in faults))


def _world_faults(request: LayoutRequest) -> Iterator[str]:
    layout, world_size = request.layout, request.world_size
    if world_size % layout.tp:
        yield (
            f"world_size={world_size} cannot be cut into groups of tp={layout.tp}; "
            f"tp must be one of {divisors(world_size)}"
        )
    elif layout.world_size != world_size:
        yield f"dp={layout.dp} x tp={layout.tp} = {layout.world_size} ranks, but world_size={world_size}"


def _attention_faults(request: LayoutRequest) -> Iterator[str]:
    sizes, tp = request.sizes, request.layout.tp
    if sizes.num_attention_heads % tp:
        yield (
            f"num_attention_heads={sizes.num_attention_heads} cannot be split over tp={tp}; "
            f"tp must be one of {allowed_tp(sizes)}"
        )
    if not kv_heads_fit(sizes.num_key_value_heads, tp):
        yield (
            f"num_key_value_heads={sizes.num_key_value_heads} can neither be split nor replicated over tp={tp}; "
            f"tp must be one of {allowed_tp(sizes)}"
        )
    if sizes.num_attention_heads % sizes.num_key_value_heads:
        yield (
            f"num_attention_heads={sizes.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={sizes.num_key_value_heads}"
        )
    if sizes.dense_layers and sizes.intermediate_size % tp:
        yield (
            f"intermediate_size={sizes.intermediate_size} of the dense layers cannot be split over tp={tp}; "
            f"tp must be one of {allowed_tp(sizes)}"
        )


def _expert_faults(request: LayoutRequest) -> Iterator[str]:
    sizes, layout, strategy = request.sizes, request.layout, request.strategy
    yield from experts_per_token_faults(num_experts=sizes.num_experts, num_experts_per_tok=sizes.num_experts_per_tok)
    if strategy not in STRATEGIES:
        yield f"strategy={strategy!r} is unknown; choose one of {list(STRATEGIES)}"
    if not sizes.num_moe_layers:
        return
    if layout.tp % layout.ep:
        yield f"ep={layout.ep} does not divide tp={layout.tp}; {_ep_choices(sizes, layout.tp)}"
    if sizes.num_experts % layout.ep:
        yield (
            f"num_experts={sizes.num_experts} cannot be split over ep={layout.ep}; "
            f"ep must be one of {divisors(sizes.num_experts)}"
        )
    needed = {"gather_weights": 1, "all_to_all": layout.tp}.get(strategy, layout.ep)
    if layout.ep != needed:
        holds = "a slice of every expert" if strategy == "gather_weights" else "whole experts"
        yield f"strategy={strategy} needs {holds} on each rank: ep={needed} with tp={layout.tp}, not ep={layout.ep}"
    if not layout.etp:
        return
    width = sizes.moe_intermediate_size // layout.etp
    if sizes.moe_intermediate_size % layout.etp:
        yield (
            f"moe_intermediate_size={sizes.moe_intermediate_size} cannot be cut into etp={layout.etp} slices; "
            f"{_ep_choices(sizes, layout.tp)}"
        )
    for name, value in (("hidden_size", sizes.hidden_size), ("moe_intermediate_size / etp", width)):
        if value % request.row_alignment:
            yield (
                f"{name}={value} must be a multiple of {request.row_alignment} for the grouped product in this "
                "precision"
            )


def _batch_faults(request: LayoutRequest) -> Iterator[str]:
    batch, sizes = request.batch, request.sizes
    if batch is None:
        return
    if batch.block_size > sizes.max_position_embeddings:
        yield (
            f"block_size={batch.block_size} is longer than max_position_embeddings={sizes.max_position_embeddings}; "
            f"choose block_size <= {sizes.max_position_embeddings}"
        )
    tokens, tp = batch.num_sequences * batch.block_size, request.layout.tp
    if tokens % tp:
        step = tp // gcd(tp, batch.num_sequences)
        yield (
            f"{batch.num_sequences} sequences x block_size={batch.block_size} = {tokens} tokens cannot be shared by "
            f"tp={tp} ranks; the nearest block_size that can is {max(step, batch.block_size // step * step)}"
        )
