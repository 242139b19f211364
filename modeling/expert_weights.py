"""Experts whose slices the ranks lend each other: gathered for a forward and again for its backward."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .experts_call import ExpertsCall, MakePass, Slices
from .scopes import scope
from .transfers import KeptChunks, Transfer, one_chunk, start_gather, start_scatter


class SlicesInFlight(NamedTuple):
    """Every rank's slices on their way to every rank, or their gradients on their way home."""

    gate_up: Transfer
    down: Transfer


class WholeExperts(NamedTuple):
    """All experts on this rank, for as long as a forward takes."""

    make_pass: MakePass
    group: ProcessGroup
    in_flight: SlicesInFlight


@scope("experts")
def lend_slices(slices: Slices, group: ProcessGroup) -> SlicesInFlight:
    """Start to gather all ranks' slices of all experts."""
    return SlicesInFlight(start_gather(slices.gate_up[None], group), start_gather(slices.down[None], group))


def whole_experts(x_tD: Tensor, slots_tA: Tensor, weights_tA: Tensor, slices: Slices, *, whole: WholeExperts) -> Tensor:
    """This rank's tokens [t, D] through all experts of the group: -> their weighted sums [t, D], complete."""
    return _WholeExperts.apply(whole, x_tD, slots_tA, weights_tA, *slices)


@scope("gathered")
def join_slices(in_flight: SlicesInFlight) -> Slices:
    """Put together F/N rows of gate, of up, and columns of down from each rank."""
    halves = in_flight.gate_up.finish().unflatten(2, (2, -1))  # [N, E, 2, f, D]
    gate_up = halves.permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(1, 2)
    return Slices(gate_up, in_flight.down.finish().permute(1, 2, 0, 3).flatten(2, 3))


@scope("experts")
def return_down(grad_down: Tensor, group: ProcessGroup) -> Transfer:
    """Start to sum whole gradients [E, D, F] over the ranks, each of which gets its columns."""
    columns = grad_down.unflatten(2, (dist.get_world_size(group), -1)).permute(2, 0, 1, 3)  # [N, E, D, f]
    return start_scatter(columns, group)


@scope("experts")
def return_gate_up(grad_gate_up: Tensor, group: ProcessGroup) -> Transfer:
    """Start to sum whole gradients [E, 2F, D] over the ranks, each of which gets its rows of gate and of up."""
    halves = grad_gate_up.unflatten(1, (2, dist.get_world_size(group), -1)).permute(2, 0, 1, 3, 4)  # [N, E, 2, f, D]
    return start_scatter(halves, group)


class _WholeExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        whole: WholeExperts,
        x_tD: Tensor,
        slots_tA: Tensor,
        weights_tA: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        chunks = one_chunk(x_tD.shape[0])
        slices = join_slices(whole.in_flight)
        experts = whole.make_pass(ExpertsCall(slots_tA, weights_tA, *slices, chunks), None)
        out_tD = experts.forward_chunk(0, x_tD).to(x_tD.dtype)
        ctx.make_pass, ctx.group, ctx.chunks = whole.make_pass, whole.group, chunks
        ctx.save_for_backward(x_tD, slots_tA, weights_tA, gate_up, down, experts.to_keep())
        return out_tD

    @staticmethod
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor | None, ...]:
        x_tD, slots_tA, weights_tA, gate_up, down, kept = ctx.saved_tensors
        slices = join_slices(lend_slices(Slices(gate_up, down), ctx.group))
        experts = ctx.make_pass(ExpertsCall(slots_tA, weights_tA, *slices, ctx.chunks), kept)
        grad_x_tD = experts.backward_chunk(0, grad_tD, KeptChunks(x_tD, ctx.chunks)).to(x_tD.dtype)
        if not (ctx.needs_input_grad[4] or ctx.needs_input_grad[5]):
            return None, grad_x_tD, None, experts.routing_gradient(), None, None
        grad_gate_up, grad_down = experts.weight_gradients(grad_tD, x_tD).own
        home = SlicesInFlight(return_gate_up(grad_gate_up, ctx.group), return_down(grad_down, ctx.group))
        grad_weights = experts.routing_gradient()
        return None, grad_x_tD, None, grad_weights, home.gate_up.finish().view_as(gate_up), home.down.finish()[0]
