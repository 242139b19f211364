"""A process group of any size with one rank in it: collectives check their arguments and send nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from modeling.layout import ParallelLayout
from modeling.mesh import ParallelMesh, build_mesh


@contextmanager
def fake_world(layout: ParallelLayout, *, num_key_value_heads: int, rank: int = 0) -> Iterator[ParallelMesh]:
    """This process as `rank` of the layout's ranks; ValueError for a rank that there is not, or in a real group."""
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
