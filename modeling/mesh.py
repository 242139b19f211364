"""The process groups of one rank: its tensor- and expert-parallel group, data-parallel peers, key-value twins."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .layout import ParallelLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class ParallelMesh:
    """Where this rank stands. Made by `build_mesh` on every rank together, or by `one_rank_mesh` alone.

    tp_group  the ranks that share attention heads and experts; None only without torch.distributed
    dp_group  the ranks with the same group_rank, one of every group
    kv_group  the ranks of the group that hold the same key-value head; None where every rank has its own
    """

    layout: ParallelLayout
    rank: int
    tp_group: ProcessGroup | None
    dp_group: ProcessGroup | None
    kv_group: ProcessGroup | None

    @cached_property
    def group_rank(self) -> int:
        return self.rank % self.layout.tp

    @cached_property
    def dp_rank(self) -> int:
        return self.rank // self.layout.tp

    @cached_property
    def group(self) -> ProcessGroup | None:
        """The group the layers communicate in; None for a group of one, where nothing has to travel."""
        return self.tp_group if self.layout.tp > 1 else None

    @cached_property
    def ep_rank(self) -> int:
        return self.group_rank // self.layout.etp

    @cached_property
    def expert_peers(self) -> list[int]:
        """For every share of the experts the rank of the group that holds this rank's slice of them."""
        etp = self.layout.etp
        return list(range(self.group_rank % etp, self.layout.tp, etp))

    @cached_property
    def dp_ranks(self) -> list[int]:
        """Global ranks of the data-parallel group."""
        return [dp * self.layout.tp + self.group_rank for dp in range(self.layout.dp)]


def one_rank_mesh() -> ParallelMesh:
    """A world of one rank, without any process group."""
    return ParallelMesh(layout=ParallelLayout(), rank=0, tp_group=None, dp_group=None, kv_group=None)


def build_mesh(layout: ParallelLayout, *, num_key_value_heads: int) -> ParallelMesh:
    """Create the process groups of `layout` over the whole world. Collective: every rank calls it with the same sizes.

    Raises ValueError when the layout does not cover the world.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if layout.world_size != world_size:
        raise ValueError(f"the layout {layout} is for {layout.world_size} ranks, but {world_size} are running")
    tp_blocks = [[dp * layout.tp + i for i in range(layout.tp)] for dp in range(layout.dp)]
    dp_blocks = [[dp * layout.tp + i for dp in range(layout.dp)] for i in range(layout.tp)]
    twins = max(layout.tp // num_key_value_heads, 1)
    kv_blocks = [block[i : i + twins] for block in tp_blocks for i in range(0, layout.tp, twins)]
    return ParallelMesh(
        layout=layout,
        rank=rank,
        tp_group=_own_group(tp_blocks, rank, options=_urgent()),
        dp_group=_own_group(dp_blocks, rank),
        kv_group=_own_group(kv_blocks, rank, options=_urgent()) if twins > 1 else None,
    )


def _urgent() -> Any:
    """Options of a group whose transfers go before products that are queued: a layer waits for the next chunk."""
    if dist.get_backend() != "nccl":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _own_group(blocks: list[list[int]], rank: int, *, options: Any = None) -> ProcessGroup:
    """Every rank creates every group, as torch requires, and keeps the one it is in."""
    groups = [(block, dist.new_group(block, pg_options=options)) for block in blocks]
    return next(group for block, group in groups if rank in block)
