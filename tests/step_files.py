"""Finds the project's files that run in one training step on two ranks, and writes them into docs/architecture.md.

    python -m tests.step_files

traces a dense and a MoE step and writes the lists anew; tests/test_architecture.py holds the page against a trace.
"""

import ast
import re
import sys
import tempfile
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from tests.ranks import end_pools, run_ranks
from tests.training import Flags, train_on_ranks, write_ds_config, write_inputs

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
ROOMS = ("recipe/", "modeling/")
NUM_RANKS = 2
# Which part of a run's second step, and of which model.
LISTS: Mapping[str, tuple[str, str]] = {
    "One dense step": ("step", "dense"),
    "One MoE step": ("step", "MoE"),
    "Between two steps": ("between", "MoE"),
}
LINE_WIDTH = 118


def trace(kind: str) -> dict[str, list[str]]:
    """Files of which a function ran on any rank, in the order of first use: `between` the steps, and in the `step`."""
    with tempfile.TemporaryDirectory(prefix="gather-moe-step-") as folder:
        by_rank = run_ranks(_trace_second_step, NUM_RANKS, _flags(Path(folder), kind))
    return {part: list(dict.fromkeys(file for found in by_rank for file in found[part])) for part in by_rank[0]}


def listed_files(title: str) -> list[str]:
    """The files that docs/architecture.md lists under this title."""
    return [line.split()[0] for line in _block(title).group(2).splitlines()]


def write_lists() -> None:
    """Put what is traced now into docs/architecture.md, each file with its first line."""
    traced = {kind: trace(kind) for kind in ("dense", "MoE")}
    for title, (part, kind) in LISTS.items():
        files = traced[kind][part]
        width = max(map(len, files))
        room = LINE_WIDTH - width - 2
        lines = [f"{file:<{width}}  {textwrap.shorten(idea_of(ROOT / file), room, placeholder=' …')}" for file in files]
        text, block = PAGE.read_text(), _block(title)
        PAGE.write_text(text[: block.start(2)] + "\n".join(lines) + "\n" + text[block.end(2) :])
        print(f"{title}: {len(files)} files, {sum(map(_num_lines, files))} lines")


def idea_of(path: Path) -> str:
    """The first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def _num_lines(file: str) -> int:
    return len((ROOT / file).read_text().splitlines())


def _block(title: str) -> "re.Match[str]":
    """The fenced block behind the line that begins with a title."""
    found = re.search(rf"^(\*\*{title}.*?^```text\n)(.*?)^```", PAGE.read_text(), re.S | re.M)
    if found is None:
        raise ValueError(f"{PAGE} has no fenced text block behind a line that begins with '**{title}'")
    return found


def _flags(folder: Path, kind: str) -> Flags:
    """Three steps of a model of two layers; whole experts on each of two ranks, or no experts at all."""
    model: dict[str, Any] = {"mlp_only_layers": [0, 1]} if kind == "dense" else {}
    parallel = {"tp": NUM_RANKS} if kind == "dense" else {"tp": NUM_RANKS, "ep": NUM_RANKS}
    quiet = {"max_steps": 3, "logging_steps": 100, "save_strategy": "no", "max_eval_samples": 0}
    return write_inputs(folder, **model) | write_ds_config(folder, parallel=parallel) | quiet


def _trace_second_step(rank: int, world_size: int, flags: Flags) -> dict[str, list[str]]:
    """Train, and watch from the end of the first update to the end of the second.

    The step begins where the engine counts the targets of its micro-batches. Whoever calls the engine is part of it.
    """
    from recipe.engine.engine import Engine

    watch, count, update, num_updates = _Watch(), Engine.count, Engine.update, 0

    def watched_count(engine: Engine, *arguments: Any) -> Any:
        if num_updates == 1:
            watch.begin("step")
        return count(engine, *arguments)

    def watched_update(engine: Engine, **options: Any) -> float:
        nonlocal num_updates
        norm = update(engine, **options)
        num_updates += 1
        if num_updates == 1:
            watch.begin("between")
        elif num_updates == 2:
            watch.stop()
        return norm

    with patch.object(Engine, "count", watched_count), patch.object(Engine, "update", watched_update):
        train_on_ranks(rank, world_size, flags)
    return {part: list(files) for part, files in watch.files.items()}


class _Watch:
    """Notes the file of every function of the project that is called, in this thread and in those that start meanwhile.

    `files` holds them by the part of the run in which they were called, in the order of their first call.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, None]] = {}
        self._part = ""

    def begin(self, part: str) -> None:
        """Note calls under this part from now on, and the files that are waiting for this call to return."""
        self._part = part
        frame: FrameType | None = sys._getframe()
        waiting = []
        while frame is not None:
            waiting.append(frame)
            frame = frame.f_back
        for frame in reversed(waiting):
            self._note(frame, "call", None)
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(ROOT):
            return
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(ROOMS):
            self.files.setdefault(self._part, {})[name] = None


if __name__ == "__main__":
    from tests import step_files  # the ranks find functions by the name of their module

    step_files.write_lists()
    end_pools()
