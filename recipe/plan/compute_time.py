"""Seconds that a rank computes in a step, part by part in the order of the code, transfers left out.

Products and attention go by their shapes, everything else by the numbers that it reads and writes, as PASSES has them:
those of the torch operators that the code runs one after another, each reading its inputs and writing its result. A
probe runs the same operators (recipe/measure/products.py) and times them instead.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from math import ceil, exp, log
from typing import Any, NamedTuple

from modeling.cost import MATRICES
from modeling.execution import VARLEN
from recipe.plan.hardware import PASSES, USUAL, Efficiencies, Hardware, Pass
from recipe.plan.job import ELEMENT_BYTES, Job
from recipe.plan.parameters import rank_parameters

Points = list[tuple[float, float]]  # (log size, log value), sizes rising
Curves = list[tuple[float, Points]]  # by the log of another size, rising
# A causal backward multiplies five times where its forward does twice (FlashAttention, 2205.14135, appendix B).
ATTENTION_BACKWARD_FLOPS = 2.5


class Rates:
    """One rank's speed in one precision: as measured where a probe did, else a roofline under stated efficiencies.

    All sizes are of the rank's own work. `utilization` is the share of the peak that the whole step would reach if its
    device stayed cold, by which products slow down; `passes` are those of another system where they are not this
    project's. Raises ValueError for a precision that a hardware file does not hold.
    """

    def __init__(
        self,
        hardware: Hardware,
        *,
        precision: str,
        utilization: float = 0.0,
        passes: Mapping[str, Pass] = PASSES,
    ) -> None:
        if hardware.measured and precision not in hardware.measured:
            raise ValueError(
                f"hardware {hardware.name} was measured in {', '.join(sorted(hardware.measured))}, not in {precision}; "
                f"measure again with `gather-moe probe --precision {precision}`"
            )
        self._hardware, self._precision = hardware, precision
        self._bytes, self._moves = ELEMENT_BYTES[precision], passes
        self._product_once_s = cache(self._product_s)
        self._measured = bool(hardware.measured)
        reached = hardware.efficiencies
        self._warm = 1.0 if reached is None else 1 + reached.heat * utilization
        if self._measured:
            found = hardware.measured[precision]
            self._passes = {name: _logs(curve) for name, curve in found.passes.items()}
            self._products = {
                kind: _curves((rate.width, rate.rows, rate.flops_per_s) for rate in rates)
                for kind, rates in found.products.items()
            }
            self._attention = [
                _curves((rate.head_dim, rate.length, getattr(rate, way)) for rate in found.attention)
                for way in ("forward", "backward")
            ]

    def product_s(
        self, kind: str, *, rows: float, width: float, out: float, count: float = 1, at_once: float = 1
    ) -> float:
        """Return the seconds of `count` products of [rows, width] with [width, out]; kinds are `Measured`'s.

        at_once  of these are one kernel's
        """
        return self._product_once_s(kind, rows, width, out, at_once) * count

    def pass_s(self, name: str, elements: float, *, count: float = 1) -> float:
        """Return the seconds of `count` passes of PASSES over this many elements."""
        if self._measured:  # fewer elements than measured take what the fewest do, more in proportion
            return count * exp(_value_at(self._passes[name], log(max(elements, 1.0)), above=1.0))
        hardware = self._hardware
        assert hardware.efficiencies is not None
        moved_bytes = self._moves[name].bytes_per_element(self._bytes) * elements
        return count * moved_bytes / (hardware.memory_bytes_per_s * hardware.efficiencies.memory)

    def attention_s(
        self, kernel: str, *, tokens: float, num_heads: float, head_dim: int, length: float, backward: bool
    ) -> float:
        """Return the seconds of causal attention of this many tokens in sequences of `length`."""
        flops = 2 * tokens * length * num_heads * head_dim
        flops *= ATTENTION_BACKWARD_FLOPS if backward else 1
        if self._measured:
            return flops / _rate_at(self._attention[backward], head_dim, length)
        reached = self._hardware.efficiencies
        assert reached is not None
        share = reached.attention.get(kernel, reached.attention[USUAL])[backward]
        peak = self._hardware.peak_flops_per_s[self._precision]
        return flops / (peak * share) * (1 + reached.half_length / length)

    def _product_s(self, kind: str, rows: float, width: float, out: float, at_once: float) -> float:
        flops = 2 * rows * width * out
        if not flops:
            return 0.0
        if self._measured:  # fewer rows than measured take as long as the fewest
            return flops / _rate_at(self._products[kind], 2 * width * out / (width + out), rows, below=1.0)
        hardware, reached = self._hardware, self._hardware.efficiencies
        assert reached is not None
        # A gradient of weights sums over the rows.
        shape, depth = ((width, out), rows) if kind == "weight_gradient" else ((rows, out), width)
        share = reached.product * depth / (depth + reached.half_depth) * _filled(shape, reached, at_once) / self._warm
        moved_bytes = self._bytes * (rows * width + width * out + rows * out)
        return max(
            flops / (hardware.peak_flops_per_s[self._precision] * share),
            moved_bytes / (hardware.memory_bytes_per_s * reached.memory),
        )


def _filled(shape: tuple[float, float], reached: Efficiencies, at_once: float) -> float:
    """Return the share of a kernel's work that makes results, with the best of its tiles; half of the last wave counts.

    Processors start on what comes next while the others end.
    """
    best = 0.0
    for rows, columns in reached.tiles:
        tiles = ceil(shape[0] / rows) * ceil(shape[1] / columns)
        waves = at_once * tiles / reached.processors
        useful = shape[0] * shape[1] / (tiles * rows * columns)
        best = max(best, useful * waves / ((waves + ceil(waves)) / 2))
    return best


def _logs(points: Iterable[tuple[float, float]]) -> Points:
    return sorted((log(size), log(value)) for size, value in points)


def _curves(points: Iterable[tuple[float, float, float]]) -> Curves:
    """Return a curve of values by size for each of what comes first in a point."""
    found = defaultdict(list)
    for at, size, value in points:
        found[at].append((size, value))
    return [(log(at), _logs(curve)) for at, curve in sorted(found.items())]


def _rate_at(curves: Curves, at: float, size: float, *, below: float = 0.0) -> float:
    """Interpolate between two curves, each at this size."""
    return exp(_between([(x, _value_at(curve, log(size), below=below)) for x, curve in curves], log(at)))


def _value_at(points: Points, x: float, *, below: float = 0.0, above: float = 0.0) -> float:
    """Interpolate between points; outside go on with these slopes from the nearest."""
    first, last = points[0], points[-1]
    if x <= first[0]:
        return first[1] + below * (x - first[0])
    if x >= last[0]:
        return last[1] + above * (x - last[0])
    return _between(points, x)


def _between(points: Points, x: float) -> float:
    """Interpolate between points; outside take the nearest one's value."""
    i = bisect_left(points, (x,))
    if i == 0 or i == len(points):
        return points[min(i, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


class Times(NamedTuple):
    """Seconds of one layer in one pass, or of what is around the layers, by what they run beside.

    before   up to the first product on gathered tokens
    chunked  products on gathered tokens, over all chunks
    between  what follows with nothing under way
    sums     products whose sums are scattered, over all chunks
    weights  gradients of weights, which run while the last sums travel
    after    the rest
    """

    before: float = 0.0
    chunked: float = 0.0
    between: float = 0.0
    sums: float = 0.0
    weights: float = 0.0
    after: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


class Both(NamedTuple):
    """Seconds of a part, forward and backward."""

    forward: Times = Times()
    backward: Times = Times()

    def total(self, *, recompute: bool) -> float:
        """Return the seconds of a micro-batch, the forward once more where it is recomputed."""
        return (2 if recompute else 1) * self.forward.total + self.backward.total


# "attention", "router", "experts" and "dense" of one layer, "head" and "other" of the whole model, in one micro-batch.
LayerTimes = Mapping[str, Both]


def layer_times(job: Job, rates: Rates, *, exact: Rates) -> LayerTimes:
    """Return what one layer of each kind computes, and what is around the layers.

    exact  the rates in float32, which the router takes in either precision
    """
    has_experts, has_dense = job.sizes.num_moe_layers > 0, bool(job.sizes.dense_layers)
    return {
        "attention": attention_times(job, rates),
        "router": router_times(job, rates, exact) if has_experts else Both(),
        "experts": expert_times(job, rates) if has_experts else Both(),
        "dense": _dense_times(job, rates) if has_dense else Both(),
        "head": head_times(job, rates),
        "other": _other_times(job, rates),
    }


def attention_times(job: Job, rates: Rates) -> Both:
    """Return the seconds of a layer's attention with the norm before it and the sum after it."""
    sizes, tp, tokens, head = job.sizes, job.layout.tp, job.num_tokens, job.sizes.head_dim
    heads, kv_heads = sizes.num_attention_heads / tp, max(sizes.num_key_value_heads / tp, 1)
    query, key_value = heads * head, kv_heads * head
    length = job.attention_length or job.block_size

    def core(backward: bool) -> float:
        shape: dict[str, Any] = {"tokens": tokens, "num_heads": heads, "head_dim": head, "length": length}
        return rates.attention_s(job.attention, **shape, backward=backward)

    turned, projected = tokens * (query + key_value), tokens * (query + 2 * key_value)
    both = rates.pass_s("rotate", turned)
    if heads > kv_heads and job.attention not in VARLEN:  # their heads' keys and values repeated
        both += rates.pass_s("copy", 2 * tokens * query)
    if tp == 1:  # queries, keys and values each have a gradient of their input
        copies, back = 0.0, rates.pass_s("add", tokens * sizes.hidden_size, count=2)
    else:  # each projection made contiguous, and attention's output; gathered in chunks they are put in order, too
        copies = rates.pass_s("copy", projected) + rates.pass_s("copy", tokens * query)
        both, back = both + (copies if job.num_chunks > 1 else 0.0), 2 * copies
    norms = [rates.pass_s(name, turned) if sizes.qk_norm != "none" else 0.0 for name in ("norm", "norm_backward")]
    return _half_of_a_layer(
        job,
        rates,
        first=query + 2 * key_value,
        second=query,
        between=(both + copies + norms[0] + core(False), both + back + norms[1] + core(True)),
    )


def _dense_times(job: Job, rates: Rates) -> Both:
    """Return the seconds of a dense feed-forward layer with the norm before it and the sum after it."""
    width = job.sizes.intermediate_size / job.layout.tp
    elements = job.num_tokens * width
    between = (rates.pass_s("activation", elements), rates.pass_s("activation_backward", elements))
    return _half_of_a_layer(job, rates, first=2 * width, second=width, between=between)


def _half_of_a_layer(job: Job, rates: Rates, *, first: float, second: float, between: tuple[float, float]) -> Both:
    """Return the seconds of products on gathered tokens to `first` numbers per token, and of `second` to their sums.

    between  of what is worked on between the products, forward and backward
    """
    hidden, tokens, chunks = job.sizes.hidden_size, job.num_tokens, job.num_chunks
    here = job.tokens_per_rank * hidden

    def product(kind: str, inner: float, out: float) -> float:
        return rates.product_s(kind, rows=tokens / chunks, width=inner, out=out, count=chunks)

    forward = Times(
        before=rates.pass_s("norm", here),
        chunked=product("forward", hidden, first),
        between=between[0],
        sums=product("forward", second, hidden),
        after=rates.pass_s("add", here),
    )
    backward = Times(
        chunked=product("input_gradient", hidden, second),
        between=between[1] + rates.product_s("weight_gradient", rows=tokens, width=second, out=hidden),
        sums=product("input_gradient", first, hidden),
        weights=rates.product_s("weight_gradient", rows=tokens, width=first, out=hidden),
        after=rates.pass_s("norm_backward", here) + rates.pass_s("add", here),
    )
    return Both(forward, backward)


def expert_times(job: Job, rates: Rates) -> Both:
    """Return the seconds of a layer's experts with the norm before them and the sum after them, without the router."""
    rows, width = job.expert_rows, job.sizes.hidden_size
    here = job.tokens_per_rank * width
    all_experts = rows.num_experts * rows.chunks
    per_expert = rows.rows / all_experts
    # One after another each expert's rows are worked on alone; grouped, a chunk's rows at once. Kernels stop at the
    # last row, however many their buffers hold.
    each, count = (rows.rows / rows.chunks, rows.chunks) if job.static_rows else (per_expert, all_experts)
    at_once = rows.num_experts if job.static_rows else 1

    def product(inner: float, out: float) -> float:
        return rates.product_s("expert", rows=per_expert, width=inner, out=out, count=all_experts, at_once=at_once)

    def weights_product(inner: float, out: float) -> float:
        shape = {"rows": per_expert * rows.chunks, "width": inner, "out": out}
        return rates.product_s("weight_gradient", **shape, count=rows.num_experts, at_once=at_once)

    def per_row(name: str, elements: float) -> float:
        return rates.pass_s(name, each * elements, count=count)

    moved_s, moved_back_s = _moved(job, rates)
    look_up = per_row("rows", width)
    if job.static_rows:
        activations = per_row("swiglu", rows.width), per_row("swiglu_back", rows.width)
        sums = rates.pass_s("combine", (rows.rows + rows.tokens) * width / rows.chunks, count=rows.chunks)
    else:
        activations = per_row("activation", rows.width), per_row("activation_backward", rows.width)
        sums = per_row("add_rows", width) + rates.pass_s("copy", rows.tokens * width)
    first = look_up + product(width, 2 * rows.width)
    again = first if job.multiplies_again else 0.0
    added = rates.pass_s("add", MATRICES * rows.num_experts * rows.width * width, count=rows.num_groups - 1)
    forward = Times(
        before=rates.pass_s("norm", here),
        sums=first + activations[0] + product(rows.width, width) + sums + moved_s,
        after=rates.pass_s("add", here),
    )
    of_inputs = look_up + product(width, rows.width) + activations[1] + product(2 * rows.width, width)
    weighted = 0.0 if job.static_rows else per_row("add", width)  # outputs' gradients by their routing weights
    backward = Times(
        sums=again + of_inputs + sums + moved_back_s,
        weights=weights_product(width, rows.width)
        + weights_product(2 * rows.width, width)
        + 2 * look_up
        + weighted
        + added,
        # The gradients of the experts' and the router's inputs and of the residual meet.
        after=rates.pass_s("norm_backward", here) + rates.pass_s("add", here, count=2),
    )
    return Both(forward, backward)


def _moved(job: Job, rates: Rates) -> tuple[float, float]:
    """Return seconds of what a strategy joins and takes apart around the experts of a layer, forward and backward."""
    sizes, strategy = job.sizes, job.group_strategy
    if strategy == "gather_weights":
        # Slices joined for either pass, and their gradients put in the order in which they go home.
        joined_s = rates.pass_s("copy", MATRICES * sizes.num_experts * sizes.moe_intermediate_size * sizes.hidden_size)
        return joined_s, 2 * joined_s
    if strategy == "all_to_all":
        # Rows of this rank's tokens looked up, and what comes back weighted and added to them; backward the same, and
        # the products that weights and outputs get their gradients from.
        sent = job.tokens_per_rank * sizes.num_experts_per_tok * sizes.hidden_size
        once_s = rates.pass_s("rows", sent) + rates.pass_s("add_rows", sent)
        return once_s, once_s + rates.pass_s("add", sent, count=2)
    return 0.0, 0.0  # gathered tokens are read where they are


def router_times(job: Job, rates: Rates, exact: Rates) -> Both:
    """Return the seconds of one layer's router: a product in float32 in either precision, and what follows it."""
    sizes, tokens = job.sizes, job.tokens_per_rank
    elements = tokens * sizes.num_experts
    half = exact.pass_s("routing", elements) / 2
    shape = {"rows": tokens, "width": sizes.hidden_size, "out": sizes.num_experts}
    if job.precision == "bf16" and job.device == "cuda":  # a gradient is cut into three parts
        forward_s = rates.product_s("forward", **shape)
        backward_s = rates.product_s("input_gradient", rows=tokens, width=3 * sizes.num_experts, out=sizes.hidden_size)
        backward_s += rates.product_s("weight_gradient", **{**shape, "out": 3 * sizes.num_experts})
        backward_s += exact.pass_s("add", elements, count=3)
    else:
        cast_s = 0.75 * exact.pass_s("copy", tokens * sizes.hidden_size) if job.precision == "bf16" else 0.0
        forward_s = exact.product_s("forward", **shape) + cast_s
        backward_s = sum(exact.product_s(kind, **shape) for kind in ("input_gradient", "weight_gradient")) + cast_s
    return Both(Times(before=forward_s + half), Times(after=backward_s + half))


def head_times(job: Job, rates: Rates) -> Both:
    """Return the seconds of the head and its loss, whose gradients are made in the forward, slice by slice."""
    sizes, tokens, width = job.sizes, job.num_tokens, job.sizes.hidden_size
    vocabulary = -(-sizes.vocab_size // job.layout.tp)
    step = min(tokens / job.num_chunks, job.head_rows)
    shape = {"rows": step, "width": width, "out": vocabulary, "count": tokens / step}
    products = sum(rates.product_s(kind, **shape) for kind in ("forward", "input_gradient", "weight_gradient"))
    if job.precision == "bf16":  # each slice's gradient of the weights is added in float32
        products += rates.pass_s("sum_up", vocabulary * width, count=tokens / step)
    forward = Times(sums=products + rates.pass_s("loss", step * vocabulary, count=tokens / step))
    backward = Times(
        before=rates.pass_s("copy", vocabulary * width) + rates.pass_s("copy", job.tokens_per_rank * width)
    )
    return Both(forward, backward)


def _other_times(job: Job, rates: Rates) -> Both:
    """Return the seconds of the embedding and the last norm."""
    width, tokens, here = job.sizes.hidden_size, job.num_tokens, job.tokens_per_rank
    rows = -(-job.sizes.vocab_size // job.layout.tp)
    forward = Times(before=rates.pass_s("rows", tokens * width, count=2), after=rates.pass_s("norm", here * width))
    backward = Times(
        before=rates.pass_s("norm_backward", here * width),
        after=rates.pass_s("add_rows", tokens * width) + rates.pass_s("copy", rows * width),
    )
    return Both(forward, backward)


class Writes(NamedTuple):
    """How often ZeRO writes every number of a gradient in a micro-batch and in a step, and of what a rank updates.

    Each a pair, in float32: to a buffer that is there, or scaled in it; and to a fresh buffer for all parameters.
    """

    micro_batch: tuple[int, int]
    step: tuple[int, int]
    update: tuple[int, int]


# By ZeRO stage, as DeepSpeed 0.19.8 does it, with one data-parallel rank, too; counted operator by operator.
WRITES: Mapping[str, tuple[Writes, ...]] = {
    "fp32": (
        Writes((0, 0), (1, 1), (1, 0)),
        Writes((0, 0), (4, 0), (2, 1)),
        Writes((4, 0), (0, 0), (2, 1)),
        Writes((4, 1), (0, 0), (2, 1)),
    ),
    "bf16": (
        Writes((0, 0), (1, 1), (1, 0)),
        Writes((0, 0), (1, 1), (3, 0)),
        Writes((4, 1), (0, 0), (3, 0)),
        Writes((3, 1), (0, 0), (2, 1)),
    ),
}


def update_time(job: Job, exact: Rates) -> float:
    """Return the seconds that gradients and weights take in one step besides computing them, without transfers."""
    held = rank_parameters(job.sizes, job.layout)
    parameters = held.total
    stage, times, is_bf16 = job.zero_stage, job.accumulation, job.precision == "bf16"
    owned = parameters / job.layout.dp if stage else parameters
    writes = WRITES[job.precision][stage]

    def written_s(times: tuple[int, int], numbers: float) -> float:
        return exact.pass_s("refill", numbers, count=times[0]) + exact.pass_s("copy", numbers, count=times[1])

    # In bf16 each micro-batch's gradients are cast, tensor by tensor; stages 1 and 2 add the first one's to sums, too.
    casts = times * parameters / held.largest if is_bf16 and stage else 0.0
    sums = times if is_bf16 and stage in (1, 2) else times - 1
    gradients_s = times * written_s(writes.micro_batch, parameters) + written_s(writes.step, parameters)
    gradients_s += exact.pass_s("copy", held.largest, count=casts) + exact.pass_s("sum_up", parameters, count=sums)
    return gradients_s + written_s(writes.update, owned) + exact.pass_s("squares", owned) + exact.pass_s("adamw", owned)


# Operators of one layer besides the passes, products and attention that have a price: views are free, these are not.
OTHER_FORWARD, OTHER_BACKWARD = 7, 9


def num_launches(job: Job) -> int:
    """Count the kernels that a rank launches in a step, without the optimizer's."""
    chunks, of_experts, sizes = job.num_chunks, job.expert_rows.chunks, job.sizes
    kernels = {name: one.num_kernels for name, one in PASSES.items()}
    attention = kernels["norm"] * 3 + kernels["rotate"] * 2 + OTHER_FORWARD + 3 * chunks
    attention_back = kernels["norm_backward"] * 3 + kernels["rotate"] * 2 + OTHER_BACKWARD + 5 * chunks
    if job.static_rows:
        # Sorting takes four; then rows, two products of two kernels each, the activation, and the sums. Chunks are put
        # together, too.
        forward, backward = 14 * of_experts - 2, 19 * of_experts + 4
    else:
        num = of_experts * sizes.num_experts // job.layout.ep
        forward = num * (3 + kernels["activation"] + kernels["add_rows"])
        backward = num * (4 + kernels["activation_backward"] + kernels["add_rows"]) + num // of_experts * 6
    moe = kernels["norm"] + kernels["routing"] / 2 + OTHER_FORWARD + forward
    moe_back = kernels["norm_backward"] + kernels["routing"] / 2 + OTHER_BACKWARD + backward
    dense, dense_back = kernels["norm"] + OTHER_FORWARD, kernels["norm_backward"] + OTHER_BACKWARD
    times = 2 if job.recompute else 1
    layers: float = sizes.num_hidden_layers * (times * attention + attention_back)
    layers += sizes.num_moe_layers * (times * moe + moe_back) + len(sizes.dense_layers) * (times * dense + dense_back)
    return round(job.accumulation * layers)
