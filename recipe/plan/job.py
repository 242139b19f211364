"""One optimizer step to be predicted: the model, the layout, and everything about how it is run that costs anything.

The planner makes jobs by trying layouts, `job_of` makes one of a run's settled configuration; the formulas for bytes,
memory and time know nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from modeling import cost
from modeling.execution import Execution
from modeling.layout import ParallelLayout
from modeling.spec import ModelSizes
from recipe.settings.model import sizes_of
from recipe.settings.resolve import ResolvedConfig

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything about a step that costs bytes, memory or time.

    model             keyword arguments of the model's configuration, as `read_model` and the presets have them
    num_sequences     B, sequences of `block_size` (S) positions that a group works on at once
    accumulation      micro-batches per optimizer step
    strategy          how tokens meet their experts; "auto" is settled by `moe_strategy`
    experts_backend   "loop" computes the rows that there are; "grouped" and "triton" a static number of rows
    zero              DeepSpeed's "zero_optimization" block, the stage included
    precision         "fp32" or "bf16", the latter with float32 master weights and gradient sums
    recompute         every block is computed again in the backward
    device            "cpu" or "cuda"
    attention_length  l = sum(length^2) / sum(length) of the documents in a block; None: each fills a block
    rho               the busiest rank's expert rows over the mean
    clips_gradients   by their norm over all ranks
    cuda_graph        blocks are replayed as CUDA graphs, as recipe/settings/parallel.py settles it
    """

    model: Mapping[str, Any]
    layout: ParallelLayout
    num_sequences: int
    block_size: int
    accumulation: int
    strategy: str
    wire: Execution
    experts_backend: str
    zero: Mapping[str, Any]
    precision: str
    recompute: bool
    device: str
    attention_length: float | None = None
    rho: float = 1.0
    clips_gradients: bool = True
    cuda_graph: bool = False

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
        if self.layout.tp == 1:
            return 1
        tokens = self.tokens_per_rank
        return cost.settle_num_chunks(
            tokens,
            sent_bytes=(self.layout.tp - 1) * tokens * self.sizes.hidden_size * self.element_bytes,
            device=self.device,
            overlap=self.wire.overlap,
            wanted=self.wire.overlap_chunks,
        )

    @cached_property
    def head_rows(self) -> int:
        """Tokens whose logits are made at a time."""
        width = -(-self.sizes.vocab_size // self.layout.tp)
        return cost.head_rows(width, chunk_bytes=cost.HEAD_CHUNK_BYTES[self.device])

    @property
    def static_rows(self) -> bool:
        """Whether a rank computes the most rows that could come, whatever the routing is."""
        return self.experts_backend != "loop"

    @cached_property
    def moe_strategy(self) -> str:
        """The strategy, with "auto" settled for this number of tokens as the layer itself settles it."""
        if self.strategy != "auto":
            return self.strategy
        even = replace(self.moe_traffic, rho=1.0, fp8_tokens=False, sum_bytes=None)
        return cost.choose_strategy(even)

    @cached_property
    def group_strategy(self) -> str:
        """The strategy that a group acts by: a rank alone exchanges nothing."""
        return self.moe_strategy if self.layout.tp > 1 else "gather_tokens"

    @property
    def moe_traffic(self) -> cost.MoeTraffic:
        """The formulas of what one layer's experts send."""
        return cost.MoeTraffic(
            sizes=self.sizes,
            layout=self.layout,
            num_tokens=self.num_tokens,
            element_bytes=self.element_bytes,
            rho=self.rho,
            regather=self.wire.regather,
            fp8_tokens=self.wire.token_dtype != "auto",
            sum_bytes=4 if self.wire.combine_dtype == "float32" else None,
        )

    @cached_property
    def micro_batch_key(self) -> tuple[Any, ...]:
        """What one micro-batch's memory and computing depend on, besides recomputation; ZeRO is no part of it."""
        limits = (self.model.get("clip_qkv"), self.model.get("capacity_factor"))
        run = (self.experts_backend, self.precision, self.device, self.attention_length, self.rho, self.num_chunks)
        return self.sizes, self.layout, self.num_sequences, self.block_size, self.group_strategy, self.wire, run, limits

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
        strategy=settings.execution.strategy,
        wire=settings.execution,
        experts_backend=settings.execution.experts_backend,
        zero=settings.engine["zero_optimization"],
        precision=settings.precision,
        recompute=recompute,
        device=device,
        clips_gradients=settings.optimizer.max_grad_norm > 0,
        cuda_graph=settings.execution.cuda_graph,
    )
