"""Published training speeds: predicted from the table's constants, each with its error, none with one of its own."""

from dataclasses import fields, replace
from math import isfinite
from statistics import median
from typing import Any

import pytest
from published import SMALL, PublishedRow, describe_published, described_time, published_table
from published_points import (
    DENSE,
    FITTED,
    HELD_OUT,
    LAYERS,
    LIKE_OURS,
    OTHERS,
    Description,
    Published,
    System,
    published_points,
)


@pytest.fixture(scope="module")
def rows() -> tuple[PublishedRow, ...]:
    return published_table()


def named(*words: str) -> Published:
    return next(point for point in published_points() if all(word in point.name for word in words))


def test_every_error_is_shown_and_what_it_is_of(rows: tuple[PublishedRow, ...]) -> None:
    lines = list(describe_published())
    assert len(rows) == len(published_points()) == 139
    for row, line in zip(rows, lines[1:], strict=False):
        assert isfinite(row.error)
        assert row.error == pytest.approx(row.predicted / row.point.value - 1)
        for words in (row.point.name, f"{row.error:+.0%}", row.point.use, row.point.missing):
            assert words in line
    text = "\n".join(lines[len(rows) :])
    assert all(kind in text for kind in SMALL)
    assert "the planner's interval" in text


@pytest.mark.parametrize(("kind", "most", "share"), [(DENSE, 0.15, 0.85), (OTHERS, 0.25, 0.85), (LAYERS, 0.20, 1.0)])
def test_points_that_nothing_was_fitted_to_are_met(
    rows: tuple[PublishedRow, ...], kind: str, most: float, share: float
) -> None:
    errors = [abs(row.error) for row in rows if row.point.kind == kind and row.point.use == HELD_OUT]
    assert sum(error <= most for error in errors) >= share * len(errors)
    assert median(errors) <= (0.08 if kind == DENSE else 0.12)


@pytest.mark.parametrize(("kind", "share"), [(DENSE, 0.95), (LIKE_OURS, 0.65), (OTHERS, 0.55)])
def test_the_planners_interval_holds_most_steps(rows: tuple[PublishedRow, ...], kind: str, share: float) -> None:
    """Of mixtures fewer, whose exchanges and hosts are described by less."""
    for use in (FITTED, HELD_OUT):
        found = [row.is_inside for row in rows if row.point.kind == kind and row.point.use == use]
        assert sum(map(bool, found)) >= share * len(found)


def test_no_point_is_left_out_that_is_far_off(rows: tuple[PublishedRow, ...]) -> None:
    """What misses by half says what the model lacks."""
    far = [row.point for row in rows if abs(row.error) > 0.5]
    assert {point.missing for point in far} == {"its host: 6.4 ms a layer", "memory at its limit, recomputation"}
    assert {point.kind for point in published_points()} == {LAYERS, DENSE, LIKE_OURS, OTHERS}


def test_a_description_has_counts_and_a_system_a_source() -> None:
    """Nothing could be tuned to meet a point: it has sizes, and how a system works is said once, with its source."""
    counts = {field.name for field in fields(Description)} - {"system", "model", "gpu", "rho", "recompute"}
    systems: dict[str, set[System]] = {}
    for point in published_points():
        assert all(type(getattr(point.description, name)) is int for name in counts)
        assert point.description.system.source
        systems.setdefault(point.description.system.name, set()).add(
            replace(point.description.system, zero=0, sums="", exchange="", exchange_hides=0.0, overlap="", source="")
        )
    # Of one system only the kernels differ: attention's by device, and the permutation's, fused or not.
    assert all(len(found) <= 2 for found in systems.values())


def test_dense_rows_take_turns_at_being_fitted() -> None:
    uses = [point.use for point in published_points() if point.name.startswith("llm-foundry")]
    assert uses == [HELD_OUT if number % 2 else FITTED for number in range(97)]


def test_the_batch_is_the_published_one() -> None:
    found = 0
    for point in published_points():
        what = point.description
        if what.system.name == "DeepSpeed":
            groups = what.num_gpus // what.tp
            assert groups * what.num_sequences * what.accumulation * what.block_size == 65_536
            found += 1
        if what.system.name == "nanotron":
            assert what.num_gpus // what.tp * what.num_sequences * what.accumulation == 256
            found += 1
    assert found == 12


def test_a_pipeline_waits_for_its_other_stages_less_with_more_parts() -> None:
    what = named("Mixtral 8x22B", "pp 8").description
    found = described_time(what)
    busy_s = found.compute_s + found.exchange_s + found.tensor_parallel_s + found.host_s
    assert found.bubble_s == pytest.approx((what.pp - 1) / what.accumulation * busy_s)
    assert described_time(replace(what, vp=4)).bubble_s < found.bubble_s


def test_a_systems_habits_cost_what_they_should() -> None:
    what = named("DeepSpeed ZeRO-1").description
    habits = what.system

    def seconds(**changes: Any) -> float:
        return described_time(replace(what, system=replace(habits, **changes))).data_parallel_s

    wide_s, scattered_s = seconds(gradient_bytes=4), seconds(sums="reduce_scatter")
    assert wide_s > seconds() > scattered_s > seconds(sums="reduce_scatter", overlap="step")
    assert seconds(bucket_bytes=2.0**20) > seconds()
    together = replace(what, tp=2, num_sequences=2)
    in_sequence = replace(together, system=replace(habits, tensor_parallel="sequence"))
    assert described_time(together).tensor_parallel_s > described_time(in_sequence).tensor_parallel_s
    once = replace(habits, exchange="once")
    assert described_time(replace(what, system=once)).exchange_s < described_time(what).exchange_s
    again = replace(what, recompute=True)
    assert described_time(again).compute_s > 1.2 * described_time(what).compute_s
