"""One optimizer step to be predicted: the model, the layout, and everything about how it is run that costs anything.

The planner makes jobs by trying layouts, `job_of` makes one of a run's settled configuration; the formulas for bytes,
memory and time know nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

from modeling import cost
from modeling.execution import Execution
from modeling.layout import ParallelLayout
from modeling.spec import ModelSizes
from recipe.settings.model import sizes_of
from recipe.settings.resolve import ResolvedConfig

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


class ExpertRows(NamedTuple):
    """What the experts of the slowest rank work on in a layer.

    rows         of all its experts: pairs of a token and one of its experts
    buffer       rows there is room for: with static rows the most that could come
    at_once      of these, those that lie in buffers at once
    num_experts  here
    width        of an expert here
    chunks       in which the rows come
    tokens       whose sums they add to
    """

    rows: float
    buffer: float
    at_once: float
    num_experts: int
    width: int
    chunks: int
    tokens: float

    @property
    def num_groups(self) -> int:
        """In how many groups the rows come, one after another."""
        return ceil(self.buffer / max(self.at_once, 1))


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything about a step that costs bytes, memory or time.

    model             keyword arguments of the model's configuration, as `read_model` and the presets have them
    num_sequences     B, sequences of `block_size` (S) positions that a group works on at once
    accumulation      micro-batches per optimizer step
    execution         its strategy "auto" is settled by `moe_strategy`; its experts_backend and cuda_graph are settled
    zero              DeepSpeed's "zero_optimization" block, the stage included
    precision         "fp32" or "bf16", the latter with float32 master weights and gradient sums
    recompute         every block is computed again in the backward
    device            "cpu" or "cuda"
    attention         the kernel's name, as a run has it
    attention_length  l = sum(length^2) / sum(length) of the documents in a block; None: each fills a block
    rho               the busiest rank's expert rows over the mean
    clips_gradients   by their norm over all ranks
    """

    model: Mapping[str, Any]
    layout: ParallelLayout
    num_sequences: int
    block_size: int
    accumulation: int
    execution: Execution
    zero: Mapping[str, Any]
    precision: str
    recompute: bool
    device: str
    attention: str = "varlen"
    attention_length: float | None = None
    rho: float = 1.0
    clips_gradients: bool = True

    @cached_property
    def sizes(self) -> ModelSizes:
        return sizes_of(self.model)

    @property
    def zero_stage(self) -> int:
        return int(self.zero.get("stage", 0))

    @property
    def num_tokens(self) -> int:
        """Tokens T of a group's micro-batch."""
        return self.num_sequences * self.block_size

    @property
    def tokens_per_rank(self) -> int:
        """Tokens t of a rank's micro-batch."""
        return self.num_tokens // self.layout.tp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all groups and micro-batches."""
        return self.num_tokens * self.accumulation * self.layout.dp

    @property
    def element_bytes(self) -> int:
        """Bytes per number of an activation and of a weight that is computed with."""
        return ELEMENT_BYTES[self.precision]

    @cached_property
    def num_chunks(self) -> int:
        """Pieces in which a rank's tokens are gathered, and their sums scattered."""
        return self._pieces(0.0)

    @cached_property
    def num_expert_chunks(self) -> int:
        """Pieces in which tokens travel to experts, whose weights every piece reads again."""
        return self._pieces(
            cost.MATRICES * self._own_experts * self._own_width * self.sizes.hidden_size * self.element_bytes
        )

    def _pieces(self, again_bytes: float) -> int:
        if self.layout.tp == 1:
            return 1
        tokens = self.tokens_per_rank
        return cost.settle_num_chunks(
            tokens,
            sent_bytes=(self.layout.tp - 1) * tokens * self.sizes.hidden_size * self.element_bytes,
            device=self.device,
            overlap=self.execution.overlap,
            wanted=self.execution.overlap_chunks,
            again_bytes=again_bytes,
        )

    @property
    def _own_experts(self) -> int:
        return self.sizes.num_experts // self.layout.ep

    @property
    def _own_width(self) -> int:
        return self.sizes.moe_intermediate_size // self.layout.etp

    def num_ranks(self, axis: str) -> int:
        """Count the ranks along an axis: "group", "dp", or "kv", those of a group with the same key-value heads."""
        layout = self.layout
        return {"group": layout.tp, "dp": layout.dp, "kv": max(1, layout.tp // self.sizes.num_key_value_heads)}[axis]

    @cached_property
    def head_rows(self) -> int:
        """Tokens whose logits are made at a time."""
        width = -(-self.sizes.vocab_size // self.layout.tp)
        return cost.head_rows(width, chunk_bytes=cost.HEAD_CHUNK_BYTES[self.device])

    @property
    def static_rows(self) -> bool:
        """Whether a rank computes the most rows that could come, whatever the routing is."""
        return self.execution.experts_backend != "loop"

    @cached_property
    def moe_strategy(self) -> str:
        """The strategy, with "auto" settled for this number of tokens as the layer itself settles it."""
        if self.execution.strategy != "auto":
            return self.execution.strategy
        even = replace(self.moe_traffic, rho=1.0, fp8_tokens=False, sum_bytes=None)
        return cost.choose_strategy(even)

    @cached_property
    def group_strategy(self) -> str:
        """The strategy that a group acts by: a rank alone exchanges nothing."""
        return self.moe_strategy if self.layout.tp > 1 else "gather_tokens"

    @cached_property
    def expert_rows(self) -> ExpertRows:
        """The rows of the slowest rank, by strategy."""
        sizes, layout, active = self.sizes, self.layout, self.sizes.num_experts_per_tok
        if self.group_strategy == "gather_weights":
            own = active * self.tokens_per_rank
            at_once = self._rows_at_once(own, experts=sizes.num_experts, width=sizes.moe_intermediate_size)
            return ExpertRows(
                own, own, at_once, sizes.num_experts, sizes.moe_intermediate_size, 1, self.tokens_per_rank
            )
        experts, width = self._own_experts, self._own_width
        rows = (self.rho if layout.ep > 1 else 1.0) * active * self.num_tokens / layout.ep
        if self.group_strategy == "all_to_all":
            return ExpertRows(rows, rows, rows, experts, width, 1, rows)
        buffer = self.num_tokens * min(active, experts) if self.static_rows else rows
        at_once = self._rows_at_once(buffer, experts=experts, width=width)
        return ExpertRows(rows, buffer, at_once, experts, width, self.num_expert_chunks, self.num_tokens)

    @property
    def multiplies_again(self) -> bool:
        """Whether the backward makes the experts' first products again: see modeling/experts.py."""
        regathers = self.execution.regather and self.layout.ep > 1 and self.group_strategy == "gather_tokens"
        return self.static_rows and (regathers or self.expert_rows.num_groups > 1)

    def _rows_at_once(self, buffer: float, *, experts: int, width: int) -> float:
        if not self.static_rows:
            return buffer
        active = min(self.sizes.num_experts_per_tok, experts)
        widths = self.sizes.hidden_size, 2 * width
        return min(buffer, active * cost.tokens_at_once(active, *widths, element_bytes=self.element_bytes))

    @property
    def moe_traffic(self) -> cost.MoeTraffic:
        """The formulas of what one layer's experts send."""
        return cost.MoeTraffic(
            sizes=self.sizes,
            layout=self.layout,
            num_tokens=self.num_tokens,
            element_bytes=self.element_bytes,
            rho=self.rho,
            regather=self.execution.regather,
            fp8_tokens=self.execution.token_dtype != "auto",
            sum_bytes=4 if self.execution.combine_dtype == "float32" else None,
        )

    @cached_property
    def micro_batch_key(self) -> tuple[Any, ...]:
        """What one micro-batch's memory and computing depend on, besides recomputation; ZeRO is no part of it."""
        limits = tuple(self.model.get(name) for name in ("clip_qkv", "capacity_factor", "router_jitter_noise"))
        run = (self.execution, self.group_strategy, self.precision, self.device, self.rho)
        attention = (self.attention, self.attention_length)
        return self.sizes, self.layout, self.num_sequences, self.block_size, run, attention, limits

    @property
    def is_packed(self) -> bool:
        """Whether blocks hold more than one document."""
        return self.attention_length is not None and self.attention_length < self.block_size


def job_of(settings: ResolvedConfig, *, model: Mapping[str, Any], recompute: bool, device: str) -> Job:
    """Return the step of a run with these settings."""
    return Job(
        model=model,
        layout=settings.layout,
        num_sequences=settings.num_sequences,
        block_size=settings.block_size,
        accumulation=settings.accumulation,
        execution=settings.execution,
        zero=settings.engine["zero_optimization"],
        precision=settings.precision,
        recompute=recompute or settings.execution.cuda_graph,  # a graph's backward computes its block again
        device=device,
        attention=settings.attention,
        clips_gradients=settings.optimizer.max_grad_norm > 0,
    )
