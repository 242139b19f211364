"""The probe: lines through readings, the same work as the layers', and a file that the planner reads."""

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import predicted
import pytest
import torch
import torch.distributed as dist

from recipe.cli import main
from recipe.dry_run.live_memory import LiveMemory
from recipe.launch.start import read_world
from recipe.measure import command
from recipe.measure.probe import SENDERS, _capability, _hardware, fit_line, measure_link
from recipe.measure.products import MAKERS, Random, _product, measure_attention, measure_products
from recipe.measure.timing import PASS_BYTES, Sizes, Timing, by_case, sizes_for
from recipe.plan.hardware import PASSES, Link, Measured, find_hardware
from recipe.plan.transfer_time import STEPS
from recipe.shared.ranks import OneRank, TorchRanks
from tests.launching import run_main
from tests.ranks import run_ranks

SMALL = Sizes(
    rows=(4, 16),
    widths=(16, 32),
    max_flops=2 * 16 * 32**2,
    lengths=(8, 16),
    head_dims=(16,),
    elements=(1024,),
    sent_bytes=(2**12, 2**22),
)
SENT_BYTES = (2**10, 2**24)  # so far apart that no disturbance makes the large one the quicker


def timing() -> Timing:
    return Timing(device="cpu", ranks=OneRank(), rounds=1)


def test_a_line_is_found_again_and_the_residual_says_how_far_readings_are_from_it() -> None:
    fit = fit_line([(n, 3 * 2e-4 + n / 5e8) for n in (1e3, 1e5, 1e7)], num_steps=3)
    assert fit.alpha_s == pytest.approx(2e-4)
    assert fit.bytes_per_s == pytest.approx(5e8)
    assert fit.residual == pytest.approx(0, abs=1e-9)
    assert fit.max_bytes == 1e7
    steep = fit_line([(1e5, 1e-5), (1e7, 1e-2)], num_steps=1)
    assert steep.alpha_s == 0 < steep.bytes_per_s
    readings = [(n, (1e-4 + n / 1e9) * factor) for n, factor in ((1e3, 1.1), (1e5, 0.9), (1e7, 1.1), (1e8, 0.9))]
    assert 0.05 < fit_line(readings, num_steps=1).residual < 0.15


def test_readings_that_make_no_line_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 transfers of one size make no line"):
        fit_line([(1e3, 1.0), (1e3, 2.0)], num_steps=1)
    with pytest.raises(ValueError, match=r"larger transfers took no longer than small ones: the machine was too busy"):
        fit_line([(1e3, 2.0), (1e7, 1.0)], num_steps=1)


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_of_the_planner_can_be_run(name: str) -> None:
    assert MAKERS.keys() == PASSES.keys()
    for dtype in (torch.float32, torch.bfloat16):
        work = MAKERS[name](Random(dtype, device="cpu"), 1024)
        work()
        work()


def test_products_and_attention_are_measured_over_the_grid() -> None:
    products = measure_products(timing(), SMALL, dtype=torch.float32)
    grid = {(rows, width) for rows in SMALL.rows for width in SMALL.widths}
    for rates in products.values():
        assert {(rate.rows, rate.width) for rate in rates} == grid
        assert all(rate.flops_per_s > 0 for rate in rates)
    products = measure_products(timing(), replace(SMALL, max_flops=2 * 4 * 16**2), dtype=torch.float32)
    assert {(rate.rows, rate.width) for rates in products.values() for rate in rates} == {(4, 16)}  # no larger ones
    attention = measure_attention(timing(), SMALL, dtype=torch.bfloat16)
    assert [(rate.length, rate.head_dim) for rate in attention] == [(8, 16), (16, 16)]
    assert all(rate.forward > 0 and rate.backward > 0 for rate in attention)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_quick_probe_measures_a_part_of_the_sizes(device: str) -> None:
    quick, full = (sizes_for(device, quick=quick, memory_bytes=1e12) for quick in (True, False))
    for name in ("rows", "widths", "lengths", "head_dims", "elements", "sent_bytes"):
        assert set(getattr(quick, name)) < set(getattr(full, name))
    assert len(quick.sent_bytes) >= 2


@pytest.mark.parametrize("gib", [1, 8, 24, 192])
def test_what_a_device_has_no_room_for_is_left_out(gib: int) -> None:
    full = sizes_for("cuda", quick=False, memory_bytes=1e12)
    small = sizes_for("cuda", quick=False, memory_bytes=gib * 2**30)
    quick = sizes_for("cuda", quick=True, memory_bytes=gib * 2**30)
    assert set(small.elements) <= set(full.elements)
    assert max(small.elements) * PASS_BYTES <= max(gib * 2**30 / 2, full.elements[2] * PASS_BYTES)
    assert (max(small.elements) < max(full.elements)) == (gib < 192)
    assert (max(small.widths) < max(full.widths)) == (gib < 24)
    assert len(quick.sent_bytes) >= 2
    assert quick.widths
    assert quick.elements


def test_what_is_held_at_once_is_no_more_than_counted() -> None:
    with LiveMemory() as memory:
        kept = [MAKERS[name](Random(torch.float32, device="cpu"), 2**12) for name in PASSES]
    assert len(kept) < memory.alive_bytes / 2**12 < PASS_BYTES


def test_a_busy_machine_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    timing = Timing(device="cpu", ranks=OneRank(), rounds=4)
    waits = itertools.cycle([0.0, 0.0, 4e-3, 8e-3])

    def uneven() -> None:
        time.sleep(2e-3 + next(waits))

    timing.measure({("uneven", 1): uneven}, name="something")
    [quartiles] = timing.quartiles["something"].values()
    assert quartiles.first < quartiles.median < quartiles.third
    assert "something: 1 of 1 cases differed by more than 20%" in capsys.readouterr().err
    assert by_case(timing.quartiles["something"]) == {"uneven 1": list(quartiles)}


def test_experts_multiply_as_many_rows_as_they_count_on_average() -> None:
    weights = [torch.ones(16, 16)]
    for rows in (1, 4, 64):
        work = _product("expert", torch.ones(rows, 16), torch.ones(rows, 16), weights=weights)
        lengths = [len(work()) for _ in range(2 * max(1, rows // 32) + 1)]  # type: ignore[arg-type]
        assert sum(lengths) == rows * len(lengths)


def test_short_work_is_repeated_and_the_median_counts(capsys: pytest.CaptureFixture[str]) -> None:
    calls = {"short": 0}

    def short() -> None:
        calls["short"] += 1

    seconds = Timing(device="cpu", ranks=OneRank(), rounds=3).measure({"short": short}, name="nothing")
    assert seconds["short"] > 0
    assert calls["short"] > 3 * 100
    assert "nothing: round 3 of 3, 1 cases" in capsys.readouterr().err


def _measure(rank: int, world_size: int) -> Link:
    timing = Timing(device="cpu", ranks=TorchRanks(), rounds=3)
    group = dist.group.WORLD
    assert group is not None
    return measure_link(timing, group, sent_bytes=SENT_BYTES)


@pytest.mark.slow
def test_a_group_agrees_on_its_link() -> None:
    first, second = run_ranks(_measure, 2)
    assert first == second
    assert first.ops.keys() == SENDERS.keys() == STEPS.keys()
    assert 0 < first.busy <= 1
    assert all(
        fit.bytes_per_s > 0 and fit.max_bytes == pytest.approx(SENT_BYTES[-1], rel=0.01) for fit in first.ops.values()
    )


@pytest.mark.slow
def test_two_ranks_write_a_file_that_the_planner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "hardware.json"

    def start(num_ranks: int, *, words: list[str]) -> int:
        """In processes that have the libraries loaded."""
        options = {"program": "recipe.cli", "LOCAL_WORLD_SIZE": str(num_ranks)}
        return run_main(["probe", *words], tmp_path, num_ranks=num_ranks, **options).returncode

    monkeypatch.setattr(command, "start_processes", start)
    assert main(["probe", "--ranks", "2", "--quick", "--precision", "fp32", "--out", str(out)]) == 0
    hardware = find_hardware(str(out), device="cpu")
    assert hardware.ranks_per_node == 2
    assert hardware.inter is None
    assert hardware.compute_capability is None
    assert hardware.measured.keys() == {"fp32"}
    assert hardware.intra is not None
    assert hardware.intra.ops["all_gather"].residual >= 0
    readings = json.loads(out.read_text())["machine"]["quartiles_s"]
    assert {"launches", "collectives of 2 ranks", "products, float32"} <= readings.keys()
    assert all(0 < q[0] <= q[1] <= q[2] for cases in readings.values() for q in cases.values())


def test_a_link_that_was_not_measured_is_none() -> None:
    """And on a GPU what it can do is asked of it."""
    measured = measure_products(timing(), SMALL, dtype=torch.float32)
    passes = dict.fromkeys(PASSES, ((1024.0, 1e-06),))
    part = {"fp32": Measured(products=measured, attention=(), passes=passes)}
    found = _hardware(read_world({}), timing(), intra=None, inter=None, measured=part)
    assert found.intra is None
    assert found.inter is None
    assert found.sources["intra"] == "not measured: one rank on a node"
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        assert _capability("cuda") == (9, 0)
    assert _capability("cpu") is None


def test_mistakes_are_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "2"}
    for words, environment, message in (
        (("--ranks", "0"), {}, "--ranks 0 must be at least 1"),
        (("--out", "nowhere/x.json"), {}, "--out nowhere/x.json: nowhere is no folder"),
        (("--ranks", "2"), launched, "a launcher started this one as rank 1 of 2; leave it out"),
    ):
        with monkeypatch.context() as patch:
            patch.delenv("RANK", raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            assert main(["probe", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_failing_rank_ends_the_probe(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.start_processes(2, words=["--no-such-flag"]) == 2
    assert "--no-such-flag" in capfd.readouterr().err


def test_a_case_without_a_figure_fails_the_benchmark() -> None:
    good, void = {"ratio": 3.0}, {"void": "ended with exit code 1"}
    assert predicted.exit_code({"loopback": [good]}) == 0
    assert predicted.exit_code({"loopback": [good], "1gbit": [good, void]}) == 1
