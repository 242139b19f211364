"""The most memory that a rank needs in an optimizer step, by what it is for, at the moment when that is most.

Closed formulas of what the code keeps and makes, for eager execution. The moments compared are the last layer's and the
first layer's backward of each kind, the head, the reduction of the last gradients, and the optimizer's step: between
two layers of a kind memory changes by the same amount each time, so that one of the ends is the most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from modeling.layout import ModelSizes
from recipe.plan.activations import attention_inputs, attention_kept, dense_kept, moe_kept
from recipe.plan.job import Job
from recipe.plan.memory_basis import attention_basis, experts_basis, zero_basis
from recipe.plan.memory_rows import ASSUMED, MEASURED, READ, Block, Row, StepSizes, block_of, step_sizes
from recipe.plan.parameters import RankParameters, rank_parameters
from recipe.plan.transients import attention_transients, dense_transients, head_transients, moe_transients
from recipe.plan.zero_memory import (
    ZeroMemory,
    arriving_rows,
    backward_rows,
    forward_rows,
    lasting_rows,
    reduce_rows,
    sent_rows,
    update_rows,
    whole_rows,
    zero_memory,
)

# No measurement: a caching allocator rounds requests up and keeps segments that no later request fits, and products,
# attention and collectives take workspace. How much depends on the order of sizes; a run of `sweep` tells.
MARGIN = 0.08
Blocks = Sequence[tuple[Block, int]]
KINDS = ("weights", "gradients", "optimizer", "activations", "gathered", "logits", "buffers")


class MemoryPlan(NamedTuple):
    """Bytes on the busiest rank at its fullest moment, each the part of it alive then; `margin` for fragmentation."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    logits: int
    buffers: int
    margin: int
    moment: str

    @property
    def peak_bytes(self) -> int:
        """Of living tensors."""
        return sum(getattr(self, kind) for kind in KINDS)

    @property
    def total_bytes(self) -> int:
        return self.peak_bytes + self.margin


class Moment(NamedTuple):
    """What is alive at some moment of a step: blocks of lines, each so many times."""

    name: str
    blocks: list[tuple[Block, int]]

    @property
    def num_bytes(self) -> float:
        return sum(block.num_bytes * times for block, times in self.blocks)

    @property
    def rows(self) -> list[Row]:
        """The lines that are not zero."""
        return [
            row._replace(num_bytes=row.num_bytes * times)
            for block, times in self.blocks
            for row in block.rows
            if row.num_bytes and times
        ]


class _Place(NamedTuple):
    """A layer, and how many of each kind there are up to it, itself included."""

    is_dense: bool
    num_moe: int
    num_dense: int

    @property
    def number(self) -> int:
        return self.num_moe + self.num_dense

    @property
    def module(self) -> str:
        """Its name in `held_modules`."""
        return f"block {self.number - 1}"


def predict_memory(job: Job, *, margin: float = MARGIN) -> MemoryPlan:
    """`margin`, a share of the peak, is for what an allocator reserves and cannot use, and for kernels' workspace."""
    fullest = max(moments(job), key=lambda moment: moment.num_bytes)
    sums = dict.fromkeys(KINDS, 0.0)
    for block, times in fullest.blocks:
        for row in block.rows:
            sums[row.kind] += row.num_bytes * times
    whole = {kind: int(value) for kind, value in sums.items()}
    return MemoryPlan(**whole, margin=int(margin * sum(whole.values())), moment=fullest.name)


def explain_memory(job: Job, *, margin: float = MARGIN) -> list[Row]:
    """The lines whose sum is the plan, at its fullest moment, and the margin."""
    fullest = max(moments(job), key=lambda moment: moment.num_bytes)
    spare = Row("for fragmentation", "margin", f"{margin:g} of the rest", margin * fullest.num_bytes, ASSUMED)
    return [*fullest.rows, spare]


def moments(job: Job) -> list[Moment]:
    """Those of which one is the fullest."""
    step = _step(job)
    z = step.zero
    found = [step.loss(), step.moment("reduction", reduce_rows(z)), step.moment("update", update_rows(z))]
    found.append(step.moment("first fetch", arriving_rows(z, "embedding", "block 0", is_backward=False)))
    for place in _ends(job.sizes):
        found += step.backward(place)
    filled = _where_filled(job.sizes, step)
    if filled is not None:
        found.append(step.first_reduction(filled))
    return found


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What all moments share.

    basis     of what ZeRO takes
    lasting   what stays from step to step
    inputs    of one layer's attention, the part of `kept` that stays longest
    kept      what a forward leaves of one layer's attention, experts, dense half
    working   what the backward of each adds
    numbers   of the parameters of a layer with experts, of a dense one
    """

    s: StepSizes
    zero: ZeroMemory
    held: RankParameters
    recompute: bool
    basis: str
    lasting: tuple[Block, ...]
    inputs: Block
    kept: tuple[Block, Block, Block]
    working: tuple[Block, Block, Block]
    numbers: tuple[int, int]
    last: _Place

    def moment(self, name: str, rows: list[Row], left: Blocks = ()) -> Moment:
        """With `rows` of what ZeRO takes."""
        lasting = [(block, 1) for block in self.lasting]
        return Moment(name, [*lasting, (block_of(rows, basis=self.basis), 1), *left])

    def loss(self) -> Moment:
        """All layers are behind, and none of the gradients made."""
        z, held = self.zero, self.held
        rows = [*forward_rows(z), *whole_rows(z, "head", is_backward=False)]
        head = block_of(head_transients(self.s, held), basis=MEASURED)
        return self.moment("loss", rows, [*self._behind(self.last), (head, 1)])

    def backward(self, place: _Place) -> list[Moment]:
        """A layer's feed-forward half, its attention, and where ZeRO-3 fetches its weights."""
        z, held = self.zero, self.held
        layer, below = self.numbers[place.is_dense], self._below(place)
        done, name = z.total - below, f"backward of layer {place.number}, "
        fetched = whole_rows(z, place.module, is_backward=True)
        made = [*fetched, *backward_rows(z, done=done)]
        half, kind = (self.working[2], "dense") if place.is_dense else (self.working[1], "experts")
        found = [self.moment(name + kind, made, [*self._at_work(place, with_feed=True), (half, 1)])]
        made = [*fetched, *backward_rows(z, done=done + layer - held.attention - held.norms)]
        # What this layer's attention works with has in it all that is still there, but for the inputs.
        left = [*self._at_work(place, with_feed=False, with_attention=False), (self.inputs, 1), (self.working[0], 1)]
        found.append(self.moment(name + "attention", made, left))
        arriving = arriving_rows(z, place.module, is_backward=True)
        if arriving:
            rows = [*arriving, *backward_rows(z, done=done)]
            found.append(self.moment(name + "fetch", rows, self._behind(place)))
        return found

    def first_reduction(self, place: _Place) -> Moment:
        """A bucket fills up in the midst of the backward: this layer's feed-forward half has gone through."""
        z, layer, below = self.zero, self.numbers[place.is_dense], self._below(place)
        own = Row("gradients of the layer", "gradients", "b P of a layer", z.b * (layer - self.held.attention))
        made = backward_rows(z, done=z.total - below)
        rows = [*whole_rows(z, place.module, is_backward=True), *made, own, *sent_rows(z)]
        return self.moment(f"first reduction, layer {place.number}", rows, self._at_work(place, with_feed=False))

    def _below(self, place: _Place) -> int:
        """Numbers of parameters whose gradients are still to come when this layer's turn is."""
        moe, dense = self.numbers
        return place.num_moe * moe + place.num_dense * dense + self.held.embedding

    def _behind(self, place: _Place) -> Blocks:
        """What all layers up to this one have left."""
        if self.recompute:
            return self._inputs(place.number)
        return self._left(place.number, place.num_moe, place.num_dense)

    def _at_work(self, place: _Place, *, with_feed: bool, with_attention: bool = True) -> Blocks:
        """The same in this layer's backward, with its feed-forward half and its attention, or without."""
        if self.recompute:
            own = self._left(with_attention, with_feed and not place.is_dense, with_feed and place.is_dense)
            return [*self._inputs(place.number - 1), *own]
        num_moe = place.num_moe - (not with_feed and not place.is_dense)
        num_dense = place.num_dense - (not with_feed and place.is_dense)
        return self._left(place.number - (not with_attention), num_moe, num_dense)

    def _inputs(self, number: int) -> Blocks:
        row = Row("layers' inputs", "activations", "t D b", self.s.t * self.s.D * self.s.b)
        return [(block_of([row], basis=MEASURED), number)]

    def _left(self, *numbers: int) -> Blocks:
        return list(zip(self.kept, numbers, strict=True))


def _step(job: Job) -> _Step:
    held = rank_parameters(job.sizes, job.layout)
    s, z = step_sizes(job), zero_memory(job, held)
    attention, experts, zero = attention_basis(job), experts_basis(job), zero_basis(job)
    return _Step(
        s=s,
        zero=z,
        held=held,
        recompute=job.recompute,
        basis=zero,
        lasting=(block_of(lasting_rows(z), basis=zero), block_of(_copies(job, held), basis=READ)),
        inputs=block_of(attention_inputs(s), basis=attention),
        kept=(
            block_of(attention_kept(s), basis=attention),
            block_of(moe_kept(s), basis=experts),
            block_of(dense_kept(s), basis=MEASURED),
        ),
        working=(
            block_of(attention_transients(s, held), basis=attention),
            block_of(moe_transients(s, held), basis=experts),
            block_of(dense_transients(s, held), basis=MEASURED),
        ),
        numbers=(held.layer(is_dense=False), held.layer(is_dense=True)),
        last=_ends(job.sizes)[-1],
    )


def _copies(job: Job, held: RankParameters) -> list[Row]:
    """Slots for other ranks' experts, and one layer's gradients of them; a grouped product also joins them."""
    number = job.wire.resident_experts
    if not number or not job.sizes.num_moe_layers:
        return []
    one = held.experts * job.layout.ep / job.sizes.num_experts * job.element_bytes
    joined = held.experts * job.element_bytes + number * one if job.static_rows else 0
    num = (job.sizes.num_moe_layers + 1) * number * one + joined
    return [Row("copies of experts", "buffers", "(L + 1) C 3 f D b", num)]


@lru_cache(maxsize=256)
def _ends(sizes: ModelSizes) -> tuple[_Place, ...]:
    """The first and the last layer of each kind."""
    kinds = ([i for i in range(sizes.num_hidden_layers) if (i in sizes.dense_layers) is kind] for kind in (False, True))
    ends = sorted({i for layers in kinds for i in (layers[:1] + layers[-1:])})
    return tuple(_place(sizes, i) for i in ends)


@lru_cache(maxsize=4096)
def _place(sizes: ModelSizes, index: int) -> _Place:
    num_dense = sum(layer <= index for layer in sizes.dense_layers)
    return _Place(index in sizes.dense_layers, index + 1 - num_dense, num_dense)


def _where_filled(sizes: ModelSizes, step: _Step) -> _Place | None:
    """About where the first bucket fills in the backward; None where it does only at the end, or gradients wait."""
    z, num_layers = step.zero, sizes.num_hidden_layers
    if z.stage < 2 or z.filled == z.total:
        return None
    mean = (z.total - step.held.embedding - step.held.head) / num_layers
    behind = int((z.bucket - step.held.head) / mean)
    return _place(sizes, num_layers - 1 - min(max(behind, 0), num_layers - 1))
