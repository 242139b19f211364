"""What a subcommand of `gather-moe` is, and the numbers on its command line.

Each room with commands has a `command.py` whose table COMMANDS defines them. It imports nothing heavy: what a command
needs is loaded when it runs.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand: `run` does the work and returns the exit code.

    A ValueError is printed as the user's mistake, with exit code 2; a RunError with its own. The words behind a -- are
    in `arguments.behind`, which is None without one: argparse does not say where it stood.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def whole_number(text: str, *, least: int) -> int:
    """Read a number for argparse, whose message then names the flag."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is too small; the least is {least}")
    return number


at_least_one = partial(whole_number, least=1)
at_least_two = partial(whole_number, least=2)


def at_least_even(text: str) -> float:
    """Read the ratio of the largest share of some work to the mean, which is 1 where it is even."""
    number = _number(text)
    if not 1 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{number} is no ratio of the most to the mean; the least is 1")
    return number


def positive_number(text: str) -> float:
    number = _number(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{number} is not above 0, or has no end")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
