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


def broken(
    *, dp: int = 1, tp: int = 1, ep: int = 1, world: int | None = None, of: ModelSizes = TINY, **others: Any
) -> LayoutRequest:
    """A request that is wrong in one respect: a number of ranks, a size of the model, the batch, or the alignment."""
    kept = {name: others.pop(name) for name in ("batch", "row_alignment") if name in others}
    return request(ParallelLayout(dp=dp, tp=tp, ep=ep), sizes=replace(of, **others), world_size=world, **kept)


WHOLE, HEADS = "must be a whole number of at least 1", "num_attention_heads"
ACTIVE = "must lie between 1 and num_experts"
FAULTS: list[tuple[LayoutRequest, str]] = [
    (broken(dp=0, world=1), f"dp=0 {WHOLE}"),
    (broken(tp=-1, world=1), f"tp=-1 {WHOLE}"),
    (broken(ep=0, world=1), f"ep=0 {WHOLE}"),
    (broken(tp=4, ep=4, world=6), r"world_size=6 cannot be cut into groups of tp=4; tp must be one of \[1, 2, 3, 6\]"),
    (broken(tp=2, ep=2, world=4), r"dp=1 x tp=2 = 2 ranks, but world_size=4"),
    (broken(tp=4, ep=4, num_attention_heads=6), rf"{HEADS}=6 cannot be split over tp=4; tp must be one of \[1, 2, 6\]"),
    (
        broken(tp=2, ep=2, num_attention_heads=6, num_key_value_heads=3),
        r"num_key_value_heads=3 can neither be split nor replicated over tp=2; tp must be one of \[1, 3, 6\]",
    ),
    (broken(num_key_value_heads=3), f"{HEADS}=4 is not a multiple of num_key_value_heads=3"),
    (
        broken(tp=4, ep=4, of=DENSE_FIRST),
        r"intermediate_size=50 of the dense layers cannot be split over tp=4; tp must be one of \[1, 2\]",
    ),
    (broken(num_experts_per_tok=5), f"num_experts_per_tok=5 {ACTIVE}=4"),
    (broken(num_experts_per_tok=0), f"num_experts_per_tok=0 {ACTIVE}=4"),
    (broken(of=NO_EXPERTS, num_experts=4, num_experts_per_tok=6), f"num_experts_per_tok=6 {ACTIVE}=4"),
    (broken(tp=4, ep=3, num_experts=6), r"ep=3 does not divide tp=4; ep must be one of \[1, 2\] for tp=4"),
    (broken(tp=4, ep=4, num_experts=6), r"num_experts=6 cannot be split over ep=4; ep must be one of \[1, 2, 3, 6\]"),
    (
        broken(tp=4, ep=1, moe_intermediate_size=6),
        r"moe_intermediate_size=6 cannot be cut into etp=4 slices; ep must be one of \[2, 4\] for tp=4",
    ),
    (
        broken(batch=BatchSizes(num_sequences=1, block_size=65)),
        r"block_size=65 is longer than max_position_embeddings=64; choose block_size <= 64",
    ),
    *(
        (
            broken(tp=tp, ep=tp, batch=BatchSizes(num_sequences=num, block_size=block)),
            rf"{num} sequences x block_size={block} = {num * block} tokens cannot be shared by tp={tp} ranks; "
            rf"the nearest block_size that can is {nearest}$",
        )
        for tp, num, block, nearest in ((2, 1, 15, 14), (4, 2, 15, 14), (4, 1, 3, 4))
    ),
    (
        broken(hidden_size=36, row_alignment=8),
        r"hidden_size=36 must be a multiple of 8 for the grouped product in this precision",
    ),
    (
        broken(tp=4, moe_intermediate_size=48, row_alignment=8),
        r"moe_intermediate_size / etp=12 must be a multiple of 8 for the grouped product in this precision",
    ),
]


@pytest.mark.parametrize(("asked", "message"), FAULTS, ids=[message[:40] for _, message in FAULTS])
def test_every_broken_rule_is_named_alone_with_a_choice_that_works(asked: LayoutRequest, message: str) -> None:
    assert len(layout_faults(asked)) == 1
    with pytest.raises(ValueError, match=message):
        check_layout(asked)


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
    ("layout", "expected"),
    [
        (ParallelLayout(tp=3, ep=3), ["num_experts=4", "num_attention_heads=4", "num_key_value_heads=2"]),
        (ParallelLayout(tp=-1, ep=0), ["tp=-1", "ep=0"]),
        (ParallelLayout(tp=0), ["tp=0"]),
    ],
    ids=str,
)
@pytest.mark.requirement("R-CFG-06")
def test_one_error_lists_every_broken_rule(layout: ParallelLayout, expected: list[str]) -> None:
    with pytest.raises(ValueError, match=f"^the layout {layout} does not fit:\n") as caught:
        check_layout(request(layout))
    faults = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    assert len(faults) == len(expected)
    for start in expected:
        assert any(start in fault for fault in faults)


def test_dense_models_have_no_expert_rules() -> None:
    layout = ParallelLayout(tp=4, ep=4)
    assert layout_faults(request(layout, sizes=NO_EXPERTS, row_alignment=7)) == []
    assert allowed_ep(NO_EXPERTS, 4) == [1, 2, 4]


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
