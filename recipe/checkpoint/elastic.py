"""A checkpoint loaded into an engine of any layout: by DeepSpeed where ranks hold what they held, else part by part."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modeling.init import full_shapes, shard_table, stored_tensors
from modeling.shard_table import Shard
from recipe.checkpoint.find import Checkpoint
from recipe.checkpoint.native import (
    describe_partition,
    kept,
    load_native,
    parts_in_place,
    restore_counters,
    start_moments,
    write_numbers,
)
from recipe.checkpoint.native_files import open_training_state
from recipe.checkpoint.rank_files import read_rank_file, reseed
from recipe.checkpoint.training_state import NATIVE_FOLDER, WEIGHT, TrainingState, boxes_between, cut, size_of
from recipe.engine.engine import Engine
from recipe.shared.errors import CheckpointBrokenError
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_every, on_first

# Details of a checkpoint that decide who holds what; any of them may differ when training goes on.
LAYOUT = ("dp", "tp", "ep", "zero_stage", "precision")

RankState = dict[str, Any]  # what a training loop keeps of a rank


def resume_training(
    engine: Engine,
    checkpoint: Checkpoint,
    *,
    details: Mapping[str, Any],
    seed: int,
    ranks: Ranks,
    say: Callable[[str], None],
) -> RankState | None:
    """Put the engine where the checkpoint was; return what the loop kept of this rank. Collective.

    `details` are those of this run's own checkpoints. Where every rank is to hold just what its namesake held,
    DeepSpeed loads its own files and all goes on bit for bit, random states included. Otherwise `load_elastic` is used,
    one line says so, and None is returned: no rank has a namesake, see `old_group_states`.
    """
    difference = _difference(engine, checkpoint, details=details, ranks=ranks)
    if difference is None:
        return load_native(engine, checkpoint.folder)
    say(
        f"resuming {difference}: weights and optimizer state are cut anew, random states start anew from the seed and "
        "the step"
    )
    load_elastic(engine, checkpoint, seed=seed, ranks=ranks)
    return None


def old_group_states(checkpoint: Checkpoint) -> list[RankState]:
    """Return what the loop kept of each data-parallel group that saved, of one rank of each. Not collective."""
    dp, tp = checkpoint.details["dp"], checkpoint.details["tp"]
    return [read_rank_file(checkpoint.folder, dp_rank * tp).state for dp_rank in range(dp)]


def load_elastic(engine: Engine, checkpoint: Checkpoint, *, seed: int, ranks: Ranks) -> None:
    """Load weights, moments, counters and the routers' biases into an engine of any layout. Collective.

    Every rank reads what it keeps and no more, one kind of one parameter at a time. Random states are seeded by
    `reseed`.

    Raises on every rank alike: ValueError where parameters are to be trained that were frozen then,
    CheckpointBrokenError or RanksFailedError.
    """
    folder, details = checkpoint.folder, checkpoint.details

    def put() -> None:
        put_state(engine, open_training_state(folder, details=details), checkpoint=checkpoint)

    with parts_in_place(engine):
        on_every(put, ranks=ranks)
    restore_counters(engine, on_first(lambda: read_rank_file(folder, 0).counters, ranks=ranks))
    reseed(seed, step=checkpoint.step, dp_rank=engine.mesh.dp_rank)


@torch.no_grad()
def put_state(engine: Engine, state: TrainingState, *, checkpoint: Checkpoint) -> None:
    """Write this rank's shards of a state into its engine; inside `parts_in_place`, not collective otherwise.

    Raises CheckpointBrokenError where the state's tensors are not the model's, ValueError where it has no moments for
    what is to be trained.
    """
    model, mesh = engine.model, engine.mesh
    table = shard_table(model.config, mesh)
    shapes = full_shapes(model, config=model.config, table=table)
    _check_tensors(state, shapes, checkpoint=checkpoint)
    _check_moments(state, stored_tensors(model), checkpoint=checkpoint)
    start_moments(engine, step=state.step)
    for name, tensor in stored_tensors(model).items():
        shard = table.shard(name, shapes[name], group_rank=mesh.group_rank)
        if not isinstance(tensor, nn.Parameter):
            value = _read_elements(state, name, kind=WEIGHT, shard=shard, wanted=range(tensor.numel()))
            tensor.copy_(value.view(tensor.shape))
            continue
        for kind in state.kinds(name) if tensor.requires_grad and state.step else (WEIGHT,):
            own = kept(engine, tensor, kind=kind)
            write_numbers(engine, tensor, _read_elements(state, name, kind=kind, shard=shard, wanted=own), kind=kind)


def _read_elements(state: TrainingState, name: str, *, kind: str, shard: Shard, wanted: range) -> Tensor:
    """Read the `wanted` elements of a flattened shard, and no others."""
    boxes = boxes_between(shard.shape, wanted.start, wanted.stop)
    parts = [_read_box(state, name, kind=kind, shard=shard, box=box).flatten() for box in boxes]
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0), *parts])


def _read_box(state: TrainingState, name: str, *, kind: str, shard: Shard, box: tuple[tuple[int, int], ...]) -> Tensor:
    """Read a box of a shard, given in the shard's own indices. Padding of the shard is not in the state, and 0."""
    ranges = tuple(cut(held, *wanted) for held, wanted in zip(shard.ranges, box, strict=True))
    shape = tuple(end - start for start, end in box)
    in_state = tuple(size_of(dim) for dim in ranges)
    if in_state == shape:
        return state.read(name, kind=kind, ranges=ranges)
    part = torch.zeros(shape)
    if 0 not in in_state:
        part[tuple(slice(0, size) for size in in_state)] = state.read(name, kind=kind, ranges=ranges)
    return part


def _check_tensors(state: TrainingState, shapes: Mapping[str, tuple[int, ...]], *, checkpoint: Checkpoint) -> None:
    found = state.shapes()
    missing, unexpected = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    misshapen = sorted(name for name in shapes.keys() & found.keys() if shapes[name] != tuple(found[name]))
    if missing or unexpected or misshapen:
        raise CheckpointBrokenError(
            checkpoint.folder,
            f"its tensors are not those of the model: {len(missing)} are missing {missing[:3]}, {len(unexpected)} are "
            f"unexpected {unexpected[:3]}, {len(misshapen)} are of another shape {misshapen[:3]}",
        )


def _check_moments(state: TrainingState, tensors: Mapping[str, Tensor], *, checkpoint: Checkpoint) -> None:
    frozen = sorted(name for name, tensor in tensors.items() if tensor.requires_grad and len(state.kinds(name)) == 1)
    if frozen:
        raise ValueError(
            f"{len(frozen)} parameters are to be trained that were frozen when {checkpoint.folder} was saved, among "
            f"them {frozen[:3]}, so it has no optimizer state for them; freeze them again, or begin a new run from its "
            "hf/ folder with --model_name_or_path"
        )


def _difference(engine: Engine, checkpoint: Checkpoint, *, details: Mapping[str, Any], ranks: Ranks) -> str | None:
    """Say why DeepSpeed cannot load its files itself; None where it can. Collective."""
    folder, then = checkpoint.folder, checkpoint.details
    if not on_first((folder / NATIVE_FOLDER).is_dir, ranks=ranks):
        return f"whole tensors as {_layout_words(details)}"
    if any(then[name] != details[name] for name in LAYOUT):
        return f"{_layout_words(then)} as {_layout_words(details)}"
    same = on_every(lambda: read_rank_file(folder, ranks.rank).partition == describe_partition(engine), ranks=ranks)
    if all(ranks.gather(same)):
        return None
    optimizer = on_first(lambda: read_rank_file(folder, 0).partition.optimizer, ranks=ranks)
    now = type(engine.ds.optimizer).__name__
    return f"{_layout_words(details)} with other parts on the ranks ({optimizer} then, {now} now)"


def _layout_words(details: Mapping[str, Any]) -> str:
    return "dp={dp} tp={tp} ep={ep} ZeRO-{zero_stage} {precision}".format(**details)
