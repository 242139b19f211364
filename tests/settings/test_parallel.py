"""The "parallel" block and the batch sizes: a layout that fits, each "auto" decided and noted, or every broken rule.

Every fault comes with a choice that works; CUDA graphs are taken where they can be.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modeling.attention import BY_MASK, PER_DOCUMENT, VARLEN
from modeling.execution import Execution
from modeling.experts_grouped import grouped_backend
from recipe.settings.parallel import ATTENTION_BY_HOST, FAST_ATTENTION
from recipe.settings.resolve import ResolvedConfig, WorldInfo
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


FLASH, RECOMPUTED = "--attn_implementation=flash_attention_2", "--gradient_checkpointing"
HOPPER, AMPERE = (9, 0), (8, 0)


def gpu(capability: tuple[int, int] | None = HOPPER, *, num_ranks: int = 4) -> WorldInfo:
    return WorldInfo(world_size=num_ranks, local_world_size=num_ranks, device="cuda", compute_capability=capability)


def with_kernels(capability: tuple[int, int]) -> WorldInfo:
    """A GPU of a machine on which every package for attention is installed."""
    return replace(gpu(capability), attention_kernels=tuple(FAST_ATTENTION))


WIDE_HEADS = replace(TINY, head_dim=128)
FASTER = "about twice as fast on this GPU: flash_attention_3, if flash-attn-3 were installed"


def notes_of(settings: ResolvedConfig) -> list[str]:
    return [note for note in settings.notes if "cuda_graph" in note]


def test_parallel_options_name_what_auto_became() -> None:
    got = resolve({"parallel": {"ep": 1}})
    assert got.execution == Execution(experts_backend="loop", overlap=True)
    assert '"parallel.overlap": "auto" became true: transfers travel while others are worked on' in got.notes
    assert '"parallel.regather": "auto" became false: gathered tokens are kept, ep=1' in got.notes
    alone = resolve({"parallel": {"tp": 1}})
    assert not alone.execution.overlap
    assert '"parallel.overlap": "auto" became false: there is one rank in a group' in alone.notes
    whole = {"parallel": {"tp": 2, "ep": 2}}
    assert resolve(whole).execution.regather
    # Where a block is computed again, its tokens come again, too, and once is enough.
    again = resolve(whole, RECOMPUTED)
    assert not again.execution.regather
    kept = "gathered tokens are kept, ep=2 and every block is recomputed"
    assert f'"parallel.regather": "auto" became false: {kept}' in again.notes
    told = {"overlap": False, "overlap_chunks": 3, "regather": True, "token_dtype": "float8_e4m3"}
    asked = resolve({"parallel": {**told, "combine_dtype": "float32"}}).execution
    assert asked == Execution(**told, combine_dtype="float32", experts_backend="loop")
    assert resolve({"parallel": {"tp": 2, "ep": 2, "resident_experts": 2}}).execution.resident_experts == 2
    assert '"parallel.cuda_graph": "auto" became false: there are no CUDA graphs on a CPU' in got.notes


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize(("flags", "dtype"), [(["--bf16"], torch.bfloat16), ([], torch.float32)])
def test_auto_takes_the_grouped_product_that_leaves_the_host_alone(
    flags: list[str], dtype: torch.dtype, capability: tuple[int, int]
) -> None:
    assert resolve(None, *flags, world=gpu(capability)).execution.experts_backend == grouped_backend(
        dtype, capability=capability
    )


@pytest.mark.parametrize(
    ("parallel", "fault"),
    [
        ({"cuda_graph": "always"}, '"parallel.cuda_graph": \'always\' is not one of "auto", true, false'),
        ({"overlap": "yes"}, '"parallel.overlap": \'yes\' is not one of "auto", true, false'),
        ({"regather": 1}, '"parallel.regather": 1 is not one of "auto", true, false'),
        ({"overlap_chunks": 0}, '"parallel.overlap_chunks": 0 must be at least 1; "auto" takes what pays'),
        ({"overlap_chunks": "many"}, "'many' is not a whole number; give one or \"auto\""),
        ({"token_dtype": "fp8"}, "\"parallel.token_dtype\": 'fp8' is not one of auto, float8_e4m3"),
        (
            {"token_dtype": "float8_e4m3", "strategy": "gather_weights", "tp": 2},
            '"parallel.token_dtype": "float8_e4m3" is for strategy "gather_tokens", the only one that gathers tokens',
        ),
        (
            {"combine_dtype": "float32", "tp": 1},
            '"parallel.combine_dtype": "float32" has no effect with tp=1, where nothing travels; use "auto"',
        ),
        ({"combine_dtype": "half"}, "\"parallel.combine_dtype\": 'half' is not one of auto, float32"),
        ({"resident_experts": "x"}, "\"parallel.resident_experts\" in the DeepSpeed configuration: 'x' is not"),
        (
            {"resident_experts": -1},
            '"parallel": resident_experts=-1 must be at least 0, which makes no copies',
        ),
        (
            {"resident_experts": 1, "tp": 2, "ep": 1},
            '"parallel": resident_experts=1 needs ep > 1: with ep=1 every rank holds a slice of every',
        ),
        (
            {"resident_experts": 1, "tp": 2, "ep": 2, "strategy": "all_to_all"},
            "resident_experts=1 is for strategy gather_tokens, where every rank knows all routing, not for all_to_all",
        ),
        (
            {"resident_experts": 3, "tp": 2, "ep": 2},
            "3 copies do not fit: of num_experts=4 over ep=2 a rank can copy 0 to 2",
        ),
        (
            {"strategy": "magic"},
            "\"parallel.strategy\": 'magic' is not one of gather_tokens, gather_weights, all_to_all",
        ),
        ({"strategy": "all_to_all", "tp": 2, "ep": 1}, "needs whole experts on each rank: ep=2 with tp=2, not ep=1"),
        (
            {"strategy": "gather_weights", "tp": 2, "ep": 2},
            "needs a slice of every expert on each rank: ep=1 with tp=2",
        ),
        ({"experts_backend": "fast"}, "\"parallel.experts_backend\": 'fast' is not one of auto, loop, grouped, triton"),
        ({"experts_backend": "grouped", "tp": 4, "ep": 1}, "moe_intermediate_size / etp=2 must be a multiple of 4"),
        (["tp"], "\"parallel\" must be an object of keys and values, got ['tp']"),
    ],
)
def test_parallel_values_that_cannot_hold_are_refused(parallel: Any, fault: str) -> None:
    assert fault in faults_of({"parallel": parallel}, sizes=replace(TINY, moe_intermediate_size=8))


def test_copies_of_experts_need_whole_weights_between_steps() -> None:
    parallel = {"parallel": {"tp": 2, "ep": 2, "resident_experts": 1}}
    fault = '"parallel.resident_experts" cannot be used with ZeRO-3, which leaves no rank whole experts to lend'
    assert fault in faults_of({**parallel, "zero_optimization": {"stage": 3}})
    assert resolve({**parallel, "zero_optimization": {"stage": 2}}).zero_stage == 2


@pytest.mark.parametrize("capability", [HOPPER, (10, 0), (10, 3)])
@pytest.mark.parametrize("parallel", [{}, {"strategy": "gather_weights", "ep": 1}, {"strategy": "auto", "ep": 1}])
def test_auto_takes_graphs_where_they_are_possible(parallel: dict[str, Any], capability: tuple[int, int]) -> None:
    got = resolve({"parallel": parallel}, "--bf16", FLASH, RECOMPUTED, world=gpu(capability))
    assert got.execution.cuda_graph is True
    assert notes_of(got) == [
        '"parallel.cuda_graph": "auto" became true: each block is recorded, and computed again in the backward'
    ]
    got = resolve({"parallel": parallel}, "--bf16", FLASH, world=gpu(capability))
    assert got.execution.cuda_graph is False
    assert notes_of(got) == [
        '"parallel.cuda_graph": "auto" became false: a graph\'s backward computes its block again, and '
        "--gradient_checkpointing is not on"
    ]
    for asked in (True, False):
        got = resolve({"parallel": {**parallel, "cuda_graph": asked}}, "--bf16", FLASH, world=gpu(capability))
        assert got.execution.cuda_graph is asked
        assert notes_of(got) == []


DENSE = replace(TINY, dense_layers=(0, 1), intermediate_size=32)


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        ({}, {"world": gpu(AMPERE)}),  # torch's grouped product waits for the host there, Triton's does not
        ({}, {"world": gpu((12, 0))}),
        ({"strategy": "all_to_all"}, {"world": gpu(num_ranks=1)}),  # a rank alone has nobody to exchange rows with
        ({"strategy": "auto", "tp": 2}, {"world": gpu(AMPERE), "sizes": DENSE}),  # no experts, no counts to read
    ],
)
def test_graphs_where_nothing_waits_for_the_host(parallel: dict[str, Any], options: dict[str, Any]) -> None:
    assert resolve({"parallel": parallel}, "--bf16", FLASH, RECOMPUTED, **options).execution.cuda_graph is True


@pytest.mark.parametrize(
    ("taken", "reason", "options"),
    [
        ("varlen", f"all documents in one call; {FASTER}", {"world": gpu()}),
        ("varlen", "all documents in one call", {"world": gpu(AMPERE)}),
        ("flash_attention_3", "all documents in one call", {"world": with_kernels(HOPPER)}),
        ("flash_attention_4", "all documents in one call", {"world": with_kernels((10, 0)), "sizes": WIDE_HEADS}),
        ("varlen", "all documents in one call", {"world": with_kernels((10, 0))}),  # no backward for such small heads
        ("varlen", "all documents in one call", {"world": with_kernels(AMPERE)}),
        ("sdpa", "its kernels are for GPUs", {}),
        ("sdpa", "its kernels need compute capability 8.0", {"world": gpu((7, 5))}),
        ("sdpa", "it knows no dropout, and attention_dropout=0.1", {"world": gpu(num_ranks=1), "dropout": 0.1}),
    ],
)
def test_attention_is_the_fastest_that_a_gpu_has(taken: str, reason: str, options: dict[str, Any]) -> None:
    got = resolve(None, "--bf16", RECOMPUTED, **options)
    assert got.attention == taken
    assert f"--attn_implementation auto became {taken}: {reason}" in got.notes
    assert got.execution.cuda_graph is (taken != "sdpa")
    if taken == "sdpa":
        message = f'--attn_implementation varlen cannot be used: {reason}; use "auto" or "sdpa"'
        assert message in faults_of(None, "--bf16", "--attn_implementation=varlen", **options)


def test_attention_in_float32_is_sdpa() -> None:
    got = resolve(None, world=gpu())
    assert got.attention == "sdpa"
    assert "--attn_implementation auto became sdpa: its kernels are for bf16, not fp32" in got.notes
    assert not got.execution.cuda_graph


WAITS = (
    "torch's grouped product reads its offsets on the host, except in bf16 on compute capability 9.x and 10.x (here "
)
BY_HOST = "works document by document, and where they begin the host reads from every batch; varlen does without"
USUAL = {"stage": 2, "bf16": True, "attention": "flash_attention_2", "world": gpu(), "dropout": 0.0}
# What differs from USUAL, and keys of "parallel".
REASONS: dict[str, dict[str, Any]] = {
    "there are no CUDA graphs on a CPU": {"world": 4},
    "ZeRO-3 moves the weights in every step": {"stage": 3},
    'strategy "all_to_all" reads counts of rows on the host; "gather_tokens" does not': {"strategy": "all_to_all"},
    'strategy "auto" may take all_to_all, which reads counts of rows on the host; "gather_tokens" does not': {
        "strategy": "auto",
        "tp": 2,
        "ep": 2,
    },
    "with resident_experts what the ranks send each other changes from step to step": {
        "resident_experts": 1,
        "tp": 2,
        "ep": 2,
    },
    'experts_backend "loop" reads counts of rows on the host; "grouped" does not': {"experts_backend": "loop"},
    f'{WAITS}fp32 on 9.0); experts_backend "triton" does not': {"experts_backend": "grouped", "bf16": False},
    f'{WAITS}bf16 on 12.0); experts_backend "triton" does not': {"experts_backend": "grouped", "world": gpu((12, 0))},
    f'{WAITS}bf16 on unknown); experts_backend "triton" does not': {"experts_backend": "grouped", "world": gpu(None)},
    f"attn_implementation sdpa {BY_HOST}": {"attention": "sdpa"},
    "attn_implementation flex_attention gets a mask that the host builds for every batch; varlen does without": {
        "attention": "flex_attention"
    },
    "attention_dropout=0.1 would drop other values when a block is computed again": {"tp": 1, "dropout": 0.1},
    f"ZeRO-3 moves the weights in every step; attn_implementation eager {BY_HOST}": {"stage": 3, "attention": "eager"},
}


@pytest.mark.parametrize(("reason", "options"), REASONS.items())
@pytest.mark.requirement("R-GRAPH-02")
def test_auto_falls_back_in_one_line_and_true_is_refused(reason: str, options: dict[str, Any]) -> None:
    parallel = {key: value for key, value in options.items() if key not in USUAL}
    stage, bf16, attention, world, dropout = ({**USUAL, **options}[key] for key in USUAL)
    config = {"zero_optimization": {"stage": stage}, "parallel": parallel}
    flags, where = [f"--bf16={bf16}", f"--attn_implementation={attention}"], {"world": world, "dropout": dropout}
    got = resolve(config, *flags, **where)
    assert got.execution.cuda_graph is False
    assert notes_of(got) == [f'"parallel.cuda_graph": "auto" became false: {reason}']
    asked = config | {"parallel": {**parallel, "cuda_graph": True}, "gradient_cliping": 1}
    text = faults_of(asked, *flags, **where)
    assert f'"parallel.cuda_graph": true cannot be used: {reason}; use "auto" or false' in text
    assert 'did you mean "gradient_clipping"?' in text  # with all other faults


def test_attention_that_the_host_prepares_is_what_the_model_says_it_is() -> None:
    assert set(ATTENTION_BY_HOST) == {*PER_DOCUMENT, *BY_MASK}
    assert not set(ATTENTION_BY_HOST) & set(VARLEN)
