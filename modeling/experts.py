"""The experts this rank holds, applied to tokens that may come from, and go home to, all ranks of the group.

One autograd Function over chunks of tokens: while one is worked on, the next arrives and the last one's sums travel
home. It saves parameters rather than views of them, so ZeRO-3 can drop their gathered copies. The products are a
backend's:

    loop      one product per expert over its rows, counts read by the host (experts_loop.py); the fastest on CPU
    grouped   torch's grouped product over a fixed number of rows, offsets on the device (experts_grouped.py)
    triton    the same by a kernel of ours, for GPUs and types where torch's reads the offsets (triton_products.py)
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .config import GatherMoeConfig
from .expert_copies import ExpertCopies, HeldCopies
from .expert_rows import HostReads
from .expert_weights import SlicesInFlight, WholeExperts, lend_slices, whole_experts
from .experts_call import ExpertsCall, MakePass, Slices
from .experts_grouped import GroupedExperts, Products, TorchProducts, TritonProducts
from .experts_loop import LoopExperts
from .linear import autocast_inputs
from .mesh import ParallelMesh
from .scopes import scope
from .transfers import Chunks, GatherInChunks, KeptChunks, ScatterInChunks, TokenTransfer, one_chunk
from .triton_products import grouped_backend


class GatherMoeExperts(nn.Module):
    """Experts as stacked weights: gate_up_proj [e, 2f, D] (gate rows first), down_proj [e, D, f]."""

    def __init__(self, config: GatherMoeConfig, *, mesh: ParallelMesh) -> None:
        super().__init__()
        layout = mesh.layout
        self.num_experts, self.num_local = config.num_experts, config.num_experts // layout.ep
        self.first_expert = mesh.ep_rank * self.num_local
        self.backend = config.experts_backend
        self.layout = layout
        self.host_reads = HostReads()
        self.products: Products | None = None  # the backend's, unless something else stands in for them
        width = config.moe_intermediate_size // layout.etp
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_local, 2 * width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(self.num_local, config.hidden_size, width))
        self.copies: ExpertCopies | None = None
        if config.resident_experts and mesh.group is not None:
            self.copies = ExpertCopies(
                config.resident_experts, num_experts=config.num_experts, mesh=mesh, strategy=config.strategy
            )

    def forward(
        self, x_tD: Tensor, ids_TA: Tensor, weights_tA: Tensor, *, transfer: TokenTransfer | None = None
    ) -> Tensor:
        """Tokens and their weights [t, D] and [t, A], all ranks' expert ids [T, A] -> the weighted sums [t, D].

        Without a transfer t = T and the sums are this rank's share: over the experts it holds, or over its slices.
        With one, tokens are gathered and shares summed over the group. The sum over a token's experts runs in float32
        at least.
        """
        x_tD, gate_up, down = autocast_inputs(x_tD, self.gate_up_proj, self.down_proj)
        if transfer is None:
            transfer = TokenTransfer(GatherInChunks(x_tD, one_chunk(x_tD.shape[0])), None, None)
        chunks = transfer.gather.chunks
        held = None if self.copies is None else self.copies.held
        if held is None:
            slots_TA = ids_TA - self.first_expert
        else:
            held = held._replace(weights=Slices(*autocast_inputs(*held.weights)))
            # In token order, so that a chunk, which has tokens of every rank, is as even as the whole.
            slots_TA = held.slots(ids_TA, num_experts=self.num_experts)
        slots_TA = chunks.to_chunk_order(slots_TA)
        # For gathered tokens whole experts' buffers are up to ep times what a balanced routing fills.
        make_pass = self.passes(x_tD, recompute=chunks.group is not None and self.layout.ep > 1)
        return _Experts.apply(make_pass, transfer, x_tD, slots_TA, weights_tA, gate_up, down, held)

    def forward_whole(
        self, x_tD: Tensor, ids_tA: Tensor, weights_tA: Tensor, *, group: ProcessGroup, in_flight: SlicesInFlight
    ) -> Tensor:
        """The same for this rank's tokens alone and all experts, whose slices the other ranks lend: -> [t, D].

        Only for ep=1, where every rank holds a slice of every expert. The result is complete.
        """
        x_tD, gate_up, down = autocast_inputs(x_tD, self.gate_up_proj, self.down_proj)
        whole = WholeExperts(self.passes(x_tD, recompute=False), group, in_flight)
        return whole_experts(x_tD, ids_tA, weights_tA, Slices(gate_up, down), whole=whole)

    def copies_PC(self, device: torch.device) -> Tensor:
        """The expert in each slot of each rank, [P, C] int64; one of the rank's own, an empty slot, if none is held."""
        if self.copies is not None and self.copies.held is not None:
            return self.copies.held.copies_PC
        own_P = torch.arange(0, self.num_experts, self.num_local, device=device)
        return own_P[:, None].expand(-1, 0 if self.copies is None else self.copies.num_slots)

    def fill_copies(self, copies: Sequence[Sequence[int]]) -> None:
        """Hold copies of these experts until they are dropped; see `ExpertCopies.fill`. Collective over the group."""
        assert self.copies is not None
        self.copies.fill(Slices(self.gate_up_proj, self.down_proj), copies)

    def drop_copies(self) -> None:
        """Use no copies any more: the weights they are of have changed."""
        if self.copies is not None:
            self.copies.drop()

    def lend(self, group: ProcessGroup) -> SlicesInFlight:
        """Start to gather every rank's slices, for `forward_whole`."""
        return lend_slices(Slices(*autocast_inputs(self.gate_up_proj, self.down_proj)), group)

    def passes(self, x: Tensor, *, recompute: bool) -> MakePass:
        """What makes a forward or backward for tokens like these; buffers of fixed size are kept, or made again."""
        backend = self.backend
        if backend == "auto":
            backend = "loop"
            if x.is_cuda:
                backend = grouped_backend(x.dtype, capability=torch.cuda.get_device_capability(x.device))
        if backend == "loop":
            return partial(LoopExperts, host_reads=self.host_reads)
        products = self.products or (TritonProducts() if backend == "triton" else TorchProducts())
        return partial(GroupedExperts, products=products, recompute=recompute)


@scope("routing")
def _scatter_routing_gradient(grad_TA: Tensor, chunks: Chunks) -> ScatterInChunks:
    """Send the routing weights' gradients [T, A] in chunk order to the ranks that routed, in one piece."""
    whole = chunks._replace(num_chunks=1)
    scatter = ScatterInChunks(grad_TA.new_empty(chunks.num_tokens, grad_TA.shape[1]), whole)
    scatter.add(0, chunks.to_token_order(grad_TA))
    return scatter


class _Experts(torch.autograd.Function):
    @staticmethod
    @scope("experts")
    def forward(
        ctx: Any,
        make_pass: MakePass,
        transfer: TokenTransfer,
        x_tD: Tensor,
        slots_TA: Tensor,
        weights_tA: Tensor,
        gate_up: Tensor,
        down: Tensor,
        held: HeldCopies | None,
    ) -> Tensor:
        gather, regather, sum_dtype, weights_TA = transfer
        chunks = gather.chunks
        weights_TA = chunks.to_chunk_order(weights_tA if weights_TA is None else weights_TA)
        copies = None if held is None else held.weights
        experts = make_pass(ExpertsCall(slots_TA, weights_TA, gate_up, down, chunks, copies), None)
        sum_dtype = sum_dtype or x_tD.dtype
        scatter = ScatterInChunks(x_tD.new_empty(x_tD.shape, dtype=sum_dtype), chunks)
        for k in range(chunks.num_chunks):
            scatter.add(k, experts.forward_chunk(k, gather.chunk(k)).to(sum_dtype))
        ctx.make_pass, ctx.chunks, ctx.regather, ctx.held = make_pass, chunks, regather, held
        kept_tokens = gather.all() if regather is None else x_tD
        # The slots are saved like the rest: autograd then complains should they be filled before the backward.
        ctx.save_for_backward(kept_tokens, slots_TA, weights_TA, gate_up, down, experts.to_keep(), *(copies or ()))
        return scatter.finish().to(x_tD.dtype)

    @staticmethod
    @scope("experts")
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor | None, ...]:
        chunks: Chunks = ctx.chunks
        held: HeldCopies | None = ctx.held
        x, slots_TA, weights_TA, gate_up, down, kept, *copies = ctx.saved_tensors
        grads = GatherInChunks(grad_tD, chunks)
        tokens = KeptChunks(x, chunks) if ctx.regather is None else ctx.regather(x, chunks)
        call = ExpertsCall(slots_TA, weights_TA, gate_up, down, chunks, Slices(*copies) if copies else None)
        grads.start_rest()
        tokens.start_rest()
        experts = ctx.make_pass(call, kept)
        scatter = ScatterInChunks(grad_tD.new_empty(grad_tD.shape), chunks)
        for k in range(chunks.num_chunks):
            scatter.add(k, experts.backward_chunk(k, grads.chunk(k), tokens).to(x.dtype))
        # Before the weights' gradients, whose products may take this rank longer than others.
        routing = _scatter_routing_gradient(experts.routing_gradient(), chunks)
        grads_TD, tokens_TD = grads.all(), tokens.all()
        own: Slices | None = None
        if ctx.needs_input_grad[5] or ctx.needs_input_grad[6]:
            own, of_copies = experts.weight_gradients(grads_TD, tokens_TD)
            if held is not None and of_copies is not None:
                held.add_home(own, of_copies=of_copies)
        return None, None, scatter.finish(), None, routing.finish(), *(own or (None, None)), None
