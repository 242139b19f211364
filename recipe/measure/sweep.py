"""Runs the best plans one after the other on processes of their own; keeps what was predicted beside what was measured.

Each plan has a limited time, and whatever becomes of it is a result.
"""

import hashlib
import json
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from recipe.plan.report import run_config, write_config
from recipe.plan.search import Found
from recipe.shared.json_files import write_json
from recipe.shared.units import duration, size

RESULTS = "sweep.json"
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


def entries_of(found: Found, *, model: Mapping[str, Any], top: int) -> list[dict[str, Any]]:
    """Begin a row of sweep.json for each of the best plans that use every rank: its name, run and prediction.

    A memory margin is for allocators, and nothing that tensors take.
    """
    plans = [plan for plan in found.plans if not found.idle(plan)]
    return [
        {
            "plan": f"{plan.arrangement} ZeRO-{plan.job.zero_stage} {plan.job.num_sequences}x{plan.job.accumulation}"
            + (" recomputed" if plan.job.recompute else ""),
            "config": run_config(plan.job, model=model),
            "predicted": {"step_s": plan.time.step_s, "memory_bytes": plan.memory.peak_bytes},
        }
        for plan in plans[:top]
    ]


def run_sweep(
    entries: Sequence[Mapping[str, Any]], *, setting: Setting, folder: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Complete the rows by what was measured, or the error. What was measured into `folder` before is not run again.

    ValueError where it holds results of other steps or ranks, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise ValueError(f"--out {folder} cannot be made: {fault.strerror}") from fault
    before = _read_results(folder / RESULTS, setting=setting)
    rows: list[dict[str, Any]] = []
    for number, entry in enumerate(entries, 1):
        old, counted = before.pop(_key(entry["config"]), None), f"{number}/{len(entries)}  {entry['plan']}"
        if old is None or old["error"] is not None:
            say(f"{counted}: predicted {duration(entry['predicted']['step_s'])}")
            place = folder / run_name(entry["config"])
            file = place.with_suffix(".json")
            write_config(file, config=entry["config"])
            measured = run_plan(file, setting=setting, folder=place)._asdict()
            error = measured.pop("error")
        else:
            measured, error = old["measured"], None
            say(f"{counted}: was run before")
        rows.append({**entry, "measured": measured, "error": error})
        say(f"      {error or 'measured ' + duration(measured['step_s'])}")
        # Rows of earlier sweeps are kept behind those of this one.
        write_json(folder / RESULTS, results_of([*rows, *before.values()], setting=setting))
    return rows


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


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Format predicted and measured time and memory, their ratio, or the error."""
    width = max(len(row["plan"]) for row in rows)
    yield (
        f"{'plan':<{width}}  {'step: predicted':>15}  {'measured':>9}  {'ratio':>5}"
        f"  {'memory: predicted':>17}  {'measured':>9}  {'ratio':>5}"
    )
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        line = f"{row['plan']:<{width}}  {duration(predicted['step_s']):>15}"
        if row["error"] is not None:
            yield f"{line}  {' '.join(row['error'].split())}"
            continue
        yield (
            f"{line}  {duration(measured['step_s']):>9}  {predicted['step_s'] / measured['step_s']:>5.2f}"
            f"  {size(predicted['memory_bytes']):>17}  {size(measured['memory_bytes']):>9}"
            f"  {predicted['memory_bytes'] / measured['memory_bytes']:>5.2f}"
        )


def results_of(rows: Sequence[Mapping[str, Any]], *, setting: Setting) -> dict[str, Any]:
    """Return what sweep.json holds and --json prints."""
    return {"ranks": setting.num_ranks, "device": setting.device, "steps": setting.num_steps, "rows": list(rows)}


def run_name(config: Mapping[str, Any]) -> str:
    """Name the files of this configuration's run, alike in every sweep."""
    return f"plan-{hashlib.sha256(_key(config).encode()).hexdigest()[:10]}"


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _read_results(path: Path, *, setting: Setting) -> dict[str, dict[str, Any]]:
    """Return rows of earlier sweeps by the run's configuration."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
        before = (content["ranks"], content["device"], content["steps"])
        found = {_key(row["config"]): row for row in content["rows"]}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of a sweep ({error!r}); choose another --out") from None
    if before != (setting.num_ranks, setting.device, setting.num_steps):
        ranks, device, steps = before
        raise ValueError(
            f"{path} has results of {ranks} ranks on {device} with {steps} steps each, not of {setting.num_ranks} on "
            f"{setting.device} with {setting.num_steps}; choose another --out"
        )
    return found


def _rank(rank: int, config_file: Path, setting: Setting, folder: Path) -> None:
    """Be one rank, with an environment and a log of its own."""
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
