"""Starts the entry script as users do: the deepspeed launcher or plain python, in an environment of its own."""

import os
import subprocess
import sys
from pathlib import Path

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


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("deepspeed")}
