"""Writes a plan as a DeepSpeed JSON that `run_pretrain.py` takes as it is."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.plan.flags import OUTPUT_DIR
from recipe.plan.job import Job
from recipe.settings.layout import ACCUMULATION_KEY, MICRO_KEY, TOTAL_KEY
from recipe.settings.resolve import zero_block


def run_config(job: Job, *, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of a run that does this job's steps. `model` has the flags that name it, "config_name" and so on.

    What is likely to be tried otherwise stands in the "arguments" block, over which the command line wins.
    """
    wire = job.wire
    derived = zero_block({}, stage=job.zero_stage, sizes=job.sizes, tp=job.layout.tp, precision=job.precision).block
    return {
        "arguments": {
            **model,
            "output_dir": OUTPUT_DIR,
            "expect_world_size": job.layout.world_size,
            "block_size": job.block_size,
            "per_device_train_batch_size": job.num_sequences,
            "gradient_accumulation_steps": job.accumulation,
            "bf16": job.precision == "bf16",
            "gradient_checkpointing": job.recompute,
        },
        "parallel": {
            "tp": job.layout.tp,
            "ep": job.layout.ep,
            "strategy": job.strategy,
            "overlap": wire.overlap,
            "overlap_chunks": "auto" if wire.overlap_chunks is None else wire.overlap_chunks,
            "regather": wire.regather,
            "token_dtype": wire.token_dtype,
            "combine_dtype": wire.combine_dtype,
            "experts_backend": job.experts_backend,
            "cuda_graph": "auto",
        },
        MICRO_KEY: "auto",
        ACCUMULATION_KEY: "auto",
        TOTAL_KEY: "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": job.zero_stage,
            **{key: value for key, value in job.zero.items() if derived.get(key) != value},
        },
    }


def how_to_start(path: Path, *, num_ranks: int, ranks_per_node: int) -> str:
    """Return a line with the command that starts this many ranks on nodes of that size."""
    if num_ranks <= ranks_per_node:
        command = f"deepspeed --num_accelerators {num_ranks} run_pretrain.py --ds_config {path}"
        return f"wrote {path}; start it: {command}"
    slots = [f"slots={ranks_per_node}"] * (num_ranks // ranks_per_node)
    if num_ranks % ranks_per_node:
        slots.append(f"slots={num_ranks % ranks_per_node}")
    lines = " and ".join(f"{slots.count(slot)} like `worker {slot}`" for slot in dict.fromkeys(slots))
    return (
        f"wrote {path}; start it on {num_ranks} ranks, HOSTS being a file of lines, {lines}: "
        f"deepspeed --hostfile HOSTS run_pretrain.py --ds_config {path}"
    )


def check_writable(path: Path) -> None:
    """Raise ValueError where no file could be written there, as far as can be seen without writing one."""
    if path.is_dir():
        raise ValueError(f"{path} cannot be written: Is a directory")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: No such file or directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: Permission denied")


def write_config(path: Path, *, config: Mapping[str, Any]) -> None:
    """Replace the file; ValueError where it cannot be written."""
    try:
        path.write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
