"""Planned collectives: a small case by hand, and ZeRO-3's fetches on models one can follow.

What every option adds to them is held against the dry run, in tests/dry_run.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modeling.layout import ParallelLayout
from modeling.model import GatherMoeForCausalLM
from recipe.plan.job import Job
from recipe.plan.parameters import Module, held_modules
from recipe.plan.traffic import planned_traffic
from recipe.plan.zero3 import Thresholds, fetches_of_a_micro_batch, persistent
from recipe.shared.sent import Sent
from tests.referee import tiny_config
from tests.traffic_jobs import small_job

TINY = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32}


def test_a_small_case_by_hand() -> None:
    """Two ranks, two groups, T=32, D=32, float32: T*D*4 = 4096 bytes, of which a rank sends half."""
    held = 2 * 25 * 32 + 2 * (16 * 32 + 2 * 8 * 32 + 16 * 32 + 4 * 32 + 2 * (64 * 32 + 32 * 32))
    vectors = 2 * 2 * 32 + 32
    assert planned_traffic(small_job(2, 2, 2, model=TINY)) == (
        Sent("dp", "all_gather", "zero", 2, (held + vectors) * 4 / 2),
        Sent("dp", "all_reduce", "counts", 1, 16),
        Sent("dp", "all_reduce", "zero", 3, (held + vectors) * 4 + 2 * 4),
        Sent("group", "all_gather", "attention", 4, 4 * 2048),
        Sent("group", "all_gather", "embedding", 1, 2048),
        Sent("group", "all_gather", "experts", 4, 4 * 2048),
        Sent("group", "all_gather", "head", 1, 2048),
        Sent("group", "all_gather", "routing", 2, 2 * 32 * 2 * 6 / 2),
        Sent("group", "all_reduce", "head", 2, 3 * 32 * 4),
        Sent("group", "all_reduce", "replicated", 3, 4 * (2 * (2 * 32 + 4 * 32) + 32)),
        Sent("group", "all_reduce", "statistics", 1, 4 * 2 * 2 * (2 * 4 + 3)),
        Sent("group", "all_reduce", "zero", 2, 2 * 4),
        Sent("group", "reduce_scatter", "attention", 4, 4 * 2048),
        Sent("group", "reduce_scatter", "embedding", 1, 2048),
        Sent("group", "reduce_scatter", "experts", 4, 4 * 2048),
        Sent("group", "reduce_scatter", "head", 1, 2048),
        Sent("group", "reduce_scatter", "routing", 2, 2 * 32 * 2 * 4 / 2),
    )


def test_one_rank_sends_nothing() -> None:
    for stage in (0, 1, 2, 3):
        assert planned_traffic(small_job(zero={"stage": stage})) == ()


def row(job: Job, axis: str, op: str, purpose: str) -> Sent:
    return next(sent for sent in planned_traffic(job) if sent[:3] == (axis, op, purpose))


def test_copies_come_once_a_step_and_their_gradients_go_home_in_every_micro_batch() -> None:
    job = small_job(1, 2, 2, resident_experts=1, accumulation=3)
    expert = 3 * 32 * 64 * 4
    assert row(job, "group", "all_to_all", "copies") == Sent("group", "all_to_all", "copies", 4 * 4, 4 * 2 * expert)


def test_slices_of_the_head_are_those_of_the_loss() -> None:
    job = small_job(1, 2, 2, model={"vocab_size": 2**20}, block_size=64)
    assert row(job, "group", "all_reduce", "head").num_calls == 2 * 128 // (2**24 // (4 * 2**19))
    assert row(replace(job, device="cuda"), "group", "all_reduce", "head").num_calls == 2


@pytest.mark.parametrize(
    ("zero", "named"),
    [
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu"}, "round_robin_gradients": True},
            "offload_optimizer, round_robin_gradients",
        ),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size"),
        ({"stage": 3, "reduce_scatter": False}, "reduce_scatter"),
        ({"stage": 3, "stage3_use_all_reduce_for_fetch_params": True}, "stage3_use_all_reduce_for_fetch_params"),
        ({"stage": 1, "round_robin_gradients": 1}, "round_robin_gradients"),
        ({"stage": 2, "use_multi_rank_bucket_allreduce": False}, "use_multi_rank_bucket_allreduce"),
    ],
    ids=str,
)
def test_options_without_a_formula_are_refused(zero: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf'"zero_optimization" sets {named}, and what ZeRO sends then has no formula'):
        planned_traffic(small_job(2, 1, zero=zero))


def test_options_that_say_no_are_none() -> None:
    off = {"offload_optimizer": {"device": "none"}, "zero_hpz_partition_size": 1, "mics_shard_size": -1}
    off |= {"stage": 2, "round_robin_gradients": 0, "use_multi_rank_bucket_allreduce": True}
    assert planned_traffic(small_job(2, 1, zero=off)) == planned_traffic(small_job(2, 1, zero={"stage": 2}))


MODULES = [
    Module("embedding", {"e": 10}),
    Module("block 0", {"a": 100, "small": 1}, block="experts"),
    Module("block 1", {"b": 100}, block="experts"),
    Module("norm", {"n": 1}),
    Module("head", {"h": 10}),
]
NOTHING_AHEAD = Thresholds(prefetch=0, max_live=10**9, max_reuse=0, persistence=0, model_persistence=10**9)


ALL = [("e",), ("a", "small"), ("b",), ("n",), ("h",)]


def gathers(thresholds: Thresholds, *, modules: list[Module] = MODULES, **options: Any) -> list[tuple[str, ...]]:
    """The names in each gather of a micro-batch."""
    fetches = fetches_of_a_micro_batch(modules, thresholds, **options)
    return [names for fetch in fetches for names in (fetch.missing, fetch.ahead) if names]


@pytest.mark.parametrize(
    ("thresholds", "expected"),
    [
        # Without any foresight a parameter is gathered for each use.
        ({}, [*ALL, *reversed(ALL)]),
        # After norm and head, 11 numbers, a block finds itself inside of the whole model, whose backward comes: kept.
        ({"max_reuse": 12}, [*ALL, ("n",), ("a", "small"), ("e",)]),
        # Fetching ahead joins gathers, and nothing that it counted with is dropped.
        ({"prefetch": 10**6}, [("e", "a", "small", "b", "n", "h")]),
        # With room for hardly any, nothing is joined.
        ({"prefetch": 10**6, "max_live": 1}, [*ALL, *reversed(ALL)]),
    ],
    ids=["each use", "used again soon", "ahead", "little room"],
)
def test_what_is_gathered_follows_from_the_thresholds(thresholds: dict[str, int], expected: list[Any]) -> None:
    assert gathers(NOTHING_AHEAD._replace(**thresholds)) == expected


def test_every_output_of_the_decoder_asks_for_it() -> None:
    """It has no parameters of its own, but each time the next one is gathered ahead."""
    one_by_one = NOTHING_AHEAD._replace(prefetch=1)
    last = Module("block 2", dict.fromkeys("abcdefgh", 100), block="dense")
    modules = [Module("embedding", {"i": 10}), last, Module("norm", {"n": 1}), Module("head", {"o": 10})]
    backward = [gathers(one_by_one, modules=modules, num_outputs=number)[-4:] for number in (1, 3)]
    assert backward == [
        [("c",), ("d",), ("e", "f", "g", "h"), ("i",)],
        [("e",), ("f",), ("g", "h"), ("i",)],
    ]


def test_what_is_dropped_was_decided_before_the_first_optimizer_step() -> None:
    """Then small parameters were yet to be gathered, so that less was gathered ahead and nothing counted with."""
    thresholds = NOTHING_AHEAD._replace(persistence=10, prefetch=1)
    assert gathers(thresholds) == [("a",), ("b",)]
    assert gathers(thresholds, accumulates=True) == [("a",), ("b",), ("b",), ("a",)]


def test_small_parameters_stay_as_long_as_all_of_them_have_room() -> None:
    thresholds = NOTHING_AHEAD._replace(persistence=10, model_persistence=12)
    assert persistent(MODULES, thresholds) == {"e": 10, "small": 1, "n": 1}
    names = [name for gather in gathers(thresholds) for name in gather]
    assert sorted(names) == ["a", "a", "b", "b", "h", "h"]


@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
def test_parameters_are_in_the_models_order_which_fetches_and_buckets_follow(qk_norm: str) -> None:
    config = tiny_config(qk_norm=qk_norm, num_hidden_layers=2, mlp_only_layers=[0], intermediate_size=48)
    with torch.device("meta"):
        model = GatherMoeForCausalLM(config)
    modules = held_modules(config.sizes, ParallelLayout())
    assert [name for module in modules for name in module.parameters] == [name for name, _ in model.named_parameters()]
