"""The case that both articles compute with, and what one of its layers weighs, sends and multiplies.

L positions, H hidden width, F expert width, E experts, k per token, m matrices per expert, b bytes per number, N ranks
in the group, q = (N - 1) / N. Forward only where not said otherwise. The formulas are the project's own
(modeling/cost.py, recipe/shared/flops.py), which know experts of three matrices; the articles' have two.
"""

from dataclasses import replace
from math import comb
from typing import NamedTuple

from modeling.cost import MATRICES, MoeTraffic
from modeling.layout import ParallelLayout
from modeling.spec import ModelSizes
from recipe.plan.traffic import ring_bytes
from recipe.shared.flops import count_parameters, model_flops_per_token

LENGTH = 16_384
RANKS = 4  # of a group: TP = EP = 4
REPLICAS = 4  # DP
GPUS = 16
EXPERT_MATRICES = 2
ELEMENT_BYTES = 2
# One layer without an embedding.
LAYER = ModelSizes(
    vocab_size=0,
    hidden_size=1024,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=4096,
    intermediate_size=0,
    max_position_embeddings=LENGTH,
    num_hidden_layers=1,
    qk_norm="none",
)
WIDTH = LAYER.hidden_size
ACTIVE = LAYER.num_experts_per_tok


class LayerFlops(NamedTuple):
    """Forward, a whole layer, per token. qkv and output are projections; scores are the causal half."""

    qkv: float
    output: float
    attention: float
    router: float
    experts: float

    @property
    def products(self) -> float:
        """All but attention itself."""
        return self.qkv + self.output + self.router + self.experts


def sent_share(ranks: int) -> float:
    """q: the share of the whole that a rank sends, and receives, in an all-gather or a reduce-scatter."""
    return (ranks - 1) / ranks


def tokens_bytes(length: int = LENGTH, *, width: int = WIDTH) -> int:
    """All tokens of a sequence."""
    return length * width * ELEMENT_BYTES


def gather_bytes(whole_bytes: float, *, ranks: int = RANKS) -> float:
    """What a rank sends in an all-gather or a reduce-scatter."""
    return ring_bytes("all_gather", whole_bytes, size=ranks)


def all_reduce_bytes(whole_bytes: float, *, ranks: int = RANKS) -> float:
    """What a rank sends."""
    return ring_bytes("all_reduce", whole_bytes, size=ranks)


def scores_bytes(length: int, *, ranks: int) -> int:
    """The score matrix of a rank's heads."""
    return LAYER.num_attention_heads // ranks * length**2 * ELEMENT_BYTES


def moe_traffic(
    num_tokens: int = LENGTH, *, ranks: int = RANKS, sizes: ModelSizes = LAYER, rho: float = 1.0
) -> MoeTraffic:
    layout = ParallelLayout(tp=ranks, ep=ranks)
    return MoeTraffic(sizes=sizes, layout=layout, num_tokens=num_tokens, element_bytes=ELEMENT_BYTES, rho=rho)


def forward_payload(traffic: MoeTraffic, *, strategy: str) -> float:
    """What a rank sends forward; the backward sends the same again, without gathering tokens a second time."""
    return traffic.wire_bytes(strategy).payload / 2


def matrices_share(matrices: int = EXPERT_MATRICES) -> float:
    """By which the project's formulas, linear in the matrices of an expert, are multiplied for another number."""
    return matrices / MATRICES


def layer_flops(length: float = LENGTH, *, sizes: ModelSizes = LAYER, matrices: int = EXPERT_MATRICES) -> LayerFlops:
    """From recipe/shared/flops.py, part by part as differences; training is three times the forward there."""

    def forward(experts: int, active: int, attention_length: float) -> float:
        part = replace(sizes, num_experts=experts, num_experts_per_tok=active)
        return model_flops_per_token(part, attention_length=attention_length) / 3

    experts, active = sizes.num_experts, sizes.num_experts_per_tok
    projections = forward(0, 0, 0)
    query, key_value = sizes.num_attention_heads, sizes.num_key_value_heads
    output = projections * query / (2 * query + 2 * key_value)
    return LayerFlops(
        qkv=projections - output,
        output=output,
        attention=forward(0, 0, length) - projections,
        router=forward(experts, 0, 0) - projections,
        experts=(forward(experts, active, 0) - forward(experts, 0, 0)) * matrices_share(matrices),
    )


def training_flops(length: float = LENGTH) -> float:
    """Per token and layer, forward and backward, without the router."""
    flops = layer_flops(length)
    return 3 * (flops.products - flops.router + flops.attention)


def layer_parameters() -> float:
    """Of the whole layer."""
    total = count_parameters(LAYER).total
    return total - LAYER.num_experts * expert_parameters(MATRICES) + LAYER.num_experts * expert_parameters()


def expert_parameters(matrices: int = EXPERT_MATRICES) -> float:
    """Of one expert."""
    counts = count_parameters(LAYER)
    return (counts.total - counts.active) / (LAYER.num_experts - ACTIVE) * matrices_share(matrices)


def ranks_hit(*, experts: int, active: int, ranks: int) -> float:
    """On how many ranks a token's experts live, on average over even routing."""
    missed = comb(experts - experts // ranks, active) / comb(experts, active)
    return ranks * (1 - missed)
