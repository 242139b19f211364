"""`gather-moe sweep`: the best plans on the ranks at hand, predicted and measured."""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

from recipe.shared.argument_types import at_least_one
from recipe.shared.command import Command


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
    """Exit code 1 where no plan fits or none of them could be measured."""
    from recipe.measure.sweep import entries_of, results_as_json, run_sweep, table
    from recipe.measure.sweep_start import Setting
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
        print(json.dumps(results_as_json(rows, setting=setting), indent=1))
    else:
        for line in table(rows):
            print(line)
    return 0 if any(row.outcome.error is None for row in rows) else 1


COMMANDS = (
    Command(
        name="sweep",
        help="run the best plans for a few steps and compare with what was predicted",
        add_arguments=_add_sweep_arguments,
        run=_sweep,
    ),
)
