"""The entry script as users start it: the deepspeed launcher, plain python, mistakes, and what is left afterwards."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.clean_process import run_clean
from tests.launching import launch, run_main, shared_memory, words_of
from tests.training import read_metrics, write_ds_config, write_inputs

METRIC_KEYS = {
    *("step", "loss", "aux_loss", "z_loss", "grad_norm", "lr", "tokens", "tokens_per_s", "model_flops_per_s", "mfu"),
    *("rho", "rank_rho", "dead_experts", "router_entropy", "skipped_steps", "peak_memory_bytes"),
}


def test_help_prints_every_group_and_no_traceback() -> None:
    done = launch(["--help"])
    assert done.returncode == 0
    for text in ("Model", "Data", "--per_device_train_batch_size", "--resume_from_checkpoint", "--ds_config"):
        assert text in done.stdout


@pytest.mark.slow
@pytest.mark.requirement("R-LAUNCH-02")
def test_two_ranks_under_the_launcher_train_log_and_save(tmp_path: Path) -> None:
    before = shared_memory()
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path) | {"eval_steps": 3, "report_to": "tensorboard"}
    # 40 documents of 20 words do not fill an evaluation batch at the end, which is padded then.
    done = launch(words_of(flags | {"per_device_eval_batch_size": 5}), num_ranks=2)
    assert done.returncode == 0, done.stdout
    run = tmp_path / "run"
    lines = read_metrics(run)
    assert sorted(lines) == [1, 2, 3, 4, 5, 6]
    for line in lines.values():
        assert set(line) == METRIC_KEYS
        assert line["tokens"] == line["step"] * 2 * 16
        assert len(line["rho"]) == 2
        assert all(1.0 <= rho <= 4.0 for rho in line["rho"])
        assert 0 < line["mfu"] < 1.5
    assert sorted(read_metrics(run, key="eval_loss")) == [3, 6]
    assert lines[6]["loss"] < lines[1]["loss"]
    results = json.loads((run / "train_results.json").read_text())
    assert results["steps"] == 6
    assert results["evaluation"]["eval_loss"] == read_metrics(run, key="eval_loss")[6]["eval_loss"]
    record = json.loads((run / "run.json").read_text())
    assert record["settings"]["layout"] == {"dp": 1, "tp": 2, "ep": 2}
    assert record["versions"].keys() >= {"python", "torch", "deepspeed", "transformers"}
    assert list((run / "tensorboard").iterdir())
    assert (run / "checkpoints" / "latest").resolve().name == "step-6"
    assert f"from_pretrained('{run}/checkpoints/latest/hf')" in done.stdout
    assert "final eval loss" in done.stdout
    assert "guessing by token frequency alone" in done.stdout
    assert shared_memory() == before
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("python -c")]
    python, option, code = shlex.split(line)
    assert (python, option) == ("python", "-c")
    assert "Qwen3MoeForCausalLM(" in run_clean(code, [], tmp_path)


@pytest.mark.slow
@pytest.mark.requirement("R-LAUNCH-04")
def test_plain_python_is_a_run_of_one_process(tmp_path: Path) -> None:
    done = run_main(words_of(write_inputs(tmp_path) | {"max_steps": 2}), tmp_path)
    assert done.returncode == 0, done.stdout
    assert "layout: dp=1 tp=1 ep=1 etp=1" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step-2" / "hf" / "config.json").exists()


def check_mistake(done: Any, *messages: str, code: int = 2) -> None:
    assert done.returncode == code, done.stdout
    for message in messages:
        assert done.stdout.count(message) == 1, (message, done.stdout)
    assert "Traceback" not in done.stdout


@pytest.mark.slow
@pytest.mark.requirement("R-CFG-06")
def test_every_mistake_is_listed_once_and_all_ranks_end(tmp_path: Path) -> None:
    """Layout, sizes and unknown keys, in one message from rank 0, before anything is started or written."""
    flags = write_inputs(tmp_path) | {"block_size": 15, "per_device_train_batch_size": 1}
    flags |= write_ds_config(tmp_path, parallel={"tp": 2, "ep": 4}, gradient_cliping=0.25)
    messages = ["gradient_cliping", "ep=4 does not divide tp=2", "1 sequences x block_size=15 = 15 tokens"]
    check_mistake(run_main(words_of(flags), tmp_path, num_ranks=2), *messages)
    unknown = "--seeed on the command line is unknown; did you mean --seed?"
    check_mistake(run_main(words_of(flags | {"seeed": 1}), tmp_path, num_ranks=2), unknown)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_launcher_without_a_number_of_ranks_starts_one_and_hands_its_exit_code_on(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"expect_world_size": 4}
    done = launch(words_of(flags), num_ranks="all")
    check_mistake(done, "--expect_world_size 4, but 1 ranks were started")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message", "code"),
    [
        ({"block_size": 128}, "block_size=128 is longer than max_position_embeddings=64", 2),
        ({"train_file": "nowhere.txt"}, "there is no file 'nowhere.txt'", 2),
        ({"config_overrides": "vocab_size=100"}, "entries, the model only vocab_size=100", 2),
        ({"hf_format": "mixtral"}, "'mixtral' cannot express this model", 2),
        ({"resume_from_checkpoint": "/nowhere"}, "/nowhere cannot be resumed from: it does not exist", 11),
    ],
)
def test_mistakes_end_in_one_message(tmp_path: Path, changes: dict[str, Any], message: str, code: int) -> None:
    check_mistake(run_main(words_of(write_inputs(tmp_path) | changes), tmp_path), message, code=code)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "RANK='x' must be a whole number"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE is not set, but RANK=0 LOCAL_RANK=0 is"),
    ],
)
@pytest.mark.requirement("R-LAUNCH-04")
def test_an_odd_variable_is_named(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    check_mistake(run_main(words_of(write_inputs(tmp_path)), tmp_path, **variables), message)


@pytest.mark.slow
def test_a_used_output_folder_is_refused_and_ranks_end_alike(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"max_steps": 1}

    def run(**changes: Any) -> Any:
        return run_main(words_of(flags | changes), tmp_path)

    assert run().returncode == 0
    check_mistake(run(), "already holds a run", code=15)
    check_mistake(run(overwrite_output_dir=True, train_file="nowhere.txt"), "there is no file 'nowhere.txt'")
    assert (tmp_path / "run" / "checkpoints" / "step-1").is_dir(), "a mistake must not cost the old run"
    done = run(overwrite_output_dir=True)
    assert done.returncode == 0, done.stdout
    assert "overwriting" in done.stdout
