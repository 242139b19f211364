"""The `gather-moe` command: a table of subcommands, each a few lines over the part of the recipe that does the work."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    """`run` returns the exit code; a ValueError it raises is printed as the user's mistake, with exit code 2."""

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


COMMANDS = (
    Command(
        name="hosts",
        help="check a hostfile and print which rank runs where",
        add_arguments=_add_hosts_arguments,
        run=_print_hosts,
    ),
)


if __name__ == "__main__":
    sys.exit(main())
