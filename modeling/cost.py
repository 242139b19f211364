"""What a MoE layer sends per rank under each strategy, and which strategy sends least for a given number of tokens.

Standard library only: the planner and the layer share these formulas, and a test holds them against counted bytes.
Letters as in docs/training.md: T tokens in the group's micro-batch, A experts per token, N ranks.
"""

import math
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

    rho         the busiest rank's load over the mean load, which only `all_to_all` depends on
    regather    tokens are gathered again in the backward
    fp8_tokens  tokens travel to the experts as one byte per number and a scale of four bytes
    sum_bytes   per number of the partial sums; None: as x
    """

    sizes: ModelSizes
    layout: ParallelLayout
    num_tokens: int
    element_bytes: int
    rho: float = 1.0
    regather: bool = False
    fp8_tokens: bool = False
    sum_bytes: int | None = None

    def wire_bytes(self, strategy: str) -> WireBytes:
        """Without activation checkpointing. All-gather and reduce-scatter each send (N-1)/N of the whole, as a ring."""
        sizes, size = self.sizes, self.layout.tp
        share = (size - 1) / size
        tokens, active, width = self.num_tokens, sizes.num_experts_per_tok, sizes.hidden_size
        if strategy == "gather_tokens":
            # x and the output's gradient gathered, the output and x's gradient scattered.
            x_bytes = width + 4 if self.fp8_tokens else width * self.element_bytes
            gradient_bytes = 2 * width * self.element_bytes
            sum_bytes = width * (self.sum_bytes or self.element_bytes)
            payload = share * tokens * ((2 if self.regather else 1) * x_bytes + sum_bytes + gradient_bytes)
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


class Link(NamedTuple):
    """What a transfer in chunks costs: `bytes_per_s` of one rank, and `chunk_s` more for every further chunk."""

    bytes_per_s: float
    chunk_s: float


# A chunk more costs a collective's latency and a product on fewer rows. CPU: 1 Gbit/s Ethernet; GPU: NVLink.
LINKS = {"cpu": Link(125e6, 1e-3), "cuda": Link(300e9, 15e-6)}
MAX_CHUNKS = 8


def choose_num_chunks(sent_bytes: float, *, device: str) -> int:
    """In how many chunks to send what overlaps with products: a power of two, 1 where more would not pay.

    The first chunk is waited for, every further one costs `chunk_s`: bytes / (chunks * rate) + chunks * chunk_s is
    least at the square root of their ratio. A fixed rule, not a measurement: every rank and every run must agree.
    """
    link = LINKS.get(device, LINKS["cuda"])
    best = math.sqrt(sent_bytes / link.bytes_per_s / link.chunk_s)
    return max(1, min(MAX_CHUNKS, 2 ** round(math.log2(max(best, 1.0)))))
