"""Runs a test function on n ranks of a gloo group, in one pool of processes per world size that lives for the session.

The pool's processes come from a forkserver that has loaded all that a training run imports, so only the first
case costs seconds, and every further one milliseconds. Ranks meet through a file, never a port. Every
wait has a limit; a failing rank brings its traceback home and ends the pool, and the next case starts a fresh one.
"""

import atexit
import gc
import io
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

CALLS_PER_POOL = 40
# With what these import in their turn. DeepSpeed and transformers leave two seconds of imports to the first engine.
PRELOAD = [
    *("torch", "torch.distributed", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "setuptools"),
    *("transformers", "transformers.models.qwen3_moe", "pytest", "psutil"),
    *("recipe.train.prepare", "recipe.train.loop", "tests.engine_runs", "tests.exports"),
]


class RankError(Exception):
    """A rank raised, died or ran out of time; the text holds its traceback."""


class _Worker(NamedTuple):
    process: ForkServerProcess
    pipe: Connection


@dataclass
class _Pool:
    workers: list[_Worker]
    folder: tempfile.TemporaryDirectory[str]
    num_calls: int = 0


_POOLS: dict[int, _Pool] = {}
_GROUPS: list[Any] = []  # of this process as a rank, to be destroyed after its case


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0, **kwargs: Any
) -> list[Any]:
    """Call `function(rank, world_size, *args, **kwargs)` on every rank and return the results by rank.

    `function` must be importable (a module-level function of a test file). Raises RankError with the first
    traceback; the other ranks are ended, since they may be waiting in a collective.
    """
    pool = _fresh_enough(world_size)
    deadline = time.monotonic() + timeout_s
    call = _pack((function, args, kwargs))
    for worker in pool.workers:
        worker.pipe.send_bytes(call)
    results: dict[int, Any] = {}
    waiting: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(pool.workers)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            _end(world_size)
            raise RankError(f"ranks {sorted(waiting.values())} of {world_size} did not answer in {timeout_s} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                pool.workers[rank].process.join(5)  # its pipe closes before its exit code is there
                ok, value = False, f"the process died with exit code {pool.workers[rank].process.exitcode}"
            if not ok:
                _end(world_size)
                raise RankError(f"rank {rank} of {world_size}:\n{value}")
            results[rank] = value
    for worker in pool.workers:
        worker.pipe.send(None)  # all ranks are through, so that none waits for another while its groups end
    return [results[rank] for rank in range(world_size)]


def with_libraries() -> ForkServerContext:
    """Where to start processes that have the libraries loaded from their first moment on."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def end_pools() -> None:
    """Stop every pool; called once at the end of the session."""
    for world_size in list(_POOLS):
        _end(world_size)


def _fresh_enough(world_size: int) -> _Pool:
    """The pool of this size, a new one from time to time: engines of DeepSpeed never quite go, nor do their threads."""
    pool = _POOLS.get(world_size)
    if pool is not None and pool.num_calls >= CALLS_PER_POOL:
        _end(world_size)
        pool = None
    pool = pool or _start(world_size)
    pool.num_calls += 1
    return pool


def _start(world_size: int) -> _Pool:
    context = with_libraries()
    folder = tempfile.TemporaryDirectory(prefix="gather-moe-ranks-")
    workers = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        arguments = (rank, world_size, folder.name, theirs)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        workers.append(_Worker(process, ours))
    if not _POOLS:
        atexit.register(end_pools)
    return _POOLS.setdefault(world_size, _Pool(workers, folder))


def _end(world_size: int) -> None:
    pool = _POOLS.pop(world_size)
    for worker in pool.workers:
        worker.pipe.close()
        worker.process.kill()
    for worker in pool.workers:
        worker.process.join(10)
    pool.folder.cleanup()


def _serve(rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    """The life of one rank: join the group, then answer calls until the pipe closes."""
    import torch
    import torch.distributed as dist

    import modeling.mesh

    log = os.open(Path(folder) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    # Of messages that DeepSpeed makes under ZeRO-3 and does not print: a fifth of a small run's time.
    torch.set_printoptions(threshold=0, edgeitems=1)
    gc.freeze()  # ZeRO-3 collects garbage again and again, which need not go through all the libraries each time
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    modeling.mesh.dist = SimpleNamespace(**vars(dist) | {"new_group": _group_of_a_case})  # type: ignore[assignment]
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        if call is None:
            # A group that is left alone wakes a hundred times a second.
            while _GROUPS:
                dist.destroy_process_group(_GROUPS.pop())
            continue
        function, args, kwargs = call
        try:
            answer = (True, function(rank, world_size, *args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(_pack(answer))


def _pack(value: object) -> bytes:
    """What the `recv` of any number of pipes makes an equal value of."""
    buffer = io.BytesIO()
    _Packer(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Packer(pickle.Pickler):
    """Packs tensors as plain bytes; a pipe's `send` would share each through a file and a connection of its own."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or value.requires_grad or value.device.type != "cpu" or value.is_sparse:
            return NotImplemented
        # A single number counts as contiguous whatever its stride is, and cannot be seen as bytes then.
        flat = value.contiguous().as_strided((value.numel(),), (1,))
        content = bytearray(flat.view(torch.uint8).numpy())
        return _unpack_tensor, (content, value.dtype, value.shape)


def _unpack_tensor(content: bytearray, dtype: Any, shape: Any) -> Any:
    import torch

    return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


def end_after_case(group: Any) -> Any:
    """Have a group of this process end after its case; every group has threads of its own."""
    _GROUPS.append(group)
    return group


def _group_of_a_case(*args: Any, **kwargs: Any) -> Any:
    """`new_group` for modeling.mesh, whose groups end with a case; DeepSpeed keeps its own for later ones."""
    import torch.distributed as dist

    group = dist.new_group(*args, **kwargs)
    return group if group is dist.GroupMember.NON_GROUP_MEMBER else end_after_case(group)
