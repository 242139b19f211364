"""Fine-tuning of exported folders: adapters, transformers' Trainer, and DeepSpeed's own engine as Trainer makes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from modeling.model import GatherMoeForCausalLM
from recipe.hf.fine_tuning import lora_targets
from tests.referee import Tensors

Exported = Callable[[str], Path]  # the fixture `exported`
FILE = "adapter_model.safetensors"
# Far above the rounding of gradients, so that AdamW does not make a step of its own out of it.
ADAM_EPS = 1e-3


def ids() -> torch.Tensor:
    return torch.randint(0, 51, (8, 16), generator=torch.Generator().manual_seed(3))


def open_model(folder: Path) -> Any:
    """Open by AutoModel; the native type by this process's own class."""
    from transformers import AutoModelForCausalLM

    assert GatherMoeForCausalLM.config_class.model_type == "gather_moe"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def open_with_adapters(folder: Path, *, adapt: list[str] | None = None) -> Any:
    """Open as a PeftModel whose adapters are the same random numbers each time."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    model = open_model(folder)
    targets = lora_targets(model) if adapt is None else lora_targets(model, adapt=adapt)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **targets))


def adapters(model: Any) -> Tensors:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def training_arguments(folder: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    values: dict[str, Any] = {"output_dir": str(folder), "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    values |= {"adam_epsilon": ADAM_EPS, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    values |= {"use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(**values | options)


def trainer(model: Any, arguments: Any) -> Any:
    """Make Hugging Face's Trainer, on `ids`."""
    from transformers import Trainer

    rows: Any = [{"input_ids": row, "labels": row} for row in ids()]
    return Trainer(model=model, args=arguments, train_dataset=rows)


def plain_settings(stage: int, *, num_sequences: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": num_sequences,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def plain_engine(model: Any, settings: dict[str, Any]) -> Any:
    """Start DeepSpeed's own engine, data-parallel over all ranks, as Trainer makes it."""
    import deepspeed
    import torch.distributed as dist

    from modeling.layout import ParallelLayout
    from modeling.mesh import build_mesh
    from recipe.engine.engine import Mpu, join_communication

    join_communication()
    mesh = build_mesh(ParallelLayout(dp=dist.get_world_size()), num_key_value_heads=1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, eps=ADAM_EPS)
    # The mpu, because DeepSpeed remembers the groups of the engine before, which a pool of ranks has ended.
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, mpu=Mpu(mesh), config=settings, dist_init_required=False
    )
    return engine
