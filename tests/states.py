"""Training states that a test makes up, and checkpoints around them."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers.initialization import no_init_weights

from modeling.config import GatherMoeConfig
from modeling.init import stored_tensors
from modeling.mesh import one_rank_mesh
from modeling.model import GatherMoeForCausalLM
from modeling.shard_table import Ranges
from modeling.spec import DEFAULTS, LOSS_SETTINGS
from recipe.checkpoint.manifest import Manifest, file_sizes, record_file, write_manifest
from recipe.checkpoint.training_state import KINDS, MOMENTS, WEIGHT, TrainingState, everything, write_whole

Tensors = dict[str, Tensor]


def part_of(tensor: Tensor, ranges: tuple[Ranges, ...]) -> Tensor:
    """Per dimension these index ranges, concatenated."""
    for dim, spans in enumerate(ranges):
        tensor = torch.cat([tensor.narrow(dim, start, end - start) for start, end in spans], dim=dim)
    return tensor


class MemoryState:
    """A TrainingState out of tensors by "KIND/NAME", which counts the bytes that are read."""

    def __init__(self, tensors: Tensors, *, step: float = 3.0) -> None:
        self.tensors, self.step, self.num_bytes = tensors, step, 0

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        weights = {key.removeprefix("weight/"): t for key, t in self.tensors.items() if key.startswith("weight/")}
        return {name: tuple(tensor.shape) for name, tensor in weights.items()}

    def kinds(self, name: str) -> tuple[str, ...]:
        return tuple(kind for kind in KINDS if f"{kind}/{name}" in self.tensors)

    def read(self, name: str, *, kind: str, ranges: tuple[Ranges, ...]) -> Tensor:
        part = part_of(self.tensors[f"{kind}/{name}"], ranges)
        self.num_bytes += part.nbytes
        return part


def state_of(config: GatherMoeConfig) -> MemoryState:
    """What a run of this model would hold, with random numbers."""
    generator = torch.Generator().manual_seed(3)
    with no_init_weights():
        model = GatherMoeForCausalLM(config, mesh=one_rank_mesh())
    model.tie_weights()
    tensors: Tensors = {}
    for name, tensor in stored_tensors(model).items():
        kinds = KINDS if isinstance(tensor, torch.nn.Parameter) else (WEIGHT,)
        for kind in kinds:
            values = torch.randn(tensor.shape, generator=generator)
            tensors[f"{kind}/{name}"] = values.abs() if kind == MOMENTS[1] else values
    return MemoryState(tensors)


def pieces_of(num_bytes: int, *, file_bytes: int = 2**20) -> AbstractContextManager[object]:
    """States are read and written so many bytes at a time, and into files of at most so many."""
    sizes = ExitStack()
    sizes.enter_context(patch("recipe.checkpoint.training_state.PIECE_BYTES", num_bytes))
    sizes.enter_context(patch("recipe.checkpoint.tensor_file.MAX_FILE_BYTES", file_bytes))
    return sizes


def ignore(_: object) -> None:
    """Stands in for what follows progress."""


def read_all(state: TrainingState) -> Tensors:
    """Every tensor of a state, read as a whole."""
    return {
        f"{kind}/{name}": state.read(name, kind=kind, ranges=everything(shape))
        for name, shape in state.shapes().items()
        for kind in state.kinds(name)
    }


def assert_same(got: Tensors, want: Tensors) -> None:
    """Equal to the bit, and none more or less; an error names the first that is not."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def details_of(config: GatherMoeConfig, **changes: Any) -> dict[str, Any]:
    """Those of a run with one rank, as far as tools look at them."""
    model = {f"model.{name}": getattr(config, name) for name in (*DEFAULTS, *LOSS_SETTINGS)}
    run = {"dp": 1, "tp": 1, "ep": 1, "zero_stage": 2, "precision": "fp32", "block_size": 16, "max_steps": 9}
    return {**run, "position": 36, "tokens": 576, "num_train_blocks": 120, "data": ["tokens-1a2b"], **model, **changes}


def seal(folder: Path, *, step: int, details: dict[str, Any]) -> Path:
    """Make what lies in a folder a complete checkpoint."""
    files = {name: record_file(folder / name) for name in file_sizes(folder)}
    write_manifest(folder, Manifest(step=step, files=files, details=details))
    return folder


def save_whole(folder: Path, state: TrainingState, *, step: int = 3, details: dict[str, Any]) -> Path:
    """A complete checkpoint with a state of no layout, and small files as a run has them beside it."""
    for name in ("ranks", "hf"):
        (folder / name).mkdir(parents=True)
    (folder / "ranks" / "rank-00000.pt").write_bytes(b"a rank's own")
    (folder / "hf" / "config.json").write_text(json.dumps({"model_type": "mixtral", "dtype": "float32"}))
    (folder / "expert_counts.json").write_text("{}")
    write_whole(folder / "whole", state, advance=ignore)
    return seal(folder, step=step, details={**details, "format": "whole"})


def same_content(a: Path, b: Path) -> bool:
    """Whether two files of checkpoints hold the same, seconds aside."""
    if a.suffix != ".pt":
        return a.read_bytes() == b.read_bytes()
    return equal(*(torch.load(path, weights_only=False, map_location="cpu") for path in (a, b)))


def equal(a: Any, b: Any) -> bool:
    """Of the same build and with the same numbers, seconds aside."""
    if isinstance(a, torch.Tensor):
        return bool(type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a if key != "elapsed_s")
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if hasattr(a, "__dict__"):
        return type(a) is type(b) and equal(vars(a), vars(b))
    return bool(np.all(a == b))
