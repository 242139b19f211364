"""Weights from a Hugging Face folder into this rank's shards, reading only the bytes they need."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from modeling.config import GatherMoeConfig
from modeling.hf_keys import FileTensor, file_tensors
from modeling.init import full_shapes, shard_table, stored_tensors
from modeling.mesh import ParallelMesh
from modeling.shard_table import Ranges, Shard
from recipe.checkpoint.hf_weights import INDEX_NAME


def load_weights(model: nn.Module, *, config: GatherMoeConfig, mesh: ParallelMesh, folder: Path) -> int:
    """Fill every tensor of `model`; returns the bytes read. ValueError lists missing and unexpected tensors.

    Routers' biases that are new to a model, which its configuration says, stay at 0.
    """
    source = _Folder(folder)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model_type, stored = described["model_type"], stored_tensors(model)
    table = shard_table(config, mesh)
    shapes = full_shapes(model, config=config, table=table)
    if not described.get("router_bias", False):
        shapes = {name: shape for name, shape in shapes.items() if isinstance(stored[name], nn.Parameter)}
    wanted = {name: file_tensors(name, num_experts=config.num_experts, model_type=model_type) for name in shapes}
    source.check({target.name for targets in wanted.values() for target in targets})
    for name, targets in wanted.items():
        shard = table.shard(name, shapes[name], group_rank=mesh.group_rank)
        parameter = stored[name]
        with torch.no_grad():
            if targets[0].expert is None:
                _fill(parameter, source.read(targets[0].name, shard.ranges, expected=shapes[name]))
            else:
                _fill_experts(parameter, targets, shard, source)
    return source.num_bytes


def _fill(parameter: Tensor, part: Tensor) -> None:
    """Copy into the real part of a parameter, what is padding stays 0."""
    parameter.zero_()
    parameter[tuple(slice(0, size) for size in part.shape)].copy_(part)


def _fill_experts(parameter: Tensor, targets: list[FileTensor], shard: Shard, source: "_Folder") -> None:
    """Each expert is a file tensor of its own; gate and up are two, the halves of our fused rows."""
    first, last = shard.ranges[0][0]
    _, rows, columns = shard.full_shape
    for target in targets:
        assert target.expert is not None
        if not first <= target.expert < last:
            continue
        local = parameter[target.expert - first]
        if target.half is None:
            local.copy_(source.read(target.name, shard.ranges[1:], expected=(rows, columns)))
            continue
        start, end = shard.ranges[1][0]  # the rows of gate here; those of up are the same, counted from its start
        part = source.read(target.name, (((start, end),), shard.ranges[2]), expected=(rows // 2, columns))
        width = shard.shape[1] // 2
        local[target.half * width : (target.half + 1) * width].copy_(part)


class _Folder:
    """The safetensors of a folder, opened as needed; counts what it reads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._file_of = _find_tensors(folder)
        self.num_bytes = 0

    def check(self, wanted: set[str]) -> None:
        missing, unexpected = sorted(wanted - self._file_of.keys()), sorted(self._file_of.keys() - wanted)
        if missing or unexpected:
            raise ValueError(
                f"the weights in {self._folder} are not those of its config.json: {len(missing)} are missing "
                f"{missing[:3]}, {len(unexpected)} are unexpected {unexpected[:3]}"
            )

    def read(self, name: str, ranges: tuple[Ranges, ...], *, expected: tuple[int, ...]) -> Tensor:
        """A part of a tensor: per dimension one range. Nothing outside it is read."""
        part = self._reader(self._file_of[name]).get_slice(name)
        if tuple(part.get_shape()) != expected:
            raise ValueError(f"{name} in {self._folder} has the shape {part.get_shape()}, expected {list(expected)}")
        tensor: Tensor = part[tuple(slice(*dim[0]) for dim in ranges)]
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def _reader(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        return self._open[file]


def _find_tensors(folder: Path) -> dict[str, str]:
    """Tensor name to file name, from the index or the single file."""
    index = folder / INDEX_NAME
    if index.exists():
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    single = folder / "model.safetensors"
    if not single.exists():
        raise ValueError(f"{folder} holds neither {INDEX_NAME} nor model.safetensors")
    with safe_open(single, framework="pt") as reader:
        return dict.fromkeys(reader.keys(), single.name)
