"""What a MoE layer sends per rank under each strategy, and which strategy sends least for a given number of tokens.

Standard library only: the planner and the layer share these formulas, and a test holds them against counted bytes.
Letters as in docs/training.md: T tokens in the group's micro-batch, A experts per token, N ranks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .layout import ParallelLayout
from .spec import ModelSizes

MATRICES = 3  # gate, up and down
ID_BYTES = 2  # an expert's number on the wire
WEIGHT_BYTES = 4  # a routing weight, and its gradient
ROW_BUFFER_BYTES = 2**30  # of one tensor of experts' rows, where it has room for the most that could come
# Of logits at a time, counted in float32. A CPU's caches are small; on a GPU every slice adds its whole gradient of the
# head's weights, so that they are few.
HEAD_CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**30}


class WireBytes(NamedTuple):
    """Bytes one rank sends for one layer, forward and backward. `routing` is ids, weights and their gradients."""

    payload: float
    routing: float

    @property
    def total(self) -> float:
        return self.payload + self.routing


class WireTransfer(NamedTuple):
    """A collective that may be cut in chunks: what one rank sends in it, for `is_routing` see `WireBytes`."""

    op: str
    sent_bytes: float
    is_routing: bool = False
    is_backward: bool = False


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
        """Without activation checkpointing."""
        transfers = self.transfers(strategy)
        payload = sum(transfer.sent_bytes for transfer in transfers if not transfer.is_routing)
        return WireBytes(payload, sum(transfer.sent_bytes for transfer in transfers if transfer.is_routing))

    def transfers(self, strategy: str) -> tuple[WireTransfer, ...]:
        """Bytes by collective. All-gather and reduce-scatter each send (N-1)/N of the whole, as a ring."""
        formulas = {
            "gather_tokens": self._gathered_tokens,
            "gather_weights": self._gathered_weights,
            "all_to_all": self._exchanged_rows,
        }
        if strategy not in formulas:
            raise ValueError(f"strategy={strategy!r} has no formula")
        return tuple(formulas[strategy]())

    def _gathered_tokens(self) -> Iterator[WireTransfer]:
        """x and the output's gradient gathered, the output and x's gradient scattered."""
        width, active = self.sizes.hidden_size, self.sizes.num_experts_per_tok
        sent = self.num_tokens * (self.layout.tp - 1) / self.layout.tp
        x_bytes = width + 4 if self.fp8_tokens else width * self.element_bytes
        yield WireTransfer("all_gather", sent * x_bytes)
        yield WireTransfer("all_gather", sent * active * (ID_BYTES + WEIGHT_BYTES), is_routing=True)
        yield WireTransfer("reduce_scatter", sent * width * (self.sum_bytes or self.element_bytes))
        if self.regather:
            yield WireTransfer("all_gather", sent * x_bytes, is_backward=True)
        yield WireTransfer("all_gather", sent * width * self.element_bytes, is_backward=True)
        yield WireTransfer("reduce_scatter", sent * width * self.element_bytes, is_backward=True)
        yield WireTransfer("reduce_scatter", sent * active * WEIGHT_BYTES, is_routing=True, is_backward=True)

    def _gathered_weights(self) -> Iterator[WireTransfer]:
        """Weights gathered forward and backward, their gradients scattered."""
        sizes = self.sizes
        matrix = sizes.num_experts * sizes.moe_intermediate_size * sizes.hidden_size * self.element_bytes
        sent = matrix * (self.layout.tp - 1) / self.layout.tp
        for op, is_backward in (("all_gather", False), ("all_gather", True), ("reduce_scatter", True)):
            for num_matrices in (2, MATRICES - 2):  # gate and up are one tensor
                yield WireTransfer(op, num_matrices * sent, is_backward=is_backward)

    def _exchanged_rows(self) -> Iterator[WireTransfer]:
        """A row per token and expert: there and back, forward and backward. Ids are int64; one count per rank."""
        sizes, size = self.sizes, self.layout.tp
        rows = self.rho * self.num_tokens * sizes.num_experts_per_tok * (size - 1) / size**2
        yield WireTransfer("all_to_all", (size - 1) * 8, is_routing=True)
        yield WireTransfer("all_to_all", rows * 8, is_routing=True)
        for is_backward in (False, False, True, True):
            yield WireTransfer("all_to_all", rows * sizes.hidden_size * self.element_bytes, is_backward=is_backward)


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
    """What a transfer in chunks costs: `bytes_per_s` of one rank, and `chunk_s` more for every further chunk.

    memory_bytes_per_s  at which a chunk reads again what all of them need
    """

    bytes_per_s: float
    chunk_s: float
    memory_bytes_per_s: float


# A chunk more costs a collective's latency and a product on fewer rows. CPU: 1 Gbit/s Ethernet, and experts that are
# worked on one by one in any case; GPU: NVLink, and the memory of an A100 or H100.
LINKS = {"cpu": Link(125e6, 1e-3, math.inf), "cuda": Link(300e9, 15e-6, 2.5e12)}
MAX_CHUNKS = 8


def choose_num_chunks(sent_bytes: float, *, device: str, again_bytes: float = 0.0) -> int:
    """In how many chunks to send what overlaps with products: a power of two, 1 where more would not pay.

    The first chunk is waited for, every further one costs `chunk_s`, and to read `again_bytes`, the experts' weights:
    bytes / (chunks * rate) + chunks * cost is least at the square root of their ratio. A fixed rule, not a measurement:
    every rank and every run must agree.
    """
    link = LINKS.get(device, LINKS["cuda"])
    best = math.sqrt(sent_bytes / link.bytes_per_s / (link.chunk_s + again_bytes / link.memory_bytes_per_s))
    return max(1, min(MAX_CHUNKS, 2 ** round(math.log2(max(best, 1.0)))))


def settle_num_chunks(
    num_tokens: int, *, sent_bytes: int, device: str, overlap: bool, wanted: int | None, again_bytes: float = 0.0
) -> int:
    """In how many chunks a rank's rows are cut: as many as are wanted, else with overlap as many as pay."""
    num = wanted or 1
    if overlap and wanted is None:
        num = choose_num_chunks(sent_bytes, device=device, again_bytes=again_bytes)
    return max(1, min(num, num_tokens))


def tokens_at_once(num_active: int, *widths: int, element_bytes: int) -> int:
    """For how many tokens of `num_active` rows each a buffer has room, whichever of these widths its rows have."""
    return max(1, ROW_BUFFER_BYTES // (num_active * max(widths) * element_bytes))


def chunk_bound(k: int, *, num_rows: int, num_chunks: int) -> int:
    """Where chunk k of so many begins; the first ones are a row longer where they do not divide."""
    return -(-num_rows * k // num_chunks)


def head_rows(width: int, *, chunk_bytes: int) -> int:
    """Tokens whose float32 logits are made at a time, over `width` entries of the vocabulary."""
    return max(1, chunk_bytes // (4 * width))
