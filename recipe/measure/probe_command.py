"""`gather-moe probe`: measures this machine, or the ranks it is started as, and writes a hardware file."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from recipe.shared.command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
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


def _run(arguments: argparse.Namespace) -> int:
    from recipe.measure.probe_start import is_rank, start_processes

    out: Path = arguments.out
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: {out.parent} is no folder")
    if is_rank(os.environ):
        if arguments.ranks is not None:
            raise ValueError(
                f"--ranks {arguments.ranks} is for a single process, but a launcher started this one as rank "
                f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}; leave it out"
            )
        return _measure(arguments)
    num_ranks = 1 if arguments.ranks is None else arguments.ranks
    if num_ranks < 1:
        raise ValueError(f"--ranks {num_ranks} must be at least 1")
    if num_ranks == 1:
        return _measure(arguments)
    words = ["--out", str(out), "--precision", *arguments.precision, *(["--quick"] if arguments.quick else [])]
    return start_processes(num_ranks, words=words)


def _measure(arguments: argparse.Namespace) -> int:
    from recipe.launch.start import read_world, start_ranks, stop_ranks
    from recipe.measure.probe import ProbeOptions, machine_facts, measure_machine
    from recipe.plan.hardware_file import hardware_as_json
    from recipe.train.log import write_json

    world = read_world(os.environ)
    say = partial(print, file=sys.stderr, flush=True)
    try:
        start_ranks(world, environ=os.environ, say=say)
        options = ProbeOptions(precisions=tuple(arguments.precision), quick=arguments.quick)
        hardware, readings = measure_machine(world, options)
        if world.rank == 0:
            machine = {**machine_facts(world), "quartiles_s": readings}
            write_json(arguments.out, hardware_as_json(hardware, machine=machine))
            if world.world_size == 1:
                say("one rank was measured and no link; `gather-moe probe --ranks N` measures what N ranks share")
            print(f"wrote {arguments.out}; plan with it: gather-moe plan --gpu {arguments.out} ...")
    finally:
        stop_ranks(world)
    return 0


COMMANDS = (
    Command(
        name="probe",
        help="measure this machine for the planner: products, attention, memory, collectives",
        add_arguments=_add_arguments,
        run=_run,
    ),
)
