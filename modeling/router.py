"""Top-k routing of this rank's tokens, in float32 at least; what a capacity drops; sums for losses and log lines."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .comm import all_gather_rows, scope, wide
from .config import GatherMoeConfig
from .mesh import ParallelMesh
from .noise import jitter
from .operators import define_own, wide_linear, wide_linear_back

SMALLEST_SUM = 1e-20  # of weights that are scaled to sum to 1; far below what a softmax can give


class Routing(NamedTuple):
    """Where tokens go.

    logits_tE      [t, E]  float32 or wider
    expert_ids_tA  [t, A]  int64, best expert first; E, which no rank owns, for tokens that are padding
    weights_tA     [t, A]  what the experts' outputs are summed with; 0 for padding
    probs_tE       [t, E]  the scores of all experts as a distribution; None where no statistics are taken
    chosen_ids_tA  [t, A]  the ids before a capacity turned those without room into E; None without a capacity
    """

    logits_tE: Tensor
    expert_ids_tA: Tensor
    weights_tA: Tensor
    probs_tE: Tensor | None = None
    chosen_ids_tA: Tensor | None = None


class RouterStatistics(NamedTuple):
    """Sums over valid tokens, per sequence, from which the auxiliary losses and the log lines are made.

    counts_BE  [B, E]  choices of each expert, dropped ones included, no gradient
    probs_BE   [B, E]  sums of the scores as a distribution over all experts
    z_B        [B]     sums of the squared log-sum-exp of the logits
    entropy_B  [B]     sums of the entropy of that distribution in nats, no gradient
    dropped_B  [B]     choices that a capacity dropped, no gradient
    """

    counts_BE: Tensor
    probs_BE: Tensor
    z_B: Tensor
    entropy_B: Tensor
    dropped_B: Tensor


class GatherMoeRouter(nn.Module):
    """The gate of one MoE layer; every rank of the group holds its weight and routes its own tokens with it.

    e_score_correction_bias  [E] float32, where the configuration has one: added to the scores for the choice alone
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, config: GatherMoeConfig, *, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh, self.capacity_factor = mesh, config.capacity_factor
        self.num_active = config.num_experts_per_tok
        self.renormalise = config.norm_topk_prob
        self.score_function = config.score_function
        self.scaling_factor = config.routed_scaling_factor
        self.jitter_width = config.router_jitter_noise
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32) if config.router_bias else None
        self.register_buffer("e_score_correction_bias", bias_E)
        define_own()  # a counter of FLOPs knows only what there was when it was made

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What `to`, `bfloat16` and the like do. The bias stays in float32: its steps are lost in bfloat16."""
        before_E = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after_E = self.e_score_correction_bias
        if before_E is not None and after_E is not None and after_E.dtype in (torch.bfloat16, torch.float16):
            self.e_score_correction_bias = before_E.to(after_E.device)
        return self

    def forward(
        self,
        x_tD: Tensor,
        *,
        weight: Tensor | None = None,
        token_mask_t: Tensor | None = None,
        noise_t: Tensor | None = None,
    ) -> Routing:
        """Route x_tD [t, D]; tokens whose mask is False go to no expert. In training a capacity drops what has no room.

        weight   instead of the module's own: the decoder block's, which sums the gradients of all replicated weights
        noise_t  [t] int64, the counters that the jitter of x is drawn from; None for none
        """
        if noise_t is not None:
            x_tD = jitter(wide(x_tD), noise_t, width=self.jitter_width)
        with torch.autocast(x_tD.device.type, enabled=False):
            logits_tE = _WideLinear.apply(x_tD, self.weight, weight)
        routing = route(
            logits_tE,
            num_active=self.num_active,
            renormalise=self.renormalise,
            token_mask_t=token_mask_t,
            score_function=self.score_function,
            bias_E=self.e_score_correction_bias,
            scaling_factor=self.scaling_factor,
        )
        if self.capacity_factor is None or not self.training:
            return routing
        num_tokens, num_experts = x_tD.shape[0] * self.mesh.layout.tp, self.weight.shape[0]
        capacity = expert_capacity(
            num_tokens, num_active=self.num_active, num_experts=num_experts, factor=self.capacity_factor
        )
        ids_tA = routing.expert_ids_tA
        kept_tA = kept_choices(ids_tA, num_experts=num_experts, capacity=capacity, group=self.mesh.group)
        return routing._replace(
            expert_ids_tA=ids_tA.masked_fill(~kept_tA, num_experts),
            weights_tA=routing.weights_tA * kept_tA,
            chosen_ids_tA=ids_tA,
        )


class _WideLinear(torch.autograd.Function):
    """Logits in float32 at least, without wide copies of what they are made from."""

    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, weight_ED: Tensor, summed_ED: Tensor | None) -> Tensor:
        """With `summed_ED`, the same numbers as the module's own weight, the weight's gradient is that one's."""
        ctx.save_for_backward(x_tD, weight_ED)
        ctx.summed_dtype = None if summed_ED is None else summed_ED.dtype
        return wide_linear(x_tD, weight_ED)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_tE: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_tD, grad_weight_ED = wide_linear_back(grad_tE, *ctx.saved_tensors, weight_dtype=ctx.summed_dtype)
        return (grad_x_tD, grad_weight_ED, None) if ctx.summed_dtype is None else (grad_x_tD, None, grad_weight_ED)


def route(
    logits_tE: Tensor,
    *,
    num_active: int,
    renormalise: bool,
    token_mask_t: Tensor | None = None,
    score_function: str = "softmax",
    bias_E: Tensor | None = None,
    scaling_factor: float = 1.0,
) -> Routing:
    """Score all experts, keep the best `num_active`, renormalise them where asked (Mixtral, 2401.04088, §2.1).

    A bias changes which experts are chosen, never their weights (2408.15664, eq. 3). Among equals the lower expert id
    wins, on every device: a stable sort promises that, torch.topk does not.
    """
    num_experts = logits_tE.shape[-1]
    scores_tE, probs_tE = expert_scores(logits_tE, score_function)
    ranked_tE = scores_tE.detach() if bias_E is None else scores_tE.detach() + bias_E
    order_tE = ranked_tE.sort(dim=-1, descending=True, stable=True).indices
    ids_tA = order_tE[:, :num_active].contiguous()
    weights_tA = scores_tE.gather(-1, ids_tA)
    if renormalise:
        weights_tA = weights_tA / (weights_tA.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    if scaling_factor != 1.0:
        weights_tA = weights_tA * scaling_factor
    if token_mask_t is not None:
        ids_tA = ids_tA.masked_fill(~token_mask_t[:, None], num_experts)
        weights_tA = weights_tA * token_mask_t[:, None]
    return Routing(logits_tE, ids_tA, weights_tA, probs_tE)


def expert_scores(logits_tE: Tensor, score_function: str) -> tuple[Tensor, Tensor]:
    """Score all experts: -> what they are chosen and weighted by, and the same as a distribution, both [t, E].

    softmax  experts compete for a token (Switch, 2101.03961, eq. 1)
    sigmoid  each expert is scored by itself (DeepSeek-V3, 2412.19437, §2.1.2; the distribution is eq. 18)
    """
    if score_function == "sigmoid":
        return logits_tE.sigmoid(), F.logsigmoid(logits_tE).softmax(dim=-1)
    probs_tE = logits_tE.softmax(dim=-1)
    return probs_tE, probs_tE


def expert_capacity(num_tokens: int, *, num_active: int, num_experts: int, factor: float) -> int:
    """Tokens an expert takes at most, of `num_tokens` in the whole group: `factor` times its even share, rounded up."""
    # As written: 1.1 times 100 tokens is 110, which the nearest binary number is a little more than.
    return math.ceil(Fraction(str(factor)) * num_tokens * num_active / num_experts)


def kept_choices(ids_tA: Tensor, *, num_experts: int, capacity: int, group: ProcessGroup | None) -> Tensor:
    """Which choices [t, A] of expert ids [t, A] fit, bool; `num_experts`, padding's id, takes no room and is kept.

    First choices go before second ones, and among equals earlier tokens of the group's micro-batch before later ones,
    so what is dropped does not depend on how many ranks share the tokens (2101.03961, §2.2; 2006.16668, §3.2). What is
    dropped skips its expert through the residual. Every rank tells the
    others how often its tokens choose each expert: one small gather, and no host waits.
    """
    num_tokens, num_active = ids_tA.shape
    width = num_experts + 1
    choice = torch.arange(num_active, device=ids_tA.device)
    # By choice, then by expert, then by token.
    key_At, order = (ids_tA + choice * width).t().flatten().sort(stable=True)
    ends = torch.searchsorted(key_At, torch.arange(num_active * width, device=ids_tA.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    before = _taken_before(counts.view(num_active, width), group)
    position = torch.arange(len(key_At), device=ids_tA.device) - (ends - counts)[key_At] + before.flatten()[key_At]
    kept = (position < capacity) | (key_At % width == num_experts)
    return torch.empty_like(kept).scatter_(0, order, kept).view(num_active, num_tokens).t()


@scope("capacity")
def _taken_before(counts_AE: Tensor, group: ProcessGroup | None) -> Tensor:
    """How many of each expert's places are taken before this rank's tokens of each choice: [A, E] int64."""
    if group is None:
        return counts_AE.cumsum(0) - counts_AE
    counts_NAE = all_gather_rows(counts_AE[None], group)
    rank = dist.get_rank(group)
    of_choice = counts_NAE.sum(0)
    return of_choice.cumsum(0) - of_choice + counts_NAE[:rank].sum(0)


def router_statistics(
    routing: Routing, *, sequence_of_token_t: Tensor, num_sequences: int, token_mask_t: Tensor | None
) -> RouterStatistics:
    """Sum what RouterStatistics holds over the tokens here, sequence by sequence."""
    logits_tE, probs_tE = routing.logits_tE, routing.probs_tE
    assert probs_tE is not None
    num_experts = logits_tE.shape[-1]
    z_t = logits_tE.logsumexp(dim=-1).square()
    entropy_t = torch.special.entr(probs_tE.detach()).sum(dim=-1)
    if token_mask_t is not None:
        probs_tE, z_t, entropy_t = probs_tE * token_mask_t[:, None], z_t * token_mask_t, entropy_t * token_mask_t
    with torch.no_grad():
        # One column more than there are experts takes the choices of padding.
        counts = probs_tE.new_zeros(num_sequences, num_experts + 1)
        chosen_tA = routing.expert_ids_tA if routing.chosen_ids_tA is None else routing.chosen_ids_tA
        flat_ids = (sequence_of_token_t[:, None] * (num_experts + 1) + chosen_tA).flatten()
        counts.view(-1).index_add_(0, flat_ids, torch.ones_like(flat_ids, dtype=counts.dtype))
        dropped_t = torch.zeros_like(entropy_t)
        if routing.chosen_ids_tA is not None:
            dropped_t = (chosen_tA != routing.expert_ids_tA).sum(dim=1).to(counts.dtype)
    # Side by side, so that they are summed at once.
    all_t = torch.cat([probs_tE, torch.stack([z_t, entropy_t, dropped_t], dim=1)], dim=1)
    sums_B = all_t.new_zeros(num_sequences, all_t.shape[1]).index_add(0, sequence_of_token_t, all_t)
    probs_BE, others_B3 = sums_B.split([num_experts, 3], dim=1)
    z_B, entropy_B, dropped_B = others_B3.unbind(1)
    return RouterStatistics(counts[:, :num_experts], probs_BE, z_B, entropy_B.detach(), dropped_B.detach())
