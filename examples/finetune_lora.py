"""Trains LoRA adapters of attention and experts with PEFT and TRL.

`python examples/finetune_lora.py [FOLDER] [OUT]` writes the adapter to OUT/adapter, and to OUT/merged the model with
the adapter merged in, an ordinary folder again. It needs `pip install peft trl`.
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from recipe.hf.fine_tuning import lora_targets, save_finetuned


def main(folder: str = "runs/demo/checkpoints/latest/hf", out: str = "runs/lora") -> None:
    rows = [{"prompt": f"def add_{n}(x):\n", "completion": f"    return x + {n}\n"} for n in range(64)]
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = SFTTrainer(
        model,
        SFTConfig(out, max_steps=20, learning_rate=1e-3, max_length=64, bf16=torch.cuda.is_available(), report_to=[]),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=8, lora_alpha=16, **lora_targets(model, adapt=["attention", "experts"])),
    )
    trainer.train()
    save_finetuned(trainer.model, f"{out}/adapter")
    save_finetuned(trainer.model.merge_and_unload(), f"{out}/merged")


if __name__ == "__main__":
    main(*sys.argv[1:])
