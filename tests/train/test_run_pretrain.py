"""The entry script as users start it: the deepspeed launcher, plain python, mistakes, SIGTERM, and what is left."""

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from recipe.shared.errors import STOPPED, STOPPED_EARLY
from tests.clean_process import run_clean
from tests.launching import (
    LAUNCHER,
    LIMIT_S,
    ROOT,
    end_session,
    environment,
    make_extensions_ready,
    run_main,
    running,
    shared_memory,
    words_of,
)
from tests.training import Flags, read_metrics, write_ds_config, write_inputs

METRIC_KEYS = {
    *("step", "loss", "aux_loss", "z_loss", "grad_norm", "lr", "tokens", "tokens_per_s", "model_flops_per_s", "mfu"),
    *("rho", "rank_rho", "dead_experts", "router_entropy", "skipped_steps", "peak_memory_bytes"),
}


def test_help_prints_every_group_and_no_traceback(tmp_path: Path) -> None:
    done = run_main(["--help"], tmp_path)
    assert done.returncode == 0
    for text in ("Model", "Data", "--per_device_train_batch_size", "--resume_from_checkpoint", "--ds_config"):
        assert text in done.stdout
    assert "Traceback" not in done.stdout


def stop_under_launcher(words: list[str], folder: Path, *, num_ranks: int, told: str) -> str:
    """Train until step 6 is logged, send SIGTERM to `told`; what was said. Checks that all of it is gone, and saved."""
    before = shared_memory()
    with running([LAUNCHER, *words]) as process:
        deadline_s = time.monotonic() + LIMIT_S
        metrics = folder / "run" / "metrics.jsonl"
        while not (metrics.exists() and '"step": 6,' in metrics.read_text()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s, "no sixth step"
            time.sleep(0.1)
        ranks = ranks_below(process)
        assert len(ranks) == num_ranks
        (process if told == "the command" else ranks[-1]).send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
        assert not any(rank.is_running() for rank in ranks)
    # The command itself just dies of the signal, and nobody is left to hear the ranks' exit code.
    assert process.returncode == (-signal.SIGTERM if told == "the command" else STOPPED), said
    saved = re.search(r"told to stop: saving step (\d+)", said)
    assert saved is not None, said
    checkpoints = folder / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", f"step-{saved[1]}"]
    assert (checkpoints / "latest" / "manifest.json").is_file()
    assert shared_memory() == before, "R-LAUNCH-02"
    return said


def ranks_below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks among a launcher's descendants, in the order of their numbers."""
    children = psutil.Process(process.pid).children(recursive=True)
    found = [child for child in children if "run_pretrain.py" in child.cmdline() and "-m" not in child.cmdline()]
    return sorted(found, key=lambda child: int(child.environ()["RANK"]))


def endless(folder: Path) -> Flags:
    return write_inputs(folder) | {"max_steps": 100_000, "hf_save": "never", "seed": 3}


@pytest.mark.slow
@pytest.mark.requirement("R-LAUNCH-02", "R-CKPT-11")
def test_two_ranks_under_the_launcher_train_log_and_save_when_one_of_them_is_told_to_stop(tmp_path: Path) -> None:
    flags = endless(tmp_path) | write_ds_config(tmp_path) | {"eval_steps": 3, "report_to": "tensorboard"}
    # 40 documents of 20 words do not fill an evaluation batch at the end, which is padded then.
    words = ["--num_accelerators", "2", "run_pretrain.py", *words_of(flags | {"per_device_eval_batch_size": 5})]
    stop_under_launcher(words, tmp_path, num_ranks=2, told="rank 1")
    run = tmp_path / "run"
    lines = read_metrics(run)
    for step in range(1, 7):
        line = lines[step]
        assert set(line) == METRIC_KEYS
        assert line["tokens"] == line["step"] * 2 * 16
        assert len(line["rho"]) == 2
        assert all(1.0 <= rho <= 4.0 for rho in line["rho"])
        assert 0 < line["mfu"] < 1.5
    assert lines[6]["loss"] < lines[1]["loss"]
    evaluated = read_metrics(run, key="eval_loss")
    assert list(evaluated)[:1] == [3]
    results = json.loads((run / "train_results.json").read_text())
    assert (results["steps"], results["stopped"]) == (max(lines), True)
    assert results["evaluation"]["eval_loss"] == list(evaluated.values())[-1]["eval_loss"]
    record = json.loads((run / "run.json").read_text())
    assert record["settings"]["layout"] == {"dp": 1, "tp": 2, "ep": 2}
    assert record["versions"].keys() >= {"python", "torch", "deepspeed", "transformers"}
    assert list((run / "tensorboard").iterdir())


@contextmanager
def at_a_terminal(command: list[str]) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A command whose terminal we are, by its file; whatever it starts is gone when the context ends."""
    make_extensions_ready()
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), preexec_fn=take_terminal, **ends)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        end_session(process.pid)
        process.wait()
        os.close(ours)


def read_terminal(terminal: int, *, until: str, said: str = "") -> str:
    """What was said up to these words, or to the end."""
    deadline_s = time.monotonic() + LIMIT_S
    while until not in said:
        assert time.monotonic() < deadline_s, said
        try:
            said += os.read(terminal, 4096).decode()
        except OSError:  # nobody is at the other end any more
            break
    return said


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ctrl_c_saves_the_step_and_leaves_no_traceback(tmp_path: Path, num_ranks: int) -> None:
    words = ["run_pretrain.py", *words_of(endless(tmp_path))]
    command = [sys.executable, *words] if num_ranks == 1 else [LAUNCHER, "--num_accelerators", "2", *words]
    with at_a_terminal(command) as (process, terminal):
        said = read_terminal(terminal, until="data: epoch 1 ")
        os.write(terminal, b"\x03")
        said = read_terminal(terminal, until="no such words", said=said)
        if num_ranks == 1:  # the command `deepspeed` itself has a traceback, and another code
            assert process.wait(timeout=60) == STOPPED, said
            assert "Traceback" not in said
    (step,) = re.findall(r"told to stop: saving step (\d+)", said)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["latest", f"step-{step}"]
    assert said.count("Traceback") <= 1
    assert "recipe/" not in said.partition("told to stop")[2]


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_says_so_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "run_pretrain.py", *words_of(endless(tmp_path))]
    with at_a_terminal(command) as (process, terminal):
        read_terminal(terminal, until="settings: ")
        os.write(terminal, b"\x03")
        said = read_terminal(terminal, until="no such words")
        assert process.wait(timeout=30) == STOPPED_EARLY
    assert "told to stop by SIGINT before the first step: nothing was saved" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.requirement("R-CKPT-11")
def test_the_launcher_without_a_number_of_ranks_starts_one_which_outlives_the_command_to_save(tmp_path: Path) -> None:
    words = ["run_pretrain.py", *words_of(endless(tmp_path))]
    stop_under_launcher(words, tmp_path, num_ranks=1, told="the command")


@pytest.mark.slow
@pytest.mark.requirement("R-LAUNCH-04")
def test_plain_python_is_a_run_of_one_process_whose_folder_is_not_used_again(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"max_steps": 2}

    def run(**changes: Any) -> Any:
        return run_main(words_of(flags | changes), tmp_path)

    done = run()
    assert done.returncode == 0, done.stdout
    assert "layout: dp=1 tp=1 ep=1 etp=1" in done.stdout
    assert "final eval loss" in done.stdout
    assert "guessing by token frequency alone" in done.stdout
    assert f"from_pretrained('{tmp_path}/run/checkpoints/latest/hf')" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("python -c")]
    python, option, code = shlex.split(line)
    assert (python, option) == ("python", "-c")
    assert "Qwen3MoeForCausalLM(" in run_clean(code, [], tmp_path)

    check_mistake(run(), "already holds a run", code=15)
    check_mistake(run(overwrite_output_dir=True, train_file="nowhere.txt"), "there is no file 'nowhere.txt'")
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir(), "a mistake must not cost the old run"
    done = run(overwrite_output_dir=True, max_steps=1)
    assert done.returncode == 0, done.stdout
    assert "overwriting" in done.stdout
    assert not (tmp_path / "run" / "checkpoints" / "step-2").exists()


def check_mistake(done: Any, *messages: str, code: int = 2) -> None:
    assert done.returncode == code, done.stdout
    for message in messages:
        assert done.stdout.count(message) == 1, (message, done.stdout)
    assert "Traceback" not in done.stdout


@pytest.mark.slow
@pytest.mark.requirement("R-CFG-06")
def test_every_mistake_is_listed_once_and_all_ranks_end(tmp_path: Path) -> None:
    """Layout, sizes, export and unknown keys, in one message from rank 0, before anything is started or written."""
    flags = write_inputs(tmp_path) | {"block_size": 15, "per_device_train_batch_size": 1}
    flags |= {"hf_format": "mixtral", "config_overrides": "max_position_embeddings=8"}
    flags |= write_ds_config(tmp_path, parallel={"tp": 2, "ep": 4}, gradient_cliping=0.25)
    messages = ["gradient_cliping", "ep=4 does not divide tp=2", "1 sequences x block_size=15 = 15 tokens"]
    messages += ["block_size=15 is longer than max_position_embeddings=8", "'mixtral' cannot express this model"]
    check_mistake(run_main(words_of(flags), tmp_path, num_ranks=2), *messages)
    unknown = "--seeed on the command line is unknown; did you mean --seed?"
    check_mistake(run_main(words_of(flags | {"seeed": 1}), tmp_path, num_ranks=2), unknown)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "variables", "message", "code"),
    [
        ({"config_overrides": "vocab_size=100"}, {}, "entries, the model only vocab_size=100", 2),
        ({"resume_from_checkpoint": "/nowhere"}, {}, "/nowhere cannot be resumed from: it does not exist", 11),
        ({"expect_world_size": 4}, {}, "--expect_world_size 4, but 1 ranks were started", 2),
        ({}, {"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "RANK='x' must be a whole number", 2),
    ],
)
@pytest.mark.requirement("R-LAUNCH-04")
def test_mistakes_end_in_one_message(
    tmp_path: Path, changes: dict[str, Any], variables: dict[str, str], message: str, code: int
) -> None:
    done = run_main(words_of(write_inputs(tmp_path) | changes), tmp_path, **variables)
    check_mistake(done, message, code=code)
