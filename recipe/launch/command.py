"""`gather-moe hosts`: checks a hostfile and prints which rank runs where."""

import argparse
import sys
from pathlib import Path

from recipe.shared.command import Command


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


COMMANDS = (Command("hosts", "check a hostfile and print which rank runs where", _add_hosts_arguments, _print_hosts),)
