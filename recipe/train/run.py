"""What a run consists of once everything is settled, and the record of it in run.json."""

import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modeling.config import GatherMoeConfig
from modeling.mesh import ParallelMesh
from recipe.checkpoint.elastic import LAYOUT
from recipe.checkpoint.find import Checkpoint
from recipe.checkpoint.run_folder import RunFolder
from recipe.data.prepare import PreparedData
from recipe.launch.start import World
from recipe.settings.flags import Arguments
from recipe.settings.resolve import ResolvedConfig
from recipe.shared.flops import count_parameters
from recipe.shared.ranks import Ranks
from recipe.train.metrics import merge_meters

# Details of a checkpoint in which a run may differ from the one that saved it: how far it is and shall go, who holds
# what, and in which form it is stored. What changes the numbers of further steps is said.
FREE_ON_RESUME = (
    *("position", "tokens", "max_steps", "optimizer", "sequences_per_step", "format", *LAYOUT),
    "model.token_dtype",  # in checkpoints of earlier versions, which took it for a part of the model
)
# Conveniences of transformers' that say nothing about the function a model computes.
NOT_THE_MODEL = ("use_cache", "output_router_logits")


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
        "model_folder": None if run.model_folder is None else str(run.model_folder),
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
        "sequences_per_step": settings.sequences_per_step,
        "precision": settings.precision,
        "block_size": settings.block_size,
        "seed": run.arguments.seed,
        # The name of a token store depends on the text, the tokenizer and how they are read.
        "data": [Path(corpus["cache"]).name for corpus in run.data.report["corpora"]],
        "packing": run.data.report["format"]["packing"],
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
            + "\nstart with the same settings, or begin a new run from its hf/ folder with "
            "--model_name_or_path"
        )
    if then["max_steps"] != now["max_steps"]:
        run.say(
            f"warning: the run had max_steps={then['max_steps']} and now has {now['max_steps']}; "
            "the learning rate follows the new schedule from here on"
        )
    if then["optimizer"] != now["optimizer"]:
        run.say(f"warning: the run had the optimizer settings {then['optimizer']} and now has {now['optimizer']}")
    if then["sequences_per_step"] != now["sequences_per_step"]:
        run.say(
            f"warning: the run had {then['sequences_per_step']} sequences per step and now has "
            f"{now['sequences_per_step']}; it goes on behind the {then['position']:,} sequences it has read"
        )
    if then["precision"] != now["precision"]:
        run.say(
            f"warning: the run had precision={then['precision']} and now has {now['precision']}; weights and moments "
            "go on from the float32 numbers of the optimizer"
        )


def merge_rank_states(states: Sequence[dict[str, Any]], *, dp_rank: int) -> dict[str, Any]:
    """What group `dp_rank` goes on with, from what the loops of all groups of an earlier layout kept.

    The first group takes over the sums of a half-finished log line, so that they count once. Copies of experts go by
    the loads of all groups, of which each may now have any part.
    """
    loads = [state["loads"] for state in states if state["loads"] is not None]
    return {
        "meter": merge_meters([state["meter"] for state in states] if dp_rank == 0 else []),
        "elapsed_s": states[0]["elapsed_s"],
        "loads": torch.tensor(loads, dtype=torch.float64).sum(0).tolist() if loads else None,
    }


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
