"""How a step is executed: each "auto" of the "parallel" block decided and noted, and CUDA graphs where they can be."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modeling.attention import BY_MASK, PER_DOCUMENT, VARLEN
from modeling.execution import Execution
from modeling.experts_grouped import grouped_backend
from recipe.settings.parallel import ATTENTION_BY_HOST
from recipe.settings.resolve import ResolvedConfig, WorldInfo
from tests.resolving import TINY, faults_of, resolve

FLASH = "--attn_implementation=flash_attention_2"
HOPPER, AMPERE = (9, 0), (8, 0)


def gpu(capability: tuple[int, int] | None = HOPPER, *, num_ranks: int = 4) -> WorldInfo:
    return WorldInfo(world_size=num_ranks, local_world_size=num_ranks, device="cuda", compute_capability=capability)


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
    assert resolve({"parallel": {"tp": 2, "ep": 2}}).execution.regather
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
    got = resolve({"parallel": parallel}, "--bf16", FLASH, world=gpu(capability))
    assert got.execution.cuda_graph is True
    assert notes_of(got) == [
        '"parallel.cuda_graph": "auto" became true: each block is recorded, and computed again in the backward'
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
    assert resolve({"parallel": parallel}, "--bf16", FLASH, **options).execution.cuda_graph is True


WAITS = (
    "torch's grouped product reads its offsets on the host, except in bf16 on compute capability 9.x and 10.x (here "
)
BY_HOST = (
    "works document by document, and where they begin the host reads from every batch; flash_attention_2 does without"
)
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
    "attn_implementation flex_attention gets a mask that the host builds for every batch; flash_attention_2 does "
    "without": {"attention": "flex_attention"},
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
