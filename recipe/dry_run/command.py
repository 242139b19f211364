"""`gather-moe dry-run`: one step of a run on fake tensors, as one of any number of ranks that are not there."""

import argparse
import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial

from recipe.shared.command import Command

USUAL = {"cuda": "h100", "cpu": "cpu"}  # hardware by what a run computes on


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    from recipe.plan.flags import add_job_flags, add_model_flags, add_world_flags

    add_model_flags(parser)
    add_world_flags(parser)
    add_job_flags(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="what the run would compute on; cuda if absent")
    parser.add_argument(
        "--gpu", metavar="NAME|FILE", help="by which the trainer chooses how experts are multiplied; h100 if absent"
    )
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="the rank that is run; 0")
    parser.add_argument(
        "--all_layers", action="store_true", help="run every layer, where else one and two tell about all"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="print the plan's numbers beside those counted; exit code 1 where bytes differ",
    )
    parser.add_argument(
        "--kernels", action="store_true", help="count launches, bytes through memory and FLOPs of a layer and a step"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    """Print what was counted; exit code 1 where the bytes of a plan that was asked for differ."""
    from recipe.plan.flags import read_job
    from recipe.plan.hardware import find_hardware

    hardware = find_hardware(arguments.gpu or USUAL[arguments.device or "cuda"], device=arguments.device)
    job, settings = read_job(arguments, device=hardware.device, compute_capability=hardware.compute_capability)
    with quiet_libraries():
        from recipe.dry_run.dry_run import dry_run
        from recipe.dry_run.report import as_json, compare, describe

        found = dry_run(
            job,
            engine_config=settings.engine,
            rank=arguments.rank,
            all_layers=arguments.all_layers,
            kernels=arguments.kernels,
            say=partial(print, file=sys.stderr, flush=True),
        )
        comparison = compare(found, job, rank=arguments.rank) if arguments.compare else None
    if arguments.json:
        print(json.dumps(as_json(found, job, rank=arguments.rank, comparison=comparison), indent=1))
    else:
        for line in describe(found, job, rank=arguments.rank, comparison=comparison):
            print(line)
    return 1 if comparison is not None and not comparison.is_equal else 0


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Drop what DeepSpeed prints to stdout, where only the result belongs, and log errors alone."""
    before = logging.root.manager.disable
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


COMMANDS = (
    Command(
        name="dry-run",
        help="count what a rank of any number would send in a step, without any of them",
        add_arguments=_add_arguments,
        run=_run,
    ),
)
