"""Going on from a checkpoint: what a run stores with one, what may differ since, and the state to continue from."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from modeling.spec import DEFAULTS, LOSS_SETTINGS
from recipe.checkpoint.elastic import LAYOUT, old_group_states, resume_training
from recipe.checkpoint.expert_counts import NAME as COUNTS_NAME
from recipe.checkpoint.expert_counts import ExpertCounter, ExpertCounts, read_expert_counts
from recipe.checkpoint.find import Checkpoint
from recipe.checkpoint.folders import step_folder
from recipe.engine.engine import Engine
from recipe.hf.config import TOKEN_IDS
from recipe.shared.together import on_first
from recipe.train.metrics import StepMeter, merge_meters
from recipe.train.placement import place_by_counts
from recipe.train.prepare import Run

# Details of a checkpoint in which a run may differ from the one that saved it: how far it is and is to go, which rank
# holds what, and in which form it is stored. Differences that change the numbers of further steps are said.
FREE_ON_RESUME = ("position", "tokens", "max_steps", "optimizer", "sequences_per_step", "format", *LAYOUT)


@dataclass(kw_only=True)
class Progress:
    """How far training has come, and what it has summed since the last log line and the last checkpoint."""

    step: int = 0
    position: int = 0  # sequences read
    elapsed_s: float = 0.0  # training time that the sums of an unfinished log line took before a resume
    meter: StepMeter = field(default_factory=StepMeter)
    expert_counts: ExpertCounter = field(default_factory=lambda: ExpertCounter(step=0, saved=None))
    saved_step: int | None = None  # of the last checkpoint that this run wrote or, as its own, went on from


def resume(run: Run, engine: Engine, checkpoint: Checkpoint | None) -> Progress:
    """Put the engine where the checkpoint was and return how far training had come; without one, 0. Collective.

    With --place_experts the experts are placed anew by the loads in the checkpoint.

    Raises on every rank alike: ValueError where the checkpoint is of another set-up, and the errors of loading.
    """
    if checkpoint is None:
        return Progress()
    check_resumable(run, checkpoint)
    state = resume_training(
        engine,
        checkpoint,
        details=checkpoint_details(run, position=0),
        seed=run.arguments.seed,
        ranks=run.ranks,
        say=run.say,
    )
    if state is None:
        state = _merged_state(run, checkpoint)
    own, counts = step_folder(run.folder.checkpoints, checkpoint.step), checkpoint.folder / COUNTS_NAME

    def look() -> tuple[bool, ExpertCounts | None]:
        is_own = checkpoint.folder.resolve() == own.resolve()
        return is_own, read_expert_counts(counts) if counts.exists() else None

    is_own, saved = on_first(look, ranks=run.ranks)
    progress = Progress(
        step=checkpoint.step,
        position=checkpoint.details["position"],
        elapsed_s=state["elapsed_s"],
        expert_counts=ExpertCounter(step=checkpoint.step, saved=saved),
        saved_step=checkpoint.step if is_own else None,
    )
    progress.meter.restore(state["meter"], device=engine.ds.device)
    engine.restore_loads(state["loads"])
    if run.arguments.place_experts:
        numbers = place_by_counts(engine, read_expert_counts(counts), say=run.say)
        progress.meter.renumber_experts(numbers)
        progress.expert_counts.renumber(numbers)
    return progress


def rank_state(progress: Progress, engine: Engine, *, elapsed_s: float) -> dict[str, Any]:
    """Return what a checkpoint keeps of this rank for `resume`, beside what the engine itself holds."""
    return {"meter": progress.meter.state(), "elapsed_s": elapsed_s, "loads": engine.loads()}


def _merged_state(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return this rank's state after a change of layout. Collective.

    What travels is as small for a thousand old groups as for one: a state for the first group, and one for the others.
    """

    def merge() -> list[dict[str, Any]]:
        states = old_group_states(checkpoint)
        return [merge_rank_states(states, dp_rank=dp_rank) for dp_rank in (0, 1)]

    first, other = on_first(merge, ranks=run.ranks)
    return other if run.mesh.dp_rank else first


def checkpoint_details(run: Run, *, position: int) -> dict[str, Any]:
    """Return what is stored with a checkpoint, and compared on resume but for FREE_ON_RESUME."""
    layout, settings = run.mesh.layout, run.settings
    # All else in the model's configuration says nothing about the function it computes.
    model = {name: getattr(run.config, name) for name in (*DEFAULTS, *LOSS_SETTINGS, *TOKEN_IDS)}
    return {
        "position": position,
        "tokens": position * settings.block_size,
        "max_steps": settings.schedule.max_steps,
        "optimizer": asdict(settings.optimizer),
        "dp": layout.dp,
        "tp": layout.tp,
        "ep": layout.ep,
        "zero_stage": settings.zero_stage,
        "sequences_per_step": settings.sequences_per_step,
        "precision": settings.precision,
        "block_size": settings.block_size,
        "seed": run.arguments.seed,
        # The name of a token store depends on the text, the tokenizer and how they are read.
        "data": [Path(corpus["cache"]).name for corpus in run.data.report["corpora"]],
        "packing": run.data.report["format"]["packing"],
        "num_train_blocks": run.num_train_blocks,
        **{f"model.{name}": value for name, value in sorted(model.items())},
        # Of how a step is executed the one option that rounds; its name is that of the first checkpoints.
        "model.token_dtype": settings.execution.token_dtype,
    }


def check_resumable(run: Run, checkpoint: Checkpoint) -> None:
    """Raise ValueError with everything in which a checkpoint differs from this run; say what may differ."""
    # Through JSON, as the manifest went: tuples became lists there.
    now, then = json.loads(json.dumps(checkpoint_details(run, position=0))), checkpoint.details
    names = sorted((now.keys() | then.keys()) - set(FREE_ON_RESUME))
    faults = [f"{n}: {then.get(n)} then, {now.get(n)} now" for n in names if then.get(n) != now.get(n)]
    if faults:
        raise ValueError(
            f"{checkpoint.folder} was saved by another set-up and cannot be continued by this one:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
            + "\nstart with the same settings, or begin a new run from its hf/ folder with "
            "--model_name_or_path"
        )
    changes = {
        "max_steps": f"max_steps={then['max_steps']} and now has {now['max_steps']}; "
        "the learning rate follows the new schedule from here on",
        "optimizer": f"the optimizer settings {then['optimizer']} and now has {now['optimizer']}",
        "sequences_per_step": f"{then['sequences_per_step']} sequences per step and now has "
        f"{now['sequences_per_step']}; it goes on behind the {then['position']:,} sequences it has read",
        "precision": f"precision={then['precision']} and now has {now['precision']}; "
        "weights and moments go on from the float32 numbers of the optimizer",
    }
    for name, change in changes.items():
        if then[name] != now[name]:
            run.say(f"warning: the run had {change}")


def merge_rank_states(states: Sequence[dict[str, Any]], *, dp_rank: int) -> dict[str, Any]:
    """Return the rank state that group `dp_rank` goes on with, from those of all groups of an earlier layout.

    The first group takes over the sums of a half-finished log line, so that they count once. Copies of experts are
    chosen by the loads of all groups, of which each may now have any part.
    """
    loads = [state["loads"] for state in states if state["loads"] is not None]
    return {
        "meter": merge_meters([state["meter"] for state in states] if dp_rank == 0 else []),
        "elapsed_s": states[0]["elapsed_s"],
        "loads": torch.tensor(loads, dtype=torch.float64).sum(0).tolist() if loads else None,
    }
