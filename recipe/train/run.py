"""A run once everything is settled, and its description in run.json."""

import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modeling.config import GatherMoeConfig
from modeling.mesh import ParallelMesh
from recipe.checkpoint.run_folder import RunFolder
from recipe.data.prepare import PreparedData
from recipe.launch.start import World
from recipe.settings.flags import Arguments
from recipe.settings.resolve import ResolvedConfig
from recipe.shared.flops import count_parameters
from recipe.shared.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that the training loop works with; the same on every rank but for the rank itself."""

    arguments: Arguments
    settings: ResolvedConfig
    config: GatherMoeConfig
    world: World
    mesh: ParallelMesh
    ranks: Ranks  # all of them, for host decisions
    folder: RunFolder
    model_folder: Path | None  # of the weights the run starts from
    repository: str | None  # of the hub, for what the run will have trained
    data: PreparedData
    say: Callable[[str], None]  # prints on rank 0

    @property
    def max_steps(self) -> int:
        """The last optimizer step."""
        max_steps = self.settings.schedule.max_steps
        assert max_steps is not None, "prepare_run settles the schedule once the data is counted"
        return max_steps

    @property
    def num_train_blocks(self) -> int:
        """How many blocks training goes through: all, or as many as --max_train_samples allows."""
        num_blocks, limit = len(self.data.train), self.arguments.max_train_samples
        return num_blocks if limit is None else min(limit, num_blocks)


def describe_run(run: Run) -> dict[str, Any]:
    """Return the content of run.json."""
    packages = ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "safetensors", "gather-moe")
    total, active = count_parameters(run.config.sizes)
    return {
        "arguments": {name: value for name, value in asdict(run.arguments).items() if name != "given"},
        "given": dict(run.arguments.given),
        "settings": asdict(run.settings),
        "model": run.config.to_dict(),
        "parameters": {"total": total, "active": active},
        "world": asdict(run.world),
        "data": run.data.report,
        "model_folder": None if run.model_folder is None else str(run.model_folder),
        "command": sys.argv,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


def describe_parameters(model: nn.Module, config: GatherMoeConfig) -> str:
    """Return a line with the sizes of the whole model, and this rank's share by kind."""
    total, active = count_parameters(config.sizes)
    kinds = {"experts": ".experts.", "router": "mlp.gate.weight", "norms": "norm", "attention": ".self_attn."}
    held = dict.fromkeys([*kinds, "embedding and dense"], 0)
    trained = dict(held)
    for name, parameter in model.named_parameters():
        kind = next((kind for kind, part in kinds.items() if part in name), "embedding and dense")
        held[kind] += parameter.numel()
        trained[kind] += parameter.numel() if parameter.requires_grad else 0
    shares = ", ".join(f"{kind} {trained[kind]:,}/{held[kind]:,}" for kind in held if held[kind])
    return (
        f"model: {total:,} parameters, {active:,} active per token; trainable/held by this rank: "
        f"{sum(trained.values()):,}/{sum(held.values()):,} ({shares})"
    )


def pick_dtype(name: str, *, precision: str) -> torch.dtype:
    """Return the type that --hf_dtype names; "auto" is the precision of the run."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return names[{"fp32": "float32", "bf16": "bfloat16"}[precision] if name == "auto" else name]
