"""Matrix products by shape, as the layers call them, and attention by length."""

from collections.abc import Iterator
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe.measure.sizes import Sizes
from recipe.measure.timing import Timing, Work
from recipe.plan.hardware_file import PRODUCT_KINDS
from recipe.plan.hardware_values import AttentionRate, ProductRate
from recipe.plan.rates import ATTENTION_BACKWARD_FLOPS

NUM_EXPERTS = 8  # whose weights are taken in turn, so that none is still in the cache
NUM_HEADS = 4


def measure_products(timing: Timing, sizes: Sizes, *, dtype: torch.dtype) -> dict[str, tuple[ProductRate, ...]]:
    """FLOP/s of every kind over the grid of rows and widths."""
    cases: dict[tuple[str, int, int], Work] = {}
    for width in sizes.widths:
        weights = [torch.randn(width, width, dtype=dtype, device=timing.device) for _ in range(NUM_EXPERTS)]
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
    """FLOP/s of causal attention, the causal half of the scores counted."""
    cases: dict[tuple[int, int, bool], Work] = {}
    for length in sizes.lengths:
        for head_dim in sizes.head_dims:
            shape = (1, NUM_HEADS, length, head_dim)
            query, key, value = (torch.randn(shape, dtype=dtype, device=timing.device) for _ in range(3))
            forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
            cases[length, head_dim, False] = torch.no_grad()(forward)
            cases[length, head_dim, True] = _attention_backward(query, key, value)
    seconds = timing.measure(cases, name=f"attention, {_name(dtype)}")
    rates = []
    for length in sizes.lengths:
        for head_dim in sizes.head_dims:
            flops = 2 * length**2 * NUM_HEADS * head_dim
            forward_s, backward_s = seconds[length, head_dim, False], seconds[length, head_dim, True]
            rates.append(
                AttentionRate(length, head_dim, flops / forward_s, ATTENTION_BACKWARD_FLOPS * flops / backward_s)
            )
    return tuple(rates)


def _product(kind: str, x: Tensor, grad: Tensor, *, weights: list[Tensor]) -> Work:
    """One of the kinds; [rows, width] each, [width, width] per expert."""
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


def _attention_backward(query: Tensor, key: Tensor, value: Tensor) -> Work:
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def best_rate(products: dict[str, tuple[ProductRate, ...]]) -> float:
    """The most FLOP/s of any product."""
    return max(_flops(products))


def _flops(products: dict[str, tuple[ProductRate, ...]]) -> Iterator[float]:
    return (rate.flops_per_s for kind in products.values() for rate in kind)
