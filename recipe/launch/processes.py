"""Processes of this machine: which one an id and the moment of its start name (Linux), and waiting for their exits."""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

PROC = Path("/proc")
POLL_S = 0.05
STATE, START_TICKS = 0, 19  # positions among the fields of /proc/PID/stat that follow the name


class ProcessId(NamedTuple):
    """A process by its pid and its start, in clock ticks since boot, which tells it from a later one with that pid."""

    pid: int
    start_ticks: int


def identify(pid: int) -> ProcessId | None:
    """Return the process that runs under this pid now; None where there is none, or only its zombie."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # of proc(5), those behind the name in parentheses, which may hold spaces
    return None if fields[STATE] in "ZX" else ProcessId(pid, int(fields[START_TICKS]))


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
    with suppress(psutil.Error):  # of a process that has just ended, or that this user may not look at
        launcher = psutil.Process(os.getppid())
        command = launcher.parent()
        if command is not None and "deepspeed.launcher.launch" in launcher.cmdline():
            names = {Path(argument).name for argument in command.cmdline()}
            return identify(command.pid) if names & {"deepspeed", "deepspeed.launcher.runner"} else None
    return None


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
