"""A checkpoint's training state opened in either form, and DeepSpeed's own files read as whole tensors.

Any part of a tensor is read, on any machine, without an engine. Only files that hold some of the part are opened and
mapped into memory; other pages of them are not read.
"""

from collections.abc import Mapping
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modeling.layout import ParallelLayout
from modeling.shard_table import Ranges, Shard, ShardTable
from recipe.checkpoint.rank_files import Position, rank_path, read_rank_file
from recipe.checkpoint.training_state import (
    KINDS,
    NATIVE_FOLDER,
    WEIGHT,
    WHOLE_FOLDER,
    TrainingState,
    WholeTensors,
    boxes_between,
    copy_overlap,
    cut,
    empty_part,
    overlaps,
)
from recipe.shared.errors import CheckpointBrokenError


def open_training_state(folder: Path, *, details: Mapping[str, Any]) -> TrainingState:
    """Open the state in a checkpoint's folder, in DeepSpeed's files or whole tensors; `details` are its manifest's.

    Needs no process group and no engine. Raises CheckpointBrokenError where neither form is there.
    """
    if (folder / NATIVE_FOLDER).is_dir():
        return NativeFiles(folder, details=details)
    if (folder / WHOLE_FOLDER).is_dir():
        return WholeTensors(folder / WHOLE_FOLDER)
    raise CheckpointBrokenError(folder, f"holds neither {NATIVE_FOLDER}/ nor {WHOLE_FOLDER}/")


class NativeFiles:
    """The TrainingState in a checkpoint's deepspeed/ and ranks/.

    A parameter's numbers are found by the positions that ranks noted when they saved (recipe/checkpoint/rank_files.py).
    """

    def __init__(self, folder: Path, *, details: Mapping[str, Any]) -> None:
        """`details` are those of the manifest. CheckpointBrokenError where a file that is needed is missing or odd."""
        self._folder = folder
        self._layout = ParallelLayout(dp=details["dp"], tp=details["tp"], ep=details["ep"])
        self._stage = int(details["zero_stage"])
        self._prefix = "bf16_" if details["precision"] == "bf16" else ""
        self._table = ShardTable(self._layout, details["model.num_key_value_heads"], details["model.qk_norm"])
        self._contents: dict[str, Any] = {}
        self._rank_file = cache(partial(read_rank_file, folder))
        first = self._rank_file(0).partition
        self._trained = first.positions.keys()
        self._shapes = {
            name: self._table.full_shape(name, tuple(shape), vocab_size=details["model.vocab_size"])
            for name, shape in first.shapes.items()
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def kinds(self, name: str) -> tuple[str, ...]:
        return KINDS if name in self._trained else (WEIGHT,)

    @cached_property
    def step(self) -> float:
        """Return AdamW's step counter.

        CheckpointBrokenError where it is not the same for all parameters, or missing though the run took steps.
        """
        file, states = self._optimizer_states(dp_rank=0, group_rank=0)
        steps = {float(state["step"]) for state in states.values() if "step" in state}
        if len(steps) > 1:
            reason = f"its parameters took different numbers of steps: {sorted(steps)}"
            raise CheckpointBrokenError(self._path(file), reason)
        counters = self._rank_file(0).counters
        taken = counters["global_steps"] - counters["skipped_steps"]
        if not steps and taken:
            raise CheckpointBrokenError(self._path(file), f"has no optimizer state, though the run took {taken} steps")
        return steps.pop() if steps else 0.0

    def read(self, name: str, *, kind: str, ranges: tuple[Ranges, ...]) -> Tensor:
        """Read a part into memory of its own, the only memory that this takes."""
        part = empty_part(ranges)
        if kind != WEIGHT and not self.step:
            return part.zero_()
        num_read = 0
        for group_rank in range(self._layout.tp):
            shard = self._table.shard(name, self._shapes[name], group_rank=group_rank)
            if not shard.replica:
                num_read += self._read_shard(part, name, kind=kind, ranges=ranges, group_rank=group_rank, shard=shard)
        assert num_read == part.numel(), (name, ranges)
        return part

    def _read_shard(
        self, part: Tensor, name: str, *, kind: str, ranges: tuple[Ranges, ...], group_rank: int, shard: Shard
    ) -> int:
        """Write into `part` what the ranks with this shard held of it; return how many elements that are."""
        by_dim = [overlaps(wanted, held) for wanted, held in zip(ranges, shard.ranges, strict=True)]
        if not all(by_dim):
            return 0
        num_read, num_wanted = 0, prod(sum(overlap.width for overlap in dim) for dim in by_dim)
        numel, row_numel = prod(shard.shape), prod(shard.shape[1:])
        first_row = min(overlap.source for overlap in by_dim[0])
        end_row = max(overlap.source + overlap.width for overlap in by_dim[0])
        position, where = self._holding(name, group_rank=group_rank, numel=numel)
        for dp_rank in position.holders(first_row * row_numel, end_row * row_numel, dp=self._layout.dp):
            piece = position.piece(dp_rank, numel=numel)
            start = piece.start
            for box in boxes_between(shard.shape, piece.offset, piece.offset + piece.numel):
                sizes = [end - begin for begin, end in box]
                held = [cut(of_shard, *span) for of_shard, span in zip(shard.ranges, box, strict=True)]
                shared = tuple(overlaps(wanted, of_box) for wanted, of_box in zip(ranges, held, strict=True))
                if all(shared):
                    flat = self._flat(name, where, position.group, kind=kind, dp_rank=dp_rank, group_rank=group_rank)
                    numbers = flat[start : start + prod(sizes)]
                    if len(numbers) == prod(sizes):  # else the file is too short, which the count shows
                        num_read += copy_overlap(part, numbers.view(sizes), shared)
                start += prod(sizes)
        if num_read != num_wanted:
            reason = f"of {name}, {num_read:,} of {num_wanted:,} elements are in the files"
            raise CheckpointBrokenError(rank_path(self._folder, group_rank), reason)
        return num_read

    def _holding(self, name: str, *, group_rank: int, numel: int) -> tuple[Position, str]:
        """Return how the data-parallel ranks hold a tensor, and under which entry of their files its weight is."""
        if name in self._trained:
            where = "optimizer_state_dict" if self._stage else "module"
            return self._rank_file(group_rank).partition.positions[name], where
        if self._stage == 3:
            file = self._model_file(dp_rank=0, group_rank=group_rank)
            if name not in self._entry(file, "buffer_names"):
                return Position(0, 0, width=-(-numel // self._layout.dp), first=0), "frozen_param_fragments"
        return Position(0, 0, width=numel, first=0), "module"

    def _flat(self, name: str, where: str, group: int, *, kind: str, dp_rank: int, group_rank: int) -> Tensor:
        """Return the flat tensor of a rank that has its numbers of a tensor."""
        if kind != WEIGHT:
            file, states = self._optimizer_states(dp_rank=dp_rank, group_rank=group_rank)
            moment: Tensor | None = states.get(group, {}).get(kind)
            if moment is None:
                reason = f"has no {kind} of the optimizer's tensor {group}, though it took {self.step:g} steps"
                raise CheckpointBrokenError(self._path(file), reason)
            return moment.reshape(-1)
        if where == "optimizer_state_dict":
            file = self._optimizer_file(dp_rank=dp_rank, group_rank=group_rank)
            groups = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
            weight: Tensor = self._entry(file, where, groups, group)
        else:
            weight = self._entry(self._model_file(dp_rank=dp_rank, group_rank=group_rank), where, name)
        return weight.reshape(-1)

    def _optimizer_states(self, *, dp_rank: int, group_rank: int) -> tuple[str, Mapping[int, Mapping[str, Any]]]:
        """Return the file of a rank's optimizer, and in it the state of its tensors by their number."""
        if self._stage == 0:
            file = self._model_file(dp_rank=dp_rank, group_rank=group_rank)
            return file, self._entry(file, "optimizer", "state")
        file = self._optimizer_file(dp_rank=dp_rank, group_rank=group_rank)
        inner = "optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"
        return file, self._entry(file, "optimizer_state_dict", inner, "state")

    def _optimizer_file(self, *, dp_rank: int, group_rank: int) -> str:
        return f"{self._prefix}zero_pp_rank_{dp_rank}_mp_rank_{group_rank:02d}_optim_states.pt"

    def _model_file(self, *, dp_rank: int, group_rank: int) -> str:
        part = f"zero_pp_rank_{dp_rank}_" if self._stage == 3 else ""
        return f"{part}mp_rank_{group_rank:02d}_model_states.pt"

    def _entry(self, file: str, *keys: Any) -> Any:
        """Return what stands in a file under these keys, each inside the one before."""
        if file not in self._contents:
            path = self._path(file)
            try:
                self._contents[file] = dict(torch.load(path, mmap=True, weights_only=False, map_location="cpu"))
            except FileNotFoundError as error:
                raise CheckpointBrokenError(path, "missing") from error
            except Exception as error:  # whatever the unpickler makes of other content
                raise CheckpointBrokenError(path, f"is not a file of DeepSpeed's ({error!r})") from error
        found = self._contents[file]
        for key in keys:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError) as error:
                raise CheckpointBrokenError(self._path(file), f"has no entry {key!r} where DeepSpeed has it") from error
        return found

    def _path(self, file: str) -> Path:
        return self._folder / NATIVE_FOLDER / file
