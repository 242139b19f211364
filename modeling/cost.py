"""What a MoE layer sends per rank under each strategy, and which strategy sends least for a given number of tokens.

Standard library only: the planner and the layer share these formulas, and a test holds them against counted bytes.
Letters as in docs/training.md: T tokens in the group's micro-batch, A experts per token, N ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

from .layout import ModelSizes, ParallelLayout

MATRICES = 3  # gate, up and down
ID_BYTES = 2  # an expert's number on the wire
WEIGHT_BYTES = 4  # a routing weight, and its gradient


class WireBytes(NamedTuple):
    """Bytes one rank sends for one layer, forward and backward. `routing` is ids, weights and their gradients."""

    payload: float
    routing: float

    @property
    def total(self) -> float:
        return self.payload + self.routing


@dataclass(frozen=True, kw_only=True)
class MoeTraffic:
    """One layer's micro-batch: `num_tokens` over the whole group, `element_bytes` per number of x and of a weight.

    `rho` is the busiest rank's load over the mean load, which only `all_to_all` depends on.
    """

    sizes: ModelSizes
    layout: ParallelLayout
    num_tokens: int
    element_bytes: int
    rho: float = 1.0

    def wire_bytes(self, strategy: str) -> WireBytes:
        """Without activation checkpointing. All-gather and reduce-scatter each send (N-1)/N of the whole, as a ring."""
        sizes, size = self.sizes, self.layout.tp
        share = (size - 1) / size
        tokens, active, width = self.num_tokens, sizes.num_experts_per_tok, sizes.hidden_size
        if strategy == "gather_tokens":
            # x and the output's gradient gathered, the output and x's gradient scattered.
            payload = 4 * share * tokens * width * self.element_bytes
            return WireBytes(payload, share * tokens * active * (ID_BYTES + 2 * WEIGHT_BYTES))
        if strategy == "gather_weights":
            # Weights gathered forward and backward, their gradients scattered.
            weights = MATRICES * sizes.num_experts * sizes.moe_intermediate_size * width
            return WireBytes(3 * share * weights * self.element_bytes, 0.0)
        if strategy == "all_to_all":
            # A row per token and expert: there and back, forward and backward. Ids are int64; one count per rank.
            rows = share * tokens * active / size
            return WireBytes(4 * self.rho * rows * width * self.element_bytes, self.rho * rows * 8 + share * size * 8)
        raise ValueError(f"strategy={strategy!r} has no formula")


def tokens_where_weights_pay(sizes: ModelSizes) -> float:
    """T*: from this many tokens in a group's micro-batch on, sending all expert weights is less than sending tokens."""
    return 0.75 * MATRICES * sizes.num_experts * sizes.moe_intermediate_size


def choose_strategy(traffic: MoeTraffic) -> str:
    """The strategy of the layout's own that sends least: what `strategy: "auto"` is for a micro-batch of this shape.

    Sliced experts (ep=1) gather tokens or weights; whole experts (ep=N) gather tokens or exchange rows, for which a
    host waits, so that only less than half the bytes is worth it; anything between gathers tokens.
    """
    layout = traffic.layout
    if layout.tp > 1 and layout.ep == 1 and traffic.num_tokens > tokens_where_weights_pay(traffic.sizes):
        return "gather_weights"
    if layout.ep == layout.tp > 1:
        exchanged, gathered = (traffic.wire_bytes(name).payload for name in ("all_to_all", "gather_tokens"))
        return "all_to_all" if exchanged < gathered / 2 else "gather_tokens"
    return "gather_tokens"
