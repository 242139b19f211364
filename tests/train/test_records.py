"""The files a run leaves behind: one number in all places, nothing half-written, a resumed log without doubles."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipe.settings.arguments import parse_arguments
from recipe.settings.presets import PRESETS
from recipe.train.log import MetricsWriter, ProgressBar, describe_evaluation, describe_step
from recipe.train.metrics import EvalRecord, StepRecord
from recipe.train.prepare import request_faults

REQUIRED_KEYS = {
    *("step", "loss", "aux_loss", "z_loss", "grad_norm", "lr", "tokens", "tokens_per_s", "model_flops_per_s", "mfu"),
    *("rho", "dead_experts", "router_entropy", "skipped_steps", "peak_memory_bytes"),
}


def _record(step: int, **changes: object) -> StepRecord:
    values = {
        "step": step,
        "loss": 5.0,
        "aux_loss": 1.0,
        "z_loss": 0.5,
        "grad_norm": 2.0,
        "lr": 0.1,
        "tokens": step * 10,
        "tokens_per_s": 1234.0,
        "model_flops_per_s": 1e9,
        "mfu": 0.25,
        "rho": (1.5, 1.25),
        "dead_experts": (0, 3),
        "router_entropy": (1.75, 0.5),
        "dropped": None,
        "rank_rho": None,
        "rank_rho_bound": None,
        "skipped_steps": 0,
        "peak_memory_bytes": 3 * 2**30,
    }
    return StepRecord(**(values | changes))  # type: ignore[arg-type]


def _lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _write(folder: Path, records: list[StepRecord | EvalRecord], *, after_step: int | None = None) -> list[str]:
    said: list[str] = []
    with MetricsWriter(folder, after_step=after_step, tensorboard=False, say=said.append) as writer:
        for record in records:
            writer.write(record)
    return said


def test_a_step_line_has_the_required_keys(tmp_path: Path) -> None:
    _write(tmp_path, [_record(1)])
    assert set(_lines(tmp_path)[0]) == REQUIRED_KEYS


def test_lines_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, after_step=None, tensorboard=False, say=print) as writer:
        writer.write(_record(1))
        writer.write(EvalRecord(step=1, eval_loss=2.0, perplexity=math.exp(2.0)))
        assert _lines(tmp_path)[1] == {"step": 1, "eval_loss": 2.0, "perplexity": math.exp(2.0)}


@pytest.mark.requirement("R-LOG-01")
def test_console_file_and_tracker_show_the_same_number(tmp_path: Path) -> None:
    record = _record(1, loss=5.0)
    with MetricsWriter(tmp_path, after_step=None, tensorboard=True, say=print) as writer:
        writer.write(record)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert describe_step(record) == (
        "loss 5.0000, 1,234 tokens/s, 3.00 GiB, rho 1.50, 3 dead experts, router entropy 0.50"
    )
    assert _lines(tmp_path)[0]["loss"] == 5.0
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 5.0)]
    assert board.Scalars("rho/moe_layer_1")[0].value == 1.25
    assert board.Scalars("dead_experts/moe_layer_1")[0].value == 3
    assert board.Scalars("router_entropy/moe_layer_0")[0].value == 1.75
    assert describe_step(_record(1, rho=None)) == "loss 5.0000, 1,234 tokens/s, 3.00 GiB"


@pytest.mark.requirement("R-LOG-02")
def test_a_resumed_run_goes_on_from_the_step_it_resumes_and_a_fresh_one_anew(tmp_path: Path) -> None:
    """Tokens are counted on; what is run again is dropped, and a line that was cut short."""
    _write(tmp_path, [_record(step) for step in (1, 2, 3, 4)])
    said = _write(tmp_path, [_record(3, loss=1.0)], after_step=2)
    lines = [(line["step"], line["loss"], line["tokens"]) for line in _lines(tmp_path)]
    assert lines == [(1, 5.0, 10), (2, 5.0, 20), (3, 1.0, 30)]
    assert said == [f"{tmp_path}/metrics.jsonl: dropped 2 lines logged after step 2, which are run again"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    _write(tmp_path, [_record(4)], after_step=3)
    assert [line["step"] for line in _lines(tmp_path)] == [1, 2, 3, 4]
    _write(tmp_path, [_record(1)])
    assert [line["step"] for line in _lines(tmp_path)] == [1]


def test_a_file_that_is_not_ours_stops_the_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nhello\n{"step": 2}\n')
    fault = r"metrics\.jsonl line 2 is not a record of a run: 'hello'; move the file away"
    with pytest.raises(ValueError, match=fault):
        _write(tmp_path, [], after_step=1)


def test_tensorboard_that_is_not_installed_is_found_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parse_arguments(["--config_name=demo", "--output_dir=run", "--report_to=tensorboard"])
    assert request_faults(arguments, PRESETS["demo"]) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [fault] = request_faults(arguments, PRESETS["demo"])
    assert fault == "--report_to tensorboard needs the tensorboard package: pip install 'gather-moe[tensorboard]'"


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    _write(tmp_path, [_record(1, loss=math.nan, rho=(math.inf, 1.0))])
    assert (_lines(tmp_path)[0]["loss"], _lines(tmp_path)[0]["rho"]) == (None, [None, 1.0])


@pytest.mark.parametrize("show", [True, False])
def test_the_bar_shows_step_loss_speed_and_memory_and_is_silent_on_other_ranks(
    show: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = ProgressBar(10, first_step=4, show=show)
    bar.advance()
    bar.show(_record(5))
    bar.say("step 5: saved")
    bar.close()
    shown = capsys.readouterr()
    if show:
        assert "5/10" in shown.err
        assert "loss 5.0000, 1,234 tokens/s, 3.00 GiB" in shown.err
        assert shown.out == "step 5: saved\n"
    else:
        assert shown == ("", "")


def test_an_evaluation_in_words() -> None:
    assert describe_evaluation(EvalRecord(step=7, eval_loss=2.0, perplexity=7.389)) == (
        "step 7: eval loss 2.0000, perplexity 7.39"
    )
    assert describe_evaluation(EvalRecord(step=7, eval_loss=None, perplexity=None)) == "step 7: nothing to evaluate"
    assert describe_step(_record(1, loss=None)).startswith("loss none")
