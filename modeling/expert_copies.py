"""Slots for copies of other ranks' experts: filled once per step, their gradients sent home in every backward.

Copies go between ranks that hold the same slice of their experts. A step is: `fill` before its first micro-batch,
forwards and backwards that hand the slots out and never fill them (recomputed ones neither), `drop` when the weights
have changed. The host knows what travels since `fill`, so no micro-batch waits for it.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import wide
from .experts_call import Slices
from .mesh import ParallelMesh
from .placement import resident_faults
from .resident import Holders, choose_holders
from .scopes import scope
from .transfers import RowSplits, all_to_all_rows


class CopyTraffic(NamedTuple):
    """What travels for one layer's copies, as one rank sees it; host numbers.

    lent    experts of this rank (numbers 0 to e - 1) that others hold copies of, by holder and then by slot
    filled  slots of this rank that hold a copy, by the rank where the expert lives
    splits  how many weights of them go to and come from every rank of the group
    """

    lent: list[int]
    filled: list[int]
    splits: RowSplits


class HeldCopies(NamedTuple):
    """One layer's copies while they are valid.

    weights    [C, ...]      of the slots here
    copies_PC  [P, C] int64  the expert in each slot of each rank; one of the rank's own means an empty slot
    filled_F   [F] int64     `traffic.filled`, so that no backward copies it to the device
    """

    weights: Slices
    copies_PC: Tensor
    filled_F: Tensor
    traffic: CopyTraffic
    mesh: ParallelMesh

    def slots(self, ids_TA: Tensor, *, num_experts: int) -> Tensor:
        """Which of its experts, or from e on which of its copies, this rank computes each pair of ids with: [T, A].

        Every rank finds the same holders from the same ids. Pairs of other ranks get e + C.
        """
        holders: Holders = choose_holders(ids_TA, self.copies_PC, num_experts=num_experts)
        num_ranks, num_copies = self.copies_PC.shape
        here = holders.rank_TA == self.mesh.ep_rank
        return torch.where(here, holders.local_TA, num_experts // num_ranks + num_copies)

    @scope("copies")
    def add_home(self, gradients: Slices, *, of_copies: Slices) -> None:
        """Send the gradients of the copies home and add, in place, what comes home to those of the experts here.

        Collective over the group. The sum over an expert's holders runs in float32 at least and is rounded once.
        """
        lent, _, splits = self.traffic
        for gradient, of_copy in zip(gradients, of_copies, strict=True):
            returned = all_to_all_rows(of_copy.index_select(0, self.filled_F), splits.turned(), _group(self.mesh))
            for expert in dict.fromkeys(lent):
                parts = [wide(part) for part, number in zip(returned, lent, strict=True) if number == expert]
                gradient[expert] = sum(parts, start=wide(gradient[expert]))


class ExpertCopies:
    """The slots of one layer. `held` is None as long as no copies are to be used."""

    def __init__(self, num_slots: int, *, num_experts: int, mesh: ParallelMesh, strategy: str) -> None:
        """ValueError where this layout cannot have so many."""
        ep = mesh.layout.ep
        for fault in resident_faults(num_slots, num_experts=num_experts, num_ranks=ep, strategy=strategy):
            raise ValueError(fault)
        self.num_slots, self._num_local, self._mesh = num_slots, num_experts // ep, mesh
        self._buffer: Slices | None = None
        self.held: HeldCopies | None = None

    @torch.no_grad()
    @scope("copies")
    def fill(self, own: Slices, copies: Sequence[Sequence[int]]) -> None:
        """Get the weights of the experts that `copies` says for the slots here, and give those that others need.

        own     [e, ...] of the experts here
        copies  for every share of experts its slots' experts, the same on all ranks

        Collective over the group, unless all slots stay empty.
        """
        traffic = copy_traffic(copies, num_local=self._num_local, mesh=self._mesh)
        self.held = None
        if all(expert // self._num_local == rank for rank, slots in enumerate(copies) for expert in slots):
            return
        if self._buffer is None:
            self._buffer = Slices(*(weight.new_zeros(self.num_slots, *weight.shape[1:]) for weight in own))
        lent_L, filled_F, copies_PC = (
            torch.tensor(numbers, dtype=torch.int64, device=own.down.device)
            for numbers in (traffic.lent, traffic.filled, copies)
        )
        for buffer, weight in zip(self._buffer, own, strict=True):
            arrived = all_to_all_rows(weight.index_select(0, lent_L), traffic.splits, _group(self._mesh))
            buffer.index_copy_(0, filled_F, arrived)
        self.held = HeldCopies(self._buffer, copies_PC, filled_F, traffic, self._mesh)

    def drop(self) -> None:
        """Use the slots no more until they are filled again."""
        self.held = None


def copy_traffic(copies: Sequence[Sequence[int]], *, num_local: int, mesh: ParallelMesh) -> CopyTraffic:
    """Who sends what to whom, from the experts in all slots; an expert that lives on its slot's rank goes nowhere."""
    here, others = mesh.ep_rank, [rank for rank in range(len(copies)) if rank != mesh.ep_rank]
    lent_to: dict[int, list[int]] = defaultdict(list)
    filled_from: dict[int, list[int]] = defaultdict(list)
    for rank in others:
        lent_to[rank] = [expert - here * num_local for expert in copies[rank] if expert // num_local == here]
        filled_from[rank] = [slot for slot, expert in enumerate(copies[here]) if expert // num_local == rank]
    send, receive = [0] * mesh.layout.tp, [0] * mesh.layout.tp
    for share, peer in enumerate(mesh.expert_peers):
        send[peer], receive[peer] = len(lent_to[share]), len(filled_from[share])
    lent, filled = ([n for rank in others for n in by_share[rank]] for by_share in (lent_to, filled_from))
    return CopyTraffic(lent, filled, RowSplits(send, receive))


def _group(mesh: ParallelMesh) -> ProcessGroup:
    assert mesh.group is not None
    return mesh.group
