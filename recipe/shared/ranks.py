"""Ranks as host code sees them: which one this is of how many, everyone's values, and meetings.

Data, checkpoints and metrics take a `Ranks` and never ask torch.distributed themselves, so that they also run in a
world of one. It moves pickled Python objects between hosts: decisions and small facts, not tensors.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

POLL_S = 0.01
MAX_POLL_S = 0.25


class RanksMissingError(TimeoutError):
    """Some ranks did not come to a meeting in time: a collective function was called on a part of the ranks only."""


class Ranks:
    """Processes that act together: here a world of one. Every method is collective: all call it, in the same order."""

    rank = 0
    world_size = 1

    def gather(self, value: object) -> list[Any]:
        """Return every rank's value, by rank, on every rank; that takes the memory of all of them everywhere."""
        return [value]

    def first(self, value: object) -> Any:
        """Return rank 0's value on every rank; what the others give is not used."""
        return value

    def any(self, value: bool) -> bool:
        """Return whether `value` is true on any rank."""
        return self.any_later(value)()

    def any_later(self, value: bool) -> Callable[[], bool]:
        """Ask as `any` does, without waiting; calling what is returned, once on every rank, gives the answer."""
        return lambda: value

    def barrier(self) -> None:
        """Return once every rank has called."""

    def meet(self, purpose: str, *, timeout_s: float) -> None:
        """Wait for every rank; RanksMissingError, with `purpose` and the absent ranks' numbers, after `timeout_s`."""


class OneRank(Ranks):
    """A world of one process."""


class TorchRanks(Ranks):
    """The ranks of a group of torch.distributed, counted within it; the whole world where `group` is None.

    torch.distributed must be initialised, and the calling process must belong to the group.
    """

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        import torch.distributed as dist

        member = dist.group.WORLD if group is None else group
        if member is None:
            raise ValueError("TorchRanks needs torch.distributed to be initialised; for one process use OneRank()")
        self.rank = dist.get_rank(member)
        if self.rank < 0:
            raise ValueError("TorchRanks needs a group that this process belongs to")
        self.world_size = dist.get_world_size(member)
        self._group: ProcessGroup = member
        self._store = member.get_group_store()

    def gather(self, value: object) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def first(self, value: object) -> Any:
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=0)
        return values[0]

    def any_later(self, value: bool) -> Callable[[], bool]:
        import torch
        import torch.distributed as dist

        flag = torch.tensor(int(value), device="cuda" if dist.get_backend(self._group) == "nccl" else "cpu")
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def answer() -> bool:
            work.wait()
            return bool(flag)

        return answer

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
        complete = f"meeting/{number}/complete"
        if self._store.add(f"meeting/{number}/present", 1) == self.world_size:
            self._store.set(complete, purpose)
        deadline_s = time.monotonic() + timeout_s
        pause_s = POLL_S
        # Not store.wait(), which keeps the store from this process's other threads while it waits.
        while not self._store.check([complete]):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if not missing:
                    return
                raise RanksMissingError(
                    f"{purpose}: rank {self.rank} waited {timeout_s:g} s, but ranks {missing} of {self.world_size} "
                    "did not come; every rank must call it, so it cannot stand under `if rank == 0`"
                )
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_POLL_S)
