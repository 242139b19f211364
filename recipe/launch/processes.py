"""Tells whether a process of this machine is still the one it was: by its id and the moment it started (Linux)."""

import os
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class ProcessId(NamedTuple):
    """`start_ticks` is in clock ticks since boot; with it a reused pid is not mistaken for the old process."""

    pid: int
    start_ticks: int


def identify(pid: int) -> ProcessId | None:
    """The process that runs under this pid now; None where there is none, or only its zombie."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # proc(5): field 3 is the state, field 22 the start. Field 2, the name in parentheses, may hold spaces.
    fields_from_3 = text.rpartition(")")[2].split()
    return None if fields_from_3[0] in "ZX" else ProcessId(pid, int(fields_from_3[19]))


def identify_myself() -> ProcessId:
    me = identify(os.getpid())
    assert me is not None
    return me


def is_alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def pid_namespace() -> str:
    """A name for the set of pids this process can see, such as "4026531836"; containers have one each."""
    return os.readlink(PROC / "self/ns/pid").removeprefix("pid:[").removesuffix("]")
