"""How the ranks of a run find each other: through a private file on one node, through an address on several."""

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import DistNetworkError, FileStore, Store, TCPStore  # type: ignore[attr-defined]

from recipe.launch.processes import ProcessId, identify_myself, is_alive, pid_namespace
from recipe.shared.errors import RunError

POLL_S = 0.02


class RendezvousError(RunError):
    """The ranks did not come together; the text says who is missing and where they were expected."""


def private_folder(parent: Path) -> Path:
    """Make a folder under `parent` that only this user can enter, for the processes that see the same pids."""
    folder = parent / f"gather-moe-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RendezvousError(
            f"{folder} must be a folder that belongs to user {os.getuid()} alone (mode 700); "
            "remove it, or set TMPDIR to a folder of your own"
        )
    folder = folder / f"pids-{pid_namespace()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def open_file_store(name: str, *, folder: Path, world_size: int) -> Store:
    """Open the store in `folder/name`, shared by every process of this user that asks for the same name.

    What dead processes left in the folder is removed first, so a name that a killed run used starts afresh.
    """
    with _locked(folder):
        _forget(folder, also=None)
        me = identify_myself()
        with (folder / f"{name}.members").open("a") as members:
            members.write(f"{me.pid} {me.start_ticks}\n")
        return FileStore(str(folder / name), world_size)


def leave_file_store(folder: Path) -> None:
    """Take this process off the member lists; the last member's files go with it."""
    with _locked(folder):
        _forget(folder, also=identify_myself())


def open_tcp_store(address: str, *, port: int, world_size: int, serve: bool, timeout_s: float) -> Store:
    """Open the store at address:port, hosted by the one process that serves.

    Raises RendezvousError at once where the port is taken, and after `timeout_s` where nobody answers.
    """
    if not serve:
        _wait_for_listener(address, port=port, timeout_s=timeout_s)
    limit = timedelta(seconds=timeout_s)
    try:
        return TCPStore(address, port, world_size, serve, timeout=limit, wait_for_workers=False)
    except DistNetworkError as error:
        if not serve or "EADDRINUSE" not in str(error):
            raise
        raise RendezvousError(
            f"port {port} is already in use by {_port_holder(port)}; choose another one with MASTER_PORT "
            "(deepspeed --master_port, torchrun --master-port)"
        ) from error


def wait_for_all(store: Store, *, rank: int, world_size: int, timeout_s: float, meeting: str) -> None:
    """Return once every rank has come; raise RendezvousError naming the missing ones after `timeout_s`."""
    if store.add(f"present/{rank}", 1) > 1:
        raise RendezvousError(f"two processes came to {meeting} as rank {rank}; RANK must differ between them")
    deadline = time.monotonic() + timeout_s
    missing = set(range(world_size))
    while missing:
        missing = {peer for peer in missing if not store.check([f"present/{peer}"])}
        if missing and time.monotonic() > deadline:
            store.delete_key(f"present/{rank}")  # whoever comes later must not count on this rank
            present = sorted(set(range(world_size)) - missing)
            raise RendezvousError(
                f"rank {rank} waited {timeout_s:g} s at {meeting}: expected ranks {list(range(world_size))}, "
                f"present {present}, missing {sorted(missing)}"
            )
        if missing:
            time.sleep(POLL_S)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _forget(folder: Path, *, also: ProcessId | None) -> None:
    """Drop dead members, and `also`, from every list; remove the store of a list that becomes empty."""
    for path in folder.glob("*.members"):
        members = [ProcessId(*map(int, line.split())) for line in path.read_text().splitlines()]
        alive = [member for member in members if member != also and is_alive(member)]
        if alive:
            path.write_text("".join(f"{member.pid} {member.start_ticks}\n" for member in alive))
        else:
            path.unlink()
            path.with_suffix("").unlink(missing_ok=True)


def _wait_for_listener(address: str, *, port: int, timeout_s: float) -> None:
    """Try to connect until it works: torch's own wait ends in a page of C++ frames."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"nobody answers at MASTER_ADDR={address} MASTER_PORT={port} after {timeout_s:g} s ({error}); "
                    "rank 0 must run on that machine, and the port must be open between the nodes"
                ) from error
            time.sleep(POLL_S)


def _port_holder(port: int) -> str:
    """Describe the process that listens on a TCP port of this machine, as far as this user may know."""
    with suppress(psutil.Error):  # another user's process, or one that has just ended
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid is not None:
                return f"process {found.pid} ({psutil.Process(found.pid).name()})"
    return "a process that this user cannot see"
