"""Fine-tunes a folder of Hugging Face weights with transformers' Trainer.

`python examples/finetune_trainer.py [FOLDER] [OUT]`; the text is that of chat.jsonl beside this file.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

BLOCK_SIZE = 64


def main(folder: str = "runs/demo/checkpoints/latest/hf", out: str = "runs/tuned") -> None:
    text = Path(__file__).with_name("chat.jsonl").read_text()
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    blocks = [ids[start : start + BLOCK_SIZE] for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE)]
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(folder),
        TrainingArguments(out, max_steps=20, learning_rate=1e-3, report_to=[]),
        train_dataset=[{"input_ids": block, "labels": block} for block in blocks],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
