"""Which tokens an expert works on: the token-expert pairs of a rank, sorted by expert.

A pair's slot is the number of its expert among those that this rank holds; every other number means that the pair is
another rank's, or nobody's.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class HostReads(NamedTuple):
    """How counts come to the host, which waits for them; another way can say what they are where there is no device.

    row_ends    [slots, chunks] int64, where the rows of each expert and each chunk of tokens end
    row_splits  [2, N] int64, how many rows go to every rank, and come from it
    """

    row_ends: Callable[[Tensor], list[list[int]]] = Tensor.tolist
    row_splits: Callable[[Tensor], list[list[int]]] = Tensor.tolist


class Rows(NamedTuple):
    """The pairs of a rank as a buffer of fixed size, sorted by slot; nothing was read by the host.

    token_R    [R] int64   which token each row is
    pair_R     [R] int64   which of the T * A pairs each row is
    valid_R    [R] bool    False in the tail that no pair fills
    offsets_e  [e] int32   end of each slot's rows
    """

    token_R: Tensor
    pair_R: Tensor
    valid_R: Tensor
    offsets_e: Tensor


class CountedRows(NamedTuple):
    """The pairs of a rank, exactly as many as there are, by slot and then by token; the host counted them.

    token_R  [R] int64   which token each row is
    pair_R   [R] int64   which of the T * A pairs each row is
    ends     per slot, per chunk of tokens, the end of its rows
    """

    token_R: Tensor
    pair_R: Tensor
    ends: list[list[int]]

    def rows(self, slot: int) -> slice:
        """All rows of a slot."""
        return slice(self.ends[slot - 1][-1] if slot else 0, self.ends[slot][-1])

    def rows_in_chunk(self, slot: int, k: int) -> slice:
        """The rows of a slot whose tokens are in chunk k."""
        start = self.ends[slot][k - 1] if k else self.rows(slot).start
        return slice(start, self.ends[slot][k])


def sort_rows(slots_TA: Tensor, *, num_slots: int) -> Rows:
    """Pairs of slots [T, A] by slot, stable, pairs of other ranks last and cut off after T * min(A, num_slots)."""
    num_tokens, num_active = slots_TA.shape
    key, order = _sort(slots_TA, num_slots)
    offsets_e = torch.searchsorted(key, torch.arange(num_slots, device=key.device), right=True).to(torch.int32)
    order = order[: num_tokens * min(num_active, num_slots)]
    return Rows(order // num_active, order, key[: order.shape[0]] < num_slots, offsets_e)


def count_rows(
    slots_TA: Tensor,
    *,
    num_slots: int,
    token_ends: list[int],
    host_reads: HostReads | None = None,
) -> CountedRows:
    """Pairs of slots [T, A] by slot, stable, without those of other ranks; `token_ends` is where each chunk ends."""
    num_active = slots_TA.shape[1]
    key, order = _sort(slots_TA, num_slots)
    token_R = order // num_active
    # A number that rises with slot and token alike finds both kinds of ends in one search.
    rising = key * slots_TA.shape[0] + token_R
    first_of_slot = torch.arange(num_slots, device=key.device)[:, None] * slots_TA.shape[0]
    row_ends = torch.searchsorted(rising, first_of_slot + torch.tensor(token_ends, device=key.device))
    ends = (host_reads or HostReads()).row_ends(row_ends)
    num_rows = ends[-1][-1]
    return CountedRows(token_R[:num_rows], order[:num_rows], ends)


def _sort(slots_TA: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Sorted slots, those of other ranks as `num_slots`, and the pairs in that order."""
    slots = slots_TA.flatten()
    key = torch.where((slots >= 0) & (slots < num_slots), slots, num_slots)
    key, order = key.sort(stable=True)
    return key, order
