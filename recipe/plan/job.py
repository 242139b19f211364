"""One optimizer step to be predicted: the model, the layout, and everything about how it is run that costs anything.

The planner makes jobs by trying layouts, `job_of` makes one of a run's settled configuration; the formulas for bytes,
memory and time know nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from modeling.cost import MoeTraffic, choose_strategy
from modeling.execution import Execution
from modeling.layout import ModelSizes, ParallelLayout
from recipe.settings.model import sizes_of
from recipe.settings.resolve import ResolvedConfig

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Job:
    """
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
    cuda_graph        blocks are replayed as CUDA graphs, as recipe/settings/execution.py settles it
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
        """T, tokens of a group's micro-batch."""
        return self.num_sequences * self.block_size

    @property
    def tokens_per_rank(self) -> int:
        """t, of a micro-batch."""
        return self.num_tokens // self.layout.tp

    @property
    def tokens_per_step(self) -> int:
        """Of all groups and micro-batches."""
        return self.num_tokens * self.accumulation * self.layout.dp

    @property
    def element_bytes(self) -> int:
        """Per number of an activation and of a weight that is computed with."""
        return ELEMENT_BYTES[self.precision]

    @property
    def static_rows(self) -> bool:
        """Whether a rank computes the most rows that could come, whatever the routing is."""
        return self.experts_backend != "loop"

    @cached_property
    def moe_strategy(self) -> str:
        """The strategy, with "auto" settled for this number of tokens as the layer itself settles it."""
        if self.strategy != "auto":
            return self.strategy
        traffic = MoeTraffic(
            sizes=self.sizes,
            layout=self.layout,
            num_tokens=self.num_tokens,
            element_bytes=self.element_bytes,
            regather=self.wire.regather,
        )
        return choose_strategy(traffic)


def job_of(settings: ResolvedConfig, *, model: Mapping[str, Any], recompute: bool, device: str) -> Job:
    """What a run with these settings does in a step."""
    return Job(
        model=model,
        layout=settings.layout,
        num_sequences=settings.num_sequences,
        block_size=settings.block_size,
        accumulation=settings.accumulation,
        strategy=settings.parallel.execution.strategy,
        wire=settings.parallel.execution,
        experts_backend=settings.parallel.execution.experts_backend,
        zero=settings.engine["zero_optimization"],
        precision=settings.precision,
        recompute=recompute,
        device=device,
        clips_gradients=settings.optimizer.max_grad_norm > 0,
        cuda_graph=settings.parallel.execution.cuda_graph,
    )
