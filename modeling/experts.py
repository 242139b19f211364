"""The experts this rank holds, applied to tokens that may come from, and go home to, all ranks of the group.

Autograd Functions over chunks of tokens: while one is worked on, the next arrives and the last one's sums travel home.
They save parameters rather than views of them, so ZeRO-3 can drop their gathered copies. The products are a backend's:

    loop      one product per expert over its rows, counts read by the host (experts_loop.py); the fastest on CPU
    grouped   torch's grouped product over a fixed number of rows, offsets on the device (experts_grouped.py)
    triton    the same by a kernel of ours, for GPUs and types where torch's reads the offsets
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .comm import (
    Chunks,
    GatherInChunks,
    ScatterInChunks,
    Transfer,
    scope,
    start_gather,
    start_in_turn,
    start_scatter,
    tokens_again,
    tokens_to_keep,
)
from .config import GatherMoeConfig
from .cost import MATRICES
from .execution import Execution
from .experts_grouped import GroupedExperts, grouped_backend
from .experts_loop import LoopExperts
from .layers import autocast_inputs
from .mesh import ParallelMesh


class GatherMoeExperts(nn.Module):
    """Experts as stacked weights: gate_up_proj [e, 2f, D] (gate rows first), down_proj [e, D, f]."""

    def __init__(self, config: GatherMoeConfig, *, mesh: ParallelMesh, execution: Execution) -> None:
        super().__init__()
        self.mesh, self.execution = mesh, execution
        self.num_experts, self.num_local = config.num_experts, config.num_experts // mesh.layout.ep
        self.first_expert = mesh.ep_rank * self.num_local
        self.fp8_tokens = execution.token_dtype == "float8_e4m3"
        self.sum_dtype = torch.float32 if execution.combine_dtype == "float32" else None  # None: the tokens' own
        width = config.moe_intermediate_size // mesh.layout.etp
        self.num_weights = MATRICES * self.num_local * width * config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_local, 2 * width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(self.num_local, config.hidden_size, width))

    def forward(
        self,
        x_tD: Tensor,
        ids_TA: Tensor,
        weights_tA: Tensor,
        *,
        tokens: GatherInChunks | None = None,
        weights_TA: Tensor | None = None,
    ) -> Tensor:
        """Map tokens [t, D], their weights [t, A] and all ranks' expert ids [T, A] to the weighted sums [t, D].

        tokens      x_tD of all ranks on their way here; shares of the sums are then summed over the group
        weights_TA  all ranks' weights in token order, without a gradient

        Without them t = T, and the sums are this rank's share: over the experts it holds, or over its slices. The sum
        over a token's experts runs in float32 at least.
        """
        [x_tD] = autocast_inputs(x_tD)
        tokens = tokens or GatherInChunks(x_tD, Chunks(x_tD.shape[0]))
        # In token order, so that with copies a chunk, which has tokens of every rank, is as even as the whole.
        slots_TA = tokens.chunks.to_chunk_order(self.slots(ids_TA))
        return _Experts.apply(self, tokens, x_tD, slots_TA, weights_tA, weights_TA, *self.stacks())

    def slots(self, ids_TA: Tensor) -> Tensor:
        """Return which of the experts in `stacks` each pair of expert ids is for; any other number: for none."""
        return ids_TA - self.first_expert

    def stacks(self) -> Sequence[Tensor]:
        """Return gate_up and down of the experts that this rank computes with."""
        return autocast_inputs(self.gate_up_proj, self.down_proj)

    def start_slices(self, group: ProcessGroup) -> list[Transfer[Tensor]]:
        """Start to gather every rank's slices of all experts, for `forward_whole`."""
        return _start_slices(self.stacks(), group)

    def forward_whole(
        self, x_tD: Tensor, ids_tA: Tensor, weights_tA: Tensor, *, group: ProcessGroup, slices: list[Transfer[Tensor]]
    ) -> Tensor:
        """Map this rank's tokens [t, D] through all experts, whose slices the other ranks lend: -> [t, D], complete.

        Only for ep=1, where every rank holds a slice of every expert.
        """
        [x_tD] = autocast_inputs(x_tD)
        return _WholeExperts.apply(self, group, slices, x_tD, ids_tA, weights_tA, *self.stacks())

    def start_pass(
        self,
        stacks: Sequence[Tensor],
        slots_TA: Tensor,
        weights_TA: Tensor,
        chunks: Chunks,
        kept: Sequence[Tensor] = (),
    ) -> LoopExperts | GroupedExperts:
        """Begin one forward, or one backward with what a forward kept, by the backend for these weights."""
        backend, weight = self.execution.experts_backend, stacks[0]
        if backend == "auto":
            backend = "loop"
            if weight.is_cuda:
                backend = grouped_backend(weight.dtype, capability=torch.cuda.get_device_capability(weight.device))
        if backend == "loop":
            return LoopExperts(stacks, slots_TA, weights_TA, chunks, kept)
        recompute = chunks.regather and self.mesh.layout.ep > 1
        triton = backend == "triton"
        return GroupedExperts(stacks, slots_TA, weights_TA, chunks, kept, triton=triton, recompute=recompute)


class _Experts(torch.autograd.Function):
    @staticmethod
    @scope("experts")
    def forward(
        ctx: Any,
        experts: GatherMoeExperts,
        tokens: GatherInChunks,
        x_tD: Tensor,
        slots_TA: Tensor,
        weights_tA: Tensor,
        weights_TA: Tensor | None,
        *stacks: Tensor,
    ) -> Tensor:
        chunks = tokens.chunks
        weights_TA = chunks.to_chunk_order(weights_tA if weights_TA is None else weights_TA)
        run = experts.start_pass(stacks, slots_TA, weights_TA, chunks)
        sum_dtype = experts.sum_dtype or x_tD.dtype
        scatter = ScatterInChunks(x_tD.new_empty(x_tD.shape, dtype=sum_dtype), chunks)
        for k in range(chunks.num_chunks):
            scatter.add(k, run.forward_chunk(k, tokens.chunk(k), dtype=sum_dtype))
        ctx.experts, ctx.chunks = experts, chunks
        ctx.save_for_backward(tokens_to_keep(tokens, x_tD), slots_TA, weights_TA, *stacks, *run.to_keep())
        return scatter.finish().to(x_tD.dtype)

    @staticmethod
    @scope("experts")
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor | None, ...]:
        experts: GatherMoeExperts = ctx.experts
        chunks: Chunks = ctx.chunks
        _, _, _, _, _, _, *stacks_need_gradients = ctx.needs_input_grad
        kept_tokens, slots_TA, weights_TA, *saved = ctx.saved_tensors
        stacks, kept_products = saved[: len(stacks_need_gradients)], saved[len(stacks_need_gradients) :]
        grads = GatherInChunks(grad_tD, chunks)
        tokens = tokens_again(kept_tokens, chunks, fp8=experts.fp8_tokens)
        if kept_products:  # tokens are for the weights' gradients alone
            grads.start_rest()
            tokens.start_rest()
        else:
            start_in_turn(grads, tokens)
        run = experts.start_pass(stacks, slots_TA, weights_TA, chunks, kept_products)
        scatter = ScatterInChunks(grad_tD.new_empty(grad_tD.shape), chunks)
        for k in range(chunks.num_chunks):
            scatter.add(k, run.backward_chunk(k, grads, tokens))
        # Before the weights' gradients, whose products may take this rank longer than others.
        routing = _scatter_routing_gradient(run.routing_gradient(), chunks)
        grads_TD, tokens_TD = grads.all(), tokens.all()
        grad_stacks: Sequence[Tensor | None] = [None] * len(stacks)
        if any(stacks_need_gradients):
            grad_stacks = run.weight_gradients(grads_TD, tokens_TD)
        return None, None, scatter.finish(), None, routing.finish(), None, *grad_stacks


@scope("routing")
def _scatter_routing_gradient(grad_TA: Tensor, chunks: Chunks) -> ScatterInChunks:
    """Send the routing weights' gradients [T, A] in chunk order to the ranks that routed, in one piece."""
    whole = Chunks(chunks.num_tokens, chunks.group, overlap=chunks.overlap)
    scatter = ScatterInChunks(grad_TA.new_empty(chunks.num_tokens, grad_TA.shape[1]), whole)
    scatter.add(0, chunks.to_token_order(grad_TA))
    return scatter


class _WholeExperts(torch.autograd.Function):
    @staticmethod
    @scope("experts")
    def forward(
        ctx: Any,
        experts: GatherMoeExperts,
        group: ProcessGroup,
        slices: list[Transfer[Tensor]],
        x_tD: Tensor,
        ids_tA: Tensor,
        weights_tA: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        chunks = Chunks(x_tD.shape[0])
        run = experts.start_pass([part.finish() for part in slices], ids_tA, weights_tA, chunks)
        out_tD = run.forward_chunk(0, x_tD, dtype=x_tD.dtype)
        ctx.experts, ctx.group, ctx.chunks = experts, group, chunks
        ctx.save_for_backward(x_tD, ids_tA, weights_tA, gate_up, down, *run.to_keep())
        return out_tD

    @staticmethod
    @scope("experts")
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor | None, ...]:
        *_, gate_up_needs_gradient, down_needs_gradient = ctx.needs_input_grad
        x_tD, ids_tA, weights_tA, gate_up, down, *kept_products = ctx.saved_tensors
        stacks = [part.finish() for part in _start_slices((gate_up, down), ctx.group)]
        run = ctx.experts.start_pass(stacks, ids_tA, weights_tA, ctx.chunks, kept_products)
        grads, tokens = (GatherInChunks(each, ctx.chunks) for each in (grad_tD, x_tD))
        grad_x_tD = run.backward_chunk(0, grads, tokens)
        if not (gate_up_needs_gradient or down_needs_gradient):
            return None, None, None, grad_x_tD, None, run.routing_gradient(), None, None
        home = _start_slices_home(run.weight_gradients(grad_tD, x_tD), ctx.group)
        grad_weights_tA = run.routing_gradient()
        return None, None, None, grad_x_tD, None, grad_weights_tA, *(part.finish()[0] for part in home)


@scope("experts")
def _start_slices(stacks: Sequence[Tensor], group: ProcessGroup) -> list[Transfer[Tensor]]:
    """Start to gather all ranks' slices of all experts: F/N rows of gate, of up, and columns of down from each."""

    @scope("gathered")
    def join_gate_up(slices: Tensor) -> Tensor:  # [N, E, 2f, D] -> [E, 2F, D]
        return slices.unflatten(2, (2, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(1, 2)

    @scope("gathered")
    def join_down(slices: Tensor) -> Tensor:  # [N, E, D, f] -> [E, D, F]
        return slices.permute(1, 2, 0, 3).flatten(2, 3)

    gate_up, down = stacks
    return [
        start_gather(gate_up[None], group).then(join_gate_up),
        start_gather(down[None], group).then(join_down),
    ]


@scope("experts")
def _start_slices_home(gradients: Sequence[Tensor], group: ProcessGroup) -> list[Transfer[Tensor]]:
    """Start to sum whole gradients [E, 2F, D] and [E, D, F] over the ranks, each of which gets its slices."""
    grad_gate_up, grad_down = gradients
    size = dist.get_world_size(group)
    rows = grad_gate_up.unflatten(1, (2, size, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)  # [N, E, 2f, D]
    columns = grad_down.unflatten(2, (size, -1)).permute(2, 0, 1, 3)  # [N, E, D, f]
    return [start_scatter(rows, group), start_scatter(columns, group)]
