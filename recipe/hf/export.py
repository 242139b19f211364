"""The hf/ folder of a checkpoint: configuration, weights, tokenizer, ready for AutoModel."""

import json
from pathlib import Path
from typing import Any

import torch

from recipe.checkpoint.files import Files
from recipe.engine.engine import Engine
from recipe.hf.config import choose_type, config_dict, write_config_files
from recipe.hf.model_card import CARD_NAME, TrainingFacts, model_card
from recipe.hf.weights import write_weights
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_first

FOLDER = "hf"


def opening_code(folder: Path) -> str:
    """Return the Python expression that opens an exported folder from anywhere; a native one has its own code."""
    brings_code = "auto_map" in json.loads((folder / "config.json").read_text())
    trust = ", trust_remote_code=True" if brings_code else ""
    return f"AutoModelForCausalLM.from_pretrained('{folder}'{trust})"


def export_hugging_face(
    engine: Engine,
    folder: Path,
    *,
    tokenizer: Any,
    hf_format: str,
    dtype: torch.dtype,
    ranks: Ranks,
    files: Files,
    facts: TrainingFacts | None = None,
) -> str:
    """Write everything AutoModel needs into `folder`; return the model type. Collective over the whole world.

    hf_format  as of --hf_format
    dtype      of all weights, taken from the float32 master copies
    facts      of the training, for a model card; without them none is written

    The weights are given to `files`, to be written and checked when these are completed.

    ValueError where --hf_format names a type that cannot express the model; see `write_weights` for what else.
    """
    config = engine.model.config
    model_type = choose_type(config, hf_format=hf_format)

    def write_small_files() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        values = config_dict(config, model_type=model_type, dtype=str(dtype).removeprefix("torch."))
        write_config_files(folder, values=values)
        tokenizer.save_pretrained(folder)
        if facts is not None:
            (folder / CARD_NAME).write_text(model_card(values, facts=facts), encoding="utf-8")

    on_first(write_small_files, ranks=ranks)
    write_weights(folder, model=engine.model, mesh=engine.mesh, model_type=model_type, dtype=dtype, files=files)
    return model_type
