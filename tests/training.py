"""Runs the entry script's own steps inside a pool of ranks, on a small text and a small model."""

import json
import os
import random
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.ranks import end_after_case, run_ranks
from tests.referee import TINY
from tests.saves import entries
from tests.states import same_content

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "red", "dog", "run", "to", "an", "old", "tree", "river")

# What a logged line says of the time and of the machine.
TIMED = ("tokens_per_s", "model_flops_per_s", "mfu", "peak_memory_bytes")

Flags = dict[str, Any]


def write_inputs(folder: Path, *, num_documents: int = 120, **model: Any) -> Flags:
    """A text, a model configuration and the flags that use them; the tokenizer has few entries."""
    generator = random.Random(7)
    lines = [" ".join(generator.choices(WORDS, k=generator.randint(8, 40))) for _ in range(num_documents)]
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    config = {**TINY, "model_type": "gather_moe", "vocab_size": 304, "qk_norm": "head"}
    (folder / "model.json").write_text(json.dumps(config | model))
    flags: Flags = {"train_file": text, "config_name": folder / "model.json", "cache_dir": folder / "cache"}
    flags |= {"output_dir": folder / "run", "train_vocab_size": 300, "block_size": 16, "learning_rate": 1e-2}
    return flags | {"per_device_train_batch_size": 2, "max_steps": 6, "logging_steps": 1}


def write_ds_config(folder: Path, **content: Any) -> Flags:
    path = folder / f"ds_config_{len(list(folder.glob('ds_config_*')))}.json"
    path.write_text(json.dumps(content))
    return {"ds_config": path}


def train_on_ranks(rank: int, world_size: int, flags: Flags) -> tuple[Any, list[str]]:
    """What `deepspeed run_pretrain.py` does with these flags once the ranks have met; results and lines said.

    The speed that MFU is relative to is made up: to measure it takes as long as a few steps of a small model do.
    """
    import run_pretrain
    from recipe.shared import ranks
    from recipe.shared.flops import Peak
    from recipe.train import loop as training_loop
    from recipe.train.loop import results_dict

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    said: list[str] = []
    request = run_pretrain.read_request([f"--{name}={value}" for name, value in flags.items()])
    torch_ranks = ranks.TorchRanks
    with (
        patch.object(training_loop, "find_peak", lambda device, *, precision: Peak(1e12, "made up")),
        ExitStack() as stack,
    ):
        with patch.object(ranks, "TorchRanks", lambda group=None: torch_ranks(group and end_after_case(group))):
            loop = run_pretrain.prepare(request, stack, said.append if rank == 0 else lambda line: None)
        results = loop.train()
        return results_dict(results, loop.run), said


def read_metrics(folder: Path, *, key: str = "loss") -> dict[int, dict[str, Any]]:
    """The logged lines that have `key`, by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if key in line}


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in TIMED}


def check_resume(folder: Path, *, world_size: int, ds_config: dict[str, Any], **changes: Any) -> None:
    """Run to step 6 and a second time from the checkpoint of step 3: the same lines and the same last checkpoint."""
    flags = write_inputs(folder) | write_ds_config(folder, **ds_config) | changes | {"save_steps": 3}
    run, straight = folder / "run", folder / "straight"
    run_ranks(train_on_ranks, world_size, flags)
    want = read_metrics(run)
    (run / "checkpoints" / "step-6" / "deepspeed").rename(straight)
    shutil.rmtree(run / "checkpoints" / "step-6")
    _, said = run_ranks(train_on_ranks, world_size, flags | {"resume_from_checkpoint": "auto"})[0]
    assert any(f"resuming from {run}/checkpoints/step-3" in line for line in said)
    assert any("dropped" in line and "after step 3" in line for line in said)
    got = read_metrics(run)
    assert want.keys() == got.keys()
    for step, line in want.items():
        assert untimed(got[step]) == untimed(line), step
    resumed = run / "checkpoints" / "step-6" / "deepspeed"
    assert entries(straight) == entries(resumed) != []
    for name in entries(straight):
        assert same_content(straight / name, resumed / name), name
