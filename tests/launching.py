"""Starts the entry script as users do, in a session of its own that ends with the test, whatever happens in it."""

import fcntl
import functools
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import with_libraries

ROOT = Path(__file__).parents[1]
LAUNCHER = str(Path(sys.executable).parent / "deepspeed")
LIMIT_S = 150
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")
CACHES = {"TORCH_EXTENSIONS_DIR": "extensions", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "cache"}
BUILD = """
from deepspeed.accelerator import get_accelerator

builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
if builder is not None and builder.is_compatible(verbose=False):
    builder.load()
"""
BUILD_LIMIT_S = 900
STALE_S = 10.0  # a lock is held for moments where an extension is loaded, and longer only where it is compiled


def caches_folder() -> Path:
    """The folder of what the tests of this user keep between their runs."""
    return Path(tempfile.gettempdir()) / f"gather-moe-tests-{os.getuid()}"


def own_caches() -> dict[str, str]:
    """Variables that keep the tests out of the user's caches, for this process and what it starts."""
    return {name: str(caches_folder() / cache) for name, cache in CACHES.items()}


def make_extensions_ready() -> None:
    """Compile what DeepSpeed compiles when it starts, once, and clear the locks of runs that were killed.

    A compile that is killed leaves a `lock` on which every later start waits for ever. So runs that are started here
    find all extensions compiled, and a lock that is not let go of is nobody's.
    """
    caches_folder().mkdir(mode=0o700, exist_ok=True)
    with (caches_folder() / "one-at-a-time").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for lock in caches_folder().glob("extensions/**/lock"):
            with suppress(FileNotFoundError):
                while time.time() - lock.stat().st_mtime < STALE_S:
                    time.sleep(0.2)
                lock.unlink()
        _compile_extensions()


@functools.cache
def _compile_extensions() -> None:
    """Compile once for these versions. What goes wrong here goes wrong in the runs as well, which say it."""
    versions = (sys.implementation.cache_tag, version("torch"), version("deepspeed"))
    compiled = caches_folder() / CACHES["TORCH_EXTENSIONS_DIR"] / f"compiled-{'-'.join(versions)}"
    if not compiled.exists():
        command = [sys.executable, "-c", BUILD]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, timeout=BUILD_LIMIT_S)
        if done.returncode == 0:
            compiled.parent.mkdir(exist_ok=True)
            compiled.touch()


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Write flags as words of a command line."""
    return [f"--{name}={value}" for name, value in flags.items()]


def environment(**changes: str) -> dict[str, str]:
    """The variables of a launched run on CPU."""
    kept = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, **own_caches(), "PATH": path, "DS_ACCELERATOR": "cpu", **changes}


@contextmanager
def running(command: Sequence[str], **changes: str) -> Iterator["subprocess.Popen[str]"]:
    """A command with stdout and stderr in one pipe; every process of its session is gone when the context ends."""
    make_extensions_ready()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end_session(process.pid)
        process.communicate()


def end_session(session: int) -> None:
    """Kill every process of a session; launchers put ranks into process groups of their own."""
    import psutil

    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                process.kill()
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue


def launch(words: Sequence[str], **changes: str) -> "subprocess.CompletedProcess[str]":
    """Run the script by a plain python to its end; stdout and stderr together."""
    command = [sys.executable, "run_pretrain.py", *words]
    with running(command, **changes) as process:
        said, _ = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(command, process.returncode, said)


def run_main(
    words: list[str], folder: Path, *, num_ranks: int = 1, program: str = "run_pretrain", **changes: str
) -> SimpleNamespace:
    """Run `python PROGRAM.py WORDS`, or as many ranks of one launcher, in processes that have the libraries loaded.

    Returns stdout and stderr of all ranks together, and the exit code that all of them ended with.
    """
    make_extensions_ready()
    out, context, processes = folder / "said.txt", with_libraries(), []
    out.write_text("")
    deadline_s = time.monotonic() + LIMIT_S
    try:
        for rank in range(num_ranks):
            ids = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)} if num_ranks > 1 else {}
            process = context.Process(target=_main, args=(program, words, environment(**ids, **changes), out))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()
    (code,) = {process.exitcode for process in processes}
    return SimpleNamespace(returncode=code, stdout=out.read_text())


def run_cluster_ranks_here(script: Any, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Have a benchmark's ranks be processes by `run_main` instead of ones on the emulated cluster."""

    def run(ranks: None, command: list[str], *, num_ranks: int) -> int:
        assert command[:2] == [sys.executable, script.__file__]
        return run_main(command[2:], folder, num_ranks=num_ranks, program=Path(script.__file__).stem).returncode

    patch.setattr(script.cluster, "run", run)


def _main(program: str, words: list[str], variables: dict[str, str], out: Path) -> None:
    os.environ.clear()
    os.environ.update(variables)
    with out.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    module = importlib.import_module(program)
    module.GRACE_S = 0.0  # type: ignore[attr-defined]  # no launcher ends the others as soon as one has ended
    sys.exit(module.main(words))


def shared_memory() -> set[str]:
    """Names of DeepSpeed's buffers in shared memory, which no run may leave."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("deepspeed")}
