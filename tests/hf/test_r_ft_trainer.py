"""transformers' Trainer and TRL's on exported folders: schedules resume, ZeRO-3 saves are whole, README's lines run."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe.hf.fine_tuning import save_finetuned
from tests.engine_runs import Tensors, assert_all_match, read_export
from tests.hf.test_r_ft_adapters import FILE, adapters, ids, open_model, open_with_adapters
from tests.ranks import run_ranks
from tests.training import train_on_ranks, write_inputs

ROOT = Path(__file__).parents[2]
Exported = Callable[[str], Path]


def training_arguments(folder: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    values: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**values | options)


def trainer(model: Any, arguments: Any) -> Any:
    from transformers import Trainer

    rows: Any = [{"input_ids": row, "labels": row} for row in ids()]
    return Trainer(model=model, args=arguments, train_dataset=rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gather_moe", "adapters"])
def test_r_ckpt_03_in_trainer_the_schedule_goes_on(name: str, exported: Exported, tmp_path: Path) -> None:
    """The model is opened from the checkpoint: of its files Trainer itself puts only those tensors back that it finds.

    Experts, whose files hold one by one what the model holds together, it would leave as they were.
    """
    options = {"lr_scheduler_type": "cosine", "warmup_steps": 5, "max_steps": 20, "save_strategy": "steps"}
    logs = []
    for checkpoint in (None, tmp_path / "checkpoint-8"):
        if name == "adapters":
            model = open_with_adapters(exported("mixtral"))
        else:
            model = open_model(checkpoint or exported(name))
        run = trainer(model, training_arguments(tmp_path, save_steps=8, **options))
        run.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        steps = [line for line in run.state.log_history if "loss" in line and line["step"] > 8]
        logs.append([(line["step"], line["learning_rate"], line["loss"]) for line in steps])
    assert [step for step, _, _ in logs[0]] == list(range(9, 21))
    assert logs[0] == logs[1]
    assert len({rate for _, rate, _ in logs[0]}) == 12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gather_moe"])
def test_r_ft_05_in_trainer_checkpointing_changes_no_adapter(name: str, exported: Exported, tmp_path: Path) -> None:
    tuned = []
    for options in ({}, {"gradient_checkpointing": True}):
        model = open_with_adapters(exported(name))
        trainer(model, training_arguments(tmp_path, max_steps=2, **options)).train()
        tuned.append({key: p.detach() for key, p in adapters(model).items()})
    assert_all_match(*tuned, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gather_moe"])
def test_trl_learns_completions_alone(name: str, exported: Exported, tmp_path: Path) -> None:
    """By TRL's defaults, activation checkpointing among them: the loss it reports is that of plain torch."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    model = open_model(exported(name))
    logits = model(ids()).logits[:, 9:-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, ids()[:, 10:].flatten()).item()
    words = Tokenizer(models.WordLevel({str(i): i for i in range(51)}, unk_token="0"))
    rows = [{"input_ids": row, "completion_mask": [0] * 10 + [1] * 6} for row in ids().tolist()]
    options = {"max_steps": 1, "logging_steps": 1, "bf16": False, "use_cpu": True, "disable_tqdm": True}
    run = SFTTrainer(
        model,
        SFTConfig(str(tmp_path), completion_only_loss=True, save_strategy="no", **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="0"),
    )
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    run.train()
    assert model.is_gradient_checkpointing
    assert run.state.log_history[0]["loss"] == pytest.approx(want, abs=1e-4)
    assert not any(torch.equal(p, before[key]) for key, p in model.named_parameters() if "experts" in key)


@contextmanager
def trainers_state() -> Iterator[None]:
    """Whatever Trainer leaves behind in the process for the next one to find, taken back."""
    from accelerate.state import AcceleratorState
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    environment = dict(os.environ)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # asked for, but the ranks have met already
    groups.mpu = None  # that of the engine before, whose groups have ended
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        unset_hf_deepspeed_config()
        os.environ.clear()
        os.environ.update(environment)


def train_in_trainer(
    rank: int, world_size: int, folder: Path, out: Path, *, stage: int, flag: bool | None, with_adapters: bool
) -> None:
    """Two steps of Trainer under DeepSpeed, saved by Trainer in `theirs` and by us in `ours`."""
    from recipe.engine.engine import join_communication

    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if flag is not None:
        zero["stage3_gather_16bit_weights_on_model_save"] = flag
    settings = {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    join_communication()
    with trainers_state():
        # The arguments first: under ZeRO-3 from_pretrained then loads into parts.
        arguments = training_arguments(out, max_steps=2, deepspeed=settings)
        run = trainer(open_with_adapters(folder) if with_adapters else open_model(folder), arguments)
        assert run.accelerator.num_processes == world_size
        run.train()
        run.save_model(str(out / "theirs"))
        save_finetuned(run.model, out / "ours")


def tune(folder: Path, out: Path, **options: Any) -> tuple[Tensors, Tensors]:
    """What Trainer saved after a training on two ranks, and what we did."""
    run_ranks(train_in_trainer, 2, folder, out, **options)
    return read_export(out / "theirs"), read_export(out / "ours")


@pytest.mark.slow
def test_r_ft_02_adapters_of_trainer_are_whole_under_zero_3(exported: Exported, tmp_path: Path) -> None:
    saved = [
        tune(exported("gather_moe"), tmp_path / str(stage), stage=stage, flag=None, with_adapters=True)
        for stage in (0, 3)
    ]
    [(want, _), (theirs, ours)] = saved
    assert len(want) == 32
    for got in (theirs, ours):
        assert got.keys() == want.keys()
        assert_all_match(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("flag", [None, False, True])
def test_r_ckpt_06_trainer_under_zero_3(flag: bool | None, exported: Exported, tmp_path: Path) -> None:
    """Without the flag Trainer leaves no weights at all, none that are empty; save_finetuned needs no flag."""
    theirs, ours = tune(exported("mixtral"), tmp_path, stage=3, flag=flag, with_adapters=False)
    start = read_export(exported("mixtral"))
    assert theirs.keys() == (start.keys() if flag else set())
    assert {key: tensor.shape for key, tensor in ours.items()} == {key: tensor.shape for key, tensor in start.items()}
    assert not any(torch.equal(tensor, start[key]) for key, tensor in ours.items())
    assert_all_match(theirs, ours, atol=0)


@pytest.mark.slow
def test_the_lines_of_readme_that_fine_tune_run(tmp_path: Path) -> None:
    """In their order and in one process, on a folder that a run of ours wrote."""
    blocks = re.findall(r"```python\n(# fine-tune.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 3
    run_ranks(train_on_ranks, 2, write_inputs(tmp_path, max_position_embeddings=64))
    (tmp_path / "runs").mkdir()
    (tmp_path / "run").rename(tmp_path / "runs" / "demo")
    shutil.copy(ROOT / "README.md", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    start = read_export(tmp_path / "runs" / "demo" / "checkpoints" / "latest" / "hf")
    for name in ("tuned", "sft", "merged"):
        tuned = read_export(tmp_path / "runs" / name)
        assert tuned.keys() == start.keys()
        changed = [key for key, tensor in tuned.items() if not torch.equal(tensor, start[key])]
        assert any("experts" in key for key in changed)
        assert any("mlp.gate." in key for key in changed) == (name != "merged")
    assert any("experts" in key for key in load_file(tmp_path / "runs" / "adapter" / FILE))
