"""`gather-moe hosts`: checks a hostfile and prints which rank runs where."""

import argparse
import sys
from pathlib import Path

from recipe.shared.command import Command


def _add_hosts_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a hostfile with lines like `worker-1 slots=8`")


def _print_hosts(arguments: argparse.Namespace) -> int:
    """Print where every rank would run, as DeepSpeed's launcher numbers them; nothing is started, no host contacted."""
    from recipe.launch.hosts import read_hostfile

    hostfile = read_hostfile(arguments.file)
    for note in hostfile.notes:
        print(f"note: {note}", file=sys.stderr)
    width = max(len("host"), *(len(host.name) for host in hostfile.hosts))
    print(f"{'rank':>6}  {'host':<{width}}  {'node':>4}  {'local rank':>10}")
    places = [(host.name, node, slot) for node, host in enumerate(hostfile.hosts) for slot in range(host.slots)]
    for rank, (name, node_rank, local_rank) in enumerate(places):
        print(f"{rank:>6}  {name:<{width}}  {node_rank:>4}  {local_rank:>10}")
    total = len(places)
    print(f"{total} ranks on {len(hostfile.hosts)} hosts; have the run check it: --expect_world_size {total}")
    return 0


COMMANDS = (Command("hosts", "check a hostfile and print which rank runs where", _add_hosts_arguments, _print_hosts),)
