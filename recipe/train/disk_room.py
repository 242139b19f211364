"""Whether the checkpoints of a run will fit on its disk, counted from the model before anything has been trained."""

import math
from typing import NamedTuple

import torch

from modeling.init import full_shapes, shard_table, stored_tensors
from recipe.checkpoint.find import Checkpoint
from recipe.checkpoint.folders import check_free_space, list_checkpoints
from recipe.engine.engine import Engine
from recipe.settings.flags import Arguments
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_first
from recipe.train.prepare import Run, pick_dtype

MASTER_BYTES = 3 * 4  # of a trained number under ZeRO: float32 copy and two moments
BYTES_PER_ENTRY = 512  # what torch.save and the rank files take to name and describe a tensor
RANK_FILE_BYTES = 16 * 1024  # random states
SCRIPTS_BYTES = 40 * 1024  # two programs that DeepSpeed adds to a checkpoint


class CheckpointSize(NamedTuple):
    """Bytes of a checkpoint over all ranks: what resuming needs, and the weights under hf/, 0 where there are none."""

    native_bytes: int
    hf_bytes: int

    def total_bytes(self, *, with_hf: bool) -> int:
        return self.native_bytes + (self.hf_bytes if with_hf else 0)


def check_disk_room(run: Run, engine: Engine, *, checkpoint: Checkpoint | None) -> CheckpointSize:
    """Raise NotEnoughSpaceError on every rank where the disk would fill up before the run ends. Collective.

    Returns the estimated size of one checkpoint.

    While a checkpoint is written, those it will replace are still there: a run that keeps k needs room for k + 1, of
    which it may have some already. Without --save_total_limit all saves to the last step must fit. The bytes of a run
    that is overwritten count as free.
    """
    arguments, with_hf = run.arguments, run.arguments.hf_save != "never"
    step = 0 if checkpoint is None else checkpoint.step
    old_bytes = run.folder.old_bytes(ranks=run.ranks)
    num_there = 0 if old_bytes else len(on_first(lambda: list_checkpoints(run.folder.checkpoints), ranks=run.ranks))
    num_more = more_at_a_time(arguments, step=step, max_steps=run.max_steps, num_there=num_there)
    dtype = pick_dtype(arguments.hf_dtype, precision=run.settings.precision) if with_hf else None
    size = estimate_size(engine, hf_dtype=dtype, ranks=run.ranks)
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


def more_at_a_time(arguments: Arguments, *, step: int, max_steps: int, num_there: int) -> int:
    """Return how many checkpoints a run that goes on after `step` adds at most to the `num_there` of now.

    It saves every `save_steps` steps (0: never) and at the end, and keeps `save_total_limit` of them (None: all).
    """
    if arguments.save_strategy == "no" or step >= max_steps:
        return 0
    every, keep = arguments.save_steps, arguments.save_total_limit
    num_saves = 1 + ((max_steps - 1) // every - step // every if every else 0)
    return num_saves if keep is None else min(num_saves, max(1, keep + 1 - num_there))


def estimate_size(engine: Engine, *, hf_dtype: torch.dtype | None, ranks: Ranks) -> CheckpointSize:
    """Estimate the bytes of DeepSpeed's files and of the weights in `hf_dtype`. Collective.

    Tensors are counted as they are; their descriptions and the small files by rules of thumb, so that the result is
    close where tensors dominate. A tokenizer is not counted.
    """
    native_bytes = sum(ranks.gather(_rank_bytes(engine))) + SCRIPTS_BYTES
    return CheckpointSize(native_bytes, 0 if hf_dtype is None else _hf_bytes(engine, hf_dtype))


def _rank_bytes(engine: Engine) -> int:
    """Return the bytes that this rank writes outside of hf/."""
    layout, stage = engine.mesh.layout, engine.zero_stage
    parameters = list(engine.model.parameters())
    trained = sum(_numel(parameter) for parameter in parameters if parameter.requires_grad)
    frozen_bytes = sum(_numel(p) * p.element_size() for p in parameters if not p.requires_grad)
    described = RANK_FILE_BYTES + BYTES_PER_ENTRY * len(parameters)
    is_writer = engine.mesh.dp_rank == 0
    if stage == 3:
        return described + (frozen_bytes + MASTER_BYTES * trained) // layout.dp  # other weights only as masters
    weights_bytes = sum(p.numel() * p.element_size() for p in parameters) if is_writer else 0
    if isinstance(engine.ds.optimizer, torch.optim.Optimizer):  # no ZeRO: the weights are their own masters
        moments_bytes = sum(2 * p.numel() * p.element_size() for p in parameters if p.requires_grad)
        return described + weights_bytes + (moments_bytes if is_writer else 0)
    # From a GPU, stage 2 writes frozen weights twice: DeepSpeed copies them to the host for an entry of their own.
    again_bytes = frozen_bytes if is_writer and stage == 2 and engine.ds.device.type != "cpu" else 0
    return described + weights_bytes + again_bytes + MASTER_BYTES * trained // layout.dp


def _numel(parameter: torch.nn.Parameter) -> int:
    """Return the elements of a parameter, also where ZeRO-3 left an empty tensor in its place."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _hf_bytes(engine: Engine, dtype: torch.dtype) -> int:
    config, model = engine.model.config, engine.model
    shapes = full_shapes(model, config=config, table=shard_table(config, engine.mesh))
    tensors = stored_tensors(model)
    sizes = (
        math.prod(shape) * (dtype if isinstance(tensors[name], torch.nn.Parameter) else tensors[name].dtype).itemsize
        for name, shape in shapes.items()
    )
    return sum(sizes)
