"""The commands that the project's documents show, and what reads the words of each: the program's own parser.

A command that nothing here knows is an AssertionError, so that none is passed over in silence.
"""

import argparse
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import recipe.cli
from recipe.settings.flags import flag_specs

ROOT = Path(__file__).parent.parent
TRAINER = "run_pretrain.py"
DEFAULT_RANKS = 2  # of `deepspeed run_pretrain.py`, which takes all accelerators there are
# Programs of the project without flags, and the tests that run what they are made of.
RUN_ELSEWHERE: Mapping[str, str] = {
    "python docs/draw_block.py": "tests/test_architecture.py",
    "python -m tests.step_files": "tests/test_architecture.py",
    "python examples/finetune_trainer.py": "tests/test_examples.py",
    "python examples/finetune_sft.py": "tests/test_examples.py",
    "python examples/finetune_lora.py": "tests/test_examples.py",
    "sbatch examples/two_nodes.sbatch": "tests/test_examples.py",
}


class Shown(NamedTuple):
    """A command as a document shows it."""

    document: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}: {self.text}"


class Training(NamedTuple):
    """What a command starts `run_pretrain.py` with."""

    num_ranks: int
    argv: list[str]


def documents() -> list[Path]:
    """README and all pages but claims.md, which a script writes and a test of its own compares."""
    pages = [path for path in sorted(ROOT.glob("docs/*.md")) if path.name != "claims.md"]
    return [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ds_configs/README.md")), *pages]


def shown_commands(path: Path) -> list[Shown]:
    """Every command in the fenced bash blocks of a document, one by one, in order; comments left out."""
    commands = []
    for block in re.findall(r"^```bash\n(.*?)^```", path.read_text(), re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            text = re.sub(r"(^|\s)#\s.*", "", line).strip()
            commands += [Shown(path.relative_to(ROOT).as_posix(), part.strip()) for part in text.split(" && ") if part]
    return commands


def check_command(text: str) -> None:
    """Have the program that a command names read the command's words; an AssertionError where none does."""
    words = shlex.split(text)
    if is_training(text):
        read_training(text)
    elif command := next((known for known in RUN_ELSEWHERE if text == known or text.startswith(f"{known} ")), None):
        name = re.sub(r".*/|^tests\.|\.\w+$", "", command.split()[-1])
        assert name in (ROOT / RUN_ELSEWHERE[command]).read_text(), text
    elif words[:1] == ["python"] and words[1].startswith("benchmarks/"):
        _read_script(ROOT / words[1], words[2:])
    else:
        assert words[0] in READERS, f"no reader is known for the command {text!r}"
        READERS[words[0]](words)


def is_training(text: str) -> bool:
    return TRAINER in shlex.split(text)


def read_training(text: str) -> Training:
    """The ranks and the words that a launcher, by its own parser, would start the trainer with."""
    words = shlex.split(text)
    if words[0] == "python":
        assert words[1] == TRAINER, text
        return Training(1, words[2:])
    if words[0] == "deepspeed":
        from deepspeed.launcher.runner import parse_args

        launched = parse_args(words[1:])
        assert launched.user_script == TRAINER, text
        num_ranks = launched.num_gpus if launched.num_gpus > 0 else DEFAULT_RANKS
        if "--hostfile" in words:
            from recipe.launch.hosts import read_hostfile

            num_ranks = sum(host.slots for host in read_hostfile(ROOT / "examples" / "hostfile").hosts)
        return Training(num_ranks, launched.user_args)
    assert words[0] == "torchrun", f"no launcher is known for the command {text!r}"
    from torch.distributed.run import get_args_parser

    run = get_args_parser().parse_args(words[1:])
    assert run.training_script == TRAINER, text
    return Training(int(run.nnodes) * int(run.nproc_per_node), run.training_script_args)


def known_flags() -> set[str]:
    """Every flag of the trainer, of `gather-moe` and its subcommands, and of the launchers, with its dashes."""
    from deepspeed.launcher import runner
    from torch.distributed.run import get_args_parser

    flags = {f"--{name}" for name in flag_specs()} | {"--help"}
    for command in recipe.cli.COMMANDS:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        flags |= set(parser._option_string_actions)
    launchers = [get_args_parser()]
    with patch.object(argparse.ArgumentParser, "parse_args", lambda parser, args: launchers.append(parser)):
        runner.parse_args([])
    return flags.union(*(parser._option_string_actions for parser in launchers))


def _read_tool(words: list[str]) -> None:
    """`gather-moe`, which does nothing with what it has read."""
    commands = tuple(command._replace(run=lambda arguments: 0) for command in recipe.cli.COMMANDS)
    with patch.object(recipe.cli, "COMMANDS", commands):
        assert recipe.cli.main(words[1:]) == 0
    if "--" in words:  # what `profile` starts a run with
        from recipe.settings.arguments import parse_arguments

        parse_arguments([*words[words.index("--") + 1 :], "--output_dir", "runs/x"])


class _WordsReadError(Exception):
    """A script's parser has read its words."""


def _read_script(path: Path, words: list[str]) -> None:
    """A script with a parser of its own, which is stopped once that has read the words."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: Any, *arguments: Any) -> None:
        parse(parser, *arguments)
        raise _WordsReadError

    path_before = list(sys.path)
    with (
        patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        patch.object(sys, "argv", [str(path), *words]),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except _WordsReadError:
            return
        finally:
            sys.path[:] = path_before
    raise AssertionError(f"{path} reads no flags")


def _read_pip(words: list[str]) -> None:
    """Only this project, in place, or what its tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[1] == "install", words
    if words[2] == "-e":
        assert len(words) == 4, words
        extra = re.fullmatch(r"\.(?:\[(\w+)\])?", words[3])
        assert extra, words
        assert extra[1] is None or extra[1] in project["optional-dependencies"]
        return
    tested = [requirement for group in project["optional-dependencies"].values() for requirement in group]
    for name in words[2:]:
        assert any(re.match(rf"{name}\b", requirement) for requirement in tested), f"{name} is not what the tests use"


def _read_pytest(words: list[str]) -> None:
    """Folders that are there, markers that are declared."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {line.partition(":")[0] for line in options["markers"]}
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            assert set(next(rest).split()) - {"not", "and", "or"} <= markers, words
        else:
            assert (ROOT / word).exists(), words


def _read_check(words: list[str]) -> None:
    """Lint and types: as `.ci/run` runs them."""
    assert " ".join(words) in (ROOT / ".ci" / "run").read_text().splitlines(), words


def _read_cat(words: list[str]) -> None:
    assert all(any(ROOT.glob(word)) for word in words[1 : words.index(">")]), words


READERS: Mapping[str, Callable[[list[str]], None]] = {
    "gather-moe": _read_tool,
    "pip": _read_pip,
    "pytest": _read_pytest,
    "ruff": _read_check,
    "mypy": _read_check,
    "cat": _read_cat,
}
