"""Every rule a layout must meet, each broken once, and what the message offers instead."""

from dataclasses import replace
from typing import Any

import pytest

from modeling.layout import (
    BatchSizes,
    LayoutRequest,
    ParallelLayout,
    allowed_ep,
    allowed_tp,
    check_layout,
    divisors,
    fitting_layouts,
    kv_heads_fit,
    layout_faults,
)
from modeling.spec import ModelSizes
from tests.resolving import TINY

DENSE_FIRST = replace(TINY, dense_layers=(0,), intermediate_size=50)
NO_EXPERTS = replace(TINY, num_experts=0, num_experts_per_tok=0, dense_layers=(0, 1), intermediate_size=48)


def request(
    layout: ParallelLayout, *, sizes: ModelSizes = TINY, world_size: int | None = None, **others: Any
) -> LayoutRequest:
    return LayoutRequest(
        sizes=sizes, layout=layout, world_size=layout.world_size if world_size is None else world_size, **others
    )


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (ParallelLayout(), TINY),
        (ParallelLayout(dp=2, tp=2, ep=2), TINY),
        (ParallelLayout(dp=2, tp=2, ep=1), TINY),
        (ParallelLayout(tp=4, ep=2), TINY),  # kv heads replicated, experts cut both ways
        (ParallelLayout(tp=2, ep=1), DENSE_FIRST),
        (ParallelLayout(tp=4, ep=1), NO_EXPERTS),
        (ParallelLayout(tp=6, ep=6), replace(TINY, num_attention_heads=12, num_key_value_heads=3, num_experts=6)),
    ],
    ids=str,
)
def test_layouts_that_fit_have_no_fault(layout: ParallelLayout, sizes: ModelSizes) -> None:
    assert layout_faults(request(layout, sizes=sizes, batch=BatchSizes(num_sequences=3, block_size=16))) == []
    check_layout(request(layout, sizes=sizes))


FAULTS: list[tuple[LayoutRequest, str]] = [
    (request(ParallelLayout(dp=0), world_size=1), r"dp=0 must be a whole number of at least 1"),
    (request(ParallelLayout(tp=0), world_size=1), r"tp=0 must be a whole number of at least 1"),
    (request(ParallelLayout(tp=-1), world_size=1), r"tp=-1 must be a whole number of at least 1"),
    (request(ParallelLayout(ep=0), world_size=1), r"ep=0 must be a whole number of at least 1"),
    (
        request(ParallelLayout(dp=1, tp=4, ep=4), world_size=6),
        r"world_size=6 cannot be cut into groups of tp=4; tp must be one of \[1, 2, 3, 6\]",
    ),
    (request(ParallelLayout(dp=1, tp=2, ep=2), world_size=4), r"dp=1 x tp=2 = 2 ranks, but world_size=4"),
    (
        request(ParallelLayout(tp=4, ep=4), sizes=replace(TINY, num_attention_heads=6)),
        r"num_attention_heads=6 cannot be split over tp=4; tp must be one of \[1, 2, 6\]",
    ),
    (
        request(ParallelLayout(tp=2, ep=2), sizes=replace(TINY, num_attention_heads=6, num_key_value_heads=3)),
        r"num_key_value_heads=3 can neither be split nor replicated over tp=2; tp must be one of \[1, 3, 6\]",
    ),
    (
        request(ParallelLayout(), sizes=replace(TINY, num_key_value_heads=3)),
        r"num_attention_heads=4 is not a multiple of num_key_value_heads=3",
    ),
    (
        request(ParallelLayout(tp=4, ep=4), sizes=DENSE_FIRST),
        r"intermediate_size=50 of the dense layers cannot be split over tp=4; tp must be one of \[1, 2\]",
    ),
    (
        request(ParallelLayout(), sizes=replace(TINY, num_experts_per_tok=5)),
        r"num_experts_per_tok=5 must lie between 1 and num_experts=4",
    ),
    (
        request(ParallelLayout(), sizes=replace(TINY, num_experts_per_tok=0)),
        r"num_experts_per_tok=0 must lie between 1 and num_experts=4",
    ),
    (
        request(ParallelLayout(tp=4, ep=3), sizes=replace(TINY, num_experts=6)),
        r"ep=3 does not divide tp=4; ep must be one of \[1, 2\] for tp=4",
    ),
    (
        request(ParallelLayout(tp=4, ep=4), sizes=replace(TINY, num_experts=6)),
        r"num_experts=6 cannot be split over ep=4; ep must be one of \[1, 2, 3, 6\]",
    ),
    (
        request(ParallelLayout(tp=4, ep=1), sizes=replace(TINY, moe_intermediate_size=6)),
        r"moe_intermediate_size=6 cannot be cut into etp=4 slices; ep must be one of \[2, 4\] for tp=4",
    ),
    (
        request(ParallelLayout(), batch=BatchSizes(num_sequences=1, block_size=65)),
        r"block_size=65 is longer than max_position_embeddings=64; choose block_size <= 64",
    ),
    (
        request(ParallelLayout(tp=2, ep=2), batch=BatchSizes(num_sequences=1, block_size=15)),
        r"1 sequences x block_size=15 = 15 tokens cannot be shared by tp=2 ranks; the nearest .* is 14$",
    ),
    (
        request(ParallelLayout(tp=4, ep=4), batch=BatchSizes(num_sequences=2, block_size=15)),
        r"2 sequences x block_size=15 = 30 tokens cannot be shared by tp=4 ranks; the nearest .* is 14$",
    ),
    (
        request(ParallelLayout(tp=4, ep=4), batch=BatchSizes(num_sequences=1, block_size=3)),
        r"= 3 tokens cannot be shared by tp=4 ranks; the nearest block_size that can is 4$",
    ),
    (
        request(ParallelLayout(), sizes=replace(TINY, hidden_size=36), row_alignment=8),
        r"hidden_size=36 must be a multiple of 8 for the grouped product in this precision",
    ),
    (
        request(ParallelLayout(tp=4, ep=1), sizes=replace(TINY, moe_intermediate_size=48), row_alignment=8),
        r"moe_intermediate_size / etp=12 must be a multiple of 8 for the grouped product in this precision",
    ),
]


@pytest.mark.parametrize(("broken", "message"), FAULTS, ids=[message[:40] for _, message in FAULTS])
def test_every_broken_rule_is_named_alone_with_a_choice_that_works(broken: LayoutRequest, message: str) -> None:
    assert len(layout_faults(broken)) == 1
    with pytest.raises(ValueError, match=message):
        check_layout(broken)


@pytest.mark.parametrize(
    ("layout", "width", "named"),
    [
        (ParallelLayout(tp=3, ep=2), 32, "ep=2 does not divide tp=3"),
        (ParallelLayout(tp=3, ep=1), 32, "moe_intermediate_size=32 cannot be cut into etp=3 slices"),
    ],
)
def test_where_no_ep_fits_the_message_says_so(layout: ParallelLayout, width: int, named: str) -> None:
    sizes = replace(TINY, num_attention_heads=6, num_key_value_heads=3, moe_intermediate_size=width)
    assert allowed_ep(sizes, 3) == []
    text = "\n".join(layout_faults(request(layout, sizes=sizes)))
    assert f"{named}; no ep fits tp=3, choose another tp" in text
    assert "[]" not in text


@pytest.mark.parametrize(
    ("layout", "sizes", "batch", "expected"),
    [
        (ParallelLayout(tp=3, ep=3), TINY, None, ["num_experts=4", "num_attention_heads=4", "num_key_value_heads=2"]),
        (ParallelLayout(tp=4, ep=4), replace(TINY, num_attention_heads=6), None, ["num_attention_heads=6"]),
        (ParallelLayout(tp=2, ep=2), TINY, BatchSizes(num_sequences=1, block_size=15), ["block_size=15"]),
        (ParallelLayout(tp=0), TINY, None, ["tp=0"]),
        (ParallelLayout(tp=-1, ep=0), TINY, None, ["tp=-1", "ep=0"]),
        (ParallelLayout(), replace(TINY, num_experts_per_tok=5), None, ["num_experts_per_tok=5"]),
    ],
    ids=str,
)
@pytest.mark.requirement("R-CFG-06")
def test_one_error_lists_every_broken_rule(
    layout: ParallelLayout, sizes: ModelSizes, batch: BatchSizes | None, expected: list[str]
) -> None:
    with pytest.raises(ValueError, match=f"^the layout {layout} does not fit:\n") as caught:
        check_layout(request(layout, sizes=sizes, batch=batch))
    faults = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    assert len(faults) == len(expected)
    for start in expected:
        assert any(start in fault for fault in faults)


def test_dense_models_have_no_expert_rules() -> None:
    layout = ParallelLayout(tp=4, ep=4)
    assert layout_faults(request(layout, sizes=NO_EXPERTS, row_alignment=7)) == []
    assert allowed_ep(NO_EXPERTS, 4) == [1, 2, 4]


def test_layouts_count_and_name_their_parts() -> None:
    layout = ParallelLayout(dp=3, tp=4, ep=2)
    assert (layout.etp, layout.world_size) == (2, 12)
    assert str(layout) == "dp=3 tp=4 ep=2 etp=2"
    assert DENSE_FIRST.num_moe_layers == 1
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_kv_heads_are_split_or_replicated_whole() -> None:
    assert [tp for tp in range(1, 13) if kv_heads_fit(4, tp)] == [1, 2, 4, 8, 12]
    assert [tp for tp in range(1, 13) if kv_heads_fit(3, tp)] == [1, 3, 6, 9, 12]


def test_allowed_sizes_are_exactly_those_without_a_fault() -> None:
    for sizes in (TINY, DENSE_FIRST, replace(TINY, num_attention_heads=12, num_key_value_heads=3, num_experts=6)):
        for tp in range(1, 13):
            faults = [layout_faults(request(ParallelLayout(tp=tp, ep=ep), sizes=sizes)) for ep in range(1, tp + 1)]
            fitting = [ep for ep, found in zip(range(1, tp + 1), faults, strict=True) if not found]
            assert fitting == (allowed_ep(sizes, tp) if tp in allowed_tp(sizes) else []), (sizes, tp)


@pytest.mark.parametrize(
    ("sizes", "world_size", "asked", "expected"),
    [
        (TINY, 8, {}, ["dp=2 tp=4 ep=4 etp=1", "dp=4 tp=2 ep=2 etp=1", "dp=8 tp=1 ep=1 etp=1"]),
        (TINY, 8, {"max_tp": 2}, ["dp=4 tp=2 ep=2 etp=1", "dp=8 tp=1 ep=1 etp=1"]),
        (TINY, 6, {}, ["dp=3 tp=2 ep=2 etp=1", "dp=6 tp=1 ep=1 etp=1"]),
        (TINY, 7, {}, ["dp=7 tp=1 ep=1 etp=1"]),
        (TINY, 4, {"ep": 1}, ["dp=1 tp=4 ep=1 etp=4", "dp=2 tp=2 ep=1 etp=2", "dp=4 tp=1 ep=1 etp=1"]),
        (TINY, 4, {"ep": 4}, ["dp=1 tp=4 ep=4 etp=1"]),
        (TINY, 4, {"ep": 3}, []),
        (TINY, 4, {"ep": 1, "row_alignment": 16}, ["dp=2 tp=2 ep=1 etp=2", "dp=4 tp=1 ep=1 etp=1"]),
        (TINY, 4, {"row_alignment": 64}, []),
        (replace(TINY, num_experts=6), 4, {"max_tp": 4}, ["dp=1 tp=4 ep=2 etp=2", "dp=2 tp=2 ep=2 etp=1"]),
        (replace(TINY, num_experts=3, moe_intermediate_size=6), 4, {}, ["dp=2 tp=2 ep=1 etp=2"]),
        (NO_EXPERTS, 4, {}, ["dp=1 tp=4 ep=4 etp=1"]),
    ],
)
def test_fitting_layouts_come_widest_first(
    sizes: ModelSizes, world_size: int, asked: dict[str, Any], expected: list[str]
) -> None:
    layouts = list(fitting_layouts(sizes, world_size=world_size, **{"max_tp": world_size, **asked}))
    assert [str(layout) for layout in layouts][: len(expected) or 1] == expected
    for layout in layouts:
        assert layout_faults(request(layout, sizes=sizes, row_alignment=asked.get("row_alignment", 1))) == []


def test_no_world_is_too_odd_for_a_layout() -> None:
    for world_size in range(1, 40):
        layouts = list(fitting_layouts(TINY, world_size=world_size, max_tp=world_size))
        assert {layout.world_size for layout in layouts} == {world_size}


def test_more_active_experts_than_experts_are_a_fault_even_where_no_layer_has_any() -> None:
    sizes = replace(NO_EXPERTS, num_experts=4, num_experts_per_tok=5)
    assert layout_faults(request(ParallelLayout(), sizes=sizes)) == [
        "num_experts_per_tok=5 must lie between 1 and num_experts=4"
    ]
