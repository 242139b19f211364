"""A rank's experts as grouped products over buffers of fixed size, offsets on the device; the host reads nothing.

Every chunk has as many rows as could ever be this rank's. With `recompute` a forward keeps nothing and the backward
makes the gate and up products again: these buffers hold up to N times the rows of a balanced routing.
"""

from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import wide
from .expert_rows import Rows, sort_rows
from .experts_call import ExpertsCall, Slices, WeightGradients
from .transfers import GatheredChunks
from .triton_products import rows_times_weights, rows_times_weights_back, weight_gradient


class Products(Protocol):
    """The three grouped products; rows past the last offset of a result may hold anything."""

    def forward(self, x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor) -> Tensor:
        """Each row times its expert's weight transposed: -> [R, O]."""

    def back(self, grad_RO: Tensor, weight_eOI: Tensor, offsets_e: Tensor) -> Tensor:
        """The gradient of `forward` for its rows: -> [R, I]."""

    def weight_gradient(self, grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor) -> Tensor:
        """The gradient of `forward` for the weights, zero for experts without a row: -> [e, O, I]."""


class TorchProducts:
    """torch's grouped product; it keeps offsets on the device for bfloat16 on compute capability 9 and 10 only."""

    def forward(self, x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor) -> Tensor:
        return F.grouped_mm(x_RI, weight_eOI.transpose(1, 2), offs=offsets_e)

    def back(self, grad_RO: Tensor, weight_eOI: Tensor, offsets_e: Tensor) -> Tensor:
        return F.grouped_mm(grad_RO, weight_eOI, offs=offsets_e)

    def weight_gradient(self, grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor) -> Tensor:
        return F.grouped_mm(grad_RO.t(), x_RI, offs=offsets_e)


class TritonProducts:
    """Kernels of our own, which keep offsets on the device for every type and GPU that Triton knows."""

    def forward(self, x_RI: Tensor, weight_eOI: Tensor, offsets_e: Tensor) -> Tensor:
        return rows_times_weights(x_RI, weight_eOI=weight_eOI, offsets_e=offsets_e)

    def back(self, grad_RO: Tensor, weight_eOI: Tensor, offsets_e: Tensor) -> Tensor:
        return rows_times_weights_back(grad_RO, weight_eOI=weight_eOI, offsets_e=offsets_e)

    def weight_gradient(self, grad_RO: Tensor, x_RI: Tensor, offsets_e: Tensor) -> Tensor:
        return weight_gradient(grad_RO, x_RI=x_RI, offsets_e=offsets_e)


class _AllRows(NamedTuple):
    """The rows of all chunks, sorted by slot, as `Rows` has them for one.

    order_R  which row of the chunks behind each other each one is; None where that is their order already
    """

    token_R: Tensor
    valid_R: Tensor
    offsets_e: Tensor
    weight_R: Tensor
    order_R: Tensor | None

    def sort(self, x: Tensor) -> Tensor:
        return x if self.order_R is None else x[self.order_R]


class GroupedExperts:
    """One forward, or one backward, of a rank's experts; see `ExpertsPass`."""

    def __init__(
        self, call: ExpertsCall, kept: Tensor | None = None, *, products: Products, recompute: bool = False
    ) -> None:
        self._products, self._recompute = products, recompute
        self._num_own, self._has_copies = call.gate_up.shape[0], call.copies is not None
        self.call = call = _stacked(call)
        num_slots, chunks = call.gate_up.shape[0], call.chunks
        places = [chunks.gathered_rows(k) for k in range(chunks.num_chunks)]
        self.rows: list[Rows] = [sort_rows(call.slots_TA[here], num_slots=num_slots) for here in places]
        weights = [call.weights_TA[here].flatten() for here in places]
        self._weight_R = [w[rows.pair_R] for w, rows in zip(weights, self.rows, strict=True)]
        sizes = [rows.token_R.shape[0] for rows in self.rows]
        self._gate_up_R2f: list[Tensor] = [] if kept is None else list(kept.split(sizes))
        # Filled by a backward, the rows of all chunks behind each other.
        self._row_ends = list(accumulate(sizes, initial=0))
        self._act_Rf = self._grad_gate_up_R2f = call.gate_up.new_empty(0)
        self._grad_weight_R: list[Tensor] = []

    def to_keep(self) -> Tensor | None:
        """The gate and up products [R, 2f] of all chunks."""
        if self._recompute:
            return None
        return self._gate_up_R2f[0] if len(self.rows) == 1 else torch.cat(self._gate_up_R2f)

    def forward_chunk(self, k: int, x_cD: Tensor) -> Tensor:
        rows = self.rows[k]
        gate_up_R2f = self._multiply_in(k, x_cD)
        if not self._recompute:
            self._gate_up_R2f.append(gate_up_R2f)
        gate, up = gate_up_R2f.chunk(2, dim=-1)
        y_RD = self._products.forward(F.silu(gate) * up, self.call.down, rows.offsets_e)
        return self._sum_by_token(k, y_RD, self._weight_R[k])

    def backward_chunk(self, k: int, grad_cD: Tensor, tokens: GatheredChunks) -> Tensor:
        call, rows, weight_R = self.call, self.rows[k], self._weight_R[k]
        here = slice(self._row_ends[k], self._row_ends[k + 1])
        if k == 0:
            num_rows, twice_width = self._row_ends[-1], call.gate_up.shape[1]
            self._act_Rf = grad_cD.new_empty(num_rows, twice_width // 2)
            self._grad_gate_up_R2f = grad_cD.new_empty(num_rows, twice_width)
        gate_up_R2f = self._multiply_in(k, tokens.chunk(k)) if not self._gate_up_R2f else self._gate_up_R2f[k]
        gate, up = _clear_tail(gate_up_R2f, rows).chunk(2, dim=-1)
        silu = F.silu(gate)
        self._act_Rf[here] = act_Rf = silu * up
        # The output's gradient before its routing weight; times the activation it is also the weight's gradient.
        grad_act_Rf = self._products.back(_clear_tail(grad_cD[rows.token_R], rows), call.down, rows.offsets_e)
        grad_act_Rf = _clear_tail(grad_act_Rf, rows)
        self._grad_weight_R.append((wide(grad_act_Rf) * wide(act_Rf)).sum(-1))
        grad_act_Rf = (grad_act_Rf * weight_R[:, None]).to(act_Rf.dtype)
        grad_gate_up_R2f, width = self._grad_gate_up_R2f[here], act_Rf.shape[1]
        grad_gate_up_R2f[:, width:] = grad_act_Rf * silu
        grad_gate_up_R2f[:, :width] = torch.ops.aten.silu_backward(grad_act_Rf * up, gate)
        return self._sum_by_token(k, self._products.back(grad_gate_up_R2f, call.gate_up, rows.offsets_e), None)

    def routing_gradient(self) -> Tensor:
        call = self.call
        grad_weights = torch.zeros_like(call.weights_TA)
        for k, (rows, grad_R) in enumerate(zip(self.rows, self._grad_weight_R, strict=True)):
            here = grad_weights[call.chunks.gathered_rows(k)].view(-1)
            here[rows.pair_R] = grad_R.to(grad_weights.dtype)
        return grad_weights

    def weight_gradients(self, grad_TD: Tensor, x_TD: Tensor) -> WeightGradients:
        every = self._all_rows()
        grad_y_RD = (grad_TD[every.token_R] * every.weight_R[:, None]).to(x_TD.dtype)
        grad_y_RD = torch.where(every.valid_R[:, None], grad_y_RD, 0.0)
        grad_down = self._products.weight_gradient(grad_y_RD, every.sort(self._act_Rf), every.offsets_e)
        del grad_y_RD
        grad_rows = every.sort(self._grad_gate_up_R2f)
        grad_gate_up = self._products.weight_gradient(grad_rows, x_TD[every.token_R], every.offsets_e)
        if not self._has_copies:
            return WeightGradients(Slices(grad_gate_up, grad_down), None)
        own, copies = (
            Slices(grad_gate_up[here], grad_down[here]) for here in (slice(self._num_own), slice(self._num_own, None))
        )
        return WeightGradients(own, copies)

    def _multiply_in(self, k: int, x_cD: Tensor) -> Tensor:
        rows = self.rows[k]
        return self._products.forward(x_cD[rows.token_R], self.call.gate_up, rows.offsets_e)

    def _sum_by_token(self, k: int, y_RD: Tensor, weight_R: Tensor | None) -> Tensor:
        """Add every row, times its weight, to its token, always in the same order: -> [c, D]."""
        rows, num_active = self.rows[k], self.call.slots_TA.shape[1]
        here = self.call.chunks.gathered_rows(k)
        num_rows, num_tokens = y_RD.shape[0], here.stop - here.start
        out_cD = wide(y_RD[:0]).new_zeros(num_tokens, y_RD.shape[1])
        # On a device index_add adds in any order; so look up each pair's row instead and add choice after choice.
        row_of_pair = rows.pair_R.new_full((num_tokens * num_active,), num_rows)
        row_of_pair[rows.pair_R] = torch.arange(num_rows, device=y_RD.device)
        scale_R = rows.valid_R.to(out_cD.dtype) if weight_R is None else weight_R
        for choice in row_of_pair.view(num_tokens, num_active).unbind(1):
            row = choice.clamp(max=num_rows - 1)
            taken = (choice < num_rows) & rows.valid_R[row]
            # Rows past the last offset are uninitialised memory: mask by selection, never by multiplying with 0.
            part = torch.where(taken[:, None], wide(y_RD[row]), 0.0)
            out_cD += part * scale_R[row, None]
        return out_cD

    def _all_rows(self) -> _AllRows:
        """The rows of all chunks as one buffer sorted by slot."""
        if len(self.rows) == 1:
            rows = self.rows[0]
            return _AllRows(rows.token_R, rows.valid_R, rows.offsets_e, self._weight_R[0], None)
        slots, tokens = [], []
        for k, rows in enumerate(self.rows):
            number = torch.arange(rows.token_R.shape[0], device=rows.token_R.device)
            slots.append(torch.searchsorted(rows.offsets_e, number, right=True))
            tokens.append(rows.token_R + self.call.chunks.gathered_rows(k).start)
        key, order = torch.cat(slots).sort(stable=True)
        num_slots = self.call.gate_up.shape[0]
        offsets_e = torch.searchsorted(key, torch.arange(num_slots, device=key.device), right=True)
        return _AllRows(
            token_R=torch.cat(tokens)[order],
            valid_R=key < num_slots,
            offsets_e=offsets_e.to(torch.int32),
            weight_R=torch.cat(self._weight_R)[order],
            order_R=order,
        )


def _stacked(call: ExpertsCall) -> ExpertsCall:
    """The same call, the copies behind the experts in one tensor: a grouped product takes no list."""
    if call.copies is None:
        return call
    gate_up, down = torch.cat([call.gate_up, call.copies.gate_up]), torch.cat([call.down, call.copies.down])
    return call._replace(gate_up=gate_up, down=down, copies=None)


def _clear_tail(x: Tensor, rows: Rows) -> Tensor:
    """Zero the rows that no pair fills."""
    return torch.where(rows.valid_R[:, None], x, 0.0)
