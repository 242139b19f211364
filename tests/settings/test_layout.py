"""Layout and batch sizes fit the ranks and the model, or every broken rule is named with a choice that works."""

from dataclasses import replace
from typing import Any

import pytest

from recipe.settings.resolve import WorldInfo
from tests.resolving import TINY, faults_of, resolve


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "train_batch_size": 16}, (2, 4, 16)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, (2, 4, 16)),
        ({"train_micro_batch_size_per_gpu": 2, "train_batch_size": 16}, (2, 4, 16)),
        ({"gradient_accumulation_steps": 4, "train_batch_size": 16}, (2, 4, 16)),
        ({"train_batch_size": 16}, (8, 1, 16)),
    ],
)
@pytest.mark.requirement("R-CFG-03")
def test_the_missing_batch_size_is_derived_over_dp(sizes: dict[str, int], batch: tuple[int, ...]) -> None:
    got = resolve({**sizes, "parallel": {"tp": 2}})
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert tuple(got.engine[name] for name in names) == batch
    assert (got.num_sequences, got.accumulation, got.sequences_per_step) == batch


@pytest.mark.requirement("R-CFG-03")
def test_a_wrong_train_batch_size_is_refused_with_the_formula() -> None:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "train_batch_size": 32}
    text = faults_of({**sizes, "parallel": {"tp": 2}})
    assert "train_batch_size=32, but micro 2 x accum 4 x dp 2 = 16 (tp=2, dp=2, world=4:" in text
    assert "use train_batch_size=16" in text


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (
            {"train_batch_size": 15, "train_micro_batch_size_per_gpu": 2},
            r"train_batch_size=15 is not a multiple of micro 2 x dp 2 = 4 .*; the nearest that is: 16",
        ),
        ({"train_batch_size": 15}, r"is not a multiple of accum 1 x dp 2 = 2"),
        ({"train_batch_size": 0}, '"train_batch_size" in .*: 0 is too small'),
        ({"train_batch_size": "many"}, "\"train_batch_size\" in .*: 'many' is not a whole number"),
        ({"train_micro_batch_size_per_gpu": 0}, '"train_micro_batch_size_per_gpu" in .*: 0 is too small'),
    ],
)
@pytest.mark.requirement("R-CFG-03")
def test_batch_sizes_that_cannot_be_are_refused(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        resolve({**config, "parallel": {"tp": 2}})


@pytest.mark.parametrize(
    ("parallel", "world", "sizes", "faults"),
    [
        ({"tp": 3, "ep": 3}, 3, {}, ["num_experts=4 cannot be split over ep=3", "num_attention_heads=4 cannot be"]),
        (
            {"tp": 4},
            4,
            {"num_attention_heads": 6},
            ["num_attention_heads=6 cannot be split over tp=4; tp must be one of"],
        ),
        ({"tp": 4}, 6, {}, ["world_size=6 cannot be cut into groups of tp=4; tp must be one of [1, 2, 3, 6]"]),
        ({"tp": 8}, 6, {}, ["world_size=6 cannot be cut into groups of tp=8", "num_attention_heads=4 cannot be split"]),
        ({"tp": 0}, 4, {}, ["tp=0 must be a whole number of at least 1", "the largest layout that fits is dp=1 tp=4"]),
        ({"tp": -1}, 4, {}, ["tp=-1 must be a whole number of at least 1", '"parallel": {"tp": 4, "ep": 4}']),
        ({"ep": 0}, 4, {}, ["ep=0 must be a whole number of at least 1"]),
        ({"tp": 1.5}, 4, {}, ['"parallel.tp" in the DeepSpeed configuration: 1.5 is not a whole number']),
        ({}, 4, {"num_experts_per_tok": 5}, ["num_experts_per_tok=5 must lie between 1 and num_experts=4"]),
        ({}, 4, {"max_position_embeddings": 8}, ["block_size=16 is longer than max_position_embeddings=8"]),
    ],
)
@pytest.mark.requirement("R-CFG-06")
def test_impossible_layouts_are_refused_with_every_broken_rule(
    parallel: dict[str, Any], world: int, sizes: dict[str, int], faults: list[str]
) -> None:
    text = faults_of({"parallel": parallel}, world=world, sizes=replace(TINY, **sizes))  # type: ignore[arg-type]
    for fault in faults:
        assert fault in text


@pytest.mark.requirement("R-CFG-06")
def test_faults_of_every_kind_come_in_one_message() -> None:
    config = {"gradient_cliping": 1, "parallel": {"tp": 3, "overlap": 2}, "fp16": {"enabled": True}}
    text = faults_of(config, "--lr_scheduler_type=constant", "--warmup_steps=3")
    for fault in [
        'did you mean "gradient_clipping"?',
        '"fp16.enabled": True in the DeepSpeed configuration cannot be used',
        "world_size=4 cannot be cut into groups of tp=3",
        "num_attention_heads=4 cannot be split over tp=3; tp must be one of [1, 2, 4]",
        "num_key_value_heads=2 can neither be split nor replicated over tp=3",
        '"parallel.overlap": 2 is not one of "auto", true, false',
        "lr_scheduler_type constant has no warm-up, but warmup_steps=3",
    ]:
        assert fault in text
    assert len(set(text.splitlines())) == len(text.splitlines())


def test_auto_takes_the_widest_group_of_one_node_that_fits() -> None:
    two_nodes = WorldInfo(world_size=8, local_world_size=4)
    assert str(resolve(None, world=two_nodes).layout) == "dp=2 tp=4 ep=4 etp=1"
    assert str(resolve({"parallel": {"ep": 1}}, world=two_nodes).layout) == "dp=2 tp=4 ep=1 etp=4"
    assert str(resolve(None, "--block_size=15", "--per_device_train_batch_size=2").layout) == "dp=2 tp=2 ep=2 etp=1"
    assert str(resolve(None, world=1).layout) == "dp=1 tp=1 ep=1 etp=1"
    assert str(resolve(None, world=3).layout) == "dp=3 tp=1 ep=1 etp=1"
    narrow = replace(TINY, moe_intermediate_size=16)  # 4 slices of 4 are too thin for bf16's grouped product
    sliced = {"parallel": {"ep": 1, "experts_backend": "grouped"}}
    assert str(resolve(sliced, "--bf16", sizes=narrow).layout) == "dp=2 tp=2 ep=1 etp=2"


def test_auto_leaves_batch_sizes_and_evaluation_whole() -> None:
    total = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert str(resolve(total).layout) == "dp=2 tp=2 ep=2 etp=1"
    flags = ["--block_size=15", "--per_device_train_batch_size=4", "--per_device_eval_batch_size=2"]
    assert str(resolve(None, *flags).layout) == "dp=2 tp=2 ep=2 etp=1"


@pytest.mark.requirement("R-CFG-06")
def test_tokens_of_training_and_evaluation_must_be_shared_evenly() -> None:
    text = faults_of({"parallel": {"tp": 2}}, "--block_size=15", "--per_device_train_batch_size=1", world=2)
    assert "1 sequences x block_size=15 = 15 tokens cannot be shared by tp=2 ranks" in text
    flags = ["--block_size=14", "--per_device_train_batch_size=2", "--per_device_eval_batch_size=1"]
    text = faults_of({"parallel": {"tp": 4}}, *flags)
    assert (
        "per_device_eval_batch_size=1 x block_size=14 tokens cannot be shared by tp=4 ranks; use a multiple of 2"
        in text
    )
    assert 'the largest layout that fits is dp=2 tp=2 ep=2 etp=1: "parallel": {"tp": 2, "ep": 2}' in text
    assert resolve({"parallel": {"tp": 4}}, *flags[:2]).layout.tp == 4


def test_the_layout_offered_instead_has_the_batch_that_was_asked_for() -> None:
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": 2}
    text = faults_of({**sizes, "parallel": {"tp": 3}})
    assert 'the largest layout that fits is dp=2 tp=2 ep=2 etp=1: "parallel": {"tp": 2, "ep": 2}' in text
    narrow = replace(TINY, hidden_size=34)
    text = faults_of({"parallel": {"tp": 4, "experts_backend": "grouped"}}, sizes=narrow)
    assert "hidden_size=34 must be a multiple of 4" in text
    assert "the largest layout that fits" not in text  # no layout mends it


def test_the_default_zero_stage_avoids_reductions_between_nodes_per_micro_batch() -> None:
    two_nodes = WorldInfo(world_size=8, local_world_size=4)
    assert resolve(None, "--gradient_accumulation_steps=2", world=two_nodes).zero_stage == 1
    assert resolve(None, world=two_nodes).zero_stage == 2
    assert resolve(None, "--gradient_accumulation_steps=2", world=8).zero_stage == 2


def test_placing_experts_needs_whole_ones_that_can_move() -> None:
    fault = "--place_experts needs whole experts that can move: ep > 1, not ep=1"
    assert fault in faults_of({"parallel": {"tp": 2, "ep": 1}}, "--place_experts")
    parallel = {"parallel": {"tp": 2, "ep": 2}, "zero_optimization": {"stage": 3}}
    assert resolve(parallel, "--place_experts").layout.ep == 2


def test_dropout_needs_a_group_of_one() -> None:
    assert "attention_dropout=0.1 cannot be used with tp=4" in faults_of(None, dropout=0.1)
    assert resolve({"parallel": {"tp": 1}}, dropout=0.1).layout.dp == 4


def test_an_automatic_strategy_says_what_it_takes_for_the_shapes_at_hand() -> None:
    small = {"strategy": "auto", "ep": 1, "tp": 2}
    notes = resolve({"parallel": small}, "--per_device_train_batch_size=1", "--per_device_eval_batch_size=64").notes
    said = [note for note in notes if "parallel.strategy" in note]
    assert len(said) == 2
    assert '"auto" takes gather_tokens for' in said[0]
    assert '"auto" takes gather_weights for' in said[1]
