"""The experts this rank holds, applied to all tokens of the group: sort rows by expert, grouped products, sum.

One autograd Function, written against three operations that a backend provides. It keeps the gathered tokens and the
gate and up products, rebuilds rows and activations in the backward, and saves parameters rather than views of them,
so ZeRO-3 can drop their gathered copies.

    loop      one product per expert over its contiguous rows, counts read by the host; the fastest on CPU
    grouped   torch's grouped product over a fixed number of rows, offsets on the device; nothing is read by the host
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .collectives import all_gather_rows, reduce_scatter_rows, wide
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
        rows = self._sort(ids_TA)
        x_TD, gate_up, down = autocast_inputs(x_TD, self.gate_up_proj, self.down_proj)
        return _Experts.apply(x_TD, weights_TA, gate_up, down, rows)

    def forward_whole(self, x_tD: Tensor, ids_tA: Tensor, weights_tA: Tensor, *, group: ProcessGroup) -> Tensor:
        """The same for this rank's tokens alone and all experts, whose slices the other ranks lend: -> [t, D].

        Only for ep=1, where every rank holds a slice of every expert. The result is complete.
        """
        rows = self._sort(ids_tA)
        x_tD, gate_up, down = autocast_inputs(x_tD, self.gate_up_proj, self.down_proj)
        return _GatheredExperts.apply(x_tD, weights_tA, gate_up, down, rows, group)

    def _sort(self, ids_TA: Tensor) -> Rows:
        grouped = self.backend == "grouped" or (self.backend == "auto" and ids_TA.is_cuda)
        return sort_by_local_expert(
            ids_TA, first_expert=self.first_expert, num_local=self.num_local, read_counts=not grouped
        )


def _segments(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """Each expert and where its rows lie."""
    for expert, (start, end) in enumerate(pairwise([0, *ends])):
        yield expert, slice(start, end)


def _multiply(x_RI: Tensor, weight_eOI: Tensor, rows: Rows) -> Tensor:
    """Each row times its expert's weight transposed: [R, I], [e, O, I] -> [R, O]."""
    if rows.ends is None:
        return F.grouped_mm(x_RI, weight_eOI.transpose(1, 2), offs=rows.offsets_e)
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_eOI.shape[1])
    for expert, here in _segments(rows.ends):
        torch.mm(x_RI[here], weight_eOI[expert].t(), out=out_RO[here])
    return out_RO


def _multiply_back(grad_RO: Tensor, weight_eOI: Tensor, rows: Rows) -> Tensor:
    """The gradient of `_multiply` for its rows: [R, O], [e, O, I] -> [R, I]."""
    if rows.ends is None:
        return F.grouped_mm(grad_RO, weight_eOI, offs=rows.offsets_e)
    out_RI = grad_RO.new_empty(grad_RO.shape[0], weight_eOI.shape[2])
    for expert, here in _segments(rows.ends):
        torch.mm(grad_RO[here], weight_eOI[expert], out=out_RI[here])
    return out_RI


def _weight_gradient(grad_RO: Tensor, x_RI: Tensor, rows: Rows) -> Tensor:
    """The gradient of `_multiply` for the weights, zero for experts without a row: [R, O], [R, I] -> [e, O, I]."""
    if rows.ends is None:
        return F.grouped_mm(grad_RO.t(), x_RI, offs=rows.offsets_e)
    out_eOI = x_RI.new_empty(len(rows.ends), grad_RO.shape[1], x_RI.shape[1])
    for expert, here in _segments(rows.ends):
        torch.mm(grad_RO[here].t(), x_RI[here], out=out_eOI[expert])
    return out_eOI


def _sum_by_token(y_RD: Tensor, weight_R: Tensor | None, rows: Rows, *, num_tokens: int, num_active: int) -> Tensor:
    """Add every row, times its weight, to its token, in float32 at least and always in the same order: -> [T, D]."""
    out_TD = wide(y_RD).new_zeros(num_tokens, y_RD.shape[1])
    if rows.ends is not None:
        for _, here in _segments(rows.ends):
            part = wide(y_RD[here])
            part = part if weight_R is None else part * weight_R[here, None]
            out_TD.index_add_(0, rows.token_R[here], part)
        return out_TD
    # On a device index_add adds in any order; so look up each pair's row instead and add slot after slot.
    num_rows = y_RD.shape[0]
    row_of_pair = rows.pair_R.new_full((num_tokens * num_active,), num_rows)
    row_of_pair[rows.pair_R] = torch.arange(num_rows, device=y_RD.device)
    assert rows.valid_R is not None
    scale_R = rows.valid_R.to(out_TD.dtype) if weight_R is None else weight_R
    for slot in row_of_pair.view(num_tokens, num_active).unbind(1):
        row = slot.clamp(max=num_rows - 1)
        taken = (slot < num_rows) & rows.valid_R[row]
        # Rows past the last offset are uninitialised memory, so mask by selection and never by multiplying with 0.
        part = torch.where(taken[:, None], wide(y_RD[row]), 0.0)
        out_TD += part * scale_R[row, None]
    return out_TD


def _clear_tail(x: Tensor, rows: Rows) -> Tensor:
    """Zero the rows that no pair fills: a grouped product leaves them uninitialised."""
    return x if rows.valid_R is None else torch.where(rows.valid_R[:, None], x, 0.0)


class Products(NamedTuple):
    """What the forward of the experts leaves for the backward to start from."""

    out_TD: Tensor
    gate_up_R2f: Tensor


class Gradients(NamedTuple):
    """In the order of `_Experts`' inputs."""

    x_TD: Tensor
    weights_TA: Tensor
    gate_up: Tensor | None
    down: Tensor | None


def experts_forward(x_TD: Tensor, weights_TA: Tensor, gate_up: Tensor, down: Tensor, *, rows: Rows) -> Products:
    """Gate and up, activation, down, and the weighted sum per token in x's type."""
    gate_up_R2f = _multiply(x_TD[rows.token_R], gate_up, rows)
    gate, up = gate_up_R2f.chunk(2, dim=-1)
    y_RD = _multiply(F.silu(gate) * up, down, rows)
    weight_R = weights_TA.flatten()[rows.pair_R]
    num_tokens, num_active = weights_TA.shape
    out_TD = _sum_by_token(y_RD, weight_R, rows, num_tokens=num_tokens, num_active=num_active)
    return Products(out_TD.to(x_TD.dtype), gate_up_R2f)


def experts_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weights_TA: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_R2f: Tensor,
    *,
    rows: Rows,
    for_weights: bool = True,
) -> Gradients:
    """The gradients of `experts_forward`; rows and activation are made again from the gate and up products."""
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
    if for_weights:
        grad_down = _weight_gradient((grad_y_RD * weight_R[:, None]).to(x_TD.dtype), act_Rf, rows)
    grad_act_Rf = (grad_act_Rf * weight_R[:, None]).to(x_TD.dtype)
    grad_gate = grad_act_Rf * up * (sigmoid + silu * (1 - sigmoid))
    grad_gate_up_R2f = torch.cat([grad_gate, grad_act_Rf * silu], dim=-1)
    if for_weights:
        grad_gate_up = _weight_gradient(grad_gate_up_R2f, x_TD[rows.token_R], rows)
    grad_rows_RD = _multiply_back(grad_gate_up_R2f, gate_up, rows)
    grad_x_TD = _sum_by_token(grad_rows_RD, None, rows, num_tokens=num_tokens, num_active=num_active)
    return Gradients(grad_x_TD.to(x_TD.dtype), grad_weights.view_as(weights_TA), grad_gate_up, grad_down)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TA: Tensor, gate_up: Tensor, down: Tensor, rows: Rows) -> Tensor:
        products = experts_forward(x_TD, weights_TA, gate_up, down, rows=rows)
        ctx.rows = rows
        ctx.save_for_backward(x_TD, weights_TA, gate_up, down, products.gate_up_R2f)
        return products.out_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        for_weights = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        gradients = experts_backward(grad_TD, *ctx.saved_tensors, rows=ctx.rows, for_weights=for_weights)
        return *gradients, None


class _GatheredExperts(torch.autograd.Function):
    """The experts of the whole group on this rank's tokens: slices are gathered, and gathered again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x_tD: Tensor, weights_tA: Tensor, gate_up: Tensor, down: Tensor, rows: Rows, group: ProcessGroup
    ) -> Tensor:
        whole_gate_up, whole_down = gather_slices(gate_up, down, group)
        products = experts_forward(x_tD, weights_tA, whole_gate_up, whole_down, rows=rows)
        ctx.rows, ctx.group = rows, group
        ctx.save_for_backward(x_tD, weights_tA, gate_up, down, products.gate_up_R2f)
        return products.out_TD

    @staticmethod
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor | None, ...]:
        x_tD, weights_tA, gate_up, down, gate_up_R2F = ctx.saved_tensors
        whole_gate_up, whole_down = gather_slices(gate_up, down, ctx.group)
        gradients = experts_backward(grad_tD, x_tD, weights_tA, whole_gate_up, whole_down, gate_up_R2F, rows=ctx.rows)
        assert gradients.gate_up is not None
        assert gradients.down is not None
        home = scatter_slices(gradients.gate_up, gradients.down, ctx.group)
        return gradients.x_TD, gradients.weights_TA, *home, None, None


class Slices(NamedTuple):
    """Weights of experts, whole or a rank's slice of each: gate_up [E, 2F, D] and down [E, D, F]."""

    gate_up: Tensor
    down: Tensor


def gather_slices(gate_up: Tensor, down: Tensor, group: ProcessGroup) -> Slices:
    """Every rank's slice of every expert, put together: F/N rows of gate, of up, and columns of down from each."""
    num_experts, twice_width, hidden = gate_up.shape
    halves = all_gather_rows(gate_up[None], group).unflatten(2, (2, twice_width // 2))  # [N, E, 2, f, D]
    whole_gate_up = halves.permute(1, 2, 0, 3, 4).reshape(num_experts, -1, hidden)
    whole_down = all_gather_rows(down[None], group).permute(1, 2, 0, 3).reshape(num_experts, hidden, -1)
    return Slices(whole_gate_up, whole_down)


def scatter_slices(gate_up: Tensor, down: Tensor, group: ProcessGroup) -> Slices:
    """The sum over the ranks of whole gradients, of which each rank keeps its slice."""
    size = dist.get_world_size(group)
    num_experts, _, hidden = gate_up.shape
    halves = gate_up.unflatten(1, (2, size, -1)).permute(2, 0, 1, 3, 4)  # [N, E, 2, f, D]
    own_gate_up = reduce_scatter_rows(halves, group).reshape(num_experts, -1, hidden)
    columns = down.unflatten(2, (size, -1)).permute(2, 0, 1, 3)  # [N, E, D, f]
    return Slices(own_gate_up, reduce_scatter_rows(columns, group)[0])
