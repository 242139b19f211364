"""Fine-tunes on prompts and completions with TRL, the loss over completions alone.

`python examples/finetune_sft.py [FOLDER] [OUT]`; needs `pip install trl`.
"""

import sys

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def main(folder: str = "runs/demo/checkpoints/latest/hf", out: str = "runs/sft") -> None:
    rows = [{"prompt": f"def add_{n}(x):\n", "completion": f"    return x + {n}\n"} for n in range(64)]
    trainer = SFTTrainer(
        folder,
        SFTConfig(out, max_steps=20, learning_rate=1e-3, max_length=64, bf16=torch.cuda.is_available(), report_to=[]),
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
