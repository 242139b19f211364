"""Starts the ranks of a probe, or finds that a launcher has started them already."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from recipe.launch.processes import wait_for_exits


def start_processes(num_ranks: int, *, words: Sequence[str]) -> int:
    """Run `gather-moe probe WORDS` as this many ranks of one node; the first code that is not 0, else 0.

    A rank that fails ends the others. On CPU each has an equal part of the cores to itself.
    """
    cores = sorted(os.sched_getaffinity(0))
    if num_ranks > len(cores):
        print(f"{num_ranks} ranks share {len(cores)} cores: what is measured is that", file=sys.stderr)
    each = max(1, len(cores) // num_ranks)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            mine = [cores[(rank * each + i) % len(cores)] for i in range(each)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "recipe.cli", "probe", *words],
                    env=os.environ | _variables(rank, num_ranks=num_ranks, num_threads=each),
                    cwd=Path.cwd(),
                    preexec_fn=lambda mine=mine: os.sched_setaffinity(0, mine),  # type: ignore[misc]
                )
            )
        return wait_for_exits(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def is_rank(environ: os._Environ[str]) -> bool:
    """Whether a launcher has told this process which rank it is."""
    return bool(environ.get("RANK") and environ.get("WORLD_SIZE"))


def _variables(rank: int, *, num_ranks: int, num_threads: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": str(num_threads),
    }
