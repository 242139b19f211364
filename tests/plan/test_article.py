"""The articles' own case: 16 A100, sequences of 16,384, a width of 1,024, and their layout DP=4 TP=4 EP=4."""

import functools
from dataclasses import replace

import pytest

from recipe.plan.report import against
from recipe.plan.search import Found, search_plans
from recipe.settings.flags import Arguments
from recipe.settings.model import read_model, sizes_of
from recipe.settings.presets import PRESETS
from tests.plan_hardware import plan_request

THEIRS = {"tp": 4, "ep": 4, "strategy": "gather_tokens"}
THEIR_BATCH = 8  # sequences: two for each of four groups, 131,072 tokens


@functools.cache
def planned(*, ranks_per_node: int, sequences_per_step: int = THEIR_BATCH, skew: float = 1.0) -> Found:
    shape = {"ranks_per_node": ranks_per_node, "block_size": 16384, "sequences_per_step": sequences_per_step}
    shape["skew"] = skew
    request = plan_request("article-1", gpus=16, **shape)
    sizes = request.sizes
    assert (sizes.hidden_size, sizes.num_experts, sizes.moe_intermediate_size) == (1024, 8, 4096)
    return search_plans(request)


@pytest.mark.parametrize("ranks_per_node", [4, 8])
def test_whole_experts_are_ahead_of_slices_only_where_routing_is_even(ranks_per_node: int) -> None:
    """Their products are larger; but the busiest rank is waited for, and slices have no busiest rank."""
    ahead = {}
    for skew in (1.0, 1.3):
        found = planned(ranks_per_node=ranks_per_node, skew=skew)
        speeds = {str(plan.arrangement): plan.tokens_per_s for plan in found.plans}
        theirs, sliced = speeds["dp=4 tp=4 ep=4 etp=1 gather_tokens"], speeds["dp=4 tp=4 ep=1 etp=4 gather_tokens"]
        ahead[skew] = theirs > sliced
    assert ahead == {1.0: True, 1.3: False}
    assert f"is {1 - theirs / found.plans[0].tokens_per_s:.1%} behind" in against(found, THEIRS)


def test_a_group_of_eight_loses_more_where_it_crosses_nodes() -> None:
    behind = {}
    for ranks_per_node in (4, 8):
        found = planned(ranks_per_node=ranks_per_node)
        widest = next(plan for plan in found.plans if plan.job.layout.tp == 8)
        inside = next(plan for plan in found.plans if plan.job.layout.tp == 4)
        behind[ranks_per_node] = widest.time.step_s / inside.time.step_s
    assert behind[4] > behind[8]


def test_single_ranks_need_a_sequence_for_every_device() -> None:
    """The articles' batch of eight leaves half of the devices idle where a group is one rank."""
    idle, behind = {}, {}
    for sequences in (THEIR_BATCH, 16):
        found = planned(ranks_per_node=8, sequences_per_step=sequences)
        alone = next(plan for plan in found.plans if plan.job.layout.tp == 1)
        idle[sequences] = found.idle(alone)
        behind[sequences] = 1 - alone.tokens_per_s / found.plans[0].tokens_per_s
    assert idle == {8: 8, 16: 0}
    assert behind[8] > behind[16]


def test_the_names_of_the_articles_models_and_of_olmoe_lead_to_their_sizes() -> None:
    assert PRESETS["olmoe"] is PRESETS["olmoe-1b-7b"]
    first, second = (sizes_of(read_model(Arguments(config_name=name)).kwargs) for name in ("article-1", "article-2"))
    assert second == replace(first, moe_intermediate_size=6144, max_position_embeddings=262144)
    assert (first.num_attention_heads, first.num_experts_per_tok, first.max_position_embeddings) == (64, 2, 32768)
