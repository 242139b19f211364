"""Attention split in different ways (attention_layers.py) beside each other: equal results, bytes and time.

    python benchmarks/attention_modes.py --ranks 2 --rate 1gbit --json FILE

Bytes are counted where collectives pass (the dry run's ledger). Times are of forward and backward, medians of the
slowest rank, the modes taking turns in the same processes on the emulated cluster (cluster.py), one core per rank. A
row is void where the output or a gradient differs from one rank's, or the bytes from the formula.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cluster
import torch
import torch.distributed as dist
from attention_layers import MODES, Job, Mode, Sizes, Traffic, Weights, check_sizes, draw, formula, make_job
from torch import Tensor

from recipe.dry_run.ledger import Ledger

TOLERANCE = 1e-4  # of the largest number


class Answer(NamedTuple):
    """Output and gradients of some tokens [t, D], and of weights or parts of them."""

    out: Tensor
    x: Tensor
    weights: Weights


class Task(NamedTuple):
    """A mode's inputs on one rank: tokens and the output's gradient [t, D], and its weights."""

    run: Callable[..., Tensor]
    x: Tensor
    grad: Tensor
    weights: Weights
    job: Job


class Measured(NamedTuple):
    """What this rank sent, and the largest difference of its answer from one rank's, over the largest number there."""

    sent: Traffic
    error: float


def own_task(mode: Mode, *, job: Job) -> Task:
    """This rank's tokens and weights."""
    problem = draw(job.sizes)
    x, grad = (whole.chunk(job.size)[job.rank] for whole in (problem.x, problem.grad))
    return Task(mode.run, x, grad, own(problem.weights, mode=mode, job=job), job)


def own(weights: Weights, *, mode: Mode, job: Job) -> Weights:
    """This rank's part of whole weights, or of their gradients."""
    parts = []
    for whole, dim in zip(weights, mode.split, strict=True):
        parts.append(whole if dim is None else whole.chunk(job.size, dim)[job.rank].contiguous())
    return Weights(*parts)


class Started(NamedTuple):
    """A forward's output, and what its backward finds gradients of."""

    out: Tensor
    x: Tensor
    weights: Weights


def forward(task: Task) -> Started:
    x = task.x.detach().requires_grad_()
    weights = Weights(*(weight.detach().requires_grad_() for weight in task.weights))
    return Started(task.run(x, w=weights, job=task.job), x, weights)


def backward(started: Started, *, grad: Tensor) -> Answer:
    started.out.backward(grad)
    assert started.x.grad is not None
    # The norms of q and k have no gradient where they are not used.
    grads = (torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in started.weights)
    return Answer(started.out.detach(), started.x.grad, Weights(*grads))


def solve(task: Task) -> Answer:
    """Forward and backward."""
    return backward(forward(task), grad=task.grad)


def solve_alone(name: str, *, sizes: Sizes) -> Answer:
    """What one rank computes with everything."""
    return solve(Task(MODES[name].reference, *draw(sizes), make_job(sizes, group=None)))


def own_answer(whole: Answer, *, mode: Mode, job: Job) -> Answer:
    """The part of one rank's answer that this rank should have."""
    out, x = (part.chunk(job.size)[job.rank] for part in (whole.out, whole.x))
    return Answer(out, x, own(whole.weights, mode=mode, job=job))


def measure(name: str, *, job: Job, whole: Answer) -> Measured:
    """Count one mode and hold it against one rank's answer. Collective."""
    mode = MODES[name]
    task = own_task(mode, job=job)
    with Ledger() as ledger:
        started = forward(task)
        forward_bytes = ledger.volume().total
        got = backward(started, grad=task.grad)
    want = own_answer(whole, mode=mode, job=job)
    pairs = [(got.out, want.out), (got.x, want.x), *zip(got.weights, want.weights, strict=True)]
    errors = [(g - w).abs().max() / w.abs().max().clamp(min=1e-30) for g, w in pairs]
    error = torch.stack(errors).max().item()  # unlike Python's, torch's max keeps a NaN
    return Measured(Traffic(forward_bytes, ledger.volume().total - forward_bytes), error)


def time_modes(names: Sequence[str], *, job: Job, turns: int) -> dict[str, list[float]]:
    """Seconds of each mode's steps on this rank, A B C A B C ..., after one turn that warms up. Collective."""
    tasks = {name: own_task(MODES[name], job=job) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + 1):
        for name, task in tasks.items():
            dist.barrier()
            start_s = time.perf_counter()
            solve(task)
            if turn:
                seconds[name].append(time.perf_counter() - start_s)
    return seconds


class Report(NamedTuple):
    """One rank's measurements by mode."""

    measured: dict[str, Measured]
    seconds: dict[str, list[float]]


def summarise(reports: Sequence[Report], *, sizes: Sizes) -> list[dict[str, Any]]:
    """A line per mode from all ranks' reports: the slowest rank of every step, the rank that sent most."""
    rows = []
    for name in reports[0].measured:
        measured = [Measured(Traffic(*sent), error) for sent, error in (report.measured[name] for report in reports)]
        want = formula(name, sizes, num_ranks=len(reports))
        row: dict[str, Any] = {
            "mode": name,
            "forward_bytes": max(m.sent.forward for m in measured),
            "backward_bytes": max(m.sent.backward for m in measured),
            "step_s": statistics.median(map(max, zip(*(report.seconds[name] for report in reports), strict=True))),
            "error": max(m.error for m in measured),
        }
        for m in measured:
            if not m.error <= TOLERANCE:
                row["void"] = f"its result differs from one rank's by {m.error:.1e} of the largest number"
            elif m.sent != want:
                row["void"] = f"a rank sent {m.sent}, where the formula says {want}"
        rows.append(row)
    return rows


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"{'mode':<22} {'forward MB':>10} {'backward MB':>11} {'step ms':>8} {'error':>8}")
    for row in rows:
        line = f"{row['mode']:<22} {row['forward_bytes'] / 1e6:>10.2f} {row['backward_bytes'] / 1e6:>11.2f}"
        void = f"  void: {row['void']}" if "void" in row else ""
        print(f"{line} {row['step_s'] * 1e3:>8.1f} {row['error']:>8.1e}{void}")


def work(folder: Path, *, sizes: Sizes, turns: int) -> None:
    """One rank: measure and time every mode, and leave a report."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    job = make_job(sizes, group=dist.group.WORLD)
    measured, wholes = {}, {}
    for name, mode in MODES.items():
        if mode.reference not in wholes:
            wholes[mode.reference] = solve_alone(name, sizes=sizes)
        measured[name] = measure(name, job=job, whole=wholes[mode.reference])
    report = Report(measured, time_modes(list(MODES), job=job, turns=turns))
    (folder / f"rank{job.rank}.json").write_text(json.dumps(report))
    dist.barrier()
    os._exit(0)  # with a background thread of gloo's still running, a plain end of the process aborts now and then


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help=cluster.RATE_HELP)
    parser.add_argument("--tokens", type=int, default=Sizes().num_tokens)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    sizes = Sizes(num_tokens=arguments.tokens)
    if arguments.folder is not None:
        work(arguments.folder, sizes=sizes, turns=arguments.turns)
        return 0
    check_sizes(sizes, num_ranks=arguments.ranks)
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster.cluster_for(arguments.ranks, rate=arguments.rate) as ranks,
    ):
        words = ["--tokens", arguments.tokens, "--turns", arguments.turns, "--folder", folder]
        code = cluster.run(ranks, [sys.executable, __file__, *map(str, words)], num_ranks=arguments.ranks)
        if code:
            return code
        files = [Path(folder) / f"rank{rank}.json" for rank in range(arguments.ranks)]
        rows = summarise([Report(*json.loads(file.read_text())) for file in files], sizes=sizes)
    print_table(rows)
    if arguments.json is not None:
        setting = {"ranks": arguments.ranks, "rate": arguments.rate if ranks else None, **sizes._asdict()}
        arguments.json.write_text(json.dumps({**setting, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
