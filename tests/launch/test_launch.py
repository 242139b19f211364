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
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

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


@pytest.mark.parametrize("environ", [DEEPSPEED, TORCHRUN])
def test_the_variables_of_both_launchers(environ: dict[str, str]) -> None:
    world = read_world(environ)
    assert world == World(rank=3, local_rank=1, world_size=4, local_world_size=2, device="cpu")
    assert world.num_nodes == 2


@pytest.mark.requirement("R-LAUNCH-04")
def test_no_variables_are_a_world_of_one() -> None:
    world = read_world(CPU)
    assert (world.rank, world.world_size, world.local_world_size, world.num_nodes) == (0, 1, 1, 1)


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
@pytest.mark.requirement("R-LAUNCH-04")
def test_a_missing_variable_is_named(missing: str) -> None:
    environ = {name: value for name, value in DEEPSPEED.items() if name != missing}
    with pytest.raises(ValueError, match=rf"{missing} is not set, but \w+=\d \w+=\d is; start with `deepspeed "):
        read_world(environ)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
def test_an_odd_variable_is_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_world(DEEPSPEED | changes)


@pytest.mark.requirement("R-LAUNCH-04")
def test_who_prints_is_known_even_from_odd_variables() -> None:
    assert (rank_from(DEEPSPEED), rank_from(DEEPSPEED, "LOCAL_RANK")) == (3, 1)
    for odd in ({}, {"RANK": "", "LOCAL_RANK": ""}, {"RANK": "x", "LOCAL_RANK": "-1"}, {"RANK": "1.5"}):
        assert (rank_from(odd), rank_from(odd, "LOCAL_RANK")) == (0, 0)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
@pytest.mark.requirement("R-LAUNCH-04")
def test_many_processes_without_ranks_are_refused(variable: str) -> None:
    with pytest.raises(ValueError, match=rf"started 8 processes \({variable}=8\) but RANK, LOCAL_RANK and WORLD_SIZE"):
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


def _start(environ: Mapping[str, str], **changes: Any) -> None:
    """Start ranks that cannot come together, in this process."""
    environ = dict(environ)
    world = read_world(environ)
    try:
        start_ranks(world, environ=environ, say=lambda text: None, join_timeout_s=0.2, **changes)
    finally:
        stop_ranks(world)


@pytest.mark.requirement("R-LAUNCH-04")
def test_a_missing_peer_on_one_node(quiet_machine: Path) -> None:
    environ = ONE_NODE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    message = (
        rf"rank 0 waited 0\.2 s at the meeting file of launcher process {os.getppid()} "
        r"\(MASTER_ADDR=127\.0\.0\.1 MASTER_PORT=29500 are not used "
        r".* expected ranks \[0, 1\], present \[0\], missing \[1\]"
    )
    with pytest.raises(RendezvousError, match=message):
        _start(environ)


@pytest.mark.requirement("R-LAUNCH-04")
def test_a_missing_peer_of_ranks_started_by_hand(quiet_machine: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        environ = CPU | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        with pytest.raises(RendezvousError, match=rf"nobody answers at MASTER_ADDR=127\.0\.0\.1 MASTER_PORT={port}"):
            _start(environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


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
        _start(CPU | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"} | changes)


def test_a_launcher_that_cannot_be_seen(quiet_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 0)
    with pytest.raises(RendezvousError, match=r"the launcher, process 0, is gone or in another pid namespace"):
        _start(ONE_NODE)


def test_more_ranks_than_gpus(quiet_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    world = World(rank=1, local_rank=1, world_size=2, local_world_size=2, device="cuda")
    with pytest.raises(ValueError, match=r"LOCAL_RANK=1 needs a GPU of its own, but torch finds 1; start at most one"):
        start_ranks(world, environ={}, say=print)


@pytest.mark.requirement("R-LAUNCH-02")
def test_starting_removes_dead_buffers_first(quiet_machine: Path) -> None:
    buffer = quiet_machine / "shm" / "deepspeed_allreduce_buffer_0_127.0.0.1_29500_0"
    buffer.write_bytes(b"x")
    with pytest.raises(RendezvousError, match=r"missing \[1\]"):
        _start(ONE_NODE)
    assert not buffer.exists()


def _join(pipe: Connection, environ: dict[str, str], folder: str) -> None:
    """A rank in a process of its own: join, add up the ranks, leave, and report."""
    tempfile.tempdir = folder
    world = read_world(environ)
    said: list[str] = []
    start_ranks(world, environ=environ, say=said.append, join_timeout_s=30)
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    backend = dist.get_backend()
    stop_ranks(world)
    pipe.send((total.item(), backend, environ, said))


def _in_processes(environs: list[dict[str, str]], folder: Path) -> list[Any]:
    """Run `_join` in one process per environment, all children of the same process, as a launcher's are."""
    context = with_libraries()
    pipes, processes = [], []
    for environ in environs:
        ours, theirs = context.Pipe()
        process = context.Process(target=_join, args=(theirs, environ, str(folder)), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        assert all(pipe.poll(40) for pipe in pipes)
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.requirement("R-LAUNCH-04")
def test_one_process_joins_a_group_of_its_own(tmp_path: Path) -> None:
    [(total, backend, environ, said)] = _in_processes([dict(CPU)], tmp_path)
    assert (total, backend, said) == (1.0, "gloo", [])
    assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == ("0", "0", "1")


@pytest.mark.requirement("R-LAUNCH-03")
def test_ranks_of_one_node_need_no_port(tmp_path: Path) -> None:
    """No MASTER_ADDR and no MASTER_PORT at all; LOCAL_SIZE goes, and nothing is left in the folder."""
    ranks = [ONE_NODE | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    for total, backend, environ, _ in _in_processes(ranks, tmp_path):
        assert (total, backend) == (3.0, "gloo")
        assert "LOCAL_SIZE" not in environ
        assert environ["LOCAL_WORLD_SIZE"] == "2"
        assert read_world(environ) == read_world(ONE_NODE | environ)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]


SCRIPT = r"""
import os, sys, time
from recipe.launch.start import read_world, start_ranks, stop_ranks
world = read_world(os.environ)
start_ranks(world, environ=os.environ, say=print)
import deepspeed, torch
deepspeed.init_distributed()
total = torch.ones(1)
deepspeed.comm.all_reduce(total)
os.write(1, f"ranks: {int(total)}\n".encode())  # in one piece, whatever the other rank prints
time.sleep(float(sys.argv[-1]))
stop_ranks(world)
sys.stdout.flush()
os._exit(0)  # threads of gloo that outlive their group can abort an interpreter that ends
"""


def _job(folder: Path, *, port: int, sleep_s: float) -> list[str]:
    """What `deepspeed --num_accelerators 2` starts on this node, and the ranks are children of."""
    script = folder / "rank.py"
    script.write_text(SCRIPT)
    nodes = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={nodes}"]
    return [*command, "--master_addr=127.0.0.1", f"--master_port={port}", str(script), str(sleep_s)]


@pytest.mark.slow
@pytest.mark.requirement("R-LAUNCH-03")
def test_two_launchers_at_once_on_a_busy_port(tmp_path: Path) -> None:
    """Each job of two ranks finds its own, although both are told the same port and somebody listens on it."""
    before = shared_memory()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        command = _job(tmp_path, port=server.getsockname()[1], sleep_s=0)
        with running(command, TMPDIR=str(tmp_path)) as one, running(command, TMPDIR=str(tmp_path)) as other:
            outputs = [job.communicate(timeout=120)[0] for job in (one, other)]
    for job, output in zip((one, other), outputs, strict=True):
        assert job.returncode == 0, output
        assert output.count("ranks: 2\n") == 2, output
    assert shared_memory() == before


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.requirement("R-LAUNCH-02")
def test_a_killed_run_leaves_no_shared_memory(tmp_path: Path, kill: signal.Signals) -> None:
    before = shared_memory()
    with running(_job(tmp_path, port=29500 + kill, sleep_s=60), TMPDIR=str(tmp_path)) as job:
        assert job.stdout is not None
        joined = 0
        for line in job.stdout:  # ends when both ranks are up, or with the job
            joined += "ranks: 2" in line
            if joined == 2:
                break
        os.killpg(job.pid, kill)
        job.communicate(timeout=60)
    assert joined == 2
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


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def _buffer(folder: Path, name: str) -> Path:
    path = folder / f"deepspeed_allreduce_buffer_{name}"
    path.write_bytes(bytes(2**20))
    return path


@pytest.mark.requirement("R-LAUNCH-02")
def test_buffers_of_dead_runs_are_removed_and_named(tmp_path: Path) -> None:
    dead = [_buffer(tmp_path, name) for name in ("0_127.0.0.1_29500_0", "0_127.0.0.1_29500_1")]
    other = tmp_path / "sem.other"
    other.write_bytes(b"x")
    said: list[str] = []
    assert remove_dead_buffers(tmp_path, say=said.append) == [path.name for path in dead]
    assert list(tmp_path.iterdir()) == [other]
    assert said == [
        f"removed what dead runs left in {tmp_path} (2 MiB): "
        "deepspeed_allreduce_buffer_0_127.0.0.1_29500_0, deepspeed_allreduce_buffer_0_127.0.0.1_29500_1"
    ]


@pytest.mark.requirement("R-LAUNCH-02")
def test_a_buffer_that_a_process_has_mapped_stays(tmp_path: Path) -> None:
    live, dead = _buffer(tmp_path, "live"), _buffer(tmp_path, "dead")
    mapped = torch.from_file(str(live), shared=True, size=2**20, dtype=torch.uint8)  # keeps no descriptor open
    assert remove_dead_buffers(tmp_path, say=print) == [dead.name]
    del mapped
    assert remove_dead_buffers(tmp_path, say=print) == [live.name]
    said: list[str] = []
    assert (remove_dead_buffers(tmp_path, say=said.append), said) == ([], [])


@pytest.mark.requirement("R-LAUNCH-02")
def test_a_buffer_that_a_process_has_open_stays(tmp_path: Path) -> None:
    """A run that has created its buffer and not mapped it yet."""
    live = _buffer(tmp_path, "live")
    with live.open("r+b"):
        assert remove_dead_buffers(tmp_path, say=print) == []
    assert live.exists()


@pytest.mark.requirement("R-LAUNCH-02")
def test_a_nearly_full_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _buffer(tmp_path, "of_somebody")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(1000 * 2**20, 951 * 2**20, 49 * 2**20))
    message = r"is nearly full: 49 of 1000 MiB are free; .*deepspeed_allreduce_buffer_of_somebody \(1 MiB\)"
    with pytest.raises(SharedMemoryError, match=message):
        check_room(tmp_path)
    # A small folder may be empty.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(64 * 2**20, 0, 64 * 2**20))
    check_room(tmp_path)
