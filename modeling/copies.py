"""Copies of hot experts on other ranks: which to hold where, how rows are shared by the holders, and how copies travel.

A step is: `fill` before its first micro-batch, forwards and backwards that hand the slots out and never fill them
(recomputed ones neither), `drop` when the weights have changed. Copies go between ranks that hold the same slice of
their experts. The host knows what travels since `fill`, so no micro-batch waits for it.

After the all-gather every rank knows the routing of all tokens, so every rank computes the same shares of rows and no
message is needed. The work is on the device, on shapes that do not depend on the routing, and nothing is read by the
host. How even the loads can be follows from sets of ranks: rows of experts that no rank outside a set holds must be
done inside it, so the densest set bounds the busiest rank from below, and shares that reach the bound exist (Hall,
1935).

Shape letters beside the usual ones: P ranks that share the experts (ep), C slots for copies on each, S = 2 ** P sets of
ranks, bit p of a set standing for rank p; K = P * C slots, M = E + K homes and slots, R = T * A pairs.
Expert i lives on rank i // (E / P). A copy of a rank's own expert means an empty slot.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .comm import RowSplits, all_to_all_rows, scope, wide
from .config import GatherMoeConfig
from .execution import Execution, check_copies, resident_faults
from .experts import GatherMoeExperts
from .layers import autocast_inputs
from .mesh import ParallelMesh

SWEEPS = 2
SQUARINGS = 4  # densities to the power of 16: close to the maximum, and yet every dense set counts
FIXED_POINT = 2**40


class ExpertsWithCopies(GatherMoeExperts):
    """A rank's experts, and slots for copies of other ranks'; `held` is None as long as no copies are to be used."""

    def __init__(self, config: GatherMoeConfig, *, mesh: ParallelMesh, execution: Execution) -> None:
        """ValueError where this layout cannot have so many slots."""
        super().__init__(config, mesh=mesh, execution=execution)
        for fault in resident_faults(execution, num_experts=self.num_experts, num_ranks=mesh.layout.ep):
            raise ValueError(fault)
        self.num_slots = execution.resident_experts
        self.held: HeldCopies | None = None
        self._slot_weights: tuple[Tensor, ...] = ()

    def slots(self, ids_TA: Tensor) -> Tensor:
        if self.held is None:
            return super().slots(ids_TA)
        return self.held.slots(ids_TA, num_experts=self.num_experts)

    def stacks(self) -> Sequence[Tensor]:
        if self.held is None:
            return super().stacks()
        own = (self.gate_up_proj, self.down_proj)
        return _UseCopies.apply(self.held, *autocast_inputs(*own, *self.held.weights))

    def copies_PC(self, device: torch.device) -> Tensor:
        """The expert in each slot of each rank, [P, C] int64; one of the rank's own, an empty slot, if none is held."""
        if self.held is not None:
            return self.held.copies_PC
        own_P = torch.arange(0, self.num_experts, self.num_local, device=device)
        return own_P[:, None].expand(-1, self.num_slots)

    @torch.no_grad()
    @scope("copies")
    def fill(self, copies: Sequence[Sequence[int]]) -> None:
        """Get the weights of the experts that `copies` says for the slots here, and give those that others need.

        `copies` has the experts in the slots of every share of experts, the same on all ranks. Collective over the
        group, unless all slots stay empty.
        """
        traffic = copy_traffic(copies, num_local=self.num_local, mesh=self.mesh)
        self.held = None
        if all(expert // self.num_local == rank for rank, slots in enumerate(copies) for expert in slots):
            return
        own = (self.gate_up_proj, self.down_proj)
        # One buffer for all steps, at one address.
        self._slot_weights = self._slot_weights or tuple(w.new_zeros(self.num_slots, *w.shape[1:]) for w in own)
        lent_L, filled_F, copies_PC = (
            torch.tensor(numbers, dtype=torch.int64, device=own[0].device)
            for numbers in (traffic.lent, traffic.filled, copies)
        )
        for buffer, weight in zip(self._slot_weights, own, strict=True):
            arrived = all_to_all_rows(weight.index_select(0, lent_L), traffic.splits, _group(self.mesh))
            buffer.index_copy_(0, filled_F, arrived)
        self.held = HeldCopies(self._slot_weights, copies_PC, filled_F, traffic, self.mesh)

    def drop(self) -> None:
        """Use the slots no more until they are filled again: the weights they are copies of have changed."""
        self.held = None


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

    weights    [C, ...]      gate_up and down of the slots here
    copies_PC  [P, C] int64  the expert in each slot of each rank; one of the rank's own means an empty slot
    filled_F   [F] int64     `traffic.filled`, so that no backward copies it to the device
    """

    weights: tuple[Tensor, ...]
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
    def add_home(self, gradients: Sequence[Tensor], *, of_copies: Sequence[Tensor]) -> None:
        """Send the gradients of the copies home and add, in place, what comes home to those of the experts here.

        Collective over the group. The sum over an expert's holders runs in float32 at least and is rounded once.
        """
        lent, _, splits = self.traffic
        for gradient, of_copy in zip(gradients, of_copies, strict=True):
            returned = all_to_all_rows(of_copy.index_select(0, self.filled_F), splits.turned(), _group(self.mesh))
            for expert in dict.fromkeys(lent):
                parts = [wide(part) for part, number in zip(returned, lent, strict=True) if number == expert]
                gradient[expert] = sum(parts, start=wide(gradient[expert]))


class _UseCopies(torch.autograd.Function):
    """The experts' weights and those of the copies; in the backward the gradients of the copies go home."""

    @staticmethod
    def forward(ctx: Any, held: HeldCopies, *stacks: Tensor) -> tuple[Tensor, ...]:
        ctx.held = held
        # The same memory, so that autograd complains should the slots be filled again before the backward.
        return tuple(stack.detach() for stack in stacks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own, of_copies = grads[:2], grads[2:]
        ctx.held.add_home(own, of_copies=of_copies)
        return None, *own, *[None] * len(of_copies)


def copy_traffic(copies: Sequence[Sequence[int]], *, num_local: int, mesh: ParallelMesh) -> CopyTraffic:
    """Derive who sends what to whom from the experts in all slots; one that lives on its slot's rank goes nowhere."""
    here, lent, filled = mesh.ep_rank, [], []
    send, receive = [0] * mesh.layout.tp, [0] * mesh.layout.tp
    for share, peer in enumerate(mesh.expert_peers):
        if share != here:
            lent_there = [expert - here * num_local for expert in copies[share] if expert // num_local == here]
            filled_from_there = [slot for slot, expert in enumerate(copies[here]) if expert // num_local == share]
            send[peer], receive[peer] = len(lent_there), len(filled_from_there)
            lent += lent_there
            filled += filled_from_there
    return CopyTraffic(lent, filled, RowSplits(send, receive))


def _group(mesh: ParallelMesh) -> ProcessGroup:
    assert mesh.group is not None
    return mesh.group


class RowShares(NamedTuple):
    """How many rows of its experts each holder takes.

    home_rows_E   [E]     int64, on the rank where the expert lives
    copy_rows_PC  [P, C]  int64, by the copy in each slot
    largest_load  []      int64, rows of the busiest rank: the least possible with these copies
    """

    home_rows_E: Tensor
    copy_rows_PC: Tensor
    largest_load: Tensor


class Holders(NamedTuple):
    """Which rank computes each token-expert pair, and with which of the experts it holds.

    rank_TA   [T, A]  int64; P for pairs of padding
    local_TA  [T, A]  int64, the rank's own experts 0 to E / P - 1, then its copies in the order of the slots
    shares            the row counts behind it
    """

    rank_TA: Tensor
    local_TA: Tensor
    shares: RowShares


def choose_copies(counts_LE: Tensor, *, num_ranks: int, num_copies: int) -> Tensor:
    """Choose the experts that each rank should copy, layer by layer: counts of rows [L, E] -> int64 [L, P, C].

    Slot after slot takes the expert that makes the sets of ranks least dense, the densest above all, given the other
    slots; a second sweep reconsiders every slot. Among equals an empty slot wins, then the lower expert. Fixed-point
    sums make the choice the same on every rank that knows the same counts, whatever the order of additions.
    """
    num_layers, num_experts = counts_LE.shape
    check_copies(num_experts, num_ranks=num_ranks, num_copies=num_copies)
    counts_LE = counts_LE.long()
    own_P = torch.arange(num_ranks, device=counts_LE.device) * (num_experts // num_ranks)
    copies_LPC = own_P[:, None].expand(num_layers, num_ranks, num_copies).clone()
    for _ in range(SWEEPS):
        for slot in range(num_copies):
            for rank in range(num_ranks):
                copies_LPC[:, rank, slot] = own_P[rank]
                copies_LPC[:, rank, slot] = _best_copy(counts_LE, copies_LPC, rank=rank)
    return copies_LPC


def _best_copy(counts_LE: Tensor, copies_LPC: Tensor, *, rank: int) -> Tensor:
    """What a free slot of `rank` is best used for, [L]."""
    num_ranks, num_experts = copies_LPC.shape[1], counts_LE.shape[1]
    sets_S, size_S = _rank_sets(num_ranks, device=counts_LE.device)
    bits_LE = _holder_bits(copies_LPC, num_experts=num_experts)
    rows_LES = torch.where(_held_inside(bits_LE, sets_S), counts_LE[..., None], 0)
    demand_LS = rows_LES.sum(1)
    # With a copy on this rank, the sets without it are free of the expert.
    relief_LES = torch.where(sets_S >> rank & 1 == 1, 0, rows_LES)
    densest_L = (demand_LS / size_S).amax(-1).clamp(min=1)
    power_LES = (demand_LS[:, None] - relief_LES) / size_S / densest_L[:, None, None]
    for _ in range(SQUARINGS):
        power_LES = power_LES * power_LES
    cost_LE = (power_LES * FIXED_POINT).round().long().sum(-1)
    least_L = cost_LE.amin(-1)
    experts_E = torch.arange(num_experts, device=counts_LE.device)
    lowest_L = torch.where(cost_LE == least_L[:, None], experts_E, num_experts).amin(-1)
    own = rank * (num_experts // num_ranks)
    return torch.where(cost_LE[:, own] == least_L, own, lowest_L)


def share_rows(counts_E: Tensor, copies_PC: Tensor) -> RowShares:
    """Share the rows of each expert, int64 [E], among its holders so that the busiest rank has as few as possible.

    Slot after slot takes as many rows as leave every set of ranks able to do what is left to it alone; the rest stays
    at home. That keeps a solution in reach at every step, so the least largest load is reached exactly, in whole rows.
    """
    num_ranks, num_copies = copies_PC.shape
    num_experts, num_slots = counts_E.shape[0], num_ranks * num_copies
    sets_S, size_S = _rank_sets(num_ranks, device=counts_E.device)
    bits_E = _holder_bits(copies_PC[None], num_experts=num_experts)[0]
    demand_S = torch.where(_held_inside(bits_E, sets_S), counts_E[:, None], 0).sum(0)
    largest = ((demand_S + size_S - 1) // size_S).amax()
    spare_S = largest * size_S - demand_S
    rank_K = torch.arange(num_slots, device=counts_E.device) // max(num_copies, 1)
    expert_K = copies_PC.flatten()
    # Sets with the slot's rank that another holder is outside of: there a row taken by the slot is an additional one.
    loaded_KS = ((bits_E[expert_K, None] & ~sets_S) != 0) & (sets_S >> rank_K[:, None] & 1 == 1)
    takes_KE = (expert_K[:, None] == torch.arange(num_experts, device=counts_E.device)).long()
    # A copy at home would take rows from the same rank: it takes none.
    limit_K = torch.where(expert_K // (num_experts // num_ranks) == rank_K, 0, num_ranks * largest)
    left_E, taken = counts_E, []
    for slot in range(num_slots):
        room = torch.where(loaded_KS[slot], spare_S, limit_K[slot]).amin()
        taken.append(torch.minimum(left_E.gather(0, expert_K[slot : slot + 1]), room))
        spare_S = spare_S - loaded_KS[slot] * taken[-1]
        left_E = left_E - takes_KE[slot] * taken[-1]
    copy_rows_K = torch.cat(taken) if taken else counts_E.new_zeros(0)
    return RowShares(left_E, copy_rows_K.view(num_ranks, num_copies), largest)


def largest_loads(counts_LE: Tensor, *, copies_LPC: Tensor) -> Tensor:
    """Rows of the busiest rank of each layer, int64 [L], for counts of rows [L, E]: what `choose_holders` reaches."""
    num_layers, num_ranks, _ = copies_LPC.shape
    sets_S, size_S = _rank_sets(num_ranks, device=counts_LE.device)
    held_LES = _held_inside(_holder_bits(copies_LPC, num_experts=counts_LE.shape[1]), sets_S)
    demand_LS = torch.where(held_LES, counts_LE[..., None], 0).sum(1)
    return ((demand_LS + size_S - 1) // size_S).amax(-1).view(num_layers)


def least_loads(counts_LE: Tensor, *, num_ranks: int, num_copies: int) -> Tensor:
    """A bound to `largest_loads` over all choices of copies, int64 [L].

    Out of a set of ranks at most `num_copies` experts for every rank outside it can be copied; the rows of the others
    stay inside.
    """
    num_experts = counts_LE.shape[1]
    sets_S, size_S = _rank_sets(num_ranks, device=counts_LE.device)
    falling_LE, order_LE = counts_LE.sort(dim=-1, descending=True)
    inside_LSE = (sets_S[:, None] >> (order_LE // (num_experts // num_ranks))[:, None] & 1).bool()
    copied_S = num_copies * (num_ranks - size_S)
    stays_LSE = inside_LSE & (inside_LSE.cumsum(-1) > copied_S[:, None])
    demand_LS = torch.where(stays_LSE, falling_LE[:, None], 0).sum(-1)
    return ((demand_LS + size_S - 1) // size_S).amax(-1)


def choose_holders(ids_TA: Tensor, copies_PC: Tensor, *, num_experts: int) -> Holders:
    """Return who computes each pair of expert ids [T, A]; id num_experts is padding, which no rank computes.

    In the order of tokens the first rows of an expert stay at home, the next ones go to the first slot that holds a
    copy of it, and so on. A rank gets at most T * min(A, E / P + C) rows: a token has at most one for each expert
    that the rank holds.
    """
    num_ranks, num_copies = copies_PC.shape
    num_local, device = num_experts // num_ranks, ids_TA.device
    ids_R, order_R = ids_TA.flatten().sort(stable=True)
    experts_E = torch.arange(num_experts, device=device)
    ends_E = torch.searchsorted(ids_R, experts_E, right=True)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    shares = share_rows(counts_E, copies_PC)

    # The sorted pairs fall into one segment for every home and every slot, an expert's home before its copies.
    ranks_P, slots_C = torch.arange(num_ranks, device=device), torch.arange(num_copies, device=device)
    order_M = torch.cat([experts_E, copies_PC.flatten()]).sort(stable=True).indices
    rows_M = torch.cat([shares.home_rows_E, shares.copy_rows_PC.flatten()])[order_M]
    rank_M = torch.cat([experts_E // num_local, ranks_P.repeat_interleave(num_copies)])[order_M]
    local_M = torch.cat([experts_E % num_local, num_local + slots_C.repeat(num_ranks)])[order_M]
    places_R = torch.arange(order_R.numel(), device=device)
    segment_R = torch.searchsorted(rows_M.cumsum(0), places_R, right=True)
    # Padding has the highest id, so it lies past the end of the last segment.
    rank_R = torch.cat([rank_M, rank_M.new_full((1,), num_ranks)])[segment_R]
    local_R = torch.cat([local_M, local_M.new_full((1,), num_local + num_copies)])[segment_R]
    return Holders(
        torch.empty_like(rank_R).scatter_(0, order_R, rank_R).view_as(ids_TA),
        torch.empty_like(local_R).scatter_(0, order_R, local_R).view_as(ids_TA),
        shares,
    )


def _rank_sets(num_ranks: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Every set of ranks as bits, and how many ranks are in it; 1 for the empty set, so that it can be divided by."""
    sets_S = torch.arange(2**num_ranks, device=device)
    bits_SP = sets_S[:, None] >> torch.arange(num_ranks, device=device) & 1
    return sets_S, bits_SP.sum(-1).clamp(min=1)


def _held_inside(bits_E: Tensor, sets_S: Tensor) -> Tensor:
    """Whether all holders of an expert, [..., E] as bits, belong to a set of ranks: -> bool [..., E, S]."""
    return (bits_E[..., None] & ~sets_S) == 0


def _holder_bits(copies_LPC: Tensor, *, num_experts: int) -> Tensor:
    """The ranks that hold each expert, as bits: [L, P, C] -> [L, E]."""
    num_layers, num_ranks, _ = copies_LPC.shape
    ranks_P = torch.arange(num_ranks, device=copies_LPC.device)
    home_E = torch.arange(num_experts, device=copies_LPC.device) // (num_experts // num_ranks)
    held_LPE = (home_E == ranks_P[:, None]).expand(num_layers, -1, -1).scatter(-1, copies_LPC, True)
    return (held_LPE.long() << ranks_P[:, None]).sum(-2)
