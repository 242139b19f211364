"""Starts the entry script as users do: the deepspeed launcher or plain python, in an environment of its own."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from tests.ranks import with_libraries
from tests.training import Flags

ROOT = Path(__file__).parents[1]
LAUNCHER = str(Path(sys.executable).parent / "deepspeed")
LIMIT_S = 150


def words_of(flags: Flags) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu", **changes}


def launch(words: list[str], *, num_ranks: int | str | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the script under the launcher, or by plain python; stdout and stderr together.

    num_ranks  None is plain python, "all" the launcher without a number
    """
    number = [] if num_ranks == "all" else ["--num_accelerators", str(num_ranks)]
    start = [sys.executable] if num_ranks is None else [LAUNCHER, *number]
    return subprocess.run(
        [*start, "run_pretrain.py", *words],
        cwd=ROOT,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )


def run_main(
    words: list[str], folder: Path, *, num_ranks: int = 1, program: str = "run_pretrain", **changes: str
) -> SimpleNamespace:
    """Run `python PROGRAM.py WORDS`, or as many ranks of one launcher, in processes that have the libraries loaded.

    Returns stdout and stderr of all ranks together, and the exit code that all of them ended with.
    """
    out, context, processes = folder / "said.txt", with_libraries(), []
    out.write_text("")
    for rank in range(num_ranks):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)} if num_ranks > 1 else {}
        process = context.Process(target=_main, args=(program, words, environment(**variables, **changes), out))
        process.start()
        processes.append(process)
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    (code,) = {process.exitcode for process in processes}
    return SimpleNamespace(returncode=code, stdout=out.read_text())


def _main(program: str, words: list[str], variables: dict[str, str], out: Path) -> None:
    os.environ.clear()
    os.environ.update(variables)
    with out.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(importlib.import_module(program).main(words))


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("deepspeed")}
