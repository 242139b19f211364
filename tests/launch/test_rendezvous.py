"""Ranks find each other, jobs do not mix, what dead runs left does not matter, and a missing rank is named."""

import multiprocessing as mp
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from recipe.launch.processes import ProcessId, identify, identify_myself, is_alive
from recipe.launch.rendezvous import (
    RendezvousError,
    leave_file_store,
    open_file_store,
    open_tcp_store,
    private_folder,
    wait_for_all,
)


def _at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls in threads and return their results; the first error is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def dead_process() -> ProcessId:
    process = mp.get_context("fork").Process(target=lambda: None)
    process.start()
    assert process.pid is not None
    found = identify(process.pid)
    process.join()
    return found or ProcessId(process.pid, 1)


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port the system chose, on the loopback device, that is listened on for as long as the test runs."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_process_is_known_by_its_start(dead_process: ProcessId) -> None:
    me = identify_myself()
    assert me.pid == os.getpid()
    assert is_alive(me)
    assert not is_alive(ProcessId(me.pid, me.start_ticks + 1))
    assert not is_alive(dead_process)


@pytest.mark.requirement("R-LAUNCH-03")
def test_two_jobs_at_once_do_not_mix(tmp_path: Path) -> None:
    folder = private_folder(tmp_path)

    def join(job: str, rank: int) -> set[str]:
        store = open_file_store(job, folder=folder, world_size=2)
        store.set(f"from-{rank}", f"{job}-{rank}")
        wait_for_all(store, rank=rank, world_size=2, timeout_s=10, meeting=job)
        return {store.get(f"from-{peer}").decode() for peer in (0, 1)}

    met = _at_once(*(lambda j=job, r=rank: join(j, r) for job in ("a", "b") for rank in (0, 1)))  # type: ignore[misc]
    assert met == [{"a-0", "a-1"}] * 2 + [{"b-0", "b-1"}] * 2


def test_the_meeting_files_go_with_the_last_member(tmp_path: Path) -> None:
    folder = private_folder(tmp_path)
    store = open_file_store("job", folder=folder, world_size=2)
    wait_for_all(store, rank=0, world_size=1, timeout_s=1, meeting="here")
    assert {path.name for path in folder.iterdir()} == {"lock", "job", "job.members"}
    leave_file_store(folder)
    assert {path.name for path in folder.iterdir()} == {"lock"}


def test_files_of_a_dead_run_are_replaced_and_those_of_a_live_one_stay(tmp_path: Path, dead_process: ProcessId) -> None:
    folder = private_folder(tmp_path)
    dead, live = f"{dead_process.pid} {dead_process.start_ticks}\n", f"1 {_start_of_process_1()}\n"
    for name, members in (("same-name", dead), ("dead", dead), ("live", dead + live)):
        (folder / name).write_text("left over")
        (folder / f"{name}.members").write_text(members)
    store = open_file_store("same-name", folder=folder, world_size=1)
    wait_for_all(store, rank=0, world_size=1, timeout_s=1, meeting="here")
    assert {path.name for path in folder.iterdir()} == {
        "lock",
        "same-name",
        "same-name.members",
        "live",
        "live.members",
    }
    assert (folder / "live.members").read_text() == live


def _start_of_process_1() -> int:
    first = identify(1)
    assert first is not None
    return first.start_ticks


@pytest.mark.parametrize("make", [lambda path: path.mkdir(mode=0o755), lambda path: path.symlink_to("/tmp")])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / f"gather-moe-{os.getuid()}")
    with pytest.raises(RendezvousError, match=r"must be a folder that belongs to user \d+ alone \(mode 700\)"):
        private_folder(tmp_path)


@pytest.mark.requirement("R-LAUNCH-04")
def test_a_missing_rank_is_named() -> None:
    with pytest.raises(
        RendezvousError, match=r"rank 2 waited 0\.1 s at a place: .* \[0, 1, 2\], present \[2\], .* \[0, 1\]"
    ):
        wait_for_all(HashStore(), rank=2, world_size=3, timeout_s=0.1, meeting="a place")


def test_a_rank_that_gave_up_is_not_counted_by_latecomers() -> None:
    store = HashStore()
    for rank in (0, 1):
        with pytest.raises(RendezvousError, match=rf"present \[{rank}\], missing \[{1 - rank}\]"):
            wait_for_all(store, rank=rank, world_size=2, timeout_s=0.1, meeting="a place")


def test_the_same_rank_twice_is_refused() -> None:
    store = HashStore()
    wait_for_all(store, rank=0, world_size=1, timeout_s=1, meeting="a place")
    with pytest.raises(RendezvousError, match=r"two processes came to a place as rank 0; RANK must differ"):
        wait_for_all(store, rank=0, world_size=1, timeout_s=1, meeting="a place")


@pytest.mark.requirement("R-LAUNCH-03")
def test_a_busy_port_names_itself_and_its_holder(taken_port: int) -> None:
    message = (
        rf"port {taken_port} is already in use by process {os.getpid()} \(.+\); choose another one with MASTER_PORT"
    )
    with pytest.raises(RendezvousError, match=message):
        open_tcp_store("127.0.0.1", port=taken_port, world_size=2, serve=True, timeout_s=5)


@pytest.mark.requirement("R-LAUNCH-04")
def test_an_address_where_nobody_answers_is_named() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # taken, but nobody listens
        port = silent.getsockname()[1]
        message = rf"nobody answers at MASTER_ADDR=127\.0\.0\.1 MASTER_PORT={port} after 0\.2 s \(.*refused\)"
        with pytest.raises(RendezvousError, match=message):
            open_tcp_store("127.0.0.1", port=port, world_size=2, serve=False, timeout_s=0.2)


def test_ranks_meet_at_an_address() -> None:
    server = open_tcp_store("127.0.0.1", port=0, world_size=2, serve=True, timeout_s=10)
    assert isinstance(server, TCPStore)
    client = open_tcp_store("127.0.0.1", port=server.port, world_size=2, serve=False, timeout_s=10)
    done = threading.Event()

    def join(rank: int) -> None:
        wait_for_all((server, client)[rank], rank=rank, world_size=2, timeout_s=10, meeting="the address")
        done.set()

    _at_once(lambda: join(0), lambda: join(1))
    assert done.is_set()
