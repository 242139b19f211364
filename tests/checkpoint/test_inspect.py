"""`gather-moe inspect` says what a checkpoint is, finds every fault, and loads torch only to look at values."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.checkpoint.inspect_checkpoint import Values, scan_values
from recipe.cli import main
from tests.referee import tiny_config
from tests.states import MemoryState, details_of, pieces_of, save_whole, seal, state_of

CHANGED = "its content has changed since it was written (SHA-256 differs)"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the steps 3 and 6, of which the first one has no layout."""
    checkpoints = tmp_path_factory.mktemp("saved") / "run" / "checkpoints"
    config = tiny_config()
    details = details_of(config, dp=2, tp=2, ep=2)
    save_whole(checkpoints / "step-3", state_of(config), details=details)
    native = checkpoints / "step-6"
    for name in ("deepspeed", "ranks", "hf"):
        (native / name).mkdir(parents=True)
        (native / name / "file").write_bytes(bytes(1536))
    later = {"position": 72, "tokens": 1152, "zero_stage": 3, "precision": "bf16"}
    seal(native, step=6, details=details | later)
    (checkpoints / "latest").symlink_to("step-6")
    return checkpoints.parent


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return shutil.copytree(saved, tmp_path / "run", symlinks=True)


def inspect(capsys: Capture, *arguments: Any) -> tuple[int, str, str]:
    """Exit code, standard output and error."""
    code = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def inspect_json(capsys: Capture, *arguments: Any) -> dict[str, Any]:
    return json.loads(inspect(capsys, *arguments, "--json")[1])


def test_a_checkpoint_is_described(saved: Path, capsys: Capture) -> None:
    folder = saved / "checkpoints" / "step-3"
    code, out, _ = inspect(capsys, folder)
    assert code == 0
    size = sum(path.stat().st_size for path in (folder / "whole").iterdir()) / 1024
    assert out.splitlines() == [
        f"checkpoint  {folder}",
        "step        3 of 9",
        "state       whole, of any layout; saved as dp=2 tp=2 ep=2, ZeRO-2, fp32",
        "data        576 tokens seen, at block 36 of 120 a pass, 16 tokens each",
        "            token store tokens-1a2b",
        "model       34,336 parameters, 22,048 active per token",
        "hf/         mixtral in float32",
        f"sizes       expert_counts.json 2 B, hf/ 45 B, ranks/ 12 B, whole/ {size:.0f} KiB",
        "health      complete: sizes and SHA-256 checksums of 5 files are as the manifest says",
    ]


def test_a_run_folder_lists_its_checkpoints_and_describes_the_newest(saved: Path, capsys: Capture) -> None:
    code, out, _ = inspect(capsys, saved, "--no-checksums")
    assert code == 0
    header, first, second, empty, *rest = out.splitlines()
    assert header.split() == ["step", "layout", "ZeRO", "form", "tokens", "size", "state"]
    assert first.split()[:7] == ["3", "dp=2", "tp=2", "ep=2", "2", "whole", "576"]
    assert second.split()[:9] == ["6", "dp=2", "tp=2", "ep=2", "3", "native", "1,152", "4", "KiB"]
    assert [line.endswith("  complete by size") for line in (first, second)] == [True, True]
    assert (empty, rest[0]) == ("", f"checkpoint  {saved / 'checkpoints' / 'step-6'}")
    assert "state       native, DeepSpeed's files of dp=2 tp=2 ep=2, ZeRO-3, bf16" in rest
    assert rest[-1] == "health      complete: sizes (contents not compared) of 3 files are as the manifest says"
    assert inspect(capsys, saved / "checkpoints" / "latest", "--no-checksums")[1].splitlines() == rest


def test_everything_is_there_for_programs(saved: Path, capsys: Capture) -> None:
    content = inspect_json(capsys, saved / "checkpoints")
    assert [(found["step"], found["faults"]) for found in content["checkpoints"]] == [(3, []), (6, [])]
    assert content["error"] is None
    found = content["checkpoint"]
    assert (found["step"], found["form"], found["checksums"], found["hf"]) == (6, "native", True, None)
    assert (found["details"]["tokens"], found["values"]) == (1152, None)
    assert found["parameters"] == {"total": 34336, "active": 22048}
    assert found["parts_bytes"] == {"deepspeed/": 1536, "hf/": 1536, "ranks/": 1536}


def test_values_are_looked_at_where_that_is_asked(saved: Path, capsys: Capture) -> None:
    folder = saved / "checkpoints" / "step-3"
    tensors = state_of(tiny_config()).tensors
    values = inspect_json(capsys, folder, "--values")["checkpoint"]["values"]
    assert list(values) == ["weight", "exp_avg", "exp_avg_sq"]
    for kind, found in values.items():
        every = torch.cat([t.flatten() for key, t in tensors.items() if key.startswith(f"{kind}/")])
        assert (found["num_tensors"], found["num_not_finite"]) == (21, 0)
        assert found["num_elements"] == every.numel() == 34336
        assert found["norm"] == pytest.approx(every.double().norm().item())
        assert (found["min"], found["max"]) == (every.min().item(), every.max().item())
    last = inspect(capsys, folder, "--values")[1].splitlines()[-1]
    assert last.startswith("exp_avg_sq  34,336 numbers, norm ")
    assert last.endswith(" 0 not finite")


def test_numbers_that_are_not_finite_are_counted_and_left_out() -> None:
    nan, inf = float("nan"), float("inf")
    state = MemoryState({"weight/a": torch.tensor([[3.0, nan], [inf, -4.0]]), "weight/b": torch.tensor([nan, nan])})
    with pieces_of(8):
        assert scan_values(state)["weight"] == Values(2, 6, 3 + 1, 5.0, -4.0, 3.0)


def test_many_faults_are_counted(run: Path, capsys: Capture) -> None:
    folder = run / "checkpoints" / "step-6"
    files = [folder / f"file-{number}" for number in range(12)]
    for file in files:
        file.write_bytes(b"x")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").unlink()
    seal(folder, step=7, details=manifest["details"])
    for file in files:
        file.unlink()
    code, out, _ = inspect(capsys, folder)
    assert code == 12
    assert f"health      broken: {folder / 'manifest.json'}: is of step 7, not of step-6" in out.splitlines()
    assert out.splitlines()[-1] == "            and 3 more faults"


def test_broken_ones_in_a_run_folder_are_passed_over(run: Path, capsys: Capture) -> None:
    newest, older = run / "checkpoints" / "step-6", run / "checkpoints" / "step-3"
    os.truncate(newest / "ranks" / "file", 5)
    code, out, _ = inspect(capsys, run)
    assert code == 0
    assert out.splitlines()[2].endswith("broken: file: has 5 bytes instead of 1536")
    assert f"checkpoint  {older}" in out.splitlines()
    (older / "manifest.json").unlink()
    code, out, err = inspect(capsys, run)
    assert code == 13
    assert out.splitlines()[1].split()[:5] == ["3", "dp=?", "tp=?", "ep=?", "-"]
    assert err.splitlines() == [
        f"gather-moe inspect: no checkpoint in {run} is complete:",
        f"  - {newest / 'ranks' / 'file'}: has 5 bytes instead of 1536",
        f"  - {older / 'manifest.json'}: missing, so the checkpoint was never completed",
    ]


def test_contents_that_changed_are_an_error_and_say_why_the_newest_of_a_run_is_passed_over(
    run: Path, capsys: Capture
) -> None:
    folder = run / "checkpoints" / "step-6"
    path = folder / "ranks" / "file"
    path.write_bytes(b"\1" + bytes(1535))
    code, out, err = inspect(capsys, folder)
    assert (code, err) == (12, f"gather-moe inspect: {path}: {CHANGED}\n")
    assert out.splitlines()[-1] == f"health      broken: {path}: {CHANGED}"
    assert inspect_json(capsys, folder, "--values")["checkpoint"]["faults"] == [f"{path}: {CHANGED}"]
    assert inspect(capsys, folder, "--no-checksums")[0] == 0
    code, out, _ = inspect(capsys, run)
    assert code == 0, "there is a complete one"
    _, older, newest, empty, *rest = out.splitlines()
    assert older.endswith("  complete")
    assert newest.endswith(f"  broken: file: {CHANGED}")
    assert (empty, rest[0]) == ("", f"passed over step-6: {path}: {CHANGED}")
    assert f"checkpoint  {run / 'checkpoints' / 'step-3'}" in rest
    found = inspect_json(capsys, run)
    assert [(one["step"], one["faults"]) for one in found["checkpoints"]] == [(3, []), (6, [f"{path}: {CHANGED}"])]
    assert found["passed_over"] == [f"step-6: {path}: {CHANGED}"]
    assert inspect_json(capsys, run, "--no-checksums")["passed_over"] == []


def test_what_is_no_checkpoint_has_an_exit_code_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    nowhere, step = tmp_path / "nowhere", tmp_path / "step-4"
    code, _, err = inspect(capsys, nowhere)
    assert (code, err) == (11, f"gather-moe inspect: {nowhere} cannot be inspected: it is no folder\n")
    assert "inspected: it holds neither manifest.json nor any step-N folder" in inspect(capsys, tmp_path)[2]
    step.mkdir()
    code, _, err = inspect(capsys, step)
    assert code == 12
    assert "manifest.json: missing, so the checkpoint was never completed" in err


def test_a_config_that_says_nothing_is_an_error_that_names_it(run: Path, capsys: Capture) -> None:
    folder = run / "checkpoints" / "step-3"
    (folder / "hf" / "config.json").write_text("[]" + " " * 43)
    code, _, err = inspect(capsys, folder, "--no-checksums")
    assert code == 12
    assert "config.json: is no model's configuration (TypeError" in err
    assert "SHA-256 differs" in inspect(capsys, folder)[2]


def test_details_of_other_writers_are_no_obstacle(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_bytes(b"x")
    code, out, _ = inspect(capsys, seal(tmp_path, step=2, details={}))
    assert code == 0
    assert "state       native, DeepSpeed's files of dp=? tp=? ep=?, ZeRO-?, ?" in out
    assert "model " not in out


def test_inspecting_loads_no_torch(saved: Path) -> None:
    code = (
        "import sys; from recipe.cli import main; code = main(['inspect', sys.argv[1]]); "
        "assert not {'torch', 'deepspeed', 'transformers', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, saved], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no progress bar where nobody watches"
