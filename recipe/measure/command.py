"""`gather-moe probe` measures this machine into a hardware file; `gather-moe sweep` runs the best plans on it."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from recipe.shared.command import Command, at_least_one


def _add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=int,
        default=None,
        metavar="N",
        help="processes to start on this machine (default: 1); not for ranks that a launcher started",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("hardware.json"), metavar="FILE", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"], help="fp32 is always measured"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes: a first look in seconds")


def _probe(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: {out.parent} is no folder")
    if os.environ.get("RANK") and os.environ.get("WORLD_SIZE"):  # a launcher has told this process which rank it is
        if arguments.ranks is not None:
            raise ValueError(
                f"--ranks {arguments.ranks} is for a single process, but a launcher started this one as rank "
                f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}; leave it out"
            )
        return _measure_here(arguments)
    num_ranks = 1 if arguments.ranks is None else arguments.ranks
    if num_ranks < 1:
        raise ValueError(f"--ranks {num_ranks} must be at least 1")
    if num_ranks == 1:
        return _measure_here(arguments)
    words = ["--out", str(out), "--precision", *arguments.precision, *(["--quick"] if arguments.quick else [])]
    return start_processes(num_ranks, words=words)


def _measure_here(arguments: argparse.Namespace) -> int:
    from recipe.launch.start import read_world, start_ranks, stop_ranks
    from recipe.measure.probe import machine_facts, measure_machine
    from recipe.plan.hardware import hardware_as_json
    from recipe.shared.json_files import write_json

    world = read_world(os.environ)
    say = partial(print, file=sys.stderr, flush=True)
    try:
        start_ranks(world, environ=os.environ, say=say)
        hardware, readings = measure_machine(world, precisions=arguments.precision, quick=arguments.quick)
        if world.rank == 0:
            machine = {**machine_facts(world), "quartiles_s": readings}
            write_json(arguments.out, hardware_as_json(hardware, machine=machine))
            if world.world_size == 1:
                say("one rank was measured and no link; `gather-moe probe --ranks N` measures what N ranks share")
            print(f"wrote {arguments.out}; plan with it: gather-moe plan --gpu {arguments.out} ...")
    finally:
        stop_ranks(world)
    return 0


def start_processes(num_ranks: int, *, words: Sequence[str]) -> int:
    """Run `gather-moe probe WORDS` as this many ranks of one node; return the first code that is not 0, else 0.

    A rank that fails ends the others. On CPU each has an equal part of the cores to itself.
    """
    from recipe.launch.processes import wait_for_exits

    cores = sorted(os.sched_getaffinity(0))
    if num_ranks > len(cores):
        print(f"{num_ranks} ranks share {len(cores)} cores: what is measured is that", file=sys.stderr)
    each = max(1, len(cores) // num_ranks)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            mine = [cores[(rank * each + i) % len(cores)] for i in range(each)]
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            variables["OMP_NUM_THREADS"] = each
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "recipe.cli", "probe", *words],
                    env=os.environ | {name: str(value) for name, value in variables.items()},
                    cwd=Path.cwd(),
                    preexec_fn=lambda mine=mine: os.sched_setaffinity(0, mine),  # type: ignore[misc]
                )
            )
        return wait_for_exits(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    from recipe.plan.flags import add_model_flags, add_plan_flags, add_world_flags

    add_model_flags(parser)
    add_world_flags(parser)
    add_plan_flags(parser)
    number = partial(parser.add_argument, type=at_least_one)
    number("--top", default=4, metavar="K", help="plans to run; 4")
    number("--steps", default=5, help="optimizer steps to time of each, after two others; 5")
    number("--limit_s", default=600, metavar="S", help="seconds after which a plan is ended; 600")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for results, runs and logs")
    parser.add_argument(
        "--hardware", default="cpu", metavar="NAME|FILE", help="the hardware.json of a probe, or a name; cpu if absent"
    )
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")


def _sweep(arguments: argparse.Namespace) -> int:
    """Run the best plans and print the table; return 1 where no plan fits or none of them could be measured."""
    from recipe.measure.sweep import Setting, entries_of, results_of, run_sweep, table
    from recipe.plan.flags import read_plan_request
    from recipe.plan.hardware import find_hardware
    from recipe.plan.search import search_plans

    hardware = find_hardware(arguments.hardware)
    plan = read_plan_request(arguments, hardware=hardware)
    found = search_plans(plan.request)
    entries = entries_of(found, model=plan.model_flags, top=arguments.top)
    setting = Setting(arguments.gpus, hardware.device, arguments.steps, arguments.limit_s)
    if not entries:
        raise ValueError(
            f"no plan fits {arguments.gpus} ranks on {hardware.name}; `gather-moe plan` says for each layout why"
        )
    os.environ["DS_ACCELERATOR"] = hardware.device  # read when the ranks' libraries are loaded
    say = partial(print, file=sys.stderr, flush=True)
    rows = run_sweep(entries, setting=setting, folder=arguments.out, say=say)
    if arguments.json:
        print(json.dumps(results_of(rows, setting=setting), indent=1))
    else:
        for line in table(rows):
            print(line)
    return 0 if any(row["error"] is None for row in rows) else 1


PROBE_HELP = "measure this machine for the planner: products, attention, memory, collectives"
SWEEP_HELP = "run the best plans for a few steps and compare with what was predicted"
COMMANDS = (
    Command("probe", PROBE_HELP, _add_probe_arguments, _probe),
    Command("sweep", SWEEP_HELP, _add_sweep_arguments, _sweep),
)
