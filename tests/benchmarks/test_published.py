"""Published training speeds: predicted from the table's constants, each with its error, none with one of its own."""

from dataclasses import fields, replace
from math import isfinite

import pytest
from published import describe_published, described_time, published_table
from published_points import DEEPSPEED_1, MEGATRON, Description, System, published_points

from recipe.plan.hardware import find_hardware
from recipe.plan.transfer_time import Ring, call_seconds


def test_every_error_is_shown_and_what_it_is_of() -> None:
    rows, lines = published_table(), describe_published()
    assert len(rows) == len(published_points()) == 7
    for row, line in zip(rows, lines[1:], strict=False):
        assert isfinite(row.error)
        assert row.error == pytest.approx(row.predicted / row.published - 1)
        assert row.name in line
        assert f"{row.error:+.0%}" in line
        assert row.missing
        assert row.missing in line
    assert "causal attention once" in lines[-1]


def test_kernels_that_are_fused_are_predicted() -> None:
    """Where the device is what a step waits for; eager systems wait for their host, which nothing here describes."""
    fused = [p for p in published_points() if p.description.system.fused and p.description.system.zero == 1]
    assert len(fused) == 2
    errors = {row.name: row.error for row in published_table()}
    assert all(abs(errors[point.name]) < 0.2 for point in fused)


def test_a_description_has_counts_and_a_system_has_sources() -> None:
    """Nothing could be tuned to meet a point: it has sizes, and how a system works is said once, with its source."""
    sizes = {field.name for field in fields(Description)} - {"system", "model", "gpu"}
    settings = {field.name for field in fields(System)} - {"name", "sources"}
    systems: dict[str, System] = {}
    for point in published_points():
        assert all(type(getattr(point.description, name)) is int for name in sizes)
        system = point.description.system
        assert systems.setdefault(system.name, system) is system
    for system in systems.values():
        assert settings - system.sources.keys() <= {"ahead"}
        assert all(system.sources.values())
    assert len(systems) == 5


def test_the_batch_is_the_published_one() -> None:
    for point in published_points():
        what = point.description
        if what.system.name.startswith("DeepSpeed"):
            groups = what.num_gpus // what.tp
            assert groups * what.num_sequences * what.accumulation * what.block_size == 65_536


def test_a_pipeline_waits_for_its_other_stages() -> None:
    [point] = [p for p in published_points() if p.description.pp > 1]
    found = described_time(point.description)
    busy_s = found.compute_s + found.exchange_s + found.tensor_parallel_s + found.launch_s
    assert found.bubble_s == pytest.approx((point.description.pp - 1) / point.description.accumulation * busy_s)


def test_a_systems_habits_cost_what_they_should() -> None:
    [point] = [p for p in published_points() if p.description.system is DEEPSPEED_1 and p.description.tp == 1]
    what, h100 = point.description, find_hardware("h100")

    def seconds(**changes: object) -> float:
        return described_time(replace(what, system=replace(DEEPSPEED_1, **changes))).data_parallel_s  # type: ignore[arg-type]

    wide_s, scattered_s = seconds(gradient_bytes=4), seconds(sums="reduce_scatter")
    assert wide_s > seconds() > scattered_s > seconds(sums="reduce_scatter", overlap="step")
    assert seconds(zero=3, overlap="block", ahead=0.0) > seconds(zero=3, overlap="block")
    ring = Ring(8, 8)
    assert call_seconds("all_reduce", 2e9, ring=ring, hardware=h100) > call_seconds(
        "reduce_scatter", 1e9, ring=ring, hardware=h100
    )
    together = replace(what, tp=2, num_sequences=2)
    in_sequence = replace(together, system=replace(DEEPSPEED_1, tensor_parallel=MEGATRON.tensor_parallel))
    assert described_time(together).tensor_parallel_s > described_time(in_sequence).tensor_parallel_s
