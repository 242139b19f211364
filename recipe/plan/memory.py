"""The most memory that a rank needs in an optimizer step, by what it is for, at the moment when that is most.

Closed formulas of what the code keeps and makes, for eager execution. The moments compared are the last layer's and the
first layer's backward of each kind, the head, the reduction of the last gradients, and the optimizer's step: between
two layers of a kind memory changes by the same amount each time, so that one of the ends is the most. Where ZeRO-3
fetches a layer's weights is not among them: they are there twice then, but its gradients take no less in its backward.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from modeling.spec import ModelSizes
from recipe.plan import memory_lines
from recipe.plan.job import Job
from recipe.plan.memory_lines import Letters, Line, Lines, text_of, total
from recipe.plan.parameters import RankParameters, rank_parameters
from recipe.plan.zero_memory import ZeroMemory

# A share of the peak, no measurement: a caching allocator rounds requests up and keeps segments that no later request
# fits, and products, attention and collectives take workspace. A run of `sweep` tells how much.
MARGIN = 0.08
KINDS = ("weights", "gradients", "optimizer", "activations", "gathered", "logits", "buffers")
MEASURED = "measured: its moment's sum against the storages of real and of fake steps"
READ = "read in the code"
ASSUMED = "assumed"


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
        """Bytes of living tensors."""
        return sum(getattr(self, kind) for kind in KINDS)

    @property
    def total_bytes(self) -> int:
        return self.peak_bytes + self.margin

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind, the margin included."""
        return {kind: getattr(self, kind) for kind in (*KINDS, "margin")}


class Row(NamedTuple):
    """A line of the plan for people; `basis` says where the formula is from, which is known of whole parts."""

    what: str
    kind: str
    formula: str
    num_bytes: float
    basis: str


class Part(NamedTuple):
    """Lines that come and go together; `num_bytes` is their sum."""

    lines: Lines
    num_bytes: float
    basis: str


class Moment(NamedTuple):
    """What is alive at some moment of a step: parts, each so many times."""

    name: str
    parts: Sequence[tuple[Part, int]]
    num_bytes: float

    @property
    def rows(self) -> list[Row]:
        """The lines that are not zero."""
        return [
            Row(what, kind, text_of(times * num_bytes), times * num_bytes, part.basis)
            for part, times in self.parts
            for what, kind, num_bytes in part.lines
            if times * num_bytes
        ]

    def by_kind(self) -> dict[str, float]:
        """Return the bytes of each kind."""
        sums = dict.fromkeys(KINDS, 0.0)
        for part, times in self.parts:
            for _, kind, num_bytes in part.lines:
                sums[kind] += times * num_bytes
        return sums


def predict_memory(job: Job) -> MemoryPlan:
    """Predict the memory of one job; see `MemoryModel`."""
    return MemoryModel().predict(job)


class MemoryModel:
    """The memory of many jobs; what does not depend on ZeRO's stage or recomputation is computed once."""

    def __init__(self) -> None:
        self._parts: dict[tuple[Any, ...], tuple[Letters, dict[str, Part]]] = {}

    def predict(self, job: Job) -> MemoryPlan:
        key = job.micro_batch_key
        if key not in self._parts:
            letters = Letters(job)
            self._parts[key] = letters, _model_parts(job, letters)
        fullest = _fullest(_moments(job, *self._parts[key]))
        whole = {kind: int(value) for kind, value in fullest.by_kind().items()}
        return MemoryPlan(**whole, margin=int(MARGIN * sum(whole.values())), moment=fullest.name)


def explain_memory(job: Job) -> list[Row]:
    """Return the lines whose sum is the plan, at its fullest moment, with their formulas, and the margin."""
    fullest = _fullest(moments(job, named=True))
    spare = Row("for fragmentation", "margin", f"{MARGIN:g} of the rest", MARGIN * fullest.num_bytes, ASSUMED)
    return [*fullest.rows, spare]


def moments(job: Job, *, named: bool = False) -> list[Moment]:
    """Return the moments of which one is the fullest; `named`: with formulas."""
    letters = Letters(job, named=named)
    return _moments(job, letters, _model_parts(job, letters))


def _fullest(found: Sequence[Moment]) -> Moment:
    return max(found, key=lambda moment: moment.num_bytes)


def _moments(job: Job, letters: Letters, parts: Mapping[str, Part]) -> list[Moment]:
    step, sizes = _Step(job, letters, parts), job.sizes
    zero = step.zero
    everything = step.kept(sizes.num_moe_layers, len(sizes.dense_layers))
    at_loss = [*zero.forward(), *zero.whole("head", is_backward=False)]
    found = [
        step.moment("loss", at_loss, {**everything, "head working": 1}),
        step.moment("reduction", zero.reduction()),
        step.moment("update", zero.update()),
    ]
    for index in _ends(sizes):
        found += step.backward(index)
    filled = _where_filled(sizes, zero, step.held)
    if filled is not None:
        found.append(step.first_reduction(filled))
    return found


def _model_parts(job: Job, s: Letters) -> dict[str, Part]:
    """Return the parts of a step's moments that the model takes, of one layer each.

    "input" is what is left of a layer that is computed again, "inputs" what its attention keeps longest, "products"
    what it keeps besides; "… working" is what the backward of a half of a layer, or of the head, adds.
    """
    # Kernels for packed documents, a backend for GPUs alone, types that change on the way and a limit to the rows were
    # not in the steps that were measured.
    attention = READ if job.is_packed and job.device == "cuda" else MEASURED
    run = job.execution
    changed = run.token_dtype != "auto" or run.combine_dtype != "auto" or run.resident_experts
    limited = job.model.get("capacity_factor") is not None
    experts = READ if changed or limited or run.experts_backend == "triton" else MEASURED
    return {
        "input": _part([Line("layers' inputs", "activations", s.t * s.D * s.b)], basis=MEASURED),
        "inputs": _part(memory_lines.attention_inputs(s), basis=attention),
        "products": _part(memory_lines.attention_products(s), basis=attention),
        "experts": _part(memory_lines.experts_kept(s), basis=experts),
        "dense": _part(memory_lines.dense_kept(s), basis=MEASURED),
        "attention working": _part(memory_lines.attention_working(s), basis=attention),
        "experts working": _part(memory_lines.experts_working(s), basis=experts),
        "dense working": _part(memory_lines.dense_working(s), basis=MEASURED),
        "head working": _part(memory_lines.head_working(s), basis=MEASURED),
        "copies": _part(_copies(job, s), basis=READ),
        "graphs": _part(_graphs(job, s), basis=READ),
    }


class _Step:
    """Puts a step's moments together from parts."""

    def __init__(self, job: Job, letters: Letters, parts: Mapping[str, Part]) -> None:
        self.held = rank_parameters(job.sizes, job.layout)
        self.zero, self._parts, self._recompute = ZeroMemory(job, letters), parts, job.recompute
        self._dense_layers = job.sizes.dense_layers
        # Buckets beside the backward were not in the steps that were measured.
        self._basis = READ if job.zero.get("overlap_comm") else MEASURED
        self._lasting = [_part(self.zero.lasting(), basis=self._basis), parts["copies"], parts["graphs"]]
        self._has_graphs = job.execution.cuda_graph
        if self._has_graphs:  # what they work with is theirs for good
            kinds = [
                kind for kind, num in (("experts", job.sizes.num_moe_layers), ("dense", len(self._dense_layers))) if num
            ]
            at_work = [_at_work(kind) for kind in kinds]
            fullest = max(at_work, key=lambda names: sum(parts[name].num_bytes for name in names))
            self._lasting += [parts[name] for name in fullest]

    def moment(self, name: str, zero: Lines, times: Mapping[str, int] | None = None) -> Moment:
        """Return the moment with these lines of ZeRO's, beside what lasts and the model's parts, each so many times."""
        once = [*self._lasting, _part(zero, basis=self._basis)]
        parts = [(part, 1) for part in once] + [(self._parts[part], n) for part, n in (times or {}).items()]
        return Moment(name, parts, sum(n * part.num_bytes for part, n in parts))

    def kept(self, num_moe: int, num_dense: int) -> Counter[str]:
        """Return what so many layers have left."""
        layers = num_moe + num_dense
        if self._recompute:
            return Counter({"input": layers})
        return Counter({"inputs": layers, "products": layers, "experts": num_moe, "dense": num_dense})

    def backward(self, index: int) -> list[Moment]:
        """Return the moments of a layer's feed-forward half and of its attention."""
        zero, held, name = self.zero, self.held, f"backward of layer {index + 1}, "
        kind, below = "dense" if self._is_dense(index) else "experts", self.kept(*self._below(index))
        done = self._done_above(index)
        done_below = done + held.layer(is_dense=self._is_dense(index)) - held.attention - held.norms
        fetched = zero.whole(f"block {index}", is_backward=True)
        # What attention works with holds all of this layer that is still there, but for the inputs.
        at_work, left = below + Counter(_at_work(kind)), below + Counter(("inputs", "attention working"))
        if self._has_graphs:
            at_work = left = below
        return [
            self.moment(name + kind, [*fetched, *zero.backward(done=done)], at_work),
            self.moment(name + "attention", [*fetched, *zero.backward(done=done_below)], left),
        ]

    def first_reduction(self, index: int) -> Moment:
        """Return the moment when a bucket fills up in the backward, after this layer's feed-forward half."""
        zero, numbers = self.zero, self.held.layer(is_dense=self._is_dense(index))
        own = Line("gradients of the layer", "gradients", zero.s.b * (numbers - self.held.attention))
        made = zero.backward(done=self._done_above(index))
        lines = [*zero.whole(f"block {index}", is_backward=True), *made, own, *zero.sent()]
        left = self.kept(*self._below(index))
        if not self._has_graphs:
            left += Counter(("inputs", "products"))
        return self.moment(f"first reduction, layer {index + 1}", lines, left)

    def _is_dense(self, index: int) -> bool:
        return index in self._dense_layers

    def _below(self, index: int) -> tuple[int, int]:
        """Count the layers with experts and the dense ones below."""
        num_dense = sum(layer < index for layer in self._dense_layers)
        return index - num_dense, num_dense

    def _done_above(self, index: int) -> float:
        """Return the numbers of parameters whose gradients are made when this layer's turn is."""
        held, (num_moe, num_dense) = self.held, self._below(index)
        below = num_moe * held.moe_layer + num_dense * held.dense_layer + held.embedding
        return self.zero.s.P - (below + held.layer(is_dense=self._is_dense(index)))


def _at_work(kind: str) -> tuple[str, ...]:
    """Return the parts that the backward of a layer's feed-forward half of this kind holds."""
    return "inputs", "products", kind, f"{kind} working"


def _graphs(job: Job, s: Letters) -> Lines:
    """Return the buffers that all blocks' graphs share (recipe/engine/graphs.py)."""
    if not job.execution.cuda_graph:
        return []
    lines = [
        Line("gradients of attention's weights, in and out of graphs", "buffers", s.P_attention * s.b),
        Line("a block's tokens and their gradients, the same", "buffers", 4 * s.t * s.D * s.b),
    ]
    if job.sizes.num_moe_layers:
        lines.append(Line("gradients of the experts' weights, the same", "buffers", s.P_experts * s.b))
    if job.sizes.dense_layers:
        lines.append(Line("gradients of a dense layer's weights, the same", "buffers", s.P_dense * s.b))
    return lines


def _part(lines: Lines, *, basis: str) -> Part:
    return Part(lines, total(lines), basis)


def _copies(job: Job, s: Letters) -> Lines:
    """Return slots for other ranks' experts and one layer's gradients of them; a grouped product also joins them."""
    number = job.execution.resident_experts
    if not number or not job.sizes.num_moe_layers:
        return []
    one = s.P_experts * job.layout.ep / s.E * s.b
    lines = [Line("copies of experts", "buffers", number * (s.L + 1) * one)]
    if s.static:
        lines.append(Line("experts and copies joined", "buffers", s.P_experts * s.b + number * one))
    return lines


@lru_cache(maxsize=256)
def _ends(sizes: ModelSizes) -> list[int]:
    """Return the first and the last layer of each kind."""
    kinds = ([i for i in range(sizes.num_hidden_layers) if (i in sizes.dense_layers) is kind] for kind in (False, True))
    return sorted({i for layers in kinds for i in (layers[:1] + layers[-1:])})


def _where_filled(sizes: ModelSizes, zero: ZeroMemory, held: RankParameters) -> int | None:
    """Return about where the first bucket fills in the backward; None where only at the end, or gradients wait."""
    if zero.stage < 2 or zero.filled == zero.s.P:
        return None
    layers = sizes.num_hidden_layers
    mean = (float(zero.s.P) - held.embedding - held.head) / layers
    passed = int((float(zero.bucket) - held.head) / mean)
    return layers - 1 - min(max(passed, 0), layers - 1)
