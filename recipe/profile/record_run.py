"""Starts a run of run_pretrain.py whose first steps behind the warm-up are recorded, and that ends with them."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe.settings.arguments import CALLER, COMMAND_LINE, parse_arguments
from recipe.shared.scopes import FOLDER, first_recorded_step

SCRIPT = Path(__file__).parents[2] / "run_pretrain.py"
# Whatever the run's files say: it is one for measuring, of which nothing is kept.
ONLY_MEASURED = {"logging_steps": 1, "save_strategy": "no", "max_eval_samples": 0, "push_to_hub": False}


def record_run(words: Sequence[str], *, out: Path, num_ranks: int, num_steps: int) -> Path:
    """The folder of the traces. What the run prints goes to stderr; unless `words` name another, its folder is OUT/run.

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
    """The user's, and those that make the run a short one that keeps nothing; an output_dir in a file is not used.

    ValueError lists what cannot be used.
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
