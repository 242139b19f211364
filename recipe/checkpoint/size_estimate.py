"""How many bytes a checkpoint will take on the disk, counted from the model before anything has been trained."""

import math
from typing import NamedTuple

import torch

from modeling.init import full_shapes, shard_table, stored_tensors
from recipe.engine.engine import Engine
from recipe.shared.ranks import Ranks

MASTER_BYTES = 3 * 4  # of a trained number under ZeRO: float32 copy and two moments
BYTES_PER_ENTRY = 512  # what torch.save and the rank files take to name and describe a tensor
RANK_FILE_BYTES = 16 * 1024  # random states
SCRIPTS_BYTES = 40 * 1024  # two programs that DeepSpeed adds to a checkpoint


class CheckpointSize(NamedTuple):
    """Of all ranks together: what resuming needs, and the weights under hf/, 0 where there are none."""

    native_bytes: int
    hf_bytes: int

    def total_bytes(self, *, with_hf: bool) -> int:
        return self.native_bytes + (self.hf_bytes if with_hf else 0)


def estimate_size(engine: Engine, *, hf_dtype: torch.dtype | None, ranks: Ranks) -> CheckpointSize:
    """Count what DeepSpeed's files and the weights in `hf_dtype` will take. Collective.

    Tensors are counted as they are; their descriptions and the small files by rules of thumb, so that the result is
    close where tensors dominate. A tokenizer is not counted.
    """
    native_bytes = sum(ranks.gather(_rank_bytes(engine))) + SCRIPTS_BYTES
    return CheckpointSize(native_bytes, 0 if hf_dtype is None else _hf_bytes(engine, hf_dtype))


def _rank_bytes(engine: Engine) -> int:
    """What this rank writes, below hf/ aside."""
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
    """ZeRO-3 may have left an empty tensor behind."""
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
