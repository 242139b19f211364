"""Weights loaded from a Hugging Face folder into this rank's shards, reading only the bytes they need.

Each of our parameters is found under the tensor names of the folder, one file or many, whichever way it stores its
experts.

From a dense model every expert starts as its feed-forward: with weights that sum to 1 the mixture is the same function,
whatever the fresh router chooses (sparse upcycling, 2212.05055).
"""

import itertools
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from modeling.config import FileTensor, GatherMoeConfig, file_tensors
from modeling.init import fill_normal, full_shapes, shard_table, stored_tensors
from modeling.mesh import ParallelMesh
from modeling.shard_table import Ranges, Shard
from recipe.hf.weights import INDEX_NAME
from recipe.settings.model_files import DENSE_TYPES

SINGLE_NAME = "model.safetensors"
# Tables of the rotary embedding, which older programs saved as buffers; they follow from the configuration.
FOLLOW_FROM_CONFIG = re.compile(r"(^|\.)rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")


class HfFolder:
    """Reads tensors of a folder by name; `num_bytes` counts what was read so far.

    ValueError where the folder holds no safetensors, or where they cannot be read or are not those of its index.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.num_bytes = 0
        self._open: dict[str, Any] = {}
        self._file_of = self._find_tensors()

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def check(self, wanted: set[str], *, allowed: Collection[str] = ()) -> None:
        """Raise ValueError unless all `wanted` tensors are there, and no others but `allowed` and rotary tables."""
        found = {name for name in self._file_of if not FOLLOW_FROM_CONFIG.search(name)}
        missing, unexpected = sorted(wanted - found), sorted(found - wanted - set(allowed))
        if missing or unexpected:
            raise ValueError(
                f"the weights in {self.path} are not those of its config.json: {len(missing)} are missing "
                f"{missing[:3]}, {len(unexpected)} are unexpected {unexpected[:3]}"
            )

    def read(self, name: str, ranges: tuple[Ranges, ...], *, expected: tuple[int, ...]) -> Tensor:
        """Read a part of a tensor, whose whole shape is `expected`: per dimension these ranges, concatenated."""
        try:
            part = self._reader(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{self.path / self._file_of[name]} does not hold {name}: {error}") from error
        if tuple(part.get_shape()) != expected:
            raise ValueError(f"{name} in {self.path} has the shape {part.get_shape()}, expected {list(expected)}")
        tensor = _join(part, ranges)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def _reader(self, file: str) -> Any:
        path = self.path / file
        if file not in self._open:
            try:
                self._open[file] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(
                    f"{path} ({path.stat().st_size:,} bytes) cannot be read as safetensors: {error}; where git fetched "
                    "the folder, `git lfs pull` brings the files themselves"
                ) from error
        return self._open[file]

    def _find_tensors(self) -> dict[str, str]:
        """Map tensor name to file name, from the index or the single file."""
        index = self.path / INDEX_NAME
        if not index.exists():
            if not (self.path / SINGLE_NAME).exists():
                raise ValueError(f"{self.path} holds neither {INDEX_NAME} nor {SINGLE_NAME}")
            return dict.fromkeys(self._reader(SINGLE_NAME).keys(), SINGLE_NAME)
        file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if (self.path / SINGLE_NAME).exists() and set(file_of.values()) != {SINGLE_NAME}:
            raise ValueError(
                f"{self.path} holds both {INDEX_NAME} and {SINGLE_NAME}, and transformers opens the second alone; "
                "remove the one that is not the model, a left-over of an earlier save, say"
            )
        missing = missing_files(self.path)
        if missing:
            raise ValueError(f"{index} names {len(missing)} files that are not there: {missing[:3]}")
        return file_of


def missing_files(folder: Path) -> list[str]:
    """Return the files of weights that a folder lacks: of its index, or the single one where it has no index."""
    index = folder / INDEX_NAME
    names = [SINGLE_NAME]
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return [name for name in names if not (folder / name).exists()]


def _join(part: Any, ranges: tuple[Ranges, ...]) -> Tensor:
    """Read several ranges of a safetensors slice, which by itself gives one range per dimension."""
    several = [dim for dim, parts in enumerate(ranges) if len(parts) > 1]
    assert len(several) <= 1, "no parameter is cut in several blocks of two dimensions"
    pieces: list[Tensor] = [part[tuple(slice(*r) for r in choice)] for choice in itertools.product(*ranges)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=several[0])


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Style = Literal["per expert", "stacked", "dense"]
_EXPERTS = re.compile(r"(?P<mlp>.*\.mlp)\.experts\.(?P<matrix>gate_up_proj|down_proj)")
_ROUTER = re.compile(r".*\.mlp\.gate\.\w+")


class ExpertNoise(NamedTuple):
    """Normal noise on the experts made of a dense model, drawn from (seed, parameter name, global index)."""

    std: float
    seed: int


def _tensors_of(name: str, *, model_type: str, style: Style, num_experts: int) -> list[FileTensor]:
    """Return what our parameter `name` is read from; nothing for the router of a dense folder.

    "per expert"  a tensor per matrix of an expert, as published
    "stacked"     all experts of a layer in one tensor, under our own names, as transformers holds them in memory and
                  saves them with `save_original_format=False`
    "dense"       one feed-forward, of which every expert is made
    """
    if style == "per expert":
        return file_tensors(name, num_experts=num_experts, model_type=model_type)
    if style == "dense" and _ROUTER.fullmatch(name):
        return []
    experts = _EXPERTS.fullmatch(name)
    if experts is None:
        return [FileTensor(name)]
    if style == "stacked":
        return [FileTensor(name, expert) for expert in range(num_experts)]
    halves = {"gate_proj": 0, "up_proj": 1} if experts["matrix"] == "gate_up_proj" else {"down_proj": None}
    return [
        FileTensor(f"{experts['mlp']}.{matrix}.weight", expert, half)
        for matrix, half in halves.items()
        for expert in range(num_experts)
    ]


def load_weights(
    model: nn.Module,
    *,
    config: GatherMoeConfig,
    mesh: ParallelMesh,
    folder: Path,
    noise: ExpertNoise | None = None,
) -> int:
    """Fill every tensor of `model`; return the bytes read. ValueError lists missing and unexpected tensors.

    Tensors that a folder does not have stay as `model` was initialised: the routers where experts are made of a dense
    model's feed-forward (`noise` is added to these experts), and routers' biases where its configuration has none.
    """
    files = HfFolder(folder)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = stored_tensors(model)
    table = shard_table(config, mesh)
    shapes = full_shapes(model, config=config, table=table)
    if not described.get("router_bias", False):
        shapes = {name: shape for name, shape in shapes.items() if isinstance(stored[name], nn.Parameter)}
    style: Style = "dense" if described["model_type"] in DENSE_TYPES else "per expert"
    if style == "per expert" and any(_EXPERTS.fullmatch(name) and name in files for name in shapes):
        style = "stacked"
    origins = {
        name: _tensors_of(name, model_type=described["model_type"], style=style, num_experts=config.num_experts)
        for name in shapes
    }
    twice = [HEAD] if config.tie_word_embeddings else []
    files.check({tensor.name for found in origins.values() for tensor in found}, allowed=twice)
    for name, found in origins.items():
        shard = table.shard(name, shapes[name], group_rank=mesh.group_rank)
        parameter = stored[name]
        with torch.no_grad():
            if not found:
                continue
            if found[0].expert is None:
                _fill(parameter, files.read(found[0].name, shard.ranges, expected=shapes[name]))
                if name == EMBEDDING and config.tie_word_embeddings and HEAD in files:
                    _check_head(parameter, files.read(HEAD, shard.ranges, expected=shapes[name]), folder=folder)
                continue
            drawn = style == "dense" and noise is not None and noise.std > 0
            if drawn:
                assert noise is not None
                fill_normal(parameter, name=f"{name}.noise", shard=shard, seed=noise.seed, std=noise.std)
            _fill_experts(parameter, found, shard=shard, files=files, is_stacked=style == "stacked", add=drawn)
    return files.num_bytes


def _fill(parameter: Tensor, part: Tensor) -> None:
    """Copy into the real part of a parameter; padding is 0."""
    parameter.zero_()
    parameter[tuple(slice(0, size) for size in part.shape)].copy_(part)


def _check_head(embedding: Tensor, head: Tensor, *, folder: Path) -> None:
    """Raise ValueError unless a head stored beside the embedding it is tied to is equal to it."""
    if not torch.equal(embedding[: head.shape[0]], head.to(embedding)):
        raise ValueError(f"{HEAD} in {folder} is not {EMBEDDING}, although its config.json says tie_word_embeddings")


def _fill_experts(
    parameter: Tensor, tensors: list[FileTensor], *, shard: Shard, files: HfFolder, is_stacked: bool, add: bool
) -> None:
    """Fill the local experts [e, 2f, D] or [e, D, f] from tensors of the folder, or `add` these to what is there."""
    first, last = shard.ranges[0][0]
    was_read = None
    for name, expert, half in tensors:
        assert expert is not None
        if not first <= expert < last:
            continue
        ranges, expected = shard.ranges[1:], shard.full_shape[1:]
        if is_stacked:
            ranges, expected = (((expert, expert + 1),), *ranges), shard.full_shape
        if half is not None:
            # The first range is gate's; the rows of up are the same, counted from its own start.
            ranges, expected = (ranges[0][:1], *ranges[1:]), (expected[0] // 2, *expected[1:])
        if (name, ranges) != was_read:  # a dense feed-forward is read once for all experts
            part, was_read = files.read(name, ranges, expected=expected), (name, ranges)
        local = parameter[expert - first]
        if half is not None:
            local = local.chunk(2)[half]
        if add:
            local.add_(part.to(local.device))
        else:
            local.copy_(part.view(local.shape))
