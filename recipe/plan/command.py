"""`gather-moe plan`: which layout to rent devices for."""

import argparse
import json
import sys
from pathlib import Path

from recipe.shared.command import Command, at_least_one


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    from recipe.plan.flags import add_model_flags, add_plan_flags, add_world_flags, layout_words

    add_model_flags(parser)
    add_world_flags(parser)
    add, against = parser.add_argument, "say how far this layout is behind the best one"
    add("--gpu", required=True, metavar="NAME|FILE", help="a GPU by name, cpu, or the hardware.json of a probe")
    add_plan_flags(parser)
    add("--top", type=at_least_one, default=10, metavar="K", help="plans to print; 10")
    add("--write", type=Path, metavar="FILE", help="write the best plan for run_pretrain.py --ds_config")
    add("--against", type=layout_words, metavar="tp=N,ep=N", help=against)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print everything as one JSON object")
    form.add_argument("-v", "--verbose", action="store_true", help="also print formulas and where numbers are from")


def _print_plans(arguments: argparse.Namespace) -> int:
    """Search, print, and write the best plan; return 1 where no layout fits."""
    from recipe.plan import report
    from recipe.plan.flags import read_plan_request
    from recipe.plan.hardware import find_hardware
    from recipe.plan.search import search_plans

    settings = read_plan_request(arguments, hardware=find_hardware(arguments.gpu))
    if arguments.write is not None:
        report.check_writable(arguments.write)
    found = search_plans(settings.request)
    notes = (*settings.notes, *report.idle_notes(found))
    shown = {"notes": notes, "top": arguments.top, "wanted": arguments.against}
    if arguments.json:
        print(json.dumps(report.as_json(found, model=settings.model_flags, **shown), indent=1))
    else:
        for line in report.describe(found, **shown):
            print(line)
    if not found.plans:
        return 1
    best = found.plans[0]
    if arguments.verbose:
        for line in report.describe_basis(best, found):
            print(line)
    if arguments.write is not None:
        config = report.run_config(best.job, model=settings.model_flags, attention=settings.request.attention)
        report.write_config(arguments.write, config=config)
        num_ranks, per_node = best.job.layout.world_size, settings.request.ranks_per_node
        line = report.how_to_start(arguments.write, num_ranks=num_ranks, ranks_per_node=per_node)
        print(line, file=sys.stderr if arguments.json else sys.stdout)
    return 0


COMMANDS = (
    Command(
        name="plan",
        help="find the layout that trains a model fastest on so many devices",
        add_arguments=_add_plan_arguments,
        run=_print_plans,
    ),
)
