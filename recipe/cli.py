"""The `gather-moe` command: a table of subcommands, each a few lines over the part of the recipe that does the work."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from recipe.dry_run.command import COMMANDS as DRY_RUN
from recipe.measure.command import COMMANDS as MEASURE
from recipe.plan.command import COMMANDS as PLAN
from recipe.profile.command import COMMANDS as PROFILE
from recipe.shared.command import Command
from recipe.shared.errors import CheckpointError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gather-moe", description="Tools around gather-moe training runs.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    words = list(sys.argv[1:] if argv is None else argv)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if command.name in words:  # the others need not load what their flags are made of
            command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    arguments = parser.parse_args(words)
    arguments.behind = words[words.index("--") + 1 :] if "--" in words else None
    command = arguments.command
    try:
        return command.run(arguments)
    except CheckpointError as error:  # some are ValueErrors, too
        print(f"gather-moe {command.name}: {error}", file=sys.stderr)
        return error.exit_code
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
    from recipe.train.place import describe, find_source, place_all, write_placed

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
        done = reshard(arguments.checkpoint, out=arguments.out, say=say)
    print(f"{done.num_read} tensors read, {done.num_read_back} read back and found equal")
    print(f"wrote {arguments.out}; continue in any layout with --resume_from_checkpoint {arguments.out}")
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
    *PLAN,
    *DRY_RUN,
    *MEASURE,
    *PROFILE,
)


if __name__ == "__main__":
    sys.exit(main())
