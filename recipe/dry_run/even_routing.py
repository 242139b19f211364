"""A model's step as if the routing were perfectly even: counts without a host read, products without numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor

from modeling import experts_grouped, experts_loop, moe
from recipe.plan.job import Job


@contextmanager
def even_routing(job: Job) -> Iterator[None]:
    """Let every expert get equally many rows, and every rank from every other, up to what does not divide.

    Replaces what waits for counts, and the grouped products, whose results on fake tensors are nothing but shapes.
    """
    pairs = job.num_tokens * job.sizes.num_experts_per_tok
    # What a rank's experts work on is as much as its own tokens ask for where weights or rows travel.
    rows = pairs // (job.layout.ep if job.moe_strategy == "gather_tokens" else job.layout.tp)
    replacements: list[tuple[Any, str, Any]] = [
        (experts_loop, "read_row_ends", _even_ends(rows)),
        (moe, "read_row_splits", _even_splits(pairs // job.layout.tp)),
        (experts_grouped, "multiply", _empty_product),
        (experts_grouped, "multiply_back", _empty_product_back),
        (experts_grouped, "multiply_outer", _empty_outer_product),
    ]
    before = [getattr(module, name) for module, name, _ in replacements]
    try:
        for module, name, function in replacements:
            setattr(module, name, function)
        yield
    finally:
        for (module, name, _), function in zip(replacements, before, strict=True):
            setattr(module, name, function)


def even_share(job: Job, *, rank: int) -> float:
    """The rows that `rank` sends in an exchange, over the mean of all ranks: 1 where they divide."""
    size = job.layout.tp
    if job.moe_strategy != "all_to_all" or size == 1:
        return 1.0
    total = job.num_tokens * job.sizes.num_experts_per_tok // size
    own = _parts(total, size=size)[rank % size]
    return (total - own) / (total * (size - 1) / size)


def _even_ends(total: int) -> Callable[[Tensor], list[list[int]]]:
    def read(ends: Tensor) -> list[list[int]]:
        num_slots, num_chunks = ends.shape
        parts = num_slots * num_chunks
        return [[total * (s * num_chunks + k + 1) // parts for k in range(num_chunks)] for s in range(num_slots)]

    return read


def _even_splits(total: int) -> Callable[[Tensor], list[list[int]]]:
    def read(splits: Tensor) -> list[list[int]]:
        counts = _parts(total, size=splits.shape[1])
        return [counts, counts]

    return read


def _parts(total: int, *, size: int) -> list[int]:
    """As equal as whole numbers are."""
    return [end - start for start, end in pairwise(total * i // size for i in range(size + 1))]


def _empty_product(x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor, *, triton: bool) -> Tensor:
    return x_RI.new_empty(x_RI.shape[0], weight_eOI.shape[1])


def _empty_product_back(grad_RO: Tensor, weight_eOI: Tensor, offsets_e: Tensor, *, triton: bool) -> Tensor:
    return grad_RO.new_empty(grad_RO.shape[0], weight_eOI.shape[2])


def _empty_outer_product(grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor, *, triton: bool) -> Tensor:
    return x_RI.new_empty(offsets_e.shape[0], grad_RO.shape[1], x_RI.shape[1])
