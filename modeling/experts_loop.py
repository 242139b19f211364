"""A rank's experts as a loop over experts, one product each over its rows; the host knows the counts. Fastest on CPU.

Rows, products and activations of one expert and chunk are worked on while they are in the cache. Weight gradients
come last and once per expert over all its rows, so that they do not depend on when chunks arrived.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .comm import Chunks, GatherInChunks, wide


class CountedRows(NamedTuple):
    """The token-expert pairs of a rank, exactly as many as there are, by slot and then by token; the host counted them.

    A pair's slot is the number of its expert among those of this rank; every other number is another rank's pair, or
    padding.

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


def count_rows(slots_TA: Tensor, *, num_slots: int, token_ends: list[int]) -> CountedRows:
    """Sort the pairs [T, A] by slot, stable, and leave out those of other ranks; `token_ends` is where chunks end."""
    num_tokens, num_active = slots_TA.shape
    slots = slots_TA.flatten()
    key, order = torch.where((slots >= 0) & (slots < num_slots), slots, num_slots).sort(stable=True)
    token_R = order // num_active
    # A number that rises with slot and token alike finds both kinds of ends in one search.
    rising = key * num_tokens + token_R
    first_of_slot = torch.arange(num_slots, device=key.device)[:, None] * num_tokens
    ends = read_row_ends(torch.searchsorted(rising, first_of_slot + torch.tensor(token_ends, device=key.device)))
    num_rows = ends[-1][-1]
    return CountedRows(token_R[:num_rows], order[:num_rows], ends)


def read_row_ends(ends: Tensor) -> list[list[int]]:
    """Wait for where the rows of each slot and each chunk of tokens end: [slots, chunks] int64 on the host."""
    return ends.tolist()


class LoopExperts:
    """One forward, or one backward, of a rank's experts over chunks of tokens in their order.

    stacks      gate_up [n, 2f, D] (gate rows first) and down [n, D, f] of the experts here, and of any others
    slots_TA    [T, A] int64, which of these experts each pair is for; any other number: for none of them
    weights_TA  [T, A], what the experts' outputs are summed with, float32 at least
    kept        what the forward left behind by `to_keep`, in its backward

    Tokens are in chunk order throughout.
    """

    def __init__(
        self,
        stacks: Sequence[Tensor],
        slots_TA: Tensor,
        weights_TA: Tensor,
        chunks: Chunks,
        kept: Sequence[Tensor] = (),
    ) -> None:
        self.chunks, self._stacks, self._weights_TA = chunks, stacks, weights_TA
        # A matrix each, so that the experts of several stacks need not be copied into one tensor.
        self._gate_up, self._down = _matrices(stacks)
        token_ends = [chunks.gathered_rows(k).stop for k in range(chunks.num_chunks)]
        self.rows = count_rows(slots_TA, num_slots=len(self._down), token_ends=token_ends)
        self._weight_R = weights_TA.flatten()[self.rows.pair_R]
        num_rows, twice_width = self.rows.token_R.shape[0], stacks[0].shape[1]
        [self._gate_up_R2f] = kept or [stacks[0].new_empty(num_rows, twice_width)]
        if kept:
            self._act_Rf = kept[0].new_empty(num_rows, twice_width // 2)
            self._grad_gate_up_R2f, self._grad_weight_R = torch.empty_like(kept[0]), torch.empty_like(self._weight_R)

    def to_keep(self) -> list[Tensor]:
        """What a forward leaves for the backward besides its inputs: the gate and up products [R, 2f]."""
        return [self._gate_up_R2f]

    def forward_chunk(self, k: int, x_cD: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Tokens [c, D] of chunk k -> the weighted sums of their experts here, [c, D] of `dtype`; sums in float32."""
        first = self.chunks.gathered_rows(k).start
        out_cD = wide(x_cD[:0]).new_zeros(x_cD.shape)
        for slot, here in self._segments(k):
            token = self.rows.token_R[here] - first
            products = torch.mm(x_cD[token], self._gate_up[slot].t(), out=self._gate_up_R2f[here])
            gate, up = products.chunk(2, dim=-1)
            y = wide(F.silu(gate).mul_(up) @ self._down[slot].t())
            out_cD.index_add_(0, token, y.mul_(self._weight_R[here, None]))
        return out_cD.to(dtype)

    def backward_chunk(self, k: int, grads: GatherInChunks, tokens: GatherInChunks) -> Tensor:
        """The gradient of chunk k's sums -> that of its tokens, [c, D] in the same type; sums in float32."""
        grad_cD = grads.chunk(k)
        first = self.chunks.gathered_rows(k).start
        grad_x_cD = wide(grad_cD[:0]).new_zeros(grad_cD.shape)
        for slot, here in self._segments(k):
            token = self.rows.token_R[here] - first
            gate, up = self._gate_up_R2f[here].chunk(2, dim=-1)
            silu = F.silu(gate)
            act = torch.mul(silu, up, out=self._act_Rf[here])
            # The output's gradient before its routing weight; times the activation it is also the weight's gradient.
            grad_act = wide(grad_cD[token] @ self._down[slot])
            torch.sum(grad_act * wide(act), dim=-1, out=self._grad_weight_R[here])
            grad_act = grad_act.mul_(self._weight_R[here, None]).to(act.dtype)
            grad_gate, grad_up = self._grad_gate_up_R2f[here].chunk(2, dim=-1)
            torch.mul(grad_act, silu, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_act.mul_(up), gate, grad_input=grad_gate)
            grad_rows = self._grad_gate_up_R2f[here] @ self._gate_up[slot]
            grad_x_cD.index_add_(0, token, wide(grad_rows))
        return grad_x_cD.to(grad_cD.dtype)

    def routing_gradient(self) -> Tensor:
        """The gradient of the routing weights [T, A], after the last chunk's backward."""
        grad = self._weights_TA.new_zeros(self._weights_TA.numel())
        grad[self.rows.pair_R] = self._grad_weight_R
        return grad.view_as(self._weights_TA)

    def weight_gradients(self, grad_TD: Tensor, x_TD: Tensor) -> list[Tensor]:
        """The gradients of the stacks, after the last chunk's backward, from all gradients and tokens."""
        gradients = [torch.empty_like(stack) for stack in self._stacks]
        grad_gate_up, grad_down = _matrices(gradients)
        for slot in range(len(self.rows.ends)):
            here = self.rows.rows(slot)
            token = self.rows.token_R[here]
            grad_y = (grad_TD[token] * self._weight_R[here, None]).to(x_TD.dtype)
            torch.mm(grad_y.t(), self._act_Rf[here], out=grad_down[slot])
            torch.mm(self._grad_gate_up_R2f[here].t(), x_TD[token], out=grad_gate_up[slot])
        return gradients

    def _segments(self, k: int) -> list[tuple[int, slice]]:
        """The slots with rows in chunk k, and which rows these are."""
        found = ((slot, self.rows.rows_in_chunk(slot, k)) for slot in range(len(self.rows.ends)))
        return [(slot, here) for slot, here in found if here.stop > here.start]


def _matrices(stacks: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Views of all gate_up and all down matrices, stack after stack."""
    gate_up, down = ([matrix for stack in kind for matrix in stack.unbind()] for kind in (stacks[::2], stacks[1::2]))
    return gate_up, down
