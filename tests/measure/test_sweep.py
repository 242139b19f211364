"""`gather-moe sweep`: plans run on ranks of their own, failures are rows, and what was run is not run again."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from recipe.cli import main
from recipe.measure import sweep
from recipe.measure.sweep import Setting, entries_of, run_name, run_plan, run_sweep, table
from recipe.plan.search import search_plans
from tests.plan_hardware import plan_request
from tests.training import write_inputs

ONE_RANK = Setting(num_ranks=1, device="cpu", num_steps=2, limit_s=60.0)


def die(rank: int, config_file: Path, setting: Setting, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(rank: int, config_file: Path, setting: Setting, folder: Path) -> None:
    raise SystemExit(3)


def fail_late(rank: int, config_file: Path, setting: Setting, folder: Path) -> None:
    (folder / f"rank-{rank}.json").write_text('{"step_s": 1.0, "memory_bytes": 1}')
    raise SystemExit(1)


def sleep(rank: int, config_file: Path, setting: Setting, folder: Path) -> None:
    signal.pause()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("life", "limit_s", "error"),
    [
        (die, 60, "rank 0 was ended by SIGKILL, as the system does where memory runs out; see "),
        (leave, 60, "rank 0 ended with exit code 3; see "),
        (fail_late, 60, "rank 0 had measured and then ended with exit code 1; see "),
        (sleep, 0.3, "no result within 0.3 s; all ranks were ended"),
    ],
)
def test_a_rank_that_ends_without_a_word_or_never_is_an_error(
    life: Any, limit_s: float, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_rank", life)
    outcome = run_plan(tmp_path / "none.json", setting=ONE_RANK._replace(limit_s=limit_s), folder=tmp_path / "plan")
    assert outcome.step_s is None
    assert error in (outcome.error or "")


@pytest.mark.slow
def test_a_sweep_ends_with_a_table_and_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_file = str(write_inputs(tmp_path)["config_name"])
    shape = {"gpus": 2, "block_size": 16, "sequences_per_step": 2, "precision": "fp32"}
    wanted = plan_request(model_file, hardware="cpu", **shape)
    first, second = entries_of(search_plans(wanted), model={"config_name": model_file}, top=2)
    broken = {**first, "plan": "broken", "config": {**first["config"], "parallel": {"tp": 3}}}
    setting = ONE_RANK._replace(num_ranks=2)
    said: list[str] = []
    rows = run_sweep([first, broken], setting=setting, folder=tmp_path / "sweep", say=said.append)
    log = tmp_path / "sweep" / run_name(first["config"]) / "rank-0.log"
    written = log.stat().st_mtime_ns
    rows = run_sweep([second, broken, first], setting=setting, folder=tmp_path / "sweep", say=said.append)
    rows = [rows[2], rows[1], rows[0]]
    assert sum("was run before" in line for line in said) == 1  # what failed is tried again
    assert log.stat().st_mtime_ns == written
    for row in (rows[0], rows[2]):
        assert row["error"] is None
        assert row["measured"]["step_s"] > 0
        assert row["measured"]["memory_bytes"] > 0
    assert "cannot be cut into groups of tp=3" in rows[1]["error"]
    lines = list(table(rows))
    assert len(lines) == 4
    words = (f"--model={model_file}", "--ranks=2", "--seq_len=16", f"--out={tmp_path / 'sweep'}", "--steps=2")
    assert main(["sweep", *words, "--top=1", "--json"]) == 0
    said_by_command = capsys.readouterr()
    assert "1/1  " in said_by_command.err
    assert "was run before" in said_by_command.err
    assert json.loads(said_by_command.out)["rows"][0]["measured"] == rows[0]["measured"]
    assert main(["sweep", *words, "--top=2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    kept = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [row["error"] is None for row in kept["rows"]] == [True, True, False]
    assert kept["rows"][0]["measured"] == rows[0]["measured"]
    # What tensors take is predicted by a formula of its own, and measured here by following them.
    assert first["predicted"]["memory_bytes"] == pytest.approx(rows[0]["measured"]["memory_bytes"], rel=0.08)


def test_a_table_has_ratios_and_errors() -> None:
    row = {"predicted": {"step_s": 0.5, "memory_bytes": 2**30}, "measured": {"step_s": 1.0, "memory_bytes": 2**29}}
    rows = [row | {"plan": "a", "error": None}, row | {"plan": "longer", "error": "rank 0: it broke\nin two lines"}]
    head, good, bad = table(rows)
    columns = ["predicted", "measured", "ratio"]
    assert head.split() == ["plan", "step:", *columns, "memory:", *columns]
    assert good.split() == ["a", "500", "ms", "1.00", "s", "0.50", "1.0", "GiB", "512", "MiB", "2.00"]
    assert bad == "longer           500 ms  rank 0: it broke in two lines"


def test_results_of_another_sweep_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"ranks": 2, "device": "cpu", "steps": 5, "rows": []}')
    with pytest.raises(ValueError, match="has results of 2 ranks on cpu with 5 steps each, not of 1 on cpu with 2"):
        run_sweep([], setting=ONE_RANK, folder=tmp_path, say=print)
    (tmp_path / "sweep.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"sweep.json is no result of a sweep \(KeyError\('ranks'\)\); choose another"):
        run_sweep([], setting=ONE_RANK, folder=tmp_path, say=print)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out .*/file/sweep cannot be made: Not a directory"):
        run_sweep([], setting=ONE_RANK, folder=tmp_path / "file" / "sweep", say=print)


def test_a_model_that_fits_nowhere_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model=qwen3-235b-a22b", "--ranks=2", "--seq_len=4096", f"--out={tmp_path}"]
    assert main(["sweep", *words]) == 2
    assert "no plan fits 2 ranks on cpu; `gather-moe plan` says for each layout why" in capsys.readouterr().err
