"""transformers' own expert parallelism with all-gathered tokens: stock models, static shapes, no wait for the host.

How to use it, on every rank:

    register_allgather()
    AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(
        tp_size=N, ep_size=N, ep_implementation="allgather"))
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from modeling.comm import (
    all_gather_rows,
    gather_routing,
    gather_tokens,
    scatter_tokens,
    sum_gradients,
    total_over_group,
)

NAME = "allgather"


def register_allgather() -> None:
    """Make "allgather" a name that `DistributedConfig(ep_implementation=...)` of transformers 5.24 knows.

    Call it on every rank before the model is loaded; calling it again changes nothing. Raises ValueError where
    somebody else has taken the name.
    """
    taken = EPImplementationInterface().get(NAME)
    if taken not in (None, AllGatherEP):
        raise ValueError(
            f"ep_implementation={NAME!r} is registered as {taken.__module__}.{taken.__qualname__} already; "
            "register that one under another name"
        )
    EPImplementationInterface.register(NAME, AllGatherEP)


class AllGatherEP(EPImplementation):
    """Runs each rank's own whole experts on all tokens of the expert group, and returns every token's sum to its rank.

    Where the expert group is the tensor-parallel group (`ep_size == tp_size`), stock models hold all tokens on every
    rank anyway. Then no token travels: the outputs, T*D numbers, are summed over the group in one all-reduce, in the
    backward the gradients of the tokens, T*D, and of the routing weights, T*A. An all-reduce is a reduce-scatter and
    an all-gather, so this is as much as `gather_tokens` sends for tokens.

    Where the group spans several batches (`ep_size > tp_size`, with FSDP), the ranks that hold the same batch take
    equal parts of it. Tokens, ids and weights of all parts are gathered, T*D numbers and T*A pairs; a reduce-scatter
    returns each part's sums, T*D, and an all-gather among the ranks of one batch concatenates them. In the backward
    gathers become reduce-scatters and the other way round, and the gradients of the parts are concatenated as the
    sums were. All ranks must bring equally many tokens.

    The experts run as `experts_implementation` says; what this class adds has the same shapes for every routing, and
    the host reads nothing of it. Sums travel in the type of the experts' output.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.num_local: int = experts.num_experts
        self.group: ProcessGroup = ep_mesh.get_group()
        self.first_expert: int = ep_mesh.get_local_rank() * self.num_local
        self.batch_group: ProcessGroup | None = tp_mesh.get_group() if tp_mesh.size() > 1 else None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [T, D] of this rank's batch, ids over all experts and weights [T, A] -> the weighted sums [T, D]."""
        if self.shares_batch:
            return self._on_one_batch(hidden_states, top_k_index, top_k_weights)
        return self._on_many_batches(hidden_states, top_k_index, top_k_weights)

    def _on_one_batch(self, x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        # Each rank's backward passes through its own experts alone, so what it finds for the shared inputs is a part.
        (x_TD,) = sum_gradients([x_TD], self.group, upcast=False)
        (weights_TA,) = sum_gradients([weights_TA], self.group, upcast=False)
        # Every rank goes on with the same sum and finds the same gradient for it: nothing to add up there.
        return total_over_group(self._run_experts(x_TD, ids_TA, weights_TA), self.group)

    def _on_many_batches(self, x_bD: Tensor, ids_bA: Tensor, weights_bA: Tensor) -> Tensor:
        num_tokens = x_bD.shape[0]
        self._check_equal(num_tokens, x_bD.device)
        x_tD = _TakePart.apply(x_bD, self.batch_group)
        weights_tA = _TakePart.apply(weights_bA, self.batch_group)
        # Padding rows of the last part go to an expert that no rank has.
        ids_tA = _own_rows(ids_bA, self.batch_group, fill=self.num_local * dist.get_world_size(self.group))
        x_TD = gather_tokens(x_tD, self.group)
        routing = gather_routing(ids_tA, weights_tA, self.group)
        partial_TD = self._run_experts(x_TD, routing.expert_ids_TA, routing.weights_TA)
        return _JoinParts.apply(scatter_tokens(partial_TD, self.group), num_tokens, self.batch_group)

    def _run_experts(self, x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """Return this rank's share of every token's sum, [T, D]."""
        local = keep_local(ids_TA, weights_TA, first_expert=self.first_expert, num_local=self.num_local)
        return self.experts_forward(x_TD, *local)

    def _check_equal(self, num_tokens: int, device: torch.device) -> None:
        """Stop, on the device, where ranks bring different numbers: a gather of unequal parts has no defined result."""
        mine = torch.full((1,), num_tokens, dtype=torch.int64, device=device)
        message = (
            f"ep_implementation={NAME!r} needs equally many tokens on all ranks of the expert group, of which this one "
            f"brought {num_tokens}; pad or pack all batches to one length, or use ep_implementation='all_to_all'"
        )
        torch._assert_async((all_gather_rows(mine, self.group) == num_tokens).all(), message)


def keep_local(ids_TA: Tensor, weights_TA: Tensor, *, first_expert: int, num_local: int) -> tuple[Tensor, Tensor]:
    """Move each token's experts of this rank to the front and cut off slots that can never be filled.

    Return, for T tokens and S = min(A, local experts) slots a token,

    ids_TS      [T, S] int64  local numbers; in empty slots the number of local experts, which transformers' skip
    weights_TS  [T, S]        0 in empty slots

    A token names an expert once at most, so no token needs more slots than there are experts on this rank. The first
    token, where it has no expert here, visits one with the weight 0: experts without a single row would leave this rank
    out of the backward, and the others waiting for it.
    """
    num_slots = min(ids_TA.shape[1], num_local)
    local_TA = ids_TA - first_expert
    foreign_TA = (local_TA < 0) | (local_TA >= num_local)
    order_TS = foreign_TA.to(torch.uint8).sort(dim=1, stable=True).indices[:, :num_slots]
    foreign_TS = foreign_TA.gather(1, order_TS)
    ids_TS = local_TA.gather(1, order_TS).masked_fill(foreign_TS, num_local)
    ids_TS[:1, :1].clamp_(max=num_local - 1)
    return ids_TS, weights_TA.gather(1, order_TS).masked_fill(foreign_TS, 0.0)


def _own_rows(x_b: Tensor, group: ProcessGroup | None, *, fill: int = 0) -> Tensor:
    """Take this rank's rows of x_b, which is the same on all ranks, cut into N equal parts, the last padded."""
    if group is None:
        return x_b
    size = -(-x_b.shape[0] // dist.get_world_size(group))
    start = dist.get_rank(group) * size
    own = x_b[start : start + size]
    return pad(own, (0, 0, 0, size - own.shape[0]), value=fill)


def _all_rows(x_t: Tensor, group: ProcessGroup | None, *, num_rows: int) -> Tensor:
    """Concatenate all ranks' parts and drop the padding after the first `num_rows` rows."""
    return x_t if group is None else all_gather_rows(x_t, group)[:num_rows]


class _TakePart(torch.autograd.Function):
    """This rank's rows; backward: the parts' gradients are gathered, so that every rank has the whole one again."""

    @staticmethod
    def forward(ctx: Any, x_b: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group, ctx.num_rows = group, x_b.shape[0]
        return _own_rows(x_b, group)

    @staticmethod
    def backward(ctx: Any, grad_t: Tensor) -> tuple[Tensor, None]:
        return _all_rows(grad_t, ctx.group, num_rows=ctx.num_rows), None


class _JoinParts(torch.autograd.Function):
    """All ranks' rows; backward: each rank keeps its part of a gradient that all of them hold whole."""

    @staticmethod
    def forward(ctx: Any, x_t: Tensor, num_rows: int, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _all_rows(x_t, group, num_rows=num_rows)

    @staticmethod
    def backward(ctx: Any, grad_b: Tensor) -> tuple[Tensor, None, None]:
        return _own_rows(grad_b, ctx.group), None, None
