"""The `gather-moe` command: every room that has commands defines them in a table of its own."""

import argparse
import os
import select
import sys
from collections.abc import Sequence

import recipe.checkpoint.command
import recipe.dry_run.command
import recipe.launch.command
import recipe.measure.command
import recipe.plan.command
import recipe.profile.command
import recipe.train.command
from recipe.shared.errors import USER_ERROR, RunError

COMMANDS = (
    *recipe.launch.command.COMMANDS,
    *recipe.train.command.COMMANDS,
    *recipe.checkpoint.command.COMMANDS,
    *recipe.plan.command.COMMANDS,
    *recipe.dry_run.command.COMMANDS,
    *recipe.profile.command.COMMANDS,
    *recipe.measure.command.COMMANDS,
)

READER_GONE = 128 + 13  # as a shell has it for SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; a user's mistake ends in one message on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser(words).parse_args(words)
    arguments.behind = words[words.index("--") + 1 :] if "--" in words else None
    command = arguments.command
    try:
        code = command.run(arguments)
        sys.stdout.flush()
        return code
    except (RunError, ValueError) as error:
        print(f"gather-moe {command.name}: {error}", file=sys.stderr)
        return getattr(error, "exit_code", USER_ERROR)
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python itself writes at its end
        return READER_GONE


def _reader_is_gone() -> bool:
    """Whether whoever read this program's output, like `head`, had enough of it."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gather-moe", description="Tools around gather-moe training runs.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if command.name in words:  # the others need not load what their flags are made of
            command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
