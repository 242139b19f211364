"""What README and the other documents show works: commands run, at a reduced size, or are read by their own parsers."""

import ast
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import recipe.cli
import run_pretrain
from recipe.data.options import EMBEDDED
from recipe.settings.arguments import parse_arguments
from recipe.shared.errors import EXIT_CODES
from tests.clean_process import run_clean
from tests.documents import (
    ROOT,
    Shown,
    check_command,
    documents,
    is_training,
    known_flags,
    read_training,
    shown_commands,
)
from tests.ranks import run_ranks
from tests.training import train_on_ranks, write_inputs


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


README = (ROOT / "README.md").read_text()
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
DEMO_FOLDER = "runs/demo/checkpoints/latest/hf"
ALL_COMMANDS = [command for path in documents() for command in shown_commands(path)]
FAULTS = re.findall(r"```bash\n([^`]*)```\n\n```text\n([^`]*)```", TROUBLES)
# Flags of programs that are not of this project.
FOREIGN_FLAGS = {"--shm-size", "--check"}


def test_readme_opens_with_exactly_two_commands() -> None:
    lines = README.splitlines()
    assert lines[0] == "```bash"
    assert lines[1] == (
        "pip install -e . && deepspeed --num_accelerators 2 run_pretrain.py --ds_config ds_configs/cpu_demo.json"
    )
    assert lines[2] == "pip install -e '.[test]' && pytest"
    assert lines[3] == "```"


def test_there_are_commands_to_check() -> None:
    assert len(ALL_COMMANDS) > 30
    assert sum(is_training(command.text) for command in ALL_COMMANDS) > 8


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Path]:
    """A folder to give a document's commands in: the project's files, and small ones that the commands speak of."""
    for name in ("ds_configs", "examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "examples" / "hostfile", tmp_path / "hosts")
    write_inputs(tmp_path, max_position_embeddings=512)
    for run in ("demo", "mine"):
        folder = tmp_path / "runs" / run / "checkpoints" / "latest" / "hf"
        folder.mkdir(parents=True)
        shutil.copy(tmp_path / "model.json", folder / "config.json")
        (folder / "tokenizer.json").touch()
    with chdir(tmp_path):
        yield tmp_path


@pytest.mark.parametrize("command", [c for c in ALL_COMMANDS if not is_training(c.text)], ids=str)
def test_a_command_is_read_by_its_program(command: Shown, workplace: Path) -> None:
    check_command(command.text)


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_the_settings_of_training_commands_hold_together(path: Path, workplace: Path) -> None:
    """In order, after the plans that some of them train by; a command of troubleshooting.md ends as that page says."""
    for command in shown_commands(path):
        if command.text.startswith("gather-moe plan") and "--write" in command.text:
            assert recipe.cli.main(command.text.split()[1:]) == 0
        if is_training(command.text) and name_of(path) != "docs/troubleshooting.md":
            request = settle(command.text)
            assert request.settings.schedule.max_steps != 0, command


def settle(command: str) -> Any:
    """What `run_pretrain.py` makes of a command before the ranks meet."""
    started = read_training(command)
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": started.num_ranks, "LOCAL_SIZE": min(8, started.num_ranks)}
    world |= {"CROSS_SIZE": max(1, started.num_ranks // 8)}
    with patch.dict(os.environ, {name: str(value) for name, value in world.items()}):
        return run_pretrain.read_request(started.argv)


@pytest.mark.parametrize(("command", "message"), FAULTS, ids=lambda text: text.split()[-1])
def test_a_fault_has_the_message_that_troubleshooting_shows(command: str, message: str, workplace: Path) -> None:
    with pytest.raises(ValueError) as caught:
        settle(command.replace("\\\n", " "))
    assert str(caught.value) == message.rstrip("\n")


def test_messages_with_gaps_are_those_of_the_code() -> None:
    """What stands between the gaps is found in one string of the code, in this order."""
    strings = [
        " ".join(string.split())
        for path in [ROOT / "run_pretrain.py", *ROOT.glob("recipe/**/*.py")]
        for string in _strings(path)
    ]
    blocks = re.findall(r"```text\n([^`]*(?:`[^`\n]+`[^`]*)*)```", TROUBLES)
    messages = [" ".join(block.split()) for block in blocks if "…" in block]
    assert len(FAULTS) == 3
    assert len(messages) > 12
    for message in messages:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")))
        assert any(pattern.search(string) for string in strings), message


def _strings(path: Path) -> Iterator[str]:
    """Every string of a file, with … where a value is put in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_exit_code_is_in_the_table() -> None:
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", TROUBLES, re.M)] == list(EXIT_CODES)


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_flags_files_and_headings_that_a_page_names_exist(path: Path) -> None:
    """Links are seen from the document's own folder, names in backticks from the top."""
    text = path.read_text()
    scripts = "".join(f.read_text() for f in (*ROOT.glob("benchmarks/**/*.py"), ROOT / "tests" / "conftest.py"))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", prose)) - FOREIGN_FLAGS
    assert not {flag for flag in flags - known_flags() if f'"{flag}"' not in scripts}
    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        if link.startswith("http"):
            continue
        target = path.parent / link if link else path
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)", target.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor
    folders = "recipe|modeling|tests|benchmarks|docs|examples|ds_configs"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.slow
def test_the_lines_that_load_and_generate_run_in_a_clean_process(tmp_path: Path) -> None:
    run_ranks(train_on_ranks, 2, write_inputs(tmp_path))
    block, *_ = re.findall(r"```python\n(.*?)```", README, re.S)
    assert DEMO_FOLDER in block
    script = block.replace(DEMO_FOLDER, str(tmp_path / "run" / "checkpoints" / "latest" / "hf"))
    assert "def main():" in run_clean(script, [], tmp_path, cold=True)


# What makes a training of minutes one of seconds.
SMALL = {
    "block_size": 16,
    "learning_rate": 1e-2,
    "max_train_documents": 40,
    "max_eval_samples": 2,
    "per_device_train_batch_size": 2,
    "train_vocab_size": 300,
}


@pytest.mark.slow
def test_the_first_hour_runs_at_a_reduced_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every training of getting-started.md in its order, in one folder: demo, resume, own text, resume, chat."""
    monkeypatch.chdir(ROOT)
    write_inputs(tmp_path, max_position_embeddings=256)
    (tmp_path / "my_text.txt").write_text((ROOT / "docs" / "training.md").read_text())
    commands = [c.text for c in shown_commands(ROOT / "docs" / "getting-started.md") if is_training(c.text)]
    assert len(commands) == 5
    lasts = []
    for number, command in enumerate(commands):
        given = parse_arguments(read_training(command).argv)
        flags = {name: getattr(given, name) for name in given.given} | SMALL | {"cache_dir": tmp_path / "cache"}
        flags |= {name: tmp_path / flags[name] for name in ("output_dir", "model_name_or_path") if name in flags}
        flags |= {name: ROOT / flags[name] for name in ("ds_config", "chat_template") if name in flags}
        if "config_name" in flags:
            flags["config_name"] = tmp_path / "model.json"
        if flags.get("train_file", EMBEDDED) != EMBEDDED:
            flags["train_file"] = (tmp_path if flags["train_file"] == "my_text.txt" else ROOT) / flags["train_file"]
        if "chat_template" in flags:
            flags["block_size"] = 256
        if "lr_scheduler_kwargs" in flags:
            flags["lr_scheduler_kwargs"] = json.dumps(dict(flags["lr_scheduler_kwargs"]))
        flags |= {"max_steps": 2 + number, "warmup_steps": 1, "save_steps": 2, "eval_steps": 0}
        results, said = run_ranks(train_on_ranks, 2, flags)[0]
        lasts.append((results["steps"], any(line.startswith("resuming from") for line in said)))
        assert results["evaluation"]["eval_loss"] > 0
    assert lasts == [(2, False), (3, True), (4, False), (5, True), (6, False)]
