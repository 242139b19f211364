"""Weights from a Hugging Face folder into this rank's shards, reading only the bytes they need.

From a dense model every expert starts as its feed-forward: with weights that sum to 1 the mixture is the same function,
whatever the fresh router chooses (sparse upcycling, 2212.05055).
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from modeling.config import GatherMoeConfig
from modeling.init import fill_normal, full_shapes, shard_table, stored_tensors
from modeling.mesh import ParallelMesh
from modeling.shard_table import Ranges, Shard
from recipe.hf.folder import HfFolder
from recipe.hf.places import Place, find_source

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class ExpertNoise(NamedTuple):
    """Normal noise on the experts made of a dense model, drawn from (seed, parameter name, global index)."""

    std: float
    seed: int


def load_weights(
    model: nn.Module,
    *,
    config: GatherMoeConfig,
    mesh: ParallelMesh,
    folder: Path,
    noise: ExpertNoise | None = None,
) -> int:
    """Fill every tensor of `model`; returns the bytes read. ValueError lists missing and unexpected tensors.

    What a folder has not, stays as `model` was initialised: the routers where a dense model gets experts, which get
    `noise`, and routers' biases that are new to a model, which its configuration says.
    """
    files = HfFolder(folder)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = stored_tensors(model)
    table = shard_table(config, mesh)
    shapes = full_shapes(model, config=config, table=table)
    if not described.get("router_bias", False):
        shapes = {name: shape for name, shape in shapes.items() if isinstance(stored[name], nn.Parameter)}
    source = find_source(files, wanted=list(shapes), model_type=described["model_type"], num_experts=config.num_experts)
    places = {name: source.places(name) for name in shapes}
    twice = [HEAD] if config.tie_word_embeddings else []
    files.check({place.tensor for found in places.values() for place in found}, allowed=twice)
    for name, found in places.items():
        shard = table.shard(name, shapes[name], group_rank=mesh.group_rank)
        parameter = stored[name]
        with torch.no_grad():
            if not found:
                continue
            if found[0].experts is None:
                _fill(parameter, files.read(found[0].tensor, shard.ranges, expected=shapes[name]))
                if name == EMBEDDING and config.tie_word_embeddings and HEAD in files:
                    _check_head(parameter, files.read(HEAD, shard.ranges, expected=shapes[name]), folder=folder)
                continue
            drawn = source.style == "dense" and noise is not None and noise.std > 0
            if drawn:
                assert noise is not None
                fill_normal(parameter, name=f"{name}.noise", shard=shard, seed=noise.seed, std=noise.std)
            for place in found:
                _fill_experts(parameter, place, shard=shard, files=files, add=drawn)
    return files.num_bytes


def _fill(parameter: Tensor, part: Tensor) -> None:
    """Copy into the real part of a parameter, what is padding stays 0."""
    parameter.zero_()
    parameter[tuple(slice(0, size) for size in part.shape)].copy_(part)


def _check_head(embedding: Tensor, head: Tensor, *, folder: Path) -> None:
    """Some folders hold tied weights twice, which is fine where they are equal."""
    if not torch.equal(embedding[: head.shape[0]], head.to(embedding.dtype)):
        raise ValueError(f"{HEAD} in {folder} is not {EMBEDDING}, although its config.json says tie_word_embeddings")


def _fill_experts(parameter: Tensor, place: Place, *, shard: Shard, files: HfFolder, add: bool) -> None:
    """What a tensor of the folder is of the local experts [e, 2f, D] or [e, D, f]; `add` to what is there already."""
    first, last = shard.ranges[0][0]
    assert place.experts is not None
    mine = [expert for expert in place.experts if first <= expert < last]
    if not mine:
        return
    if place.stacked:
        for expert in mine:
            part = files.read(place.tensor, (((expert, expert + 1),), *shard.ranges[1:]), expected=shard.full_shape)
            parameter[expert - first].copy_(part[0])
        return
    rows, expected = _rows(place, shard)
    part = files.read(place.tensor, (rows, shard.ranges[2]), expected=expected)
    for expert in mine:
        local = parameter[expert - first]
        if place.half is not None:
            local = local.chunk(2)[place.half]
        if add:
            local.add_(part)
        else:
            local.copy_(part)


class _Rows(NamedTuple):
    """Which rows of a matrix of one expert are here, and the shape of the whole matrix."""

    rows: Ranges
    expected: tuple[int, int]


def _rows(place: Place, shard: Shard) -> _Rows:
    _, num_rows, num_columns = shard.full_shape
    if place.half is None:
        return _Rows(shard.ranges[1], (num_rows, num_columns))
    # The first range is gate's; the rows of up are the same, counted from its own start.
    return _Rows(shard.ranges[1][:1], (num_rows // 2, num_columns))
