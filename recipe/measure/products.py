"""The work of one rank that is timed, as the layers run it: products by shape, attention by length, passes over memory.

A pass is one of PASSES in recipe/plan/hardware.py, run with the operators that the layers use.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle, product

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.attention import RotaryTables, rotate
from modeling.comm import Chunks, wide
from modeling.layers import rms_norm
from modeling.router import route, router_statistics
from modeling.rows import Rows, combine, swiglu, swiglu_back
from modeling.vocabulary import Vocabulary, vocab_parallel_losses
from recipe.measure.timing import Sizes, Timing, Work
from recipe.plan.compute_time import ATTENTION_BACKWARD_FLOPS
from recipe.plan.hardware import PASSES, PRODUCT_KINDS, AttentionRate, Curve, ProductRate

NUM_EXPERT_WEIGHTS = 8  # whose weights are taken in turn, so that none is still in the cache
NUM_ATTENTION_HEADS = 4
# Of passes.
WIDTH = 512  # of a row
VOCABULARY = 4096
HEAD_DIM, NUM_HEADS = 64, 8
NUM_EXPERTS, NUM_ACTIVE = 32, 4


def measure_products(timing: Timing, sizes: Sizes, *, dtype: torch.dtype) -> dict[str, tuple[ProductRate, ...]]:
    """Measure FLOP/s of every kind over the grid of rows and widths."""
    cases: dict[tuple[str, int, int], Work] = {}
    for width in sizes.widths:
        weights = [torch.randn(width, width, dtype=dtype, device=timing.device) for _ in range(NUM_EXPERT_WEIGHTS)]
        for rows in sizes.rows:
            if 2 * rows * width**2 <= sizes.max_flops:
                x, grad = (torch.randn(rows, width, dtype=dtype, device=timing.device) for _ in range(2))
                for kind in PRODUCT_KINDS:
                    cases[kind, rows, width] = _product(kind, x, grad, weights=weights)
    seconds = timing.measure(cases, name=f"products, {_name(dtype)}")
    return {
        kind: tuple(
            ProductRate(rows, width, 2 * rows * width**2 / taken_s)
            for (found, rows, width), taken_s in seconds.items()
            if found == kind
        )
        for kind in PRODUCT_KINDS
    }


def measure_attention(timing: Timing, sizes: Sizes, *, dtype: torch.dtype) -> tuple[AttentionRate, ...]:
    """Measure FLOP/s of causal attention, the causal half of the scores counted."""
    cases: dict[tuple[int, int, bool], Work] = {}
    for length, head_dim in product(sizes.lengths, sizes.head_dims):
        shape = (1, NUM_ATTENTION_HEADS, length, head_dim)
        query, key, value = (
            torch.randn(shape, dtype=dtype, device=timing.device, requires_grad=True) for _ in range(3)
        )
        forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
        cases[length, head_dim, False] = torch.no_grad()(forward)
        cases[length, head_dim, True] = _backward(forward(), [query, key, value])
    seconds = timing.measure(cases, name=f"attention, {_name(dtype)}")
    rates = []
    for length, head_dim in product(sizes.lengths, sizes.head_dims):
        flops = 2 * length**2 * NUM_ATTENTION_HEADS * head_dim
        forward_s, backward_s = (seconds[length, head_dim, is_backward] for is_backward in (False, True))
        rates.append(AttentionRate(length, head_dim, flops / forward_s, ATTENTION_BACKWARD_FLOPS * flops / backward_s))
    return tuple(rates)


def _product(kind: str, x: Tensor, grad: Tensor, *, weights: list[Tensor]) -> Work:
    """Make a product of one of the kinds; [rows, width] each, [width, width] per expert."""
    weight, experts = weights[0], cycle(weights)
    # An expert hardly ever has as many rows as before, and some kernels are made anew for every number: now some more
    # than `rows` and now as many fewer.
    rows = len(x)
    off = max(1, rows // 32) if rows > 1 else 0
    more = torch.cat([x, x[:off]])
    lengths = cycle([rows, *(rows + sign * i for i in range(1, off + 1) for sign in (-1, 1))])
    works: dict[str, Work] = {
        "forward": lambda: x @ weight.t(),
        "expert": lambda: more[: next(lengths)] @ next(experts).t(),
        "input_gradient": lambda: grad @ weight,
        "weight_gradient": lambda: grad.t() @ x,
    }
    return works[kind]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Make = Callable[["Random", int], Work]


class Random:
    """Tensors of one type on one device."""

    def __init__(self, dtype: torch.dtype, *, device: str) -> None:
        self.dtype, self.device = dtype, device

    def rows(self, elements: int, *, width: int = WIDTH, dtype: torch.dtype | None = None) -> Tensor:
        """Draw [elements / width, width], at least one row."""
        return torch.randn(max(1, elements // width), width, dtype=dtype or self.dtype, device=self.device)

    def wide_rows(self, elements: int) -> Tensor:
        """Draw the same in float32."""
        return self.rows(elements, dtype=torch.float32)

    def order(self, rows: Tensor) -> Tensor:
        """Return their numbers, shuffled."""
        return torch.randperm(len(rows), device=self.device)


def measure_passes(timing: Timing, sizes: Sizes, *, dtype: torch.dtype) -> dict[str, Curve]:
    """Measure seconds of every pass by its number of elements."""
    random = Random(dtype, device=timing.device)
    cases = {(name, n): MAKERS[name](random, n) for name in PASSES for n in sizes.elements}
    seconds = timing.measure(cases, name=f"passes over memory, {_name(dtype)}")
    return {name: tuple((n, seconds[name, n]) for n in sizes.elements) for name in PASSES}


def _norm(random: Random, n: int) -> Work:
    x, weight = random.rows(n), torch.ones(WIDTH, device=random.device)
    return lambda: rms_norm(x, weight, eps=1e-6)


def _norm_backward(random: Random, n: int) -> Work:
    x = random.rows(n).requires_grad_()
    weight = torch.ones(WIDTH, device=random.device, requires_grad=True)
    out = rms_norm(x, weight, eps=1e-6)
    return _backward(out, [x, weight])


def _rotate(random: Random, n: int) -> Work:
    length = max(1, n // (NUM_HEADS * HEAD_DIM))
    x = random.rows(length * NUM_HEADS * HEAD_DIM).view(1, length, NUM_HEADS, HEAD_DIM).transpose(1, 2)
    tables = RotaryTables(*(random.rows(length * HEAD_DIM, width=HEAD_DIM)[None] for _ in range(2)))
    return lambda: rotate(x, tables)


def _rows(random: Random, n: int) -> Work:
    x = random.rows(n)
    order = random.order(x)
    return lambda: x[order]


def _add_rows(random: Random, n: int) -> Work:
    y = random.rows(n)
    out, order, weight = torch.zeros_like(wide(y)), random.order(y), random.rows(len(y), width=1)
    return lambda: out.index_add_(0, order, wide(y) * weight)


def _one_each(rows: int, *, device: str) -> Rows:
    """Rows of one expert, in any order, for as many tokens."""
    row_TA = torch.randperm(rows, device=device, dtype=torch.int32)[:, None]
    pair_R = torch.empty_like(row_TA[:, 0])
    pair_R[row_TA[:, 0].long()] = torch.arange(rows, device=device, dtype=torch.int32)
    return Rows(pair_R, row_TA, torch.tensor([rows], device=device, dtype=torch.int32))


def _combine(random: Random, n: int) -> Work:
    y = random.rows(max(n // 2, WIDTH))  # as much is written as read
    rows = _one_each(len(y), device=random.device)
    return lambda: combine(y, rows, dtype=y.dtype)


def _swiglu(random: Random, n: int) -> Work:
    gate_up = random.rows(2 * n, width=2 * WIDTH)
    rows = _one_each(len(gate_up), device=random.device)
    weights = torch.rand(len(gate_up), 1, device=random.device)
    return lambda: swiglu(gate_up, weights, rows)


def _swiglu_back(random: Random, n: int) -> Work:
    gate_up, grad = random.rows(2 * n, width=2 * WIDTH), random.rows(n)
    rows = _one_each(len(gate_up), device=random.device)
    weights = torch.rand(len(gate_up), 1, device=random.device)
    outs = {"grad_gate_up_R2f": torch.empty_like(gate_up), "act_Rf": torch.empty_like(grad)}
    return lambda: swiglu_back(grad, gate_up, weights, rows, **outs)


def _activation(random: Random, n: int) -> Work:
    gate, up = random.rows(2 * n, width=2 * WIDTH).chunk(2, dim=-1)
    return lambda: F.silu(gate).mul_(up)


def _activation_backward(random: Random, n: int) -> Work:
    gate, up = random.rows(2 * n, width=2 * WIDTH).chunk(2, dim=-1)
    grads = random.rows(2 * n, width=2 * WIDTH)
    grad_gate, grad_up = grads.chunk(2, dim=-1)
    grad, weight, act = random.rows(n), random.rows(len(gate), width=1), random.rows(n)

    def work() -> None:
        silu = F.silu(gate)
        torch.mul(silu, up, out=act)
        grad_act = wide(grad)
        (grad_act * wide(act)).sum(-1)
        grad_act = (grad_act * weight).to(act.dtype)
        torch.mul(grad_act, silu, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_act.mul_(up), gate, grad_input=grad_gate)

    return work


def _routing(random: Random, n: int) -> Work:
    logits = random.rows(n, width=NUM_EXPERTS, dtype=torch.float32).requires_grad_()
    sequences = torch.zeros(len(logits), dtype=torch.int64, device=random.device)

    def work() -> None:
        routing = route(logits, num_active=NUM_ACTIVE, renormalise=True)
        sums = router_statistics(routing, sequence_of_token_t=sequences, num_sequences=1, token_mask_t=None)
        loss = routing.weights_tA.sum() + sums.probs_BE.sum() + sums.z_B.sum()
        torch.autograd.grad(loss, [logits])

    return work


def _loss(random: Random, n: int) -> Work:
    # So narrow that its products weigh nothing.
    x = random.rows(max(1, n // VOCABULARY) * 8, width=8).requires_grad_()
    weight = random.rows(VOCABULARY * 8, width=8).requires_grad_()
    targets = torch.zeros(len(x), dtype=torch.int64, device=random.device)
    vocabulary = Vocabulary(0, VOCABULARY, None)
    return lambda: vocab_parallel_losses(x, weight, targets, vocabulary=vocabulary, chunks=Chunks(len(x)))


def _adamw(random: Random, n: int) -> Work:
    parameter = torch.nn.Parameter(random.wide_rows(n))
    parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW([parameter], lr=1e-9, fused=True).step


def _squares(random: Random, n: int) -> Work:
    x = random.wide_rows(n)
    return lambda: torch.linalg.vector_norm(x.double())


def _backward(out: Tensor, inputs: list[Tensor]) -> Work:
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


MAKERS: Mapping[str, Make] = {
    "copy": lambda random, n: random.rows(n).clone,
    "add": lambda random, n: partial(torch.add, random.rows(n), random.rows(n)),
    "norm": _norm,
    "norm_backward": _norm_backward,
    "rotate": _rotate,
    "rows": _rows,
    "add_rows": _add_rows,
    "combine": _combine,
    "activation": _activation,
    "activation_backward": _activation_backward,
    "swiglu": _swiglu,
    "swiglu_back": _swiglu_back,
    "routing": _routing,
    "loss": _loss,
    "refill": lambda random, n: partial(random.wide_rows(n).copy_, random.wide_rows(n)),
    "sum_up": lambda random, n: partial(random.wide_rows(n).add_, random.wide_rows(n)),
    "adamw": _adamw,
    "squares": _squares,
}
