"""The hardware table says where its numbers are from; a probe's file is read strictly; rates follow from both."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from recipe.plan.compute_time import ATTENTION_BACKWARD_FLOPS, Rates
from recipe.plan.hardware import (
    ALIASES,
    FORMAT,
    SHEETS,
    find_hardware,
    hardware_as_json,
    known_names,
    read_hardware,
    with_network,
)
from recipe.shared.flops import table_peak
from recipe.shared.json_files import write_json
from tests.plan_hardware import flat_hardware

NUMBERS = ("memory_bytes", "peak_flops_per_s", "memory_bytes_per_s", "ranks_per_node", "intra", "inter", "launch_s")


@pytest.mark.parametrize("name", known_names())
def test_every_number_of_the_table_has_a_source(name: str) -> None:
    hardware = find_hardware(name)
    assert hardware.memory_bytes > 2**30
    assert {"bf16", "fp32"} == hardware.peak_flops_per_s.keys()
    for number in (*NUMBERS, "efficiencies"):
        assert any(key.split(".")[0] == number and text for key, text in hardware.sources.items()), number
    assert not hardware.measured


def test_the_table_takes_peaks_from_where_mfu_does() -> None:
    for name, sheet in SHEETS.items():
        peak = table_peak(sheet.device_name)
        assert peak is not None
        assert find_hardware(name).peak_flops_per_s["bf16"] == peak.flops_per_s
    assert find_hardware("H100").peak_flops_per_s["bf16"] == 989.4e12
    assert all(find_hardware(alias) == find_hardware(name) for alias, name in ALIASES.items())


@pytest.mark.parametrize(
    ("said", "name"),
    [
        *(("A100_80GB", "a100-80g"), ("NVIDIA A100-SXM4-40GB", "a100-40g"), ("h100-sxm", "h100")),
        *(("NVIDIA H100 80GB HBM3", "h100"), ("GeForce RTX 4090", "rtx-4090"), ("amd_instinct_mi300x", "mi300x")),
    ],
)
def test_a_name_may_be_written_in_many_ways(said: str, name: str) -> None:
    assert find_hardware(said).name == name


@pytest.mark.parametrize(
    ("other", "device", "message"),
    [
        ("h1000", None, r"is not known; choose one of a100-80g \(or a100\), .*rtx-4090 \(or 4090, .*cpu, or"),
        *((other, None, "is not known") for other in ("h100-pcie", "h100-nvl", "rtx-4090-d", "a100-mig-1g.10gb")),
        ("h100", "cpu", "is a cuda, but the plan is for device cpu"),
    ],
)
def test_another_device_is_not_taken_for_a_known_one(other: str, device: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=rf"hardware '{other}' {message}"):
        find_hardware(other, device=device)


def test_a_file_brings_back_what_was_measured(tmp_path: Path) -> None:
    hardware, path = flat_hardware(rate=2e9), tmp_path / "hardware.json"
    write_json(path, hardware_as_json(hardware, machine={"cores": 2}))
    assert find_hardware(str(path)) == hardware
    assert json.loads(path.read_text())["machine"] == {"cores": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["hardware.json"]


GONE = object()
# What a probe finds in one precision, as its file has it.
MEASURED = asdict(flat_hardware().measured["fp32"])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("format", FORMAT - 1, r"has an older format \(1\) than this program's 2; measure again with"),
        ("format", GONE, r"has an older format \(None\)"),
        ("format", FORMAT + 1, r"has a newer format \(3\)"),
        ("hardware/memory_bytes", GONE, r"cannot be used: hardware.memory_bytes: Field required; measure again"),
        ("hardware/measured/fp32/passes/copy", GONE, r"measured.fp32: 'copy' is missing in passes"),
        ("hardware/measured/fp32/passes/copy", [], r"passes.copy is \[\]: .* at least 1 item"),
        ("hardware/measured/fp32/passes/add", [[0, 1e-6]], r"passes.add.0.0 is 0: .* greater than 0"),
        ("hardware/measured/fp32/products/expert", [[0, 64, 1e9]], r"products.expert.0.0 is 0: .* greater than 0"),
        ("hardware/measured/fp32/attention", [[1, 2]], r"attention.0.\w+ is \[1, 2\]: .*required"),
        ("hardware/measured/fp8", MEASURED, r"hardware: 'fp8' in measured is not one of fp32, bf16"),
        ("hardware/measured", {}, r"hardware.measured: .* at least 1 item"),
        ("hardware/measured", GONE, r"hardware.measured: Field required"),
        ("hardware/measured", [], r"measured is \[\]: .* an object"),
        ("hardware/device", "tpu", r"hardware: its device is 'tpu', not cpu or cuda"),
        ("hardware/memory_bytes_per_s", -1, r"memory_bytes_per_s is -1: .* greater than 0"),
        ("hardware/launch_s", None, r"launch_s is None: .* a valid number"),
        ("hardware/launch_s", True, r"launch_s is True: .* a valid number"),
        ("hardware/ranks_per_node", 2.5, r"ranks_per_node is 2.5: .* a valid integer"),
        ("hardware/ranks_per_node", 0, r"ranks_per_node is 0: .* greater than or equal to 1"),
        ("hardware/peak_flops_per_s", {}, r"peak_flops_per_s has no fp32, which was"),
        ("hardware/peak_flops_per_s", {"bf16": 1}, r"peak_flops_per_s has no fp32, which was"),
        ("hardware/name", 3, r"name is 3: .* a valid string"),
        ("hardware/colour", "red", r"hardware.colour is 'red': Unexpected"),
        ("hardware/intra/colour", "red", r"hardware.intra.colour is 'red': Unexpected"),
        ("hardware/compute_capability", [9], r"compute_capability.1 is \[9\]: Field required"),
        ("hardware/intra/alpha_s", -1, r"intra.alpha_s is -1: .* greater than or equal to 0"),
        ("hardware/intra/alpha_s", "x", r"intra.alpha_s is 'x': .* a valid number"),
        ("hardware/intra/bytes_per_s", float("inf"), r"bytes_per_s is inf: .* less than inf"),
        ("hardware/intra/busy", 7, r"intra.busy is 7: .* less than or equal to 1"),
        ("hardware/intra/ops", [], r"intra.ops is \[\]: .* an object"),
        ("hardware/intra/ops", {"gossip": [0, 1, 0, 0]}, r"intra: 'gossip' in ops is not one of all_gather,"),
        ("hardware/intra/ops/all_gather", [0, 0, 0, 0], r"all_gather.1 is 0: .* greater than 0"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(place: str, value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    write_json(path, hardware_as_json(flat_hardware(), machine={}))
    whole = block = json.loads(path.read_text())
    *outer, key = place.split("/")
    for name in outer:
        block = block[name]
    block.update({key: value}) if value is not GONE else block.pop(key)
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=rf"hardware file .*old.json .*{message}"):
        read_hardware(path)


def test_a_file_that_is_none_says_so(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "folder.json").mkdir()
    for name, message in (
        ("none", "does not exist; .*`gather-moe probe --out"),
        ("text", "is no JSON"),
        ("folder", "cannot be read: Is a directory"),
    ):
        with pytest.raises(ValueError, match=rf"{name}.json {message}"):
            find_hardware(str(tmp_path / f"{name}.json"))


def h100_rates(**changes: Any) -> Rates:
    return Rates(find_hardware("h100"), precision="bf16", **changes)


def test_a_product_is_bound_by_operations_or_by_bytes() -> None:
    reached = find_hardware("h100").efficiencies
    assert reached is not None
    rates = h100_rates()
    # 33 x 64 tiles of 256 x 128 are 16 whole waves of 132 processors.
    large_s = rates.product_s("forward", rows=256 * 33, width=4096, out=128 * 64)
    share = reached.product * 4096 / (4096 + reached.half_depth)
    assert large_s == pytest.approx(2 * 256 * 33 * 4096 * 128 * 64 / (989.4e12 * share))
    one_row_s = rates.product_s("forward", rows=1, width=4096, out=4096)
    assert one_row_s == pytest.approx(2 * (4096**2 + 2 * 4096) / (3352e9 * reached.memory))
    assert rates.product_s("forward", rows=8192, width=4096, out=0) == 0


def test_a_gradient_of_weights_sums_over_rows() -> None:
    """Its kernel's depth is the number of rows, and its results are the weights."""
    shape = {"rows": 65536, "width": 4096, "out": 4096}
    rates = h100_rates()
    deep_s, wide_s = (rates.product_s(kind, **shape) for kind in ("weight_gradient", "forward"))
    assert deep_s < wide_s
    few = {"rows": 512, "width": 8192, "out": 8192}
    assert rates.product_s("weight_gradient", **few) > rates.product_s("forward", **few)


def test_products_slow_down_on_a_busy_device_and_share_a_wave_in_one_kernel() -> None:
    shape = {"rows": 8192, "width": 4096, "out": 4096}
    reached = find_hardware("h100").efficiencies
    assert reached is not None
    cold_s, warm_s = (h100_rates(utilization=u).product_s("forward", **shape) for u in (0.0, 0.5))
    assert warm_s == pytest.approx((1 + reached.heat * 0.5) * cold_s)
    one = {"rows": 256, "width": 2048, "out": 1536, "count": 16}
    apart_s, together_s = (h100_rates().product_s("expert", **one, at_once=n) for n in (1, 16))
    assert together_s < apart_s


def test_few_rows_per_expert_and_short_sequences_are_slow() -> None:
    rates = Rates(find_hardware("a100-80g"), precision="bf16")

    def rate(rows: float) -> float:
        return rows / rates.product_s("expert", rows=rows, width=2048, out=1536, count=8)

    assert rate(4096) > 1.5 * rate(64) > 2 * rate(16)

    def attention_s(kernel: str, length: int) -> float:
        shape = {"tokens": 1, "num_heads": 8, "head_dim": 128, "length": length, "backward": False}
        return h100_rates().attention_s(kernel, **shape) / length

    assert attention_s("varlen", 512) > 1.5 * attention_s("varlen", 8192)
    assert attention_s("varlen", 8192) > 2 * attention_s("flash_attention_3", 8192)


def test_a_network_can_be_stated() -> None:
    slow = with_network(find_hardware("h100"), 100)
    assert slow.inter is not None
    assert slow.inter.bytes_per_s == 0.5 * 100e9 / 8
    assert slow.sources["inter.bytes_per_s"] == "100 Gbit/s per device, as stated"
    for hardware in (flat_hardware(), find_hardware("cpu")):
        with pytest.raises(ValueError, match="has its own network; only that of a GPU by name can be stated"):
            with_network(hardware, 100)


def test_measured_rates_are_met_and_joined() -> None:
    hardware = flat_hardware(rate=1e9)
    measured = hardware.measured["fp32"]
    products = {
        kind: tuple(r._replace(flops_per_s=r.rows * r.width * 1e6) for r in rates)
        for kind, rates in measured.products.items()
    }
    hardware = replace(hardware, measured={"fp32": replace(measured, products=products)})
    rates = Rates(hardware, precision="fp32")

    def rate(rows: float, width: float, out: float) -> float:
        return 2 * rows * width * out / rates.product_s("forward", rows=rows, width=width, out=out)

    for point in products["forward"]:
        assert rate(point.rows, point.width, point.width) == pytest.approx(point.flops_per_s)
    assert rate(128, 256, 256) == pytest.approx(128 * 256 * 1e6)  # a power law is joined by itself
    assert rate(64, 64 * 2 / 3, 64 * 2) == pytest.approx(64 * 64 * 1e6)  # by the harmonic mean of 2/3 and 2
    assert rate(10**6, 10**6, 10**6) == pytest.approx(products["forward"][-1].flops_per_s)
    few_s = [rates.product_s("forward", rows=rows, width=64, out=64) for rows in (1, 16)]
    assert few_s[0] == pytest.approx(few_s[1])


def test_passes_cost_a_call_below_and_are_in_proportion_above_what_was_measured() -> None:
    rates = Rates(flat_hardware(pass_s=1e-6), precision="fp32")
    measured_s = rates.pass_s("norm", 2**10)
    assert rates.pass_s("norm", 1) == rates.pass_s("norm", 0) == measured_s
    assert rates.pass_s("norm", 2**30) == pytest.approx(2**10 * rates.pass_s("norm", 2**20))
    assert rates.pass_s("norm", 2**10, count=3) == 3 * measured_s


def test_attention_of_a_probe_counts_the_causal_half() -> None:
    rates = Rates(flat_hardware(rate=1e9), precision="fp32")
    shape: dict[str, Any] = {"tokens": 32, "num_heads": 4, "head_dim": 64, "length": 16}
    forward_s = rates.attention_s("sdpa", **shape, backward=False)
    assert forward_s == pytest.approx(2 * 32 * 16 * 4 * 64 / 1e9)
    assert rates.attention_s("sdpa", **shape, backward=True) == pytest.approx(
        ATTENTION_BACKWARD_FLOPS * forward_s / 1.25
    )


def test_a_precision_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"flat was measured in fp32, not in bf16; .*--precision bf16"):
        Rates(flat_hardware(), precision="bf16")
