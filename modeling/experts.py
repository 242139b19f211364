"""The experts this rank holds, applied to all tokens of the group: sort rows by expert, grouped products, sum.

One autograd Function, written against three operations that a backend provides. It keeps the gathered tokens and the
gate and up products, rebuilds rows and activations in the backward, and saves parameters rather than views of them,
so ZeRO-3 can drop their gathered copies.

    loop      one product per expert over its contiguous rows, counts read by the host; the fastest on CPU
    grouped   torch's grouped product over a fixed number of rows, offsets on the device; nothing is read by the host
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import wide
from .config import GatherMoeConfig
from .linear import autocast_inputs
from .mesh import ParallelMesh


class Rows(NamedTuple):
    """The token-expert pairs that this rank works on, sorted by local expert.

    token_R      [R] int64   which gathered token each row is
    pair_R       [R] int64   which of the T * A pairs each row is
    valid_R      [R] bool    False in the tail of a fixed-size buffer that no pair fills; None where there is no tail
    offsets_e    [e] int32   end of each expert's rows
    ends         the same on the host; None where the host must not read it
    """

    token_R: Tensor
    pair_R: Tensor
    valid_R: Tensor | None
    offsets_e: Tensor
    ends: list[int] | None


def sort_by_local_expert(ids_TA: Tensor, *, first_expert: int, num_local: int, read_counts: bool) -> Rows:
    """Order the pairs of expert ids [T, A] by local expert, stable, pairs of other ranks last and cut off.

    With `read_counts` exactly the local rows remain. Without, as many rows as can ever be local remain,
    T * min(A, num_local), and the host learns nothing about the routing.
    """
    num_tokens, num_active = ids_TA.shape
    local = ids_TA.flatten() - first_expert
    key = torch.where((local >= 0) & (local < num_local), local, num_local)
    key, order = key.sort(stable=True)
    experts = torch.arange(num_local, device=key.device)
    offsets_e = torch.searchsorted(key, experts, right=True).to(torch.int32)
    ends: list[int] | None = None
    if read_counts:
        ends = offsets_e.tolist()
        order = order[: ends[-1]]
        valid_R = None
    else:
        order = order[: num_tokens * min(num_active, num_local)]
        valid_R = key[: order.shape[0]] < num_local
    return Rows(order // num_active, order, valid_R, offsets_e, ends)


class GatherMoeExperts(nn.Module):
    """Experts as stacked weights: gate_up_proj [e, 2f, D] (gate rows first), down_proj [e, D, f]."""

    def __init__(self, config: GatherMoeConfig, *, mesh: ParallelMesh) -> None:
        super().__init__()
        layout = mesh.layout
        self.num_local = config.num_experts // layout.ep
        self.first_expert = mesh.ep_rank * self.num_local
        self.backend = config.experts_backend
        width = config.moe_intermediate_size // layout.etp
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_local, 2 * width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(self.num_local, config.hidden_size, width))

    def forward(self, x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """x_TD [T, D], expert ids and weights [T, A] -> this rank's share of each token's sum, [T, D].

        The sum over the experts of a token runs in float32 at least. Summed over the group it is the layer's output.
        """
        grouped = self.backend == "grouped" or (self.backend == "auto" and x_TD.is_cuda)
        rows = sort_by_local_expert(
            ids_TA, first_expert=self.first_expert, num_local=self.num_local, read_counts=not grouped
        )
        x_TD, gate_up, down = autocast_inputs(x_TD, self.gate_up_proj, self.down_proj)
        return _Experts.apply(x_TD, weights_TA, gate_up, down, rows)


def _multiply(x_RI: Tensor, weight_eOI: Tensor, rows: Rows) -> Tensor:
    """Each row times its expert's weight transposed: [R, I], [e, O, I] -> [R, O]."""
    if rows.ends is None:
        return F.grouped_mm(x_RI, weight_eOI.transpose(1, 2), offs=rows.offsets_e)
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_eOI.shape[1])
    start = 0
    for expert, end in enumerate(rows.ends):
        torch.mm(x_RI[start:end], weight_eOI[expert].t(), out=out_RO[start:end])
        start = end
    return out_RO


def _multiply_back(grad_RO: Tensor, weight_eOI: Tensor, rows: Rows) -> Tensor:
    """The gradient of `_multiply` for its rows: [R, O], [e, O, I] -> [R, I]."""
    if rows.ends is None:
        return F.grouped_mm(grad_RO, weight_eOI, offs=rows.offsets_e)
    out_RI = grad_RO.new_empty(grad_RO.shape[0], weight_eOI.shape[2])
    start = 0
    for expert, end in enumerate(rows.ends):
        torch.mm(grad_RO[start:end], weight_eOI[expert], out=out_RI[start:end])
        start = end
    return out_RI


def _weight_gradient(grad_RO: Tensor, x_RI: Tensor, rows: Rows) -> Tensor:
    """The gradient of `_multiply` for the weights, zero for experts without a row: [R, O], [R, I] -> [e, O, I]."""
    if rows.ends is None:
        return F.grouped_mm(grad_RO.t(), x_RI, offs=rows.offsets_e)
    out_eOI = x_RI.new_empty(len(rows.ends), grad_RO.shape[1], x_RI.shape[1])
    start = 0
    for expert, end in enumerate(rows.ends):
        torch.mm(grad_RO[start:end].t(), x_RI[start:end], out=out_eOI[expert])
        start = end
    return out_eOI


def _sum_by_token(y_RD: Tensor, weight_R: Tensor | None, rows: Rows, *, num_tokens: int, num_active: int) -> Tensor:
    """Add every row, times its weight, to its token, in float32 at least and always in the same order: -> [T, D]."""
    out_TD = wide(y_RD).new_zeros(num_tokens, y_RD.shape[1])
    if rows.ends is not None:
        start = 0
        for end in rows.ends:
            part = wide(y_RD[start:end])
            part = part if weight_R is None else part * weight_R[start:end, None]
            out_TD.index_add_(0, rows.token_R[start:end], part)
            start = end
        return out_TD
    # On a device index_add adds in any order; so look up each pair's row instead and add slot after slot.
    num_rows = y_RD.shape[0]
    row_of_pair = rows.pair_R.new_full((num_tokens * num_active,), num_rows)
    row_of_pair[rows.pair_R] = torch.arange(num_rows, device=y_RD.device)
    assert rows.valid_R is not None
    scale_R = rows.valid_R.to(out_TD.dtype) if weight_R is None else weight_R
    for slot in row_of_pair.view(num_tokens, num_active).unbind(1):
        here = slot.clamp(max=num_rows - 1)
        taken = (slot < num_rows) & rows.valid_R[here]
        # Rows past the last offset are uninitialised memory, so mask by selection and never by multiplying with 0.
        part = torch.where(taken[:, None], wide(y_RD[here]), 0.0)
        out_TD += part * scale_R[here, None]
    return out_TD


def _clear_tail(x: Tensor, rows: Rows) -> Tensor:
    """Zero the rows that no pair fills: a grouped product leaves them uninitialised."""
    return x if rows.valid_R is None else torch.where(rows.valid_R[:, None], x, 0.0)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TA: Tensor, gate_up: Tensor, down: Tensor, rows: Rows) -> Tensor:
        gate_up_R2f = _multiply(x_TD[rows.token_R], gate_up, rows)
        gate, up = gate_up_R2f.chunk(2, dim=-1)
        y_RD = _multiply(F.silu(gate) * up, down, rows)
        weight_R = weights_TA.flatten()[rows.pair_R]
        ctx.rows = rows
        ctx.save_for_backward(x_TD, weights_TA, gate_up, down, gate_up_R2f)
        num_tokens, num_active = weights_TA.shape
        out_TD = _sum_by_token(y_RD, weight_R, rows, num_tokens=num_tokens, num_active=num_active)
        return out_TD.to(x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, None]:
        x_TD, weights_TA, gate_up, down, gate_up_R2f = ctx.saved_tensors
        rows: Rows = ctx.rows
        num_tokens, num_active = weights_TA.shape
        weight_R = weights_TA.flatten()[rows.pair_R]
        gate, up = _clear_tail(gate_up_R2f, rows).chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        act_Rf = silu * up
        grad_y_RD = _clear_tail(grad_TD[rows.token_R], rows)
        # The output's gradient before its routing weight; times the activation it is also the weight's gradient.
        grad_act_Rf = _clear_tail(_multiply_back(grad_y_RD, down, rows), rows)
        grad_weight_R = (wide(grad_act_Rf) * wide(act_Rf)).sum(-1)
        grad_weights = weights_TA.new_zeros(weights_TA.numel())
        grad_weights[rows.pair_R] = grad_weight_R.to(weights_TA.dtype)
        grad_down = grad_gate_up = None
        if ctx.needs_input_grad[3]:
            grad_down = _weight_gradient((grad_y_RD * weight_R[:, None]).to(x_TD.dtype), act_Rf, rows)
        grad_act_Rf = (grad_act_Rf * weight_R[:, None]).to(x_TD.dtype)
        grad_gate = grad_act_Rf * up * (sigmoid + silu * (1 - sigmoid))
        grad_gate_up_R2f = torch.cat([grad_gate, grad_act_Rf * silu], dim=-1)
        if ctx.needs_input_grad[2]:
            grad_gate_up = _weight_gradient(grad_gate_up_R2f, x_TD[rows.token_R], rows)
        grad_rows_RD = _multiply_back(grad_gate_up_R2f, gate_up, rows)
        grad_x_TD = _sum_by_token(grad_rows_RD, None, rows, num_tokens=num_tokens, num_active=num_active)
        return grad_x_TD.to(x_TD.dtype), grad_weights.view_as(weights_TA), grad_gate_up, grad_down, None
