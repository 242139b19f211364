"""Keeps /dev/shm usable: removes the buffers that dead DeepSpeed runs left there, and refuses to start when it is full.

DeepSpeed's all-reduce for CPUs maps one buffer of 66 MiB per rank and never unlinks it. They are memory, not disk.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from recipe.launch.processes import PROC
from recipe.shared.errors import RunError
from recipe.shared.units import MIB

BUFFER_PREFIX = "deepspeed_allreduce_buffer_"
MIN_FREE_SHARE = 0.05


class SharedMemoryError(RunError):
    """/dev/shm has no room to work with."""


def remove_dead_buffers(folder: Path, *, say: Callable[[str], None]) -> list[str]:
    """Remove this user's all-reduce buffers that no process has mapped or open, and say which.

    A process in another pid namespace that shares the folder is not seen. Taking a buffer's name away does not
    disturb a run that has mapped it; only a peer that has yet to open it would miss it.
    """
    buffers = [path for path in folder.glob(BUFFER_PREFIX + "*") if path.stat().st_uid == os.getuid()]
    if not buffers:
        return []
    in_use = set(_files_in_use(folder))
    dead = sorted(path for path in buffers if str(path) not in in_use)
    size_bytes = sum(path.stat().st_size for path in dead)
    for path in dead:
        path.unlink()
    names = [path.name for path in dead]
    if dead:
        say(f"removed what dead runs left in {folder} ({size_bytes / MIB:.0f} MiB): {', '.join(names)}")
    return names


def check_room(folder: Path) -> None:
    """Raise SharedMemoryError where less than 5 % is free: processes would stall or die with SIGBUS later."""
    usage = shutil.disk_usage(folder)
    if usage.free >= MIN_FREE_SHARE * usage.total:
        return
    files = sorted(((p.stat().st_size, p.name) for p in folder.iterdir() if p.is_file()), reverse=True)[:3]
    largest = ", ".join(f"{name} ({size_bytes / MIB:.0f} MiB)" for size_bytes, name in files) or "none visible"
    raise SharedMemoryError(
        f"{folder} is nearly full: {usage.free / MIB:.0f} of {usage.total / MIB:.0f} MiB are free; "
        f"remove what dead programs left there (largest files: {largest}) or give the container a larger one"
    )


def _files_in_use(folder: Path) -> Iterator[str]:
    """Yield every path under `folder` that a process of this user has open or mapped.

    A buffer is open before it is mapped, and mapped for as long as it is used: looking at both, in this order, leaves
    no moment in which a starting run goes unseen.
    """
    for process in PROC.iterdir():
        if not process.name.isdecimal():
            continue
        try:
            paths = [*_open_files(process), *_mapped_files(process)]
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # another user's process, which cannot open our buffers, or one that has just ended
        yield from (path.removesuffix(" (deleted)") for path in paths if path.startswith(f"{folder}/"))


def _open_files(process: Path) -> Iterator[str]:
    for descriptor in os.listdir(process / "fd"):
        # A descriptor may close while the others are read; the one os.listdir used, if the process is this one, has.
        with suppress(FileNotFoundError):
            yield os.readlink(process / "fd" / descriptor)


def _mapped_files(process: Path) -> Iterator[str]:
    for line in (process / "maps").read_text().splitlines():
        _, slash, path = line.partition("/")
        yield slash + path
