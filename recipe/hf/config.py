"""The configuration files of a Hugging Face folder: a stock type's where one fits, else ours with its code."""

import json
import shutil
from pathlib import Path
from typing import Any

import modeling
from modeling.config import GatherMoeConfig
from modeling.spec import NATIVE, SHARED_NAMES, STOCK_TYPES, stock_type

AUTO_MAP = {
    "AutoConfig": "config.GatherMoeConfig",
    "AutoModel": "model.GatherMoeModel",
    "AutoModelForCausalLM": "model.GatherMoeForCausalLM",
}
# Used by our training only; what travels with a checkpoint is the model.
STAYS_HOME = ("__init__.py", "init.py", "shard_table.py")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # what generation needs; None where there is none


def choose_type(config: GatherMoeConfig, *, hf_format: str) -> str:
    """Return the model type to write for --hf_format; ValueError if a stock type cannot express the configuration."""
    if hf_format == "native":
        return NATIVE
    best = stock_type(config)
    if hf_format not in ("auto", best):
        raise ValueError(
            f"hf_format={hf_format!r} cannot express this model (qk_norm={config.qk_norm!r}, "
            f"norm_topk_prob={config.norm_topk_prob}, clip_qkv={config.clip_qkv}, "
            f"{len(config.dense_layers)} dense layers, score_function={config.score_function!r}, "
            f"routed_scaling_factor={config.routed_scaling_factor}, router_bias={config.router_bias}); "
            f"it is a {best!r}, which --hf_format auto writes"
        )
    return best


def config_dict(config: GatherMoeConfig, *, model_type: str, dtype: str) -> dict[str, Any]:
    """Return what config.json holds for `model_type`."""
    common: dict[str, Any] = {
        **{name: getattr(config, name) for name in (*SHARED_NAMES, *TOKEN_IDS)},
        "use_cache": True,
        # True would add the balance loss to the loss of an evaluation, too.
        "output_router_logits": False,
        "dtype": dtype,
    }
    if model_type == NATIVE:
        values = {**config.to_diff_dict(), **common, "auto_map": AUTO_MAP, "architectures": ["GatherMoeForCausalLM"]}
    else:
        values = _stock_dict(config, model_type, common)
    # Readers that are older than transformers 5 look for these names.
    rope = config.rope_parameters
    assert rope is not None
    values |= {"torch_dtype": dtype, "num_experts": config.num_experts, "rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        values["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return values


def write_config_files(folder: Path, *, values: dict[str, Any]) -> None:
    """Write config.json, generation_config.json and, for our own type, the code that reads them."""
    _write(folder / "config.json", values)
    generation = {name: values[name] for name in TOKEN_IDS if values[name] is not None}
    _write(folder / "generation_config.json", generation)
    if values["model_type"] == NATIVE:
        for source in sorted(Path(modeling.__path__[0]).glob("*.py")):
            if source.name not in STAYS_HOME:
                shutil.copyfile(source, folder / source.name)


def _stock_dict(config: GatherMoeConfig, model_type: str, common: dict[str, Any]) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    own = {theirs: getattr(config, ours) for theirs, ours in STOCK_TYPES[model_type].says.items()}
    stock = CONFIG_MAPPING[model_type](**common, **own)
    names = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    return {**stock.to_diff_dict(), **common, **own, "model_type": model_type, "architectures": names}


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
