"""From the launcher's environment variables to a joined process group, whatever started the ranks.

`deepspeed` sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, CROSS_RANK, CROSS_SIZE, MASTER_ADDR and MASTER_PORT;
`torchrun` sets LOCAL_WORLD_SIZE and GROUP_WORLD_SIZE in place of LOCAL_SIZE and CROSS_SIZE. Without any of them the
process is a world of its own.

/dev/shm is kept usable: DeepSpeed's all-reduce for CPUs maps one buffer of 66 MiB per rank there and never unlinks it.
What dead runs left is removed, and no run starts where it is full. It is memory, not disk.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from recipe.launch.processes import PROC, identify
from recipe.shared.errors import RunError
from recipe.shared.units import MIB

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

SHARED_MEMORY = Path("/dev/shm")
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
COMMAND = "deepspeed --num_accelerators N run_pretrain.py ..."
# Launchers that start many processes without telling them RANK: (their name, their count of processes).
FOREIGN_LAUNCHERS = (("mpirun", "OMPI_COMM_WORLD_SIZE"), ("mpiexec", "PMI_SIZE"), ("srun", "SLURM_STEP_NUM_TASKS"))


@dataclass(frozen=True, kw_only=True)
class World:
    """Who this process is among the ranks, and what it computes on."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: str  # "cpu" or "cuda"
    by_launcher: bool = True  # False: one process alone, or ranks started by hand without a count per node

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size


def read_world(environ: Mapping[str, str]) -> World:
    """Read and check the launcher's variables; ValueError names the missing or the odd one."""
    device = _choose_device(environ)
    if not any(environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        _refuse_foreign_launchers(environ)
        return World(rank=0, local_rank=0, world_size=1, local_world_size=1, device=device, by_launcher=False)
    world_size = _whole_number(environ, "WORLD_SIZE", at_least=1)
    rank = _whole_number(environ, "RANK", at_least=0)
    local_rank = _whole_number(environ, "LOCAL_RANK", at_least=0)
    local_world_size = _local_world_size(environ)
    world = World(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size or world_size,
        device=device,
        by_launcher=local_world_size is not None,
    )
    _check_world(world, environ)
    return world


def rank_from(environ: Mapping[str, str], name: str = "RANK") -> int:
    """Read this process's rank; 0 where RANK is missing or no number, so that an error about it is printed, too."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def check_world_size(world: World, *, expected: int | None) -> None:
    """Stop a run that got fewer or more ranks than its user asked for with --expect_world_size."""
    if expected is None or expected == world.world_size:
        return
    raise ValueError(
        f"--expect_world_size {expected}, but {world.world_size} ranks were started on {world.num_nodes} nodes; "
        "a launcher that cannot read its hostfile goes on with one node: check the file with `gather-moe hosts FILE`"
    )


def start_ranks(
    world: World,
    *,
    environ: MutableMapping[str, str],
    say: Callable[[str], None],
    join_timeout_s: float = 300.0,
) -> None:
    """Make the node fit for work and join torch's default process group (gloo on CPU, NCCL on GPU).

    To be called before DeepSpeed starts its communication, which then uses this group. `environ` is the process's
    own and is changed: the variables of `world` are set, and LOCAL_SIZE is taken away on CPU, where it would make
    DeepSpeed map 66 MiB of shared memory per rank that nobody unlinks.

    On one node the ranks meet through a file in a folder of their own, named after the launcher's process, so no
    port is needed. On several, and where ranks were started by hand, they meet at MASTER_ADDR and MASTER_PORT.
    Raises RendezvousError where ranks are missing after `join_timeout_s`, and SharedMemoryError.
    """
    import torch.distributed as dist

    from recipe.launch.rendezvous import wait_for_all

    _export(world, environ)
    if world.local_rank == 0 and SHARED_MEMORY.is_dir():
        remove_dead_buffers(SHARED_MEMORY, say=say)
        check_room(SHARED_MEMORY)
    if world.device == "cuda":
        _take_gpu(world)
    if world.world_size > 1 and not world.by_launcher:
        say(f"neither LOCAL_SIZE nor LOCAL_WORLD_SIZE is set: all {world.world_size} ranks count as one node's")
    store = _open_store(world, environ, timeout_s=join_timeout_s)
    meeting = _describe_meeting(world, environ)
    wait_for_all(store, rank=world.rank, world_size=world.world_size, timeout_s=join_timeout_s, meeting=meeting)
    dist.init_process_group(
        "nccl" if world.device == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def stop_ranks(world: World) -> None:
    """Leave the process group and remove what `start_ranks` made; to be called after a failure in there too."""
    import torch.distributed as dist

    from recipe.launch.rendezvous import leave_file_store, private_folder

    if dist.is_initialized():
        dist.destroy_process_group()
    if _meets_by_file(world):
        leave_file_store(private_folder(Path(tempfile.gettempdir())))


def compute_capability(world: World) -> tuple[int, int] | None:
    """Return (major, minor) of this rank's GPU; None on a CPU."""
    import torch

    if world.device == "cpu":
        return None
    # A rank too many is refused when the ranks meet, with more to say.
    return torch.cuda.get_device_capability(min(world.local_rank, torch.cuda.device_count() - 1))


def _choose_device(environ: Mapping[str, str]) -> str:
    """Choose the device as DeepSpeed will: DS_ACCELERATOR where it is set, else the GPU where there is one."""
    import torch

    wanted = environ.get("DS_ACCELERATOR")
    if wanted not in (None, "cpu", "cuda"):
        raise ValueError(f"DS_ACCELERATOR={wanted!r} is not supported; it must be cpu or cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("DS_ACCELERATOR=cuda, but torch finds no CUDA device; unset it, or set it to cpu")
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


def _refuse_foreign_launchers(environ: Mapping[str, str]) -> None:
    """Refuse many processes of which each would take itself for a whole run and train the same model."""
    for launcher, variable in FOREIGN_LAUNCHERS:
        count = environ.get(variable, "1")
        if count != "1":
            raise ValueError(
                f"{launcher} started {count} processes ({variable}={count}) but RANK, LOCAL_RANK and WORLD_SIZE are "
                f"not set; start with `{COMMAND}`, or set the three variables in every process"
            )


def _required(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name)
    if not text:
        present = " ".join(f"{n}={environ[n]}" for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if environ.get(n))
        raise ValueError(
            f"{name} is not set, but {present} is; start with `{COMMAND}`, or unset RANK, LOCAL_RANK and WORLD_SIZE "
            "to run in one process"
        )
    return text


def _whole_number(environ: Mapping[str, str], name: str, *, at_least: int) -> int:
    text = _required(environ, name)
    if not text.isdecimal() or int(text) < at_least:
        raise ValueError(f"{name}={text!r} must be a whole number of at least {at_least}")
    return int(text)


def _local_world_size(environ: Mapping[str, str]) -> int | None:
    """Read how many ranks the launcher started on this node; None where it does not say."""
    counts = {
        name: _whole_number(environ, name, at_least=1)
        for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")
        if environ.get(name)
    }
    if len(set(counts.values())) > 1:
        raise ValueError(f"LOCAL_SIZE={counts['LOCAL_SIZE']} and LOCAL_WORLD_SIZE={counts['LOCAL_WORLD_SIZE']} differ")
    return next(iter(counts.values()), None)


def _check_world(world: World, environ: Mapping[str, str]) -> None:
    if world.rank >= world.world_size:
        raise ValueError(f"RANK={world.rank} must be below WORLD_SIZE={world.world_size}")
    if world.local_rank >= world.local_world_size:
        raise ValueError(
            f"LOCAL_RANK={world.local_rank} must be below the {world.local_world_size} ranks of this node "
            "(LOCAL_SIZE or LOCAL_WORLD_SIZE)"
        )
    counts = [_whole_number(environ, n, at_least=1) for n in ("CROSS_SIZE", "GROUP_WORLD_SIZE") if environ.get(n)]
    num_nodes = counts[0] if world.by_launcher and counts else world.num_nodes
    if num_nodes * world.local_world_size != world.world_size:
        raise ValueError(
            f"WORLD_SIZE={world.world_size} ranks on {num_nodes} nodes, but this node has {world.local_world_size}; "
            "every node must run the same number of ranks"
        )


def _export(world: World, environ: MutableMapping[str, str]) -> None:
    """Set the variables of `world`: DeepSpeed asks for LOCAL_RANK even where torch.distributed is already up."""
    if world.device == "cpu":
        environ.pop("LOCAL_SIZE", None)
    environ.update(RANK=str(world.rank), LOCAL_RANK=str(world.local_rank), WORLD_SIZE=str(world.world_size))
    if world.by_launcher:
        environ["LOCAL_WORLD_SIZE"] = str(world.local_world_size)


def _take_gpu(world: World) -> None:
    import torch

    if world.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK={world.local_rank} needs a GPU of its own, but torch finds {torch.cuda.device_count()}; "
            "start at most one rank per GPU, or set DS_ACCELERATOR=cpu"
        )
    torch.cuda.set_device(world.local_rank)


def _meets_by_file(world: World) -> bool:
    return world.by_launcher and world.world_size > 1 and world.num_nodes == 1


def _open_store(world: World, environ: Mapping[str, str], *, timeout_s: float) -> "Store":
    from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

    from recipe.launch.rendezvous import open_file_store, open_tcp_store, private_folder

    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if world.world_size == 1:
        return HashStore()
    if _meets_by_file(world):
        folder = private_folder(Path(tempfile.gettempdir()))
        return open_file_store(f"{_launcher_name()}-{restart}", folder=folder, world_size=world.world_size)
    # torchrun's agent already serves a store at this address, and tells its workers so.
    serve = world.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = open_tcp_store(
        _required(environ, "MASTER_ADDR"),
        port=_whole_number(environ, "MASTER_PORT", at_least=1),
        world_size=world.world_size,
        serve=serve,
        timeout_s=timeout_s,
    )
    return PrefixStore(f"gather-moe-{restart}", store)


def _launcher_name() -> str:
    """Return a name that all ranks of one launcher process have, and no others."""
    from recipe.launch.rendezvous import RendezvousError

    launcher = identify(os.getppid())
    if launcher is None:
        raise RendezvousError(f"the launcher, process {os.getppid()}, is gone or in another pid namespace")
    return f"launcher-{launcher.pid}-{launcher.start_ticks}"


def _describe_meeting(world: World, environ: Mapping[str, str]) -> str:
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if _meets_by_file(world):
        return (
            f"the meeting file of launcher process {os.getppid()} (MASTER_ADDR={address} MASTER_PORT={port} are not "
            "used on one node; a script between the launcher and a rank must end in exec)"
        )
    return f"MASTER_ADDR={address} MASTER_PORT={port}"


BUFFER_PREFIX = "deepspeed_allreduce_buffer_"
MIN_FREE_SHARE = 0.05


class SharedMemoryError(RunError):
    """/dev/shm has no room to work with."""


def remove_dead_buffers(folder: Path, *, say: Callable[[str], None]) -> None:
    """Remove this user's all-reduce buffers that no process has mapped or open, and say which.

    A process in another pid namespace that shares the folder is not seen. Taking a buffer's name away does not
    disturb a run that has mapped it; only a peer that has yet to open it would miss it.
    """
    buffers = [path for path in folder.glob(BUFFER_PREFIX + "*") if path.stat().st_uid == os.getuid()]
    if not buffers:
        return
    in_use = set(_files_in_use(folder))
    dead = sorted(path for path in buffers if str(path) not in in_use)
    size_bytes = sum(path.stat().st_size for path in dead)
    for path in dead:
        path.unlink()
    if dead:
        names = ", ".join(path.name for path in dead)
        say(f"removed what dead runs left in {folder} ({size_bytes / MIB:.0f} MiB): {names}")


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
    for process in psutil.process_iter():
        # Another user's process cannot open our buffers, and one may just have ended.
        with suppress(psutil.Error, PermissionError, FileNotFoundError, ProcessLookupError):
            opened = [file.path for file in process.open_files()]
            # psutil's own list of mappings has their sizes, too, for which the kernel counts every page.
            mapped = ["/" + line.partition("/")[2] for line in (PROC / f"{process.pid}/maps").read_text().splitlines()]
            yield from (p.removesuffix(" (deleted)") for p in (*opened, *mapped) if p.startswith(f"{folder}/"))
