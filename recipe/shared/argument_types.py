"""Numbers on a command line, for argparse, whose messages name the flag."""

import argparse


def whole_number(text: str, *, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is too small; the least is {least}")
    return number


def at_least_one(text: str) -> int:
    return whole_number(text, least=1)


def at_least_two(text: str) -> int:
    return whole_number(text, least=2)


def at_least_even(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 1 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{number} is no ratio of the most to the mean; the least is 1")
    return number
