"""`gather-moe profile`: records some steps of a run, or reads traces of one, and says where the time of a step goes."""

import argparse
from pathlib import Path

from recipe.shared.command import Command, at_least_one

NUM_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="TRACE",
        help="traces of the PyTorch profiler, one a rank, or folders of them such as RUN/profile; or, behind --, the "
        "flags of a run of run_pretrain.py, of which some steps are recorded",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for profile.html and profile.json")
    parser.add_argument("--num_ranks", type=at_least_one, metavar="N", help="ranks of the run; 1 if absent")
    parser.add_argument("--steps", type=at_least_one, metavar="N", help=f"steps to record; {NUM_STEPS} if absent")
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="a GPU, or a file that `gather-moe probe` wrote: bandwidth is held against its links",
    )
    parser.add_argument("--link_bytes_per_s", type=float, metavar="RATE", help="what a rank can send, in place of that")
    parser.add_argument("--json", action="store_true", help="print what profile.json holds as one JSON object")


def profile(arguments: argparse.Namespace) -> int:
    """Write the page and the JSON, and print the largest savings."""
    from recipe.profile.links import read_links
    from recipe.profile.record_run import record_run
    from recipe.profile.report import check_place, describe, write_report
    from recipe.profile.summary import summarise
    from recipe.profile.trace_file import find_traces, read_traces

    flags = arguments.behind
    places = [Path(word) for word in arguments.words[: len(arguments.words) - len(flags or ())]]
    if not places and flags is None:
        raise ValueError("name traces or a folder of them, or give the flags of a run behind --")
    if places and (flags is not None or arguments.num_ranks or arguments.steps):
        raise ValueError(
            f"{places[0]} is read as a trace, but --num_ranks, --steps and what stands behind -- are for a run to be "
            "recorded; keep one of both"
        )
    links = read_links(arguments.hardware, bytes_per_s=arguments.link_bytes_per_s)
    if flags is not None:
        num_ranks, num_steps = arguments.num_ranks or 1, arguments.steps or NUM_STEPS
        places = [record_run(flags, out=arguments.out, num_ranks=num_ranks, num_steps=num_steps)]
    traces = find_traces(places)
    check_place(arguments.out, traces=traces)
    summary = summarise(read_traces(traces), links=links)
    written = write_report(summary, folder=arguments.out)
    print(written.json if arguments.json else "\n".join([*describe(summary), f"wrote {written.page}"]))
    return 0


COMMANDS = (
    Command(
        name="profile",
        help="record some steps of a run, or read traces of one, and show where the time goes",
        add_arguments=add_arguments,
        run=profile,
    ),
)
