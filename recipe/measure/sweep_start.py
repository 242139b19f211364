"""Runs one plan on processes of its own, for a limited time; whatever becomes of it is a result."""

import json
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

POLL_S = 0.05
# The second is what DeepSpeed loads late and slowly, with torch's compiler in its wake.
PRELOAD = ["recipe.measure.trial", "deepspeed.runtime.zero.muon.original_muon"]
# What a launcher of the sweep itself may have left in the environment.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_SIZE", "CROSS_RANK")


class Outcome(NamedTuple):
    """What was measured, the greatest over the ranks; or the error."""

    step_s: float | None = None
    memory_bytes: int | None = None
    error: str | None = None


class Setting(NamedTuple):
    """What all plans of a sweep are run on: ranks of this machine ("cpu" or "cuda"), steps each, seconds each."""

    num_ranks: int
    device: str
    num_steps: int
    limit_s: float


def run_plan(config_file: Path, *, setting: Setting, folder: Path) -> Outcome:
    """Measure the run of `config_file`; logs and the ranks' answers stay in `folder`.

    The ranks end whatever happens. On a CPU they come from a process that loads the libraries once for all plans;
    CUDA does not survive being loaded there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank-*"):
        old.unlink()
    make_process: Callable[..., BaseProcess] = mp.get_context("spawn").Process
    if setting.device == "cpu":
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        make_process = context.Process
    ranks: list[BaseProcess] = []
    try:
        for rank in range(setting.num_ranks):
            process = make_process(target=_rank, args=(rank, config_file, setting, folder))
            process.start()
            ranks.append(process)
        return _outcome(ranks, folder=folder, limit_s=setting.limit_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _rank(rank: int, config_file: Path, setting: Setting, folder: Path) -> None:
    """The life of one rank, with an environment and a log of its own."""
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    size = str(setting.num_ranks)
    os.environ.update(DS_ACCELERATOR=setting.device, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)

    from recipe.measure.trial import measure_run

    raise SystemExit(measure_run(config_file, num_steps=setting.num_steps, out=folder / f"rank-{rank}.json"))


def _outcome(ranks: list[BaseProcess], *, folder: Path, limit_s: float) -> Outcome:
    """Wait until all ranks have ended well, one has not, or the time is over."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                return Outcome(error=_error(rank, code=code, folder=folder))
        if all(code == 0 for code in codes):
            answers = [_answer(rank, folder=folder) for rank in range(len(ranks))]
            return Outcome(max(a["step_s"] for a in answers), max(a["memory_bytes"] for a in answers))
        time.sleep(POLL_S)
    return Outcome(error=f"no result within {limit_s:g} s; all ranks were ended")


def _error(rank: int, *, code: int, folder: Path) -> str:
    log = folder / f"rank-{rank}.log"
    if code < 0:
        hint = ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
        return f"rank {rank} was ended by {signal.Signals(-code).name}{hint}; see {log}"
    if not (folder / f"rank-{rank}.json").exists():
        return f"rank {rank} ended with exit code {code}; see {log}"
    answer = _answer(rank, folder=folder)
    if "error" not in answer:
        return f"rank {rank} had measured and then ended with exit code {code}; see {log}"
    return f"rank {rank}: {answer['error']}"


def _answer(rank: int, *, folder: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
    return answer
