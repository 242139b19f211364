"""CUDA graphs are used where they can be, and where not, one line says why; asked for by name, that is an error."""

from dataclasses import replace
from typing import Any

import pytest

from modeling.attention import BY_MASK, PER_DOCUMENT, VARLEN
from recipe.settings.execution import ATTENTION_BY_HOST
from recipe.settings.resolve import ResolvedConfig, WorldInfo
from tests.resolving import TINY, faults_of, resolve

FLASH = "--attn_implementation=flash_attention_2"
HOPPER, AMPERE = (9, 0), (8, 0)


def gpu(capability: tuple[int, int] | None = HOPPER) -> WorldInfo:
    return WorldInfo(world_size=4, local_world_size=4, device="cuda", compute_capability=capability)


def note_of(settings: ResolvedConfig) -> str:
    [note] = [note for note in settings.notes if "cuda_graph" in note]
    return note


@pytest.mark.parametrize("capability", [HOPPER, (10, 0), (10, 3)])
@pytest.mark.parametrize("parallel", [{}, {"strategy": "gather_weights", "ep": 1}, {"strategy": "auto", "ep": 1}])
def test_auto_takes_graphs_where_they_are_possible(parallel: dict[str, Any], capability: tuple[int, int]) -> None:
    got = resolve({"parallel": parallel}, "--bf16", FLASH, world=gpu(capability))
    assert got.execution.cuda_graph is True
    assert note_of(got) == (
        '"parallel.cuda_graph": "auto" became true: each block is recorded, and computed again in the backward'
    )
    asked = resolve({"parallel": {**parallel, "cuda_graph": True}}, "--bf16", FLASH, world=gpu(capability))
    assert asked.execution.cuda_graph is True
    assert not [note for note in asked.notes if "cuda_graph" in note]


@pytest.mark.parametrize(("flags", "capability"), [([], HOPPER), (["--bf16"], AMPERE), (["--bf16"], (12, 0))])
def test_where_torchs_grouped_product_waits_for_the_host_tritons_does_not(
    flags: list[str], capability: tuple[int, int]
) -> None:
    got = resolve(None, *flags, FLASH, world=gpu(capability))
    assert got.execution.experts_backend == "triton"
    assert got.execution.cuda_graph is True


def test_false_is_eager_without_a_word() -> None:
    got = resolve({"parallel": {"cuda_graph": False}}, "--bf16", FLASH, world=gpu())
    assert got.execution.cuda_graph is False
    assert not [note for note in got.notes if "cuda_graph" in note]


ON_GPU: dict[str, Any] = {"world": gpu()}
BY_TORCH = {"parallel": {"experts_backend": "grouped"}}
WAITS = (
    "torch's grouped product reads its offsets on the host, except in bf16 on compute capability 9.x and 10.x (here "
)
REASONS: list[tuple[dict[str, Any], list[str], dict[str, Any], str]] = [
    ({}, ["--bf16", FLASH], {"world": 4}, "there are no CUDA graphs on a CPU"),
    ({"zero_optimization": {"stage": 3}}, ["--bf16", FLASH], ON_GPU, "ZeRO-3 moves the weights in every step"),
    (
        {"parallel": {"strategy": "all_to_all"}},
        ["--bf16", FLASH],
        ON_GPU,
        'strategy "all_to_all" reads counts of rows on the host; "gather_tokens" does not',
    ),
    (
        {"parallel": {"strategy": "auto", "tp": 2, "ep": 2}},
        ["--bf16", FLASH],
        ON_GPU,
        'strategy "auto" may take all_to_all, which reads counts of rows on the host; "gather_tokens" does not',
    ),
    (
        {"parallel": {"resident_experts": 1, "tp": 2, "ep": 2}},
        ["--bf16", FLASH],
        ON_GPU,
        "with resident_experts what the ranks send each other changes from step to step",
    ),
    (
        {"parallel": {"experts_backend": "loop"}},
        ["--bf16", FLASH],
        ON_GPU,
        'experts_backend "loop" reads counts of rows on the host; "grouped" does not',
    ),
    (BY_TORCH, [FLASH], ON_GPU, f'{WAITS}fp32 on 9.0); experts_backend "triton" does not'),
    (BY_TORCH, ["--bf16", FLASH], {"world": gpu(AMPERE)}, f'{WAITS}bf16 on 8.0); experts_backend "triton" does not'),
    (BY_TORCH, ["--bf16", FLASH], {"world": gpu((12, 0))}, f'{WAITS}bf16 on 12.0); experts_backend "triton" does not'),
    (BY_TORCH, ["--bf16", FLASH], {"world": gpu(None)}, f'{WAITS}bf16 on unknown); experts_backend "triton" does not'),
    (
        {},
        ["--bf16"],
        ON_GPU,
        "attn_implementation sdpa works document by document, and where they begin the host reads from every batch; "
        "flash_attention_2 does without",
    ),
    (
        {},
        ["--bf16", "--attn_implementation=flex_attention"],
        ON_GPU,
        "attn_implementation flex_attention gets a mask that the host builds for every batch; "
        "flash_attention_2 does without",
    ),
    (
        {"parallel": {"tp": 1}},
        ["--bf16", FLASH],
        ON_GPU | {"dropout": 0.1},
        "attention_dropout=0.1 would drop other values when a block is computed again",
    ),
    (
        {"zero_optimization": {"stage": 3}},
        ["--bf16", "--attn_implementation=eager"],
        ON_GPU,
        "ZeRO-3 moves the weights in every step; attn_implementation eager works document by document, and where they "
        "begin the host reads from every batch; flash_attention_2 does without",
    ),
]


@pytest.mark.parametrize(("config", "flags", "options", "reason"), REASONS)
def test_r_graph_02_auto_falls_back_in_one_line_and_true_is_refused(
    config: dict[str, Any], flags: list[str], options: dict[str, Any], reason: str
) -> None:
    got = resolve(config, *flags, **options)
    assert got.execution.cuda_graph is False
    assert note_of(got) == f'"parallel.cuda_graph": "auto" became false: {reason}'
    asked = config | {"parallel": {**config.get("parallel", {}), "cuda_graph": True}, "gradient_cliping": 1}
    text = faults_of(asked, *flags, **options)
    assert f'"parallel.cuda_graph": true cannot be used: {reason}; use "auto" or false' in text
    assert 'did you mean "gradient_clipping"?' in text  # with all other faults


def test_a_rank_alone_has_nobody_to_exchange_rows_with() -> None:
    alone = WorldInfo(world_size=1, local_world_size=1, device="cuda", compute_capability=HOPPER)
    config = {"parallel": {"strategy": "all_to_all"}}
    assert resolve(config, "--bf16", FLASH, world=alone).execution.cuda_graph is True


def test_layers_without_experts_have_no_counts_to_read() -> None:
    dense = replace(TINY, dense_layers=(0, 1), intermediate_size=32)
    got = resolve({"parallel": {"strategy": "auto", "tp": 2}}, FLASH, world=gpu(AMPERE), sizes=dense)
    assert got.execution.cuda_graph is True


def test_a_value_that_is_none_is_refused() -> None:
    text = faults_of({"parallel": {"cuda_graph": "always"}}, "--bf16", FLASH, world=gpu())
    assert '"parallel.cuda_graph": \'always\' is not one of "auto", true, false' in text


def test_attention_that_the_host_prepares_is_what_the_model_says_it_is() -> None:
    assert set(ATTENTION_BY_HOST) == {*PER_DOCUMENT, *BY_MASK}
    assert not set(ATTENTION_BY_HOST) & set(VARLEN)
