"""What a run consists of once everything is settled, and the record of it in run.json."""

import json
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
from recipe.checkpoint.find import Checkpoint
from recipe.checkpoint.run_folder import RunFolder
from recipe.data.prepare import PreparedData
from recipe.flops import count_parameters
from recipe.launch.start import World
from recipe.ranks import Ranks
from recipe.settings.ds_config import ResolvedConfig
from recipe.settings.flags import Arguments

# Settings that may change from one start of a run to the next: its length, and what is only logged or kept.
FREE_ON_RESUME = ("position", "tokens", "max_steps", "optimizer")
# Entries of the model's configuration that say nothing about the function it computes.
NOT_THE_MODEL = (
    *("use_cache", "experts_backend", "strategy", "output_router_logits"),
    *("overlap", "overlap_chunks", "regather", "combine_dtype", "resident_experts"),
)


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
    data: PreparedData
    say: Callable[[str], None]  # prints on rank 0

    @property
    def num_train_blocks(self) -> int:
        """Blocks that training goes through, as many as --max_train_samples allows."""
        num_blocks, limit = len(self.data.train), self.arguments.max_train_samples
        return num_blocks if limit is None else min(limit, num_blocks)


def describe_run(run: Run) -> dict[str, Any]:
    """The content of run.json."""
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
        "command": sys.argv,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


def checkpoint_details(run: Run, *, position: int) -> dict[str, Any]:
    """What is stored with a checkpoint, and compared when it is resumed but for FREE_ON_RESUME."""
    layout, settings = run.mesh.layout, run.settings
    model = {name: getattr(run.config, name) for name in GatherMoeConfig.__annotations__ if name not in NOT_THE_MODEL}
    return {
        "position": position,
        "tokens": position * settings.block_size,
        "max_steps": settings.schedule.max_steps,
        "optimizer": asdict(settings.optimizer),
        "dp": layout.dp,
        "tp": layout.tp,
        "ep": layout.ep,
        "zero_stage": settings.zero_stage,
        "precision": settings.precision,
        "block_size": settings.block_size,
        "seed": run.arguments.seed,
        # The name of a token store depends on the text, the tokenizer and how they are read.
        "data": [Path(corpus["cache"]).name for corpus in run.data.report["corpora"]],
        "num_train_blocks": run.num_train_blocks,
        **{f"model.{name}": value for name, value in sorted(model.items())},
    }


def check_resumable(run: Run, checkpoint: Checkpoint) -> None:
    """ValueError with everything in which a checkpoint differs from this run; what may differ is only said."""
    # Through JSON, as the manifest went: tuples became lists there.
    now, then = json.loads(json.dumps(checkpoint_details(run, position=0))), checkpoint.details
    names = sorted((now.keys() | then.keys()) - set(FREE_ON_RESUME))
    faults = [f"{n}: {then.get(n)} then, {now.get(n)} now" for n in names if then.get(n) != now.get(n)]
    if faults:
        raise ValueError(
            f"{checkpoint.folder} was saved by another set-up and cannot be continued by this one:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
            + "\nstart with the same settings and ranks, or begin a new run from its hf/ folder with "
            "--model_name_or_path"
        )
    if then["max_steps"] != now["max_steps"]:
        run.say(
            f"warning: the run had max_steps={then['max_steps']} and now has {now['max_steps']}; "
            "the learning rate follows the new schedule from here on"
        )
    if then["optimizer"] != now["optimizer"]:
        run.say(f"warning: the run had the optimizer settings {then['optimizer']} and now has {now['optimizer']}")


def describe_parameters(model: nn.Module, config: GatherMoeConfig) -> str:
    """One line with the sizes of the whole model, and this rank's share by kind."""
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
    """The type that --hf_dtype names; "auto" is the precision of the run."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return names[{"fp32": "float32", "bf16": "bfloat16"}[precision] if name == "auto" else name]
