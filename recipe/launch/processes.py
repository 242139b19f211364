"""Processes of this machine: which one an id and the moment of its start name (Linux), and waiting for their exits."""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
POLL_S = 0.05


class ProcessId(NamedTuple):
    """`start_ticks` is in clock ticks since boot; with it a reused pid is not mistaken for the old process."""

    pid: int
    start_ticks: int


def identify(pid: int) -> ProcessId | None:
    """The process that runs under this pid now; None where there is none, or only its zombie."""
    fields_from_3 = _read_stat(pid)
    if not fields_from_3 or fields_from_3[0] in "ZX":
        return None
    return ProcessId(pid, int(fields_from_3[19]))


def identify_myself() -> ProcessId:
    me = identify(os.getpid())
    assert me is not None
    return me


def is_alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def find_deepspeed_command() -> ProcessId | None:
    """The `deepspeed` command that this rank was started by on its own node; None where there is none to be seen.

    It starts a launcher, which starts the ranks. On one node it does not pass signals on: it just dies of them.
    """
    launcher = os.getppid()
    if "deepspeed.launcher.launch" not in _read_arguments(launcher):
        return None
    stat = _read_stat(launcher)
    command = int(stat[1]) if stat else 0
    names = [Path(argument).name for argument in _read_arguments(command)]
    return identify(command) if {"deepspeed", "deepspeed.launcher.runner"} & set(names) else None


def pid_namespace() -> str:
    """A name for the set of pids this process can see, such as "4026531836"; containers have one each."""
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
    """Fields of proc(5) from the third on: state, parent, ..., start as the 22nd; none where there is no process."""
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
