"""Reads a config.json, ours or a stock Mixtral, Qwen3-MoE or OLMoE one, as keyword arguments of our model's config.

A setting that our model cannot express is an error, never dropped.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.settings.config_files import load_json_object


@dataclass(frozen=True, kw_only=True)
class StockType:
    """How a stock type's keys are named here, and what it does without saying so."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)


STOCK_TYPES: Mapping[str, StockType] = {
    "gather_moe": StockType(renamed={"num_local_experts": "num_experts"}),
    "mixtral": StockType(
        renamed={"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"},
        implied={"qk_norm": "none", "norm_topk_prob": True},
    ),
    "qwen3_moe": StockType(renamed={"num_local_experts": "num_experts"}, implied={"qk_norm": "head"}),
    "olmoe": StockType(
        renamed={"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"},
        implied={"qk_norm": "full"},
    ),
}

# Say nothing about the function the model computes, or are settings of the run here (losses, expert backend).
WITHOUT_EFFECT = (
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "auto_map",
    "balance_scope",
    "dtype",
    "experts_backend",
    "logits_z_loss_coef",
    "max_window_layers",
    "model_type",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)

# Settings our model has only one value for.
ONLY_VALUE: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "router_jitter_noise": (0, None),
    "use_sliding_window": (False, None),
}


def read_model_file(config_name: str, *, allowed: tuple[str, ...]) -> dict[str, Any]:
    """The keyword arguments in a JSON file or in a folder's config.json; `allowed` are the keys our config has.

    ValueError lists everything in the file that our model cannot express.
    """
    path = Path(config_name)
    file = path / "config.json" if path.is_dir() else path
    content = load_json_object(str(file))
    model_type = content.get("model_type", "gather_moe")
    if model_type not in STOCK_TYPES:
        raise ValueError(f'{file} holds a "{model_type}"; configurations can be read of {", ".join(STOCK_TYPES)}')
    stock = STOCK_TYPES[model_type]
    kwargs = {stock.renamed.get(key, key): value for key, value in content.items() if key not in WITHOUT_EFFECT}
    faults = list(_faults(kwargs, allowed=allowed))
    if faults:
        raise ValueError(f"{file} cannot be used: " + "; ".join(faults))
    return {**stock.implied, **{key: value for key, value in kwargs.items() if key in allowed}}


def _faults(kwargs: Mapping[str, Any], *, allowed: tuple[str, ...]) -> Iterator[str]:
    for key, value in kwargs.items():
        if key in ONLY_VALUE:
            if value not in ONLY_VALUE[key]:
                yield f"{key}={value!r} is not available, only {ONLY_VALUE[key][0]!r}"
        elif key == "sliding_window":
            if value is not None and kwargs.get("use_sliding_window", True):
                yield f"sliding_window={value!r} is not available, only null"
        elif key not in allowed:
            yield f"{key} is unknown"
