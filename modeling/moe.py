"""The feed-forward half of a decoder block: a sparse mixture of experts, or one dense SwiGLU layer.

Each strategy is a function that routes this rank's tokens and sends them through experts of the whole group, all with
the same result as a single rank:

strategy         layout        what moves, forward                                         the host waits
gather_tokens    any ep x etp  all tokens to every rank, sums home                         never
gather_weights   ep = 1        slices of expert weights to every rank, tokens stay         never
all_to_all       ep = N        each token's row to the ranks of its experts, and back      for the counts
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .comm import RowSplits, all_to_all_rows, cut_in_chunks, exchange_rows, scope, start_routing, start_tokens, wide
from .config import GatherMoeConfig
from .copies import ExpertsWithCopies
from .cost import MoeTraffic, choose_strategy
from .execution import Execution
from .experts import GatherMoeExperts
from .layers import Linear, autocast_inputs, check_plain, gather_linear, linear_scatter, plain_weight
from .mesh import ParallelMesh
from .router import GatherMoeRouter, Routing


class MoeOutput(NamedTuple):
    """The weighted sums of the experts' outputs for this rank's tokens, [t, D], and how these were routed."""

    out_tD: Tensor
    routing: Routing


class GatherMoeSparseBlock(nn.Module):
    """A router over the experts of the whole group."""

    def __init__(self, config: GatherMoeConfig, *, mesh: ParallelMesh, execution: Execution) -> None:
        super().__init__()
        self.mesh, self.execution, self.sizes = mesh, execution, config.sizes
        self.strategy = execution.strategy
        self.gate = GatherMoeRouter(config, mesh=mesh)
        has_copies = execution.resident_experts and mesh.group is not None
        self.experts = (ExpertsWithCopies if has_copies else GatherMoeExperts)(config, mesh=mesh, execution=execution)

    def forward(self, x_tD: Tensor, **router_inputs: Tensor | None) -> MoeOutput:
        """Map this rank's normed tokens [t, D] to their outputs; `router_inputs` are the router's keyword arguments."""
        if self.mesh.group is None:
            routing = self.gate(x_tD, **router_inputs)
            return MoeOutput(self.experts(x_tD, routing.expert_ids_tA, routing.weights_tA), routing)
        check_plain(self.experts, kind=GatherMoeExperts)
        strategy = {"gather_tokens": gather_tokens, "gather_weights": gather_weights, "all_to_all": all_to_all}
        return strategy[self.strategy_for(x_tD)](self, x_tD, router_inputs, self.mesh.group)

    def strategy_for(self, x_tD: Tensor) -> str:
        """Return the strategy asked for; for "auto" what sends least for as many tokens as there are."""
        if self.strategy != "auto":
            return self.strategy
        layout = self.mesh.layout
        traffic = MoeTraffic(
            sizes=self.sizes,
            layout=layout,
            num_tokens=x_tD.shape[0] * layout.tp,
            element_bytes=x_tD.element_size(),
            regather=self.execution.regather,
        )
        return choose_strategy(traffic)


def gather_tokens(
    block: GatherMoeSparseBlock, x_tD: Tensor, router_inputs: dict[str, Tensor | None], group: ProcessGroup
) -> MoeOutput:
    """Gather all tokens on every rank, which works on its experts or slices, and send the sums home.

    Wire per rank, forward: T*D in and T*D out, and 6*A bytes per token for ids and weights, whatever the routing is.
    The router works while the first tokens travel, and its choice goes before the others.
    """
    [sent_tD] = autocast_inputs(x_tD)
    with scope("experts"):
        weight_bytes = block.experts.num_weights * sent_tD.element_size()
        chunks = cut_in_chunks(sent_tD, group, block.execution, again_bytes=weight_bytes)
        tokens = start_tokens(sent_tD, chunks, fp8=block.experts.fp8_tokens)
    routing = block.gate(x_tD, **router_inputs)
    choices = start_routing(routing.expert_ids_tA, routing.weights_tA, group)
    with scope("experts"):
        tokens.start_rest()
    ids_TA, weights_TA = choices.finish()
    out_tD = block.experts(sent_tD, ids_TA, routing.weights_tA, tokens=tokens, weights_TA=weights_TA)
    return MoeOutput(out_tD, routing)


def gather_weights(
    block: GatherMoeSparseBlock, x_tD: Tensor, router_inputs: dict[str, Tensor | None], group: ProcessGroup
) -> MoeOutput:
    """Gather the other ranks' slices of all experts, and work on this rank's own tokens.

    Wire per rank: the 3*E*F*D weights of the layer, forward and again backward, and their gradients home, whatever
    the number of tokens is. Pays for many tokens and few experts. The router works while the weights travel.
    """
    slices = block.experts.start_slices(group) if block.execution.overlap else None
    routing = block.gate(x_tD, **router_inputs)
    slices = slices or block.experts.start_slices(group)
    ids_tA, weights_tA = routing.expert_ids_tA, routing.weights_tA
    return MoeOutput(block.experts.forward_whole(x_tD, ids_tA, weights_tA, group=group, slices=slices), routing)


def all_to_all(
    block: GatherMoeSparseBlock, x_tD: Tensor, router_inputs: dict[str, Tensor | None], group: ProcessGroup
) -> MoeOutput:
    """Send every token-expert pair as a row to the rank of its expert, and the output back; nothing is dropped.

    Wire per rank, forward: t*A*D out and back on average, times the load of the busiest rank. The counts are read by
    the host (GShard, 2006.16668, §3.2, without its capacity).
    """
    routing = block.gate(x_tD, **router_inputs)
    num_tokens, num_active = routing.expert_ids_tA.shape
    size = block.mesh.layout.tp
    ids = routing.expert_ids_tA.flatten()
    # Padding belongs to no expert, thus to the rank after the last, and stays behind.
    owner, order = (ids // block.experts.num_local).clamp(max=size).sort(stable=True)
    counts = torch.searchsorted(owner, torch.arange(size + 1, device=ids.device), right=False).diff()
    splits = agree_on_splits(counts, group)
    order = order[: sum(splits.send)]
    with scope("routing"):
        sent_ids = all_to_all_rows(ids[order], splits, group)
    rows_RD = exchange_rows(x_tD[order // num_active], splits, group)
    ones_R1 = torch.ones(rows_RD.shape[0], 1, dtype=routing.weights_tA.dtype, device=rows_RD.device)
    y_RD = block.experts(rows_RD, sent_ids[:, None], ones_R1)
    back_RD = exchange_rows(y_RD, splits.turned(), group)
    weighted_RD = wide(back_RD) * routing.weights_tA.flatten()[order][:, None]
    out_tD = weighted_RD.new_zeros(num_tokens, x_tD.shape[1]).index_add(0, order // num_active, weighted_RD)
    return MoeOutput(out_tD.to(x_tD.dtype), routing)


@scope("routing")
def agree_on_splits(counts: Tensor, group: ProcessGroup) -> RowSplits:
    """Tell every rank how many rows it will get: counts [N] int64 of the rows that go to each."""
    one_each = [1] * len(counts)
    received = all_to_all_rows(counts, RowSplits(one_each, one_each), group)
    return RowSplits(*read_row_splits(torch.stack([counts, received])))


def read_row_splits(splits: Tensor) -> list[list[int]]:
    """Wait for how many rows go to every rank, and come from it: [2, N] int64 on the host."""
    return splits.tolist()


class GatherMoeMlp(nn.Module):
    """SwiGLU (Shazeer, 2002.05202), its width split over the group."""

    def __init__(self, config: GatherMoeConfig, *, mesh: ParallelMesh, execution: Execution) -> None:
        super().__init__()
        self.mesh, self.execution = mesh, execution
        width = config.intermediate_size // mesh.layout.tp
        self.gate_proj = Linear(config.hidden_size, width)
        self.up_proj = Linear(config.hidden_size, width)
        self.down_proj = Linear(width, config.hidden_size)

    def forward(self, x_tD: Tensor) -> Tensor:
        """Map this rank's normed tokens [t, D] to their outputs [t, D]."""
        if self.mesh.group is None:
            return self.down_proj(F.silu(self.gate_proj(x_tD)) * self.up_proj(x_tD))
        chunks = cut_in_chunks(x_tD, self.mesh.group, self.execution)
        gate, up = gather_linear(x_tD, [plain_weight(self.gate_proj), plain_weight(self.up_proj)], chunks=chunks)
        return linear_scatter(F.silu(gate) * up, plain_weight(self.down_proj), chunks=chunks)
