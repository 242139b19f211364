"""DeepSpeed's own files inside a checkpoint, and beside them each rank's random states."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from recipe.engine import Engine

TAG = "deepspeed"
RANK_FOLDER = "ranks"
OPTIMIZER_SETTINGS = ("betas", "eps", "weight_decay")
MOMENTS = ("exp_avg", "exp_avg_sq")


class _HoldingBack:
    """DeepSpeed's checkpoint engine, its errors kept until all ranks are through the barriers of a save.

    DeepSpeed's save has barriers behind its writes: a rank that raised at once, on a full disk say, would leave the
    others waiting there.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.error: Exception | None = None

    def save(self, state_dict: Any, path: str) -> Any:
        try:
            return self._inner.save(state_dict, path)
        except Exception as error:
            self.error = self.error or error
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def save_native(engine: Engine, folder: Path, *, rank_state: dict[str, Any]) -> None:
    """Write weights, optimizer state, this rank's random states and `rank_state` below `folder`. Collective."""
    inner = engine.ds.checkpoint_engine
    holding = _HoldingBack(inner)
    engine.ds.checkpoint_engine = holding
    try:
        engine.ds.save_checkpoint(str(folder), tag=TAG, save_latest=False)
    finally:
        engine.ds.checkpoint_engine = inner
    if holding.error is not None:
        raise holding.error
    (folder / RANK_FOLDER).mkdir(exist_ok=True)
    states = _random_states(engine.ds.device)
    torch.save({"random": states, "state": rank_state}, _rank_file(folder, engine.mesh.rank))


def load_native(engine: Engine, folder: Path) -> dict[str, Any]:
    """Put back what `save_native` wrote, for the same layout and ZeRO stage; returns its `rank_state`. Collective.

    Raises RuntimeError where DeepSpeed finds nothing to load, which it reports by a warning only.
    """
    wanted = [{name: group[name] for name in OPTIMIZER_SETTINGS} for group in engine.ds.optimizer.param_groups]
    path, _ = engine.ds.load_checkpoint(str(folder), tag=TAG, load_module_strict=True)
    if path is None:
        raise RuntimeError(f"DeepSpeed found no checkpoint in {folder / TAG}")
    # DeepSpeed brings back the settings of the run that saved, too; those of this run hold.
    for group, settings in zip(engine.ds.optimizer.param_groups, wanted, strict=True):
        group.update(settings)
    if hasattr(engine.ds.optimizer, "clip_grad"):
        engine.ds.optimizer.clip_grad = engine.ds.gradient_clipping()
    saved = torch.load(_rank_file(folder, engine.mesh.rank), weights_only=False)
    states = saved["random"]
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if engine.ds.device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    return saved["state"]


def full_precision_shard(parameter: nn.Parameter) -> Tensor:
    """This rank's shard of a parameter under the engine, from the optimizer's float32 copy. Collective over dp."""
    master = safe_get_full_fp32_param(parameter)
    if master is None:
        return parameter.detach()  # ZeRO 0 in float32 trains the parameter itself
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return master.detach().view(shape)


def link_moments(engine: Engine) -> None:
    """Let DeepSpeed find the moments of all parameters (stages 1 and 2); by itself it does so in a step.

    And then only those of the first group of parameters, since it does so after that group's step.
    """
    if engine.zero_stage == 0:
        return
    optimizer = engine.ds.optimizer
    names = ("bit16_groups", "single_partition_of_fp32_groups")
    if not hasattr(optimizer, names[0]):
        names = ("bf16_groups", "fp32_groups_flat_partition")
    for parameters, flat in zip(*(getattr(optimizer, name) for name in names), strict=True):
        lazy_init_hp_params_optimizer_state(parameters, flat, optimizer.optimizer.state)


def read_training_state(engine: Engine, parameter: nn.Parameter) -> list[Tensor]:
    """Copies of this rank's shard of a trained parameter, then of its moments, in float32 at least.

    Collective over dp. Up to ZeRO-2, after `link_moments`.
    """
    if engine.zero_stage == 0:
        state = engine.ds.optimizer.state[parameter]
        return [parameter.detach().clone(), *(state[name].clone() for name in MOMENTS)]
    moments = (safe_get_full_optimizer_state(parameter, name) for name in MOMENTS)
    return [safe_get_full_fp32_param(parameter), *moments]


def write_training_state(engine: Engine, parameter: nn.Parameter, state: list[Tensor]) -> None:
    """Put back what `read_training_state` gave, changed: what the forward uses and what the optimizer keeps."""
    weight, *moments = state
    parameter.data.copy_(weight)
    if engine.zero_stage == 0:
        for name, moment in zip(MOMENTS, moments, strict=True):
            engine.ds.optimizer.state[parameter][name].copy_(moment)
        return
    safe_set_full_fp32_param(parameter, weight)
    for name, moment in zip(MOMENTS, moments, strict=True):
        safe_set_full_optimizer_state(parameter, moment, name)


def _random_states(device: torch.device) -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else {})


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / RANK_FOLDER / f"rank-{rank:05d}.pt"
