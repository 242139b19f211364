"""A rank's experts as a loop over experts, one product each over its rows; the host knows the counts. Fastest on CPU.

Rows, products and activations of one expert and chunk are worked on while they are in the cache. Weight gradients
come last and once per expert over all its rows, so that they do not depend on when chunks arrived.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import wide
from .expert_rows import CountedRows, HostReads, count_rows
from .experts_call import ExpertsCall, Slices, WeightGradients
from .transfers import GatheredChunks


class _Matrices(NamedTuple):
    """One of each kind for every slot."""

    gate_up: list[Tensor]
    down: list[Tensor]


class LoopExperts:
    """One forward, or one backward, of a rank's experts; see `ExpertsPass`."""

    def __init__(self, call: ExpertsCall, kept: Tensor | None = None, *, host_reads: HostReads | None = None) -> None:
        self.call = call
        chunks = call.chunks
        token_ends = [chunks.gathered_rows(k).stop for k in range(chunks.num_chunks)]
        own = Slices(call.gate_up, call.down)
        # A matrix each, so that experts and copies need not lie in one tensor.
        self._gate_up, self._down = _matrices(own, call.copies)
        self.rows: CountedRows = count_rows(
            call.slots_TA,
            num_slots=len(self._down),
            token_ends=token_ends,
            host_reads=host_reads,
        )
        self._weight_R = call.weights_TA.flatten()[self.rows.pair_R]
        num_rows, twice_width = self.rows.token_R.shape[0], call.gate_up.shape[1]
        self._gate_up_R2f = call.gate_up.new_empty(num_rows, twice_width) if kept is None else kept
        # Filled by a backward.
        self._act_Rf = self._gate_up_R2f.new_empty(0)
        self._grad_gate_up_R2f = self._gate_up_R2f.new_empty(0)
        self._grad_weight_R = torch.empty_like(self._weight_R)

    def to_keep(self) -> Tensor:
        """The gate and up products [R, 2f]."""
        return self._gate_up_R2f

    def forward_chunk(self, k: int, x_cD: Tensor) -> Tensor:
        first = self.call.chunks.gathered_rows(k).start
        out_cD = wide(x_cD[:0]).new_zeros(x_cD.shape)
        for slot, here in self._segments(k):
            token = self.rows.token_R[here] - first
            products = torch.mm(x_cD[token], self._gate_up[slot].t(), out=self._gate_up_R2f[here])
            gate, up = products.chunk(2, dim=-1)
            y = wide(F.silu(gate).mul_(up) @ self._down[slot].t())
            out_cD.index_add_(0, token, y.mul_(self._weight_R[here, None]))
        return out_cD

    def backward_chunk(self, k: int, grad_cD: Tensor, tokens: GatheredChunks) -> Tensor:
        first = self.call.chunks.gathered_rows(k).start
        if k == 0:
            num_rows, twice_width = self._gate_up_R2f.shape
            self._act_Rf = grad_cD.new_empty(num_rows, twice_width // 2)
            self._grad_gate_up_R2f = grad_cD.new_empty(num_rows, twice_width)
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
        return grad_x_cD

    def routing_gradient(self) -> Tensor:
        weights_TA = self.call.weights_TA
        grad = weights_TA.new_zeros(weights_TA.numel())
        grad[self.rows.pair_R] = self._grad_weight_R
        return grad.view_as(weights_TA)

    def weight_gradients(self, grad_TD: Tensor, x_TD: Tensor) -> WeightGradients:
        call, rows = self.call, self.rows
        own = Slices(torch.empty_like(call.gate_up), torch.empty_like(call.down))
        copies = None if call.copies is None else Slices(*map(torch.empty_like, call.copies))
        grad_gate_up, grad_down = _matrices(own, copies)
        for slot in range(len(rows.ends)):
            here = rows.rows(slot)
            token = rows.token_R[here]
            grad_y = (grad_TD[token] * self._weight_R[here, None]).to(x_TD.dtype)
            torch.mm(grad_y.t(), self._act_Rf[here], out=grad_down[slot])
            torch.mm(self._grad_gate_up_R2f[here].t(), x_TD[token], out=grad_gate_up[slot])
        return WeightGradients(own, copies)

    def _segments(self, k: int) -> list[tuple[int, slice]]:
        """The slots with rows in chunk k, and which rows these are."""
        found = ((slot, self.rows.rows_in_chunk(slot, k)) for slot in range(len(self.rows.ends)))
        return [(slot, here) for slot, here in found if here.stop > here.start]


def _matrices(own: Slices, copies: Slices | None) -> _Matrices:
    """Views of the experts' and then of the copies' matrices."""
    parts = [own] if copies is None else [own, copies]
    return _Matrices(*([matrix for weight in kind for matrix in weight.unbind()] for kind in zip(*parts, strict=True)))
