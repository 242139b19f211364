"""A checkpoint's training state opened in either form, and DeepSpeed's own files read as whole tensors.

Any part of a tensor is read, on any machine, without an engine. Only files that hold some of the part are opened and
mapped into memory; other pages of them are not read.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling.layout import ParallelLayout
from modeling.shard_table import Ranges, ShardTable
from recipe.checkpoint.rank_files import Partition, Position, rank_path, read_rank_file
from recipe.checkpoint.training_state import (
    KINDS,
    NATIVE_FOLDER,
    WEIGHT,
    WHOLE_FOLDER,
    Overlap,
    TrainingState,
    copy_run,
    empty_part,
    overlaps,
)
from recipe.checkpoint.whole import WholeTensors
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


class _Run(NamedTuple):
    """Elements of a shard, flattened, from `begin` on."""

    numbers: Tensor
    begin: int


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
        file = read_rank_file(folder, 0)
        first, self._counters = file.partition, file.counters
        self._partitions = {0: first}
        self._trained = first.positions.keys()
        self._shapes = {
            name: self._table.full_shape(name, tuple(shape), vocab_size=details["model.vocab_size"])
            for name, shape in first.shapes.items()
        }
        self.num_bytes = 0

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
        taken = self._counters.global_steps - self._counters.skipped_steps
        if not steps and taken:
            raise CheckpointBrokenError(self._path(file), f"has no optimizer state, though the run took {taken} steps")
        return steps.pop() if steps else 0.0

    def read(self, name: str, *, kind: str, ranges: tuple[Ranges, ...]) -> Tensor:
        """Read a part into memory of its own, the only memory that this takes."""
        part = empty_part(ranges)
        found = 0
        for group_rank in range(self._layout.tp):
            shard = self._table.shard(name, self._shapes[name], group_rank=group_rank)
            by_dim = tuple(overlaps(wanted, held) for wanted, held in zip(ranges, shard.ranges, strict=True))
            if shard.replica:
                continue
            for box in product(*by_dim):
                target = part[tuple(slice(dim.target, dim.target + dim.width) for dim in box)]
                self._fill(target, name, kind=kind, group_rank=group_rank, shape=shard.shape, box=box)
                found += target.numel()
        assert found == part.numel(), (name, ranges)
        self.num_bytes += part.nbytes
        return part

    def _fill(
        self, target: Tensor, name: str, *, kind: str, group_rank: int, shape: tuple[int, ...], box: Sequence[Overlap]
    ) -> None:
        """Read the box of an old rank's shard of `shape`."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        begin = sum(dim.source * stride for dim, stride in zip(box, strides, strict=True))
        end = sum((dim.source + dim.width - 1) * stride for dim, stride in zip(box, strides, strict=True)) + 1
        runs = self._runs(name, kind=kind, group_rank=group_rank, numel=math.prod(shape), wanted=range(begin, end))
        num_found = sum(copy_run(target, run.numbers, begin=run.begin, shape=shape, box=box) for run in runs)
        if num_found != target.numel():
            where = rank_path(self._folder, group_rank)
            reason = f"of {name}, {num_found:,} of {target.numel():,} elements are in the files"
            raise CheckpointBrokenError(where, reason)

    def _runs(self, name: str, *, kind: str, group_rank: int, numel: int, wanted: range) -> Iterator[_Run]:
        """Yield the `wanted` ones of the `numel` elements of a rank's shard; files that hold none are not opened."""
        position = self._position(name, group_rank=group_rank, numel=numel)
        if position is None:
            numbers = self._replicated(name, kind=kind, group_rank=group_rank)
            yield _Run(_zeros(numel) if numbers is None else numbers.reshape(-1), 0)
            return
        for dp_rank in position.holders(wanted.start, wanted.stop, dp=self._layout.dp):
            piece = position.piece(dp_rank, numel=numel)
            if name in self._trained:
                flat = self._flat(position.group, kind=kind, dp_rank=dp_rank, group_rank=group_rank)
            else:
                flat = self._frozen(name, dp_rank=dp_rank, group_rank=group_rank)
            numbers = _zeros(piece.numel) if flat is None else flat[piece.start :][: piece.numel]
            yield _Run(numbers, piece.offset)

    def _position(self, name: str, *, group_rank: int, numel: int) -> Position | None:
        """Return how the data-parallel ranks share a parameter; None where each has all of it."""
        if name in self._trained:
            return self._partition(group_rank).positions[name] if self._stage else None
        if self._stage < 3:
            return None
        file = self._model_file(dp_rank=0, group_rank=group_rank)
        is_buffer = name in self._entry(file, self._content(file), "buffer_names")
        return None if is_buffer else Position(group=0, start=0, width=-(-numel // self._layout.dp), first=0)

    def _replicated(self, name: str, *, kind: str, group_rank: int) -> Tensor | None:
        """Return what every data-parallel rank held alike; None for moments before the first step."""
        if kind != WEIGHT:
            return self._moment(
                self._partition(group_rank).positions[name].group, kind=kind, dp_rank=0, group_rank=group_rank
            )
        file = self._model_file(dp_rank=0, group_rank=group_rank)
        found: Tensor = self._entry(file, self._entry(file, self._content(file), "module"), name)
        return found

    def _frozen(self, name: str, *, dp_rank: int, group_rank: int) -> Tensor:
        """Return a rank's part of a parameter that ZeRO-3 does not train."""
        file = self._model_file(dp_rank=dp_rank, group_rank=group_rank)
        fragment: Tensor = self._entry(file, self._content(file).get("frozen_param_fragments"), name)
        return fragment.reshape(-1)

    def _flat(self, group: int, *, kind: str, dp_rank: int, group_rank: int) -> Tensor | None:
        """Return a flat tensor of a rank's optimizer under ZeRO; None for moments before the first step."""
        if kind != WEIGHT:
            return self._moment(group, kind=kind, dp_rank=dp_rank, group_rank=group_rank)
        file = self._optimizer_file(dp_rank=dp_rank, group_rank=group_rank)
        name = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        flat: Tensor = self._entry(
            file, self._entry(file, self._content(file).get("optimizer_state_dict"), name), group
        )
        return flat

    def _moment(self, number: int, *, kind: str, dp_rank: int, group_rank: int) -> Tensor | None:
        """Return a moment of the optimizer's tensor `number`; None before the first step, which means zeros."""
        file, states = self._optimizer_states(dp_rank=dp_rank, group_rank=group_rank)
        moment: Tensor | None = states.get(number, {}).get(kind)
        if moment is None and self.step:
            reason = f"has no {kind} of the optimizer's tensor {number}, though it took {self.step:g} steps"
            raise CheckpointBrokenError(self._path(file), reason)
        return moment

    def _optimizer_states(self, *, dp_rank: int, group_rank: int) -> tuple[str, Mapping[int, Mapping[str, Any]]]:
        """Return the file of a rank's optimizer, and in it the state of its tensors by their number."""
        if self._stage == 0:
            file = self._model_file(dp_rank=dp_rank, group_rank=group_rank)
            optimizer = self._content(file).get("optimizer")
        else:
            file = self._optimizer_file(dp_rank=dp_rank, group_rank=group_rank)
            name = "optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"
            optimizer = self._entry(file, self._content(file).get("optimizer_state_dict"), name)
        return file, self._entry(file, optimizer, "state")

    def _optimizer_file(self, *, dp_rank: int, group_rank: int) -> str:
        return f"{self._prefix}zero_pp_rank_{dp_rank}_mp_rank_{group_rank:02d}_optim_states.pt"

    def _model_file(self, *, dp_rank: int, group_rank: int) -> str:
        part = f"zero_pp_rank_{dp_rank}_" if self._stage == 3 else ""
        return f"{part}mp_rank_{group_rank:02d}_model_states.pt"

    def _entry(self, file: str, container: Any, key: Any) -> Any:
        try:
            return container[key]
        except (KeyError, IndexError, TypeError) as error:
            raise CheckpointBrokenError(self._path(file), f"has no entry {key!r} where DeepSpeed has it") from error

    def _content(self, file: str) -> dict[str, Any]:
        if file not in self._contents:
            path = self._path(file)
            try:
                self._contents[file] = dict(torch.load(path, mmap=True, weights_only=False, map_location="cpu"))
            except FileNotFoundError as error:
                raise CheckpointBrokenError(path, "missing") from error
            except Exception as error:  # whatever the unpickler makes of other content
                raise CheckpointBrokenError(path, f"is not a file of DeepSpeed's ({error!r})") from error
        return self._contents[file]

    def _path(self, file: str) -> Path:
        return self._folder / NATIVE_FOLDER / file

    def _partition(self, rank: int) -> Partition:
        if rank not in self._partitions:
            self._partitions[rank] = read_rank_file(self._folder, rank).partition
        return self._partitions[rank]


def _zeros(numel: int) -> Tensor:
    """Return `numel` zeros that share the memory of one."""
    return torch.zeros(()).expand(numel)
