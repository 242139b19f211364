"""From environment variables to joined ranks: how they meet, who is missing, and what is left by dead runs."""

import base64
import json
import multiprocessing as mp
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import recipe.launch.start
from recipe.launch.processes import ProcessId, identify, identify_myself, is_alive
from recipe.launch.rendezvous import (
    RendezvousError,
    open_file_store,
    open_tcp_store,
    private_folder,
    wait_for_all,
)
from recipe.launch.start import (
    SharedMemoryError,
    World,
    check_room,
    check_world_size,
    compute_capability,
    rank_from,
    read_world,
    remove_dead_buffers,
    start_ranks,
    stop_ranks,
)
from tests.launching import running, shared_memory
from tests.ranks import with_libraries

CPU = {"DS_ACCELERATOR": "cpu"}
THIS_RANK = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
DEEPSPEED = CPU | THIS_RANK | {"LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"} | ADDRESS
TORCHRUN = CPU | THIS_RANK | {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
ONE_NODE = CPU | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}


@pytest.mark.requirement("R-LAUNCH-04")
def test_the_variables_of_both_launchers_and_of_none() -> None:
    for environ in (DEEPSPEED, TORCHRUN):
        world = read_world(environ)
        assert world == World(rank=3, local_rank=1, world_size=4, local_world_size=2, device="cpu")
        assert world.num_nodes == 2
    alone = read_world(CPU)
    assert (alone.rank, alone.world_size, alone.local_world_size, alone.num_nodes) == (0, 1, 1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: ""}, rf"{name} is not set, but \w+=\d \w+=\d is; start with `deepspeed ")
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        ),
        ({"RANK": "x"}, r"RANK='x' must be a whole number of at least 0"),
        ({"WORLD_SIZE": "0"}, r"WORLD_SIZE='0' must be a whole number of at least 1"),
        ({"RANK": "4"}, r"RANK=4 must be below WORLD_SIZE=4"),
        ({"LOCAL_RANK": "2"}, r"LOCAL_RANK=2 must be below the 2 ranks of this node"),
        ({"LOCAL_WORLD_SIZE": "4"}, r"LOCAL_SIZE=2 and LOCAL_WORLD_SIZE=4 differ"),
        ({"CROSS_SIZE": "3"}, r"WORLD_SIZE=4 ranks on 3 nodes, but this node has 2; every node must run the same"),
        ({"DS_ACCELERATOR": "xpu"}, r"DS_ACCELERATOR='xpu' is not supported; it must be cpu or cuda"),
    ],
)
@pytest.mark.requirement("R-LAUNCH-04")
def test_a_missing_or_an_odd_variable_is_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_world(DEEPSPEED | changes)


@pytest.mark.requirement("R-LAUNCH-04")
def test_who_prints_is_known_even_from_odd_variables() -> None:
    assert (rank_from(DEEPSPEED), rank_from(DEEPSPEED, "LOCAL_RANK")) == (3, 1)
    for odd in ({}, {"RANK": "", "LOCAL_RANK": ""}, {"RANK": "x", "LOCAL_RANK": "-1"}, {"RANK": "1.5"}):
        assert (rank_from(odd), rank_from(odd, "LOCAL_RANK")) == (0, 0)


@pytest.mark.requirement("R-LAUNCH-04")
def test_many_processes_without_ranks_are_refused() -> None:
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        with pytest.raises(ValueError, match=rf"started 8 processes \({variable}=8\) but RANK, LOCAL_RANK and WORLD_"):
            read_world(CPU | {variable: "8"})
        assert read_world(CPU | {variable: "1"}).world_size == 1


def test_the_device_is_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert read_world({}).device == "cpu"
    with pytest.raises(ValueError, match=r"DS_ACCELERATOR=cuda, but torch finds no CUDA device"):
        read_world({"DS_ACCELERATOR": "cuda"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert read_world({}).device == "cuda"
    assert read_world(CPU).device == "cpu"


def test_the_compute_capability_is_that_of_this_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute_capability(read_world(CPU)) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, index))
    world = replace(read_world(CPU), device="cuda")
    assert [compute_capability(replace(world, local_rank=i)) for i in (0, 1, 5)] == [(8, 0), (8, 1), (8, 1)]


@pytest.mark.requirement("R-LAUNCH-01")
def test_a_run_with_other_ranks_than_expected_stops() -> None:
    world = read_world(DEEPSPEED)
    check_world_size(world, expected=None)
    check_world_size(world, expected=4)
    with pytest.raises(ValueError, match=r"--expect_world_size 8, but 4 ranks were started on 2 nodes; .* hosts FILE"):
        check_world_size(world, expected=8)


@pytest.fixture
def quiet_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Meeting files and shared memory in folders of this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(recipe.launch.start, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path


def _start(environ: dict[str, str]) -> None:
    """Start ranks that cannot come together, in this process."""
    world = read_world(environ)
    try:
        start_ranks(world, environ=dict(environ), say=lambda text: None, join_timeout_s=0.2)
    finally:
        stop_ranks(world)


@pytest.mark.requirement("R-LAUNCH-02", "R-LAUNCH-04")
def test_a_missing_peer_on_one_node_is_named_after_dead_buffers_were_removed(quiet_machine: Path) -> None:
    buffer = _buffer(quiet_machine / "shm", "0_127.0.0.1_29500_0")
    message = (
        rf"rank 0 waited 0\.2 s at the meeting file of launcher process {os.getppid()} "
        r"\(MASTER_ADDR=127\.0\.0\.1 MASTER_PORT=29500 are not used "
        r".* expected ranks \[0, 1\], present \[0\], missing \[1\]"
    )
    with pytest.raises(RendezvousError, match=message):
        _start(ONE_NODE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    assert not buffer.exists()


BY_HAND = CPU | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.requirement("R-LAUNCH-04")
def test_a_missing_peer_of_ranks_started_by_hand(quiet_machine: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"nobody answers at MASTER_ADDR=127\.0\.0\.1 MASTER_PORT={port}"):
            _start(BY_HAND | {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"MASTER_ADDR is not set, but RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 is"),
        ({"MASTER_ADDR": "localhost"}, r"MASTER_PORT is not set"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "high"}, r"MASTER_PORT='high' must be a whole number"),
    ],
)
@pytest.mark.requirement("R-LAUNCH-04")
def test_ranks_started_by_hand_need_an_address(quiet_machine: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _start(BY_HAND | changes)


def test_a_launcher_that_cannot_be_seen(quiet_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 0)
    with pytest.raises(RendezvousError, match=r"the launcher, process 0, is gone or in another pid namespace"):
        _start(ONE_NODE)


def test_more_ranks_than_gpus(quiet_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    world = World(rank=1, local_rank=1, world_size=2, local_world_size=2, device="cuda")
    with pytest.raises(ValueError, match=r"LOCAL_RANK=1 needs a GPU of its own, but torch finds 1; start at most one"):
        start_ranks(world, environ={}, say=print)


def _join(environ: dict[str, str], folder: str) -> tuple[float, str, dict[str, str], list[str]]:
    """A rank in a process of its own: join, add up the ranks, leave, and report."""
    tempfile.tempdir = folder
    world = read_world(environ)
    said: list[str] = []
    start_ranks(world, environ=environ, say=said.append, join_timeout_s=30)
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    backend = dist.get_backend()
    stop_ranks(world)
    return total.item(), backend, environ, said


def _in_processes(environs: list[dict[str, str]], folder: Path) -> list[Any]:
    """Run `_join` in one process per environment, all children of the same process, as a launcher's are."""
    with ProcessPoolExecutor(len(environs), mp_context=with_libraries()) as pool:
        return list(pool.map(_join, environs, [str(folder)] * len(environs), timeout=60))


@pytest.mark.requirement("R-LAUNCH-03", "R-LAUNCH-04")
def test_one_process_joins_a_group_of_its_own_and_ranks_of_one_node_need_no_port(tmp_path: Path) -> None:
    """No MASTER_ADDR and no MASTER_PORT at all; LOCAL_SIZE goes, and nothing is left in the folder."""
    [(total, backend, environ, said)] = _in_processes([dict(CPU)], tmp_path)
    assert (total, backend, said) == (1.0, "gloo", [])
    assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == ("0", "0", "1")
    ranks = [ONE_NODE | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    for total, backend, environ, _ in _in_processes(ranks, tmp_path):
        assert (total, backend) == (3.0, "gloo")
        assert "LOCAL_SIZE" not in environ
        assert environ["LOCAL_WORLD_SIZE"] == "2"
        assert read_world(environ) == read_world(ONE_NODE | environ)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]


SCRIPT = """
import os, time
from recipe.launch.start import read_world, start_ranks
start_ranks(read_world(os.environ), environ=os.environ, say=print)
import deepspeed, torch
deepspeed.init_distributed()
total = torch.ones(1)
deepspeed.comm.all_reduce(total)
os.write(1, f"ranks: {int(total)}\\n".encode())  # in one piece, whatever the other rank prints
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.requirement("R-LAUNCH-02", "R-LAUNCH-03")
def test_two_launchers_at_once_on_a_busy_port_leave_no_shared_memory_when_they_are_killed(
    tmp_path: Path, taken_port: int
) -> None:
    """Each job of two ranks finds its own, although both are told the same port and somebody listens on it."""
    before = shared_memory()
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    nodes = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    # What `deepspeed --num_accelerators 2` starts on this node, and the ranks are children of.
    command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={nodes}"]
    command += ["--master_addr=127.0.0.1", f"--master_port={taken_port}", str(script)]
    with running(command, TMPDIR=str(tmp_path)) as one, running(command, TMPDIR=str(tmp_path)) as other:
        for job, kill in ((one, signal.SIGINT), (other, signal.SIGKILL)):
            assert job.stdout is not None
            joined = 0
            for line in job.stdout:  # ends when both ranks are up, or with the job
                joined += "ranks: 2" in line
                if joined == 2:
                    break
            assert joined == 2
            os.killpg(job.pid, kill)
            job.communicate(timeout=60)
    assert shared_memory() == before


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


def test_a_rank_that_gave_up_is_not_counted_by_latecomers_and_none_may_come_twice() -> None:
    store = HashStore()
    for rank in (0, 1):
        with pytest.raises(RendezvousError, match=rf"present \[{rank}\], missing \[{1 - rank}\]"):
            wait_for_all(store, rank=rank, world_size=2, timeout_s=0.1, meeting="a place")
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


def test_ranks_meet_at_an_address() -> None:
    server = open_tcp_store("127.0.0.1", port=0, world_size=2, serve=True, timeout_s=10)
    assert isinstance(server, TCPStore)
    client = open_tcp_store("127.0.0.1", port=server.port, world_size=2, serve=False, timeout_s=10)

    def join(rank: int) -> int:
        wait_for_all((server, client)[rank], rank=rank, world_size=2, timeout_s=10, meeting="the address")
        return rank

    assert _at_once(lambda: join(0), lambda: join(1)) == [0, 1]


def _buffer(folder: Path, name: str) -> Path:
    path = folder / f"deepspeed_allreduce_buffer_{name}"
    path.write_bytes(bytes(2**20))
    return path


@pytest.mark.requirement("R-LAUNCH-02")
def test_buffers_of_dead_runs_are_removed_and_named_and_those_in_use_stay(tmp_path: Path) -> None:
    """A run has its buffer open before it has mapped it, and keeps no descriptor afterwards."""
    dead = [_buffer(tmp_path, name) for name in ("0_127.0.0.1_29500_0", "0_127.0.0.1_29500_1")]
    other, mapped, opened = tmp_path / "sem.other", _buffer(tmp_path, "mapped"), _buffer(tmp_path, "open")
    other.write_bytes(b"x")
    mapping = torch.from_file(str(mapped), shared=True, size=2**20, dtype=torch.uint8)
    said: list[str] = []
    with opened.open("r+b"):
        remove_dead_buffers(tmp_path, say=said.append)
        assert sorted(tmp_path.iterdir()) == [mapped, opened, other]
    assert said == [f"removed what dead runs left in {tmp_path} (2 MiB): {dead[0].name}, {dead[1].name}"]
    del mapping
    remove_dead_buffers(tmp_path, say=said.append)
    remove_dead_buffers(tmp_path, say=said.append)
    assert list(tmp_path.iterdir()) == [other]
    assert len(said) == 2


@pytest.mark.requirement("R-LAUNCH-02")
def test_a_nearly_full_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _buffer(tmp_path, "of_somebody")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1000 * 2**20, free=49 * 2**20))
    message = r"is nearly full: 49 of 1000 MiB are free; .*deepspeed_allreduce_buffer_of_somebody \(1 MiB\)"
    with pytest.raises(SharedMemoryError, match=message):
        check_room(tmp_path)
    # A small folder may be empty.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 * 2**20, free=64 * 2**20))
    check_room(tmp_path)
