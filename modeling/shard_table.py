"""How every parameter is split over the ranks of a group, as one table that initialising, saving and planning read.

Standard library only. A shard is described by index ranges per dimension of the whole tensor: the local tensor is the
concatenation of those ranges in order. The experts' fused gate and up projection is cut in both of its halves, so a
rank that holds a slice of an expert holds the same slice of gate and of up.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from .layout import ParallelLayout

Ranges = tuple[tuple[int, int], ...]  # half-open index ranges along one dimension


class Split(NamedTuple):
    """One dimension of a parameter and what it is divided over."""

    dim: int
    over: str  # "tp", "kv" (tp, or fewer parts where several ranks share a key-value head), "ep" or "etp"
    num_blocks: int = 1  # cut each of this many equal blocks of the dimension, not the dimension as one
    padded: bool = False  # rounded up to a multiple of the parts inside, never in what is exported


class Rule(NamedTuple):
    """All parameters whose name matches are split alike."""

    pattern: str
    splits: tuple[Split, ...]


_HEADS = (Split(0, "tp"),)
_KV_HEADS = (Split(0, "kv"),)

TABLE = (
    Rule(r"(^|\.)(embed_tokens|lm_head)\.weight$", (Split(0, "tp", padded=True),)),
    Rule(r"\.self_attn\.q_proj\.weight$", _HEADS),
    Rule(r"\.self_attn\.[kv]_proj\.weight$", _KV_HEADS),
    Rule(r"\.self_attn\.o_proj\.weight$", (Split(1, "tp"),)),
    Rule(r"\.mlp\.experts\.gate_up_proj$", (Split(0, "ep"), Split(1, "etp", num_blocks=2))),
    Rule(r"\.mlp\.experts\.down_proj$", (Split(0, "ep"), Split(2, "etp"))),
    Rule(r"\.mlp\.(gate|up)_proj\.weight$", (Split(0, "tp"),)),
    Rule(r"\.mlp\.down_proj\.weight$", (Split(1, "tp"),)),
    # Each rank's gradient is its tokens' share; the bias has none and moves by the same amounts on every rank.
    Rule(r"(norm|layernorm|mlp\.gate)\.weight$|\.mlp\.gate\.e_score_correction_bias$", ()),
)
# Norms over the full width of q and k have one weight per channel, which is split as the heads are.
FULL_QK_NORM = (
    Rule(r"\.self_attn\.q_norm\.weight$", _HEADS),
    Rule(r"\.self_attn\.k_norm\.weight$", _KV_HEADS),
)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one rank of the group holds of one parameter.

    ranges      per dimension, which indices of the whole tensor are here, in order
    shape       of the local tensor; longer than the ranges where it is padded
    full_shape  of the whole tensor, without padding
    replica     which copy this is among the group's ranks that hold the same numbers; 0 is the first
    num_replicas  how many ranks of the group hold the same numbers
    is_replicated  nothing is split: every rank of the group holds the whole tensor
    """

    ranges: tuple[Ranges, ...]
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    replica: int
    num_replicas: int
    is_replicated: bool


class ShardTable(NamedTuple):
    """The table with the sizes it needs filled in."""

    layout: ParallelLayout
    num_key_value_heads: int
    qk_norm: str

    def covers(self, name: str) -> bool:
        """Whether there is a rule for a tensor's name."""
        return self._find(name) is not None

    def rule(self, name: str) -> Rule:
        """The rule for a tensor's name; a KeyError for a name that no rule covers."""
        rule = self._find(name)
        if rule is None:
            raise KeyError(f"no rule of the shard table covers the parameter {name!r}")
        return rule

    def _find(self, name: str) -> Rule | None:
        rules = (*FULL_QK_NORM, *TABLE) if self.qk_norm == "full" else TABLE
        return next((rule for rule in rules if re.search(rule.pattern, name)), None)

    def shard(self, name: str, full_shape: tuple[int, ...], *, group_rank: int) -> Shard:
        """What `group_rank` holds of the parameter `name` whose whole shape is `full_shape`."""
        rule = self.rule(name)
        ranges: list[Ranges] = [((0, size),) for size in full_shape]
        shape = list(full_shape)
        num_distinct = 1
        for split in rule.splits:
            index, parts = self.part(split.over, group_rank)
            size = full_shape[split.dim]
            block = size // split.num_blocks
            width = -(-block // parts) if split.padded else block // parts
            ranges[split.dim] = tuple(
                (min(start + index * width, size), min(start + (index + 1) * width, size))
                for start in range(0, split.num_blocks * block, block)
            )
            shape[split.dim] = width * split.num_blocks
            num_distinct *= parts
        num_replicas = self.layout.tp // num_distinct
        return Shard(
            ranges=tuple(ranges),
            shape=tuple(shape),
            full_shape=tuple(full_shape),
            replica=group_rank % num_replicas,
            num_replicas=num_replicas,
            is_replicated=not rule.splits,
        )

    def full_shape(self, name: str, local_shape: tuple[int, ...], *, vocab_size: int) -> tuple[int, ...]:
        """The whole shape, without padding, of the parameter of which every rank's shard has `local_shape`."""
        shape = list(local_shape)
        for split in self.rule(name).splits:
            _, parts = self.part(split.over, 0)
            shape[split.dim] = vocab_size if split.padded else shape[split.dim] * parts
        return tuple(shape)

    def part(self, over: str, group_rank: int) -> tuple[int, int]:
        """Which part of how many a rank holds. Ranks are numbered ep-major: group_rank = ep_rank * etp + etp_rank."""
        layout = self.layout
        if over == "ep":
            return group_rank // layout.etp, layout.ep
        if over == "etp":
            return group_rank % layout.etp, layout.etp
        parts = min(layout.tp, self.num_key_value_heads) if over == "kv" else layout.tp
        return group_rank * parts // layout.tp, parts
