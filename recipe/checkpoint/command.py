"""`gather-moe inspect` and `gather-moe reshard`: what a checkpoint is, and its whole tensors written for any layout."""

import argparse
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from recipe.shared.command import Command


def _add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CKPT",
        help="a checkpoint, or a run folder, whose checkpoints are listed and the newest complete one described",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--no-checksums", action="store_true", help="compare sizes, but do not read the files")
    parser.add_argument(
        "--values", action="store_true", help="norm, range and non-finite numbers of weights and moments"
    )


def _inspect_checkpoint(arguments: argparse.Namespace) -> int:
    """Print what a checkpoint is; a broken one is described as far as it can be, and then is the error."""
    from recipe.checkpoint.inspect_checkpoint import as_json, describe, inspect_path

    # DeepSpeed, whose classes its files may need, logs to the standard output.
    with redirect_stdout(sys.stderr):
        found = inspect_path(arguments.checkpoint, checksums=not arguments.no_checksums, values=arguments.values)
    for line in [as_json(found)] if arguments.json else describe(found):
        print(line)
    if found.error is not None:
        raise found.error
    return 0


def _add_reshard_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CKPT",
        help="a checkpoint, or a run folder, of which the newest complete one is taken",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, which must not exist")


def _reshard_checkpoint(arguments: argparse.Namespace) -> int:
    """Write whole tensors in place of DeepSpeed's files; needs no GPU, no ranks, and memory for a piece of a tensor."""
    from recipe.checkpoint.reshard import reshard

    say = partial(print, file=sys.stdout)
    with redirect_stdout(sys.stderr):  # as for inspect
        num_read, num_read_back = reshard(arguments.checkpoint, out=arguments.out, say=say)
    print(f"{num_read} tensors read, {num_read_back} read back and found equal")
    print(f"wrote {arguments.out}; continue in any layout with --resume_from_checkpoint {arguments.out}")
    return 0


COMMANDS = (
    Command(
        name="inspect",
        help="say what a checkpoint is and whether it is sound",
        add_arguments=_add_inspect_arguments,
        run=_inspect_checkpoint,
    ),
    Command(
        name="reshard",
        help="write a checkpoint as whole tensors, to continue in any layout",
        add_arguments=_add_reshard_arguments,
        run=_reshard_checkpoint,
    ),
)
