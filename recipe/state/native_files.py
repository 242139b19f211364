"""DeepSpeed's own files of a checkpoint, read as whole tensors: any part, on any machine, without an engine.

Files are mapped into memory, and of them only the rows of the shards that overlap the asked part are touched.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling.layout import ParallelLayout
from modeling.shard_table import Ranges, Shard, ShardTable
from recipe.checkpoint.errors import CheckpointBrokenError
from recipe.state.rank_files import Partition, rank_path, read_rank_file
from recipe.state.training_state import (
    KINDS,
    NATIVE_FOLDER,
    WEIGHT,
    Overlap,
    copy_overlap,
    empty_part,
    overlaps,
)


class _Run(NamedTuple):
    """Elements of a rank's shard in one flat tensor: `offset` of the shard is `start` there; None is all zeros."""

    flat: Tensor | None
    start: int
    offset: int
    numel: int


class NativeFiles:
    """The TrainingState in a checkpoint's deepspeed/ and ranks/.

    A parameter's numbers are found by the pieces that every rank noted when it saved (recipe/state/rank_files.py).
    """

    def __init__(self, folder: Path, *, details: Mapping[str, Any]) -> None:
        """`details` are those of the manifest. CheckpointBrokenError where a file that is needed is missing or odd."""
        self._folder = folder
        self._layout = ParallelLayout(dp=details["dp"], tp=details["tp"], ep=details["ep"])
        self._stage = int(details["zero_stage"])
        self._prefix = "bf16_" if details["precision"] == "bf16" else ""
        self._table = ShardTable(self._layout, details["model.num_key_value_heads"], details["model.qk_norm"])
        self._partitions: dict[int, Partition] = {}
        self._contents: dict[str, Any] = {}
        first = self._partition(0)
        self._trained = first.pieces.keys()
        self._shapes = {
            name: self._table.full_shape(name, tuple(shape), vocab_size=details["model.vocab_size"])
            for name, shape in first.shapes.items()
        }
        self.num_bytes = 0

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As TrainingState."""
        return self._shapes

    def kinds(self, name: str) -> tuple[str, ...]:
        """As TrainingState."""
        return KINDS if name in self._trained else (WEIGHT,)

    @cached_property
    def step(self) -> float:
        """AdamW's step counter. CheckpointBrokenError where it is not the same for all parameters."""
        file, states = self._optimizer_states(dp_rank=0, group_rank=0)
        steps = {float(state["step"]) for state in states.values() if "step" in state}
        if len(steps) > 1:
            reason = f"its parameters took different numbers of steps: {sorted(steps)}"
            raise CheckpointBrokenError(self._path(file), reason)
        return steps.pop() if steps else 0.0

    def read(self, name: str, *, kind: str, ranges: tuple[Ranges, ...]) -> Tensor:
        """As TrainingState. Holds at most one old rank's shard beside the result, where that rank had it in parts."""
        part = empty_part(ranges)
        found = 0
        for group_rank in range(self._layout.tp):
            shard = self._table.shard(name, self._shapes[name], group_rank=group_rank)
            by_dim = tuple(overlaps(wanted, held) for wanted, held in zip(ranges, shard.ranges, strict=True))
            if shard.replica or not all(by_dim):
                continue
            runs = list(self._runs(name, kind=kind, group_rank=group_rank, numel=math.prod(shard.shape)))
            for rows in by_dim[0]:
                held = self._read_rows(runs, rows, shard=shard)
                copy_overlap(part, held, ([rows._replace(source=0)], *by_dim[1:]))
                self.num_bytes += held.numel() * held.element_size()
            found += math.prod(sum(overlap.width for overlap in dim) for dim in by_dim)
        assert found == part.numel(), (name, ranges)
        return part

    def _read_rows(self, runs: list[_Run], rows: Overlap, *, shard: Shard) -> Tensor:
        """Some rows of an old rank's shard."""
        row_numel = math.prod(shard.shape[1:])
        start, numel = rows.source * row_numel, rows.width * row_numel
        shape = (rows.width, *shard.shape[1:])
        out: Tensor | None = None
        for run in runs:
            first, last = max(start, run.offset), min(start + numel, run.offset + run.numel)
            if first >= last:
                continue
            here = torch.zeros(()).expand(last - first)
            if run.flat is not None:
                here = run.flat[run.start + first - run.offset :][: last - first]
            if last - first == numel:
                return here.view(shape)
            out = torch.empty(numel) if out is None else out
            out[first - start : last - start] = here
        assert out is not None
        return out.view(shape)

    def _runs(self, name: str, *, kind: str, group_rank: int, numel: int) -> Iterator[_Run]:
        """Where the `numel` elements of a rank's shard are, in any order."""
        covered = 0
        for run in self._held(name, kind=kind, group_rank=group_rank, numel=numel):
            covered += run.numel
            yield run
        if covered != numel:
            where = rank_path(self._folder, group_rank)
            raise CheckpointBrokenError(where, f"of {name}, {covered:,} of {numel:,} elements are in the files")

    def _held(self, name: str, *, kind: str, group_rank: int, numel: int) -> Iterator[_Run]:
        layout, trained = self._layout, name in self._trained
        if self._stage == 0 or not trained:
            yield from self._replicated(name, kind=kind, group_rank=group_rank, numel=numel)
            return
        for dp_rank in range(layout.dp):
            for piece in self._partition(dp_rank * layout.tp + group_rank).pieces[name]:
                flat = self._flat(piece.group, kind=kind, dp_rank=dp_rank, group_rank=group_rank)
                yield _Run(flat, piece.start, piece.offset, piece.numel)

    def _replicated(self, name: str, *, kind: str, group_rank: int, numel: int) -> Iterator[_Run]:
        """What every data-parallel rank held alike; but for what ZeRO-3 froze, which it cuts evenly."""
        if kind != WEIGHT:
            (piece,) = self._partition(group_rank).pieces[name]
            _, states = self._optimizer_states(dp_rank=0, group_rank=group_rank)
            moment = states.get(piece.group, {}).get(kind)
            yield _Run(None if moment is None else moment.reshape(-1), 0, 0, numel)
            return
        file = self._model_file(dp_rank=0, group_rank=group_rank)
        content = self._content(file)
        if self._stage < 3 or name in self._entry(file, content, "buffer_names"):
            yield _Run(self._entry(file, content["module"], name).reshape(-1), 0, 0, numel)
            return
        width = -(-numel // self._layout.dp)
        for dp_rank in range(self._layout.dp):
            file = self._model_file(dp_rank=dp_rank, group_rank=group_rank)
            fragment = self._entry(file, self._content(file).get("frozen_param_fragments"), name)
            offset = dp_rank * width
            yield _Run(fragment.reshape(-1), 0, offset, max(0, min(width, numel - offset)))

    def _flat(self, group: int, *, kind: str, dp_rank: int, group_rank: int) -> Tensor | None:
        """A flat tensor of a rank's optimizer under ZeRO; None for moments before the first step."""
        if kind != WEIGHT:
            _, states = self._optimizer_states(dp_rank=dp_rank, group_rank=group_rank)
            return states.get(group, {}).get(kind)
        file = self._optimizer_file(dp_rank=dp_rank, group_rank=group_rank)
        name = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        return self._entry(file, self._entry(file, self._content(file).get("optimizer_state_dict"), name), group)

    def _optimizer_states(self, *, dp_rank: int, group_rank: int) -> tuple[str, Mapping[int, Mapping[str, Any]]]:
        """The file of a rank's optimizer, and in it the state of its tensors by their number."""
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
