"""Whether the checkpoints of a run will fit on its disk, asked before hours are spent on it."""

from recipe.checkpoint.find import Checkpoint
from recipe.checkpoint.folders import list_checkpoints
from recipe.checkpoint.size_estimate import CheckpointSize, estimate_size
from recipe.checkpoint.space import check_free_space
from recipe.engine.engine import Engine
from recipe.shared.together import on_first
from recipe.train.run import Run, pick_dtype


def estimate_checkpoint(run: Run, engine: Engine) -> CheckpointSize:
    """Of one checkpoint of this run; without hf/ where no checkpoint has it. Collective."""
    with_hf = run.arguments.hf_save != "never"
    dtype = pick_dtype(run.arguments.hf_dtype, precision=run.settings.precision) if with_hf else None
    return estimate_size(engine, hf_dtype=dtype, ranks=run.ranks)


def check_disk_room(run: Run, engine: Engine, *, checkpoint: Checkpoint | None) -> CheckpointSize:
    """NotEnoughSpaceError on every rank where the disk would fill up before the run ends. Collective.

    Returns what one checkpoint takes.

    While a checkpoint is written, those it will replace are still there: a run that keeps k needs room for k + 1, those
    that it has already included. Without --save_total_limit all saves to the last step must fit. What the run that is
    overwritten takes counts as free.
    """
    arguments, max_steps = run.arguments, run.settings.schedule.max_steps
    assert max_steps is not None
    step = 0 if checkpoint is None else checkpoint.step
    num_saves = saves_to_come(step, max_steps=max_steps, save_steps=arguments.save_steps)
    num_saves = 0 if arguments.save_strategy == "no" else num_saves
    old_bytes = run.folder.old_bytes(ranks=run.ranks)
    num_there = 0 if old_bytes else len(on_first(lambda: list_checkpoints(run.folder.checkpoints), ranks=run.ranks))
    num_more = more_at_a_time(num_saves, keep=arguments.save_total_limit, num_there=num_there)
    size = estimate_checkpoint(run, engine)
    num_with_hf = {"every": num_more, "last": min(1, num_more), "never": 0}[arguments.hf_save]
    free = check_free_space(
        run.folder.checkpoints,
        needed_bytes=num_more * size.native_bytes + num_with_hf * size.hf_bytes,
        ranks=run.ranks,
        freed_bytes=old_bytes,
        detail=f"; up to {num_more} more at a time, each {size.native_bytes:,} and under hf/ {size.hf_bytes:,}",
        ways_out="free some space, keep fewer checkpoints with --save_total_limit, save less often with --save_steps, "
        "leave out hf/ with --hf_save, or choose another --output_dir",
    )
    run.say(
        f"checkpoints: about {size.native_bytes:,} bytes each and {size.hf_bytes:,} under hf/, "
        f"up to {num_more} more at a time; {free:,} bytes are free"
    )
    return size


def saves_to_come(step: int, *, max_steps: int, save_steps: int) -> int:
    """How often a run that goes on after `step` will save: every `save_steps` steps (0: never) and at the end."""
    if step >= max_steps:
        return 0
    return 1 + ((max_steps - 1) // save_steps - step // save_steps if save_steps else 0)


def more_at_a_time(num_saves: int, *, keep: int | None, num_there: int) -> int:
    """How many checkpoints there will at most be beside the `num_there` of now, if a run saves `num_saves` times."""
    if keep is None:
        return num_saves
    return min(num_saves, max(1, keep + 1 - num_there))
