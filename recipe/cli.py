"""The `gather-moe` command: a table of subcommands, each a few lines over the part of the recipe that does the work."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from recipe.checkpoint.errors import CheckpointError


class Command(NamedTuple):
    """`run` returns the exit code. A ValueError is printed as the user's mistake, with exit code 2; a CheckpointError
    with its own exit code."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gather-moe", description="Tools around gather-moe training runs.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    arguments = parser.parse_args(argv)
    command = arguments.command
    try:
        return command.run(arguments)
    except ValueError as error:
        print(f"gather-moe {command.name}: {error}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"gather-moe {command.name}: {error}", file=sys.stderr)
        return error.exit_code


def _add_hosts_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a hostfile with lines like `worker-1 slots=8`")


def _print_hosts(arguments: argparse.Namespace) -> int:
    """Print where every rank would run; nothing is started and no host is contacted."""
    from recipe.launch.hosts import rank_table, read_hostfile

    hostfile = read_hostfile(arguments.file)
    table = rank_table(hostfile.hosts)
    for note in hostfile.notes:
        print(f"note: {note}", file=sys.stderr)
    width = max(len("host"), *(len(host.name) for host in hostfile.hosts))
    print(f"{'rank':>6}  {'host':<{width}}  {'node':>4}  {'local rank':>10}")
    for place in table:
        print(f"{place.rank:>6}  {place.host:<{width}}  {place.node_rank:>4}  {place.local_rank:>10}")
    print(f"{len(table)} ranks on {len(hostfile.hosts)} hosts; have the run check it: --expect_world_size {len(table)}")
    return 0


def _add_place_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a run folder, of which the latest checkpoint is taken, a checkpoint, or a Hugging Face folder",
    )
    parser.add_argument("--out", type=Path, help="write a Hugging Face folder with the experts numbered anew")
    parser.add_argument("--ep", type=int, help="ranks that share the experts; the checkpoint's own by default")
    parser.add_argument("--counts", type=Path, metavar="FILE", help="the expert_counts.json of another checkpoint")


def _place_experts(arguments: argparse.Namespace) -> int:
    """Print how even the ranks' work could be; weights are only read where a folder is to be written."""
    from recipe.place import describe, find_source, place_all, write_placed

    source = find_source(arguments.source, counts_file=arguments.counts, num_ranks=arguments.ep)
    placements = place_all(source)
    for line in describe(source, placements):
        print(line)
    if arguments.out is None:
        print("nothing was written; --out FOLDER writes the weights with the experts in these places")
        return 0
    write_placed(source, placements, out=arguments.out)
    print(f"wrote {arguments.out}; train on from it with --model_name_or_path {arguments.out}")
    return 0


COMMANDS = (
    Command(
        name="hosts",
        help="check a hostfile and print which rank runs where",
        add_arguments=_add_hosts_arguments,
        run=_print_hosts,
    ),
    Command(
        name="place",
        help="spread a model's experts over the ranks by their measured loads",
        add_arguments=_add_place_arguments,
        run=_place_experts,
    ),
)


if __name__ == "__main__":
    sys.exit(main())
