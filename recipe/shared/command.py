"""What a subcommand of `gather-moe` is. A file with commands defines them in such a table and imports nothing heavy."""

import argparse
from collections.abc import Callable
from typing import NamedTuple


class Command(NamedTuple):
    """`run` returns the exit code. A ValueError is printed as the user's mistake, with exit code 2; a CheckpointError
    with its own exit code. It finds the words behind a -- as `behind`, too, None without one: argparse does not say
    where it stood."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
