"""Processes of this machine: which one an id and the moment of its start name (Linux), and waiting for their exits."""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
POLL_S = 0.05
STATE, PARENT, START_TICKS = 0, 1, 19  # positions in what `_read_stat` returns


class ProcessId(NamedTuple):
    """A process by its pid and its start, in clock ticks since boot, which tells it from a later one with that pid."""

    pid: int
    start_ticks: int


def identify(pid: int) -> ProcessId | None:
    """Return the process that runs under this pid now; None where there is none, or only its zombie."""
    stat = _read_stat(pid)
    if not stat or stat[STATE] in "ZX":
        return None
    return ProcessId(pid, int(stat[START_TICKS]))


def identify_myself() -> ProcessId:
    """Identify this process."""
    me = identify(os.getpid())
    assert me is not None
    return me


def is_alive(process: ProcessId) -> bool:
    """Return whether the process still runs, and not another one under its pid."""
    return identify(process.pid) == process


def find_deepspeed_command() -> ProcessId | None:
    """Return the `deepspeed` command that started this rank on its own node; None where none is to be seen.

    It starts a launcher, which starts the ranks. On one node it does not pass signals on: it just dies of them.
    """
    launcher = os.getppid()
    if "deepspeed.launcher.launch" not in _read_arguments(launcher):
        return None
    stat = _read_stat(launcher)
    command = int(stat[PARENT]) if stat else 0
    names = [Path(argument).name for argument in _read_arguments(command)]
    return identify(command) if {"deepspeed", "deepspeed.launcher.runner"} & set(names) else None


def pid_namespace() -> str:
    """Return a name for the set of pids this process can see, such as "4026531836"; containers have one each."""
    return os.readlink(PROC / "self/ns/pid").removeprefix("pid:[").removesuffix("]")


def wait_for_exits(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended well, or one has not; return 0, or the exit code of the first that fails.

    The code is 1 where a signal ended it. The other processes go on.
    """
    waiting = list(processes)
    while waiting:
        for process in list(waiting):
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=POLL_S)
                waiting.remove(process)
                if code:
                    return code if code > 0 else 1
    return 0


def _read_stat(pid: int) -> list[str]:
    """Read the fields of proc(5) from the third on: state, parent, ..., start as the 22nd; none without a process."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()  # the second field, the name in parentheses, may hold spaces


def _read_arguments(pid: int) -> list[str]:
    try:
        return (PROC / str(pid) / "cmdline").read_text(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
