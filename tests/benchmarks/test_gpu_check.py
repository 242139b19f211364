"""The script for a GPU, its parts on a CPU with emulated graphs: what it measures, what it finds wrong, how it ends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_cases
import gpu_check
import gpu_layers
import pytest
import torch
from gpu_cases import Bench, Case, Row

from recipe.engine.graphs import install_graphs
from recipe.shared.flops import Peak, model_flops_per_token
from tests.emulated_graphs import EmulatedCapture
from tests.referee import TINY, tiny_config


def install_emulated(model: Any) -> None:
    install_graphs(model, capture=EmulatedCapture())


def bench(**changes: Any) -> Bench:
    """A CPU in a GPU's place."""
    return Bench(
        device=torch.device("cpu"),
        models={"small": dict(TINY)},
        product_sizes=(64, 16, 24, 4),
        batch=(2, 16),
        products={"torch": gpu_cases.TORCH},
        variants={"eager": lambda model: None, "graphed": install_emulated},
        num_ranks=2,
        num_steps=4,
        num_timed=2,
    )._replace(**changes)


def bad(rows: list[Row]) -> list[str]:
    return [row.what for row in rows if not row.is_good]


def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert not torch.cuda.is_available()
    assert gpu_check.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "gpu_check: torch finds no GPU here, so there is nothing to check\n"


@pytest.mark.slow
def test_all_cases_run_and_are_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cases, "find_peak", lambda device, *, precision: Peak(1e9, f"{device} in {precision}"))
    rows = gpu_check.run_cases(gpu_cases.cases(bench()), limit_s=60)
    assert bad(rows) == []
    assert {row.section for row in rows} == {"products", "precision", "graphs", "speed"}
    by_place = {(row.case, row.what): row.value for row in rows}
    assert by_place["fp32", "loss: eager again"] == by_place["fp32", "gradients: graphed"] == 0
    assert 0 < by_place["bf16", "gradients: norm of the error"] < 0.5
    for case, share in {"small graphed": 1, "graphed, 1 of 2": 2}.items():
        numbers = {row.what: row.value for row in rows if row.case == case}
        assert numbers["tokens"] == pytest.approx(32 / numbers["step"] * 1e3)
        flops = model_flops_per_token(tiny_config().sizes, attention_length=16) * numbers["tokens"] / share
        assert numbers["MFU of 0.001 TFLOP/s (cpu in bf16)"] == pytest.approx(100 * flops / 1e9)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_the_work_around_products_is_within_bounds() -> None:
    rows = gpu_check.run_cases(gpu_layers.layer_cases(bench()), limit_s=60)
    assert bad(rows) == []
    assert {row.section for row in rows} == {"rows", "operators", "norms", "attention", "waits"}
    operators = {"sort_rows", "permute", "combine", "swiglu", "swiglu_back"}
    assert {row.what.split(":")[0] for row in rows if row.section == "rows"} == operators
    elements = {"turn", "logit_sums_", "logit_gradients_", "wide_linear", "wide_linear_back"}
    assert {row.what.split(":")[0] for row in rows if row.section == "operators"} == elements
    assert all(row.value > 0 for row in rows if row.unit == "GB/s")


def test_wrong_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first = gpu_layers.row_operators
    calls: list[int] = []

    def second_is_wrong(*given: Any, **options: Any) -> Any:
        calls.append(1)
        found = first(*given, **options)
        return found | ({"sort_rows": lambda: found["sort_rows"]() + 1} if len(calls) == 2 else {})

    monkeypatch.setattr(gpu_layers, "row_operators", second_is_wrong)
    assert bad(gpu_layers.check_rows(bench(), torch.float32)) == ["sort_rows: error"]


def wrong(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, gpu_cases.Products]:
    forward, back, weight_gradient = gpu_cases.TORCH
    return {"triton": gpu_cases.Products(lambda *given: change(forward(*given)), back, weight_gradient)}


def test_wrong_products_are_found() -> None:
    rows = gpu_cases.check_products(bench(products=wrong(lambda out: out * 1.02)), "triton", "bf16")
    errors = [row for row in rows if row.what.endswith("error")]
    assert len(errors) == 9
    assert bad(errors) == ["forward, uneven: error", "forward, to one expert: error"]  # without rows there is nothing


def test_products_that_write_rows_of_nobody_are_found() -> None:
    """The first 60 of 64 rows are experts'."""
    products = wrong(lambda out: torch.where(torch.arange(len(out))[:, None] < 60, out.nan_to_num(), 1.0))
    rows = gpu_cases.check_products(bench(products=products), "triton", "bf16")
    assert "forward, uneven: rows of nobody" in bad(rows)
    assert "forward, uneven: error" not in bad(rows)


def test_wrong_graphs_are_found() -> None:
    """Blocks that train, beside them one weight that goes the other way."""

    def install(model: Any) -> None:
        install_emulated(model)
        model.get_parameter("model.embed_tokens.weight").register_hook(torch.neg)

    rows = gpu_cases.check_graphs(bench(variants={"eager": lambda model: None, "graphed": install}), "fp32")
    assert bad(rows) == ["gradients: graphed", "losses of 4 steps: graphed"]


def test_a_case_that_fails_or_comes_too_late_is_void() -> None:
    def fail() -> list[Row]:
        raise RuntimeError("no such kernel\nand more")

    fine = Row("a", "fine", "what", 1.0, bound=2.0)
    todo = [Case("a", "fails", fail), Case("a", "fine", lambda: [fine])]
    rows = gpu_check.run_cases(iter(todo), limit_s=60)
    assert rows == [Row("a", "fails", "", None, void="RuntimeError: no such kernel"), fine]
    late = gpu_check.run_cases(iter(todo), limit_s=-1)
    assert [row.void for row in late] == ["left out: -1 s were over"] * 2
    assert not any(row.is_good for row in late)


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (3.0, 1), (float("nan"), 1)])
def test_the_report_and_the_exit_code(
    value: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "gpu_bench", bench)
    monkeypatch.setattr(gpu_check, "layer_cases", lambda bench: iter(()))
    monkeypatch.setattr(
        gpu_check, "cases", lambda bench: iter([Case("a", "b", lambda: [Row("a", "b", "c", value, bound=2.0)])])
    )
    monkeypatch.setattr(gpu_check, "describe_machine", lambda: {"gpu": "none"})
    path = tmp_path / "report.json"
    assert gpu_check.main(["--json", str(path)]) == code
    report = json.loads(path.read_text())
    assert report["machine"] == {"gpu": "none"}
    assert report["rows"][0]["what"] == "c"
    assert ("TOO MUCH" in capsys.readouterr().out) == bool(code)


def test_the_machine_is_described_without_a_gpu_too() -> None:
    machine = gpu_check.describe_machine()
    assert machine["torch"] == torch.__version__
    assert machine["commit"]
