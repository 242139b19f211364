"""What is not there in a dry run, replaced: the other ranks, the routing that data would decide, the grouped products.

Everything that replaces a part of the model stands in this file.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from modeling import comm, experts_grouped, experts_loop, moe, vocabulary
from modeling.config import GatherMoeConfig
from modeling.cost import HEAD_CHUNK_BYTES, settle_num_chunks
from modeling.layout import ParallelLayout
from modeling.mesh import ParallelMesh, build_mesh
from modeling.operators import NAMESPACE
from recipe.plan.job import Job


@contextmanager
def fake_world(layout: ParallelLayout, *, num_key_value_heads: int, rank: int = 0) -> Iterator[ParallelMesh]:
    """Make this process `rank` of the layout's ranks: collectives check their arguments and send nothing.

    ValueError for a rank outside the layout, and in a process that is a rank of a real group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is none of {layout.world_size} ranks, which are 0 to {layout.world_size - 1}")
    if dist.is_initialized():
        raise ValueError("a dry run needs a process of its own, and this one is a rank of a real group")
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        yield build_mesh(layout, num_key_value_heads=num_key_value_heads)
    finally:
        dist.destroy_process_group()


def config_of(job: Job) -> GatherMoeConfig:
    """Return the model's configuration in a run of this job."""
    config = GatherMoeConfig(**job.model, use_cache=False)
    config._attn_implementation = "sdpa"
    return config


@contextmanager
def without_data(job: Job, *, on_wait: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """Let the model run on fake CPU tensors as it would on the job's device, its routing perfectly even.

    Every expert gets equally many rows and every rank sends equally many, up to the remainder. Tokens are cut into as
    many chunks, and as many at a time in the head, as on the job's device.

    on_wait  is told where a host would wait for numbers that are made up here
    """
    pairs, rows = job.num_tokens * job.sizes.num_experts_per_tok, _even_rows(job)

    def as_on_the_device(num_tokens: int, **options: Any) -> int:
        return settle_num_chunks(num_tokens, **{**options, "device": job.device})

    def waiting(name: str, read: Callable[[Tensor], list[list[int]]]) -> Callable[[Tensor], list[list[int]]]:
        def replaced(counts: Tensor) -> list[list[int]]:
            on_wait(name)
            return read(counts)

        return replaced

    with ExitStack() as stack:
        for module, name, function in (
            (comm, "settle_num_chunks", as_on_the_device),
            (vocabulary, "CHUNK_BYTES", HEAD_CHUNK_BYTES[job.device]),
            (experts_loop, "read_row_ends", waiting("read_row_ends", _even_ends(rows))),
            (moe, "read_row_splits", waiting("read_row_splits", _even_splits(pairs // job.layout.tp))),
            (experts_grouped, "multiply", _product),
            (experts_grouped, "multiply_outer", _outer_product),
        ):
            stack.enter_context(patch.object(module, name, function))
        yield


# Our operators for either backend: they are dispatched as one, and fake tensors of any shape pass.
def _product(x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor, *, triton: bool) -> Tensor:
    experts_grouped.define_products()
    return getattr(torch.ops, NAMESPACE).multiply(x_RI, weight_eOI, offsets_e, None)


def _outer_product(grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor, *, triton: bool) -> Tensor:
    experts_grouped.define_products()
    return getattr(torch.ops, NAMESPACE).multiply_outer(grad_RO, x_RI, offsets_e, None)


def _even_rows(job: Job) -> int:
    """Rows of a rank's experts: as many as its own tokens ask for where weights or rows travel."""
    pairs = job.num_tokens * job.sizes.num_experts_per_tok
    return pairs // (job.layout.ep if job.moe_strategy == "gather_tokens" else job.layout.tp)


def share_of_rows(job: Job) -> float:
    """Return which part of the experts' buffers of rows is there."""
    active, experts = job.sizes.num_experts_per_tok, job.sizes.num_experts // job.layout.ep
    if job.group_strategy != "gather_tokens":
        return 1.0
    return _even_rows(job) / (job.num_tokens * min(active, experts))


def even_parts(total: int, *, size: int) -> list[int]:
    """Split a total into `size` whole numbers as equal as possible."""
    return [end - start for start, end in pairwise(total * i // size for i in range(size + 1))]


def _even_ends(total: int) -> Callable[[Tensor], list[list[int]]]:
    def read(ends: Tensor) -> list[list[int]]:
        num_slots, num_chunks = ends.shape
        parts = num_slots * num_chunks
        return [[total * (s * num_chunks + k + 1) // parts for k in range(num_chunks)] for s in range(num_slots)]

    return read


def _even_splits(total: int) -> Callable[[Tensor], list[list[int]]]:
    def read(splits: Tensor) -> list[list[int]]:
        counts = even_parts(total, size=splits.shape[1])
        return [counts, counts]

    return read
