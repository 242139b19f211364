"""What host code needs to know about the other ranks: who it is among how many, everyone's values, and a place to meet.

Data, checkpoints and metrics take a `Ranks` and never ask torch.distributed themselves, so that they also run in a
world of one. What travels here is pickled Python objects between hosts: decisions and small facts, not tensors.
"""

import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

POLL_S = 0.01


class RanksMissingError(TimeoutError):
    """Some ranks did not come to a meeting in time: a collective function was called on a part of the ranks only."""


class Ranks(Protocol):
    """Processes that act together. Every method is collective: all ranks call it, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, by rank, on every rank."""
        ...

    def any(self, value: bool) -> bool:
        """Whether it is true on any rank; cheap enough for every step."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called."""
        ...

    def meet(self, purpose: str, *, timeout_s: float) -> None:
        """A barrier that raises RanksMissingError, with `purpose` and the absent ranks by number, after `timeout_s`."""
        ...


class OneRank:
    """A world of one process."""

    rank = 0
    world_size = 1

    def gather(self, value: object) -> list[Any]:
        return [value]

    def any(self, value: bool) -> bool:
        return value

    def barrier(self) -> None:
        return None

    def meet(self, purpose: str, *, timeout_s: float) -> None:
        return None


class TorchRanks:
    """The ranks of a group of torch.distributed, counted within it; the whole world where `group` is None.

    torch.distributed must be initialised, and the calling process must belong to the group.
    """

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        import torch.distributed as dist

        member = dist.group.WORLD if group is None else group
        if member is None:
            raise ValueError("TorchRanks needs torch.distributed to be initialised; for one process use OneRank()")
        self.rank: int = dist.get_rank(member)
        if self.rank < 0:
            raise ValueError("TorchRanks needs a group that this process belongs to")
        self.world_size: int = dist.get_world_size(member)
        self._group: ProcessGroup = member
        self._store = member.get_group_store()

    def gather(self, value: object) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def any(self, value: bool) -> bool:
        import torch
        import torch.distributed as dist

        flag = torch.tensor(int(value), device="cuda" if dist.get_backend(self._group) == "nccl" else "cpu")
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self._group)

    def meet(self, purpose: str, *, timeout_s: float) -> None:
        """Meet in the group's key-value store.

        Unlike a collective that runs out of time, this leaves the group usable and tells every waiting rank who is
        absent. (torch's own monitored_barrier tells rank 0 only, and a lone other rank waits for the group's time-out.)
        """
        # The store counts a rank's meetings, so that two TorchRanks of one group agree which meeting this is.
        number = self._store.add(f"meeting/{self.rank}", 1)
        keys = [f"meeting/{number}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], purpose)
        deadline_s = time.monotonic() + timeout_s
        while not self._store.check(keys):
            if time.monotonic() > deadline_s:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RanksMissingError(
                    f"{purpose}: rank {self.rank} waited {timeout_s:g} s, but ranks {missing} of {self.world_size} "
                    "did not come; every rank must call it, so it cannot stand under `if rank == 0`"
                )
            time.sleep(POLL_S)
