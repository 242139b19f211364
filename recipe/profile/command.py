"""`gather-moe profile`: records some steps of a run, or reads traces of one, and says where the time of a step goes."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe.settings.arguments import CALLER, COMMAND_LINE, parse_arguments
from recipe.shared.command import Command, at_least_one
from recipe.shared.scopes import FOLDER, first_recorded_step

NUM_STEPS = 3
SCRIPT = Path(__file__).parents[2] / "run_pretrain.py"
# Whatever the run's files say: it is one for measuring, of which nothing is kept.
ONLY_MEASURED = {"logging_steps": 1, "save_strategy": "no", "max_eval_samples": 0, "push_to_hub": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="TRACE",
        help="traces of the PyTorch profiler, one a rank, or folders of them such as RUN/profile; or, behind --, the "
        "flags of a run of run_pretrain.py, of which some steps are recorded",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for profile.html, profile.json and the timeline"
    )
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
    from recipe.profile.report import check_place, describe, write_report
    from recipe.profile.summary import summarise
    from recipe.profile.trace_file import REPORT_NAME, find_traces, read_traces
    from recipe.profile.transfers import read_links

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
    page = write_report(summary, folder=arguments.out)
    if arguments.json:
        print(page.with_name(REPORT_NAME).read_text("utf-8").rstrip())
    else:
        print("\n".join([*describe(summary), f"wrote {page}"]))
    return 0


def record_run(words: Sequence[str], *, out: Path, num_ranks: int, num_steps: int) -> Path:
    """Record a run; return the folder of its traces. Its output goes to stderr; its folder is OUT/run unless named.

    Raises ValueError for flags that cannot be used, and where the run fails.
    """
    flags = run_flags(words, out=out, num_steps=num_steps)
    if not SCRIPT.is_file():
        raise ValueError(
            f"{SCRIPT} is not there; start the run yourself with --profile_steps, and name its traces here"
        )
    start = [sys.executable]
    if num_ranks > 1:
        start += ["-m", "deepspeed.launcher.runner", "--num_accelerators", str(num_ranks)]
    code = subprocess.run([*start, str(SCRIPT), *flags], stdout=sys.stderr).returncode
    if code:
        raise ValueError(f"the run to be recorded ended with exit code {code}; it says why above")
    return Path(parse_arguments(flags).output_dir or "") / FOLDER


def run_flags(words: Sequence[str], *, out: Path, num_steps: int) -> list[str]:
    """Return the user's flags, and those that make the run a short one that keeps nothing.

    An output_dir in a file is not used. ValueError lists what cannot be used.
    """
    asked = parse_arguments(words, defaults={"output_dir": str(out / "run")})
    named = {name for name, place in asked.given.items() if place == COMMAND_LINE}
    if "profile_steps" in named:
        raise ValueError("--profile_steps is what --steps becomes; give that, before the --")
    added: dict[str, Any] = {"profile_steps": num_steps, **ONLY_MEASURED}
    if "output_dir" not in named:
        added |= {"output_dir": out / "run", "overwrite_output_dir": True}
        if asked.place("output_dir") != CALLER:
            print(
                f"the run's folder is {out / 'run'}, not the {asked.output_dir} {asked.place('output_dir')}, which "
                "may hold a run; --output_dir behind the -- names another",
                file=sys.stderr,
            )
    last = first_recorded_step(asked.profile_from_step, after_step=0) + num_steps - 1
    added["max_steps"] = last
    if asked.warmup_steps > last:
        added["warmup_steps"] = last
    flags = [*words, *(f"--{name}={value}" for name, value in added.items() if name not in named)]
    parse_arguments(flags)
    return flags


HELP = "record some steps of a run, or read traces of one, and show where the time goes"
COMMANDS = (Command("profile", HELP, add_arguments, profile),)
