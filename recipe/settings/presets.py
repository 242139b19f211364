"""Named model configurations, and how a name, a file and overrides become the keyword arguments of a model's config.

The sizes are those of the published models; standard library only.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modeling.layout import ModelSizes
from recipe.settings.model_files import read_model_file

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "demo": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "qk_norm": "head",
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "qk_norm": "head",
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "qwen3-235b-a22b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "qk_norm": "head",
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "mixtral-8x7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "moe_intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "qk_norm": "none",
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "mixtral-8x22b": {
        "vocab_size": 32000,
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "moe_intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "qk_norm": "none",
        "max_position_embeddings": 65536,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "olmoe-1b-7b": {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "qk_norm": "full",
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}

# What may be overridden or read from a file beside the keys above.
OPTIONAL_KEYS = (
    "attention_dropout",
    "bos_token_id",
    "clip_qkv",
    "decoder_sparse_step",
    "eos_token_id",
    "hidden_act",
    "initializer_range",
    "mlp_only_layers",
    "pad_token_id",
    "rope_parameters",
)
NEEDED_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
)
CONFIG_KEYS = (*PRESETS["demo"], *OPTIONAL_KEYS)


def model_kwargs(config_name: str, *, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keyword arguments for the model's config: a preset's, or a config.json's, with `overrides` applied.

    `config_name` is a preset, a JSON file, or a folder that holds a config.json.
    """
    if config_name in PRESETS:
        kwargs = dict(PRESETS[config_name])
    elif Path(config_name).exists():
        kwargs = read_model_file(config_name, allowed=CONFIG_KEYS)
    else:
        raise ValueError(f"config_name {config_name!r} is neither a file nor a preset ({', '.join(PRESETS)})")
    unknown = [key for key in overrides or {} if key not in CONFIG_KEYS]
    if unknown:
        raise ValueError("config_overrides: " + "; ".join(_unknown(key) for key in unknown))
    return {**kwargs, **(overrides or {})}


def sizes_of(kwargs: Mapping[str, Any]) -> ModelSizes:
    """The sizes a layout depends on. ValueError names every one that is missing or is no count."""
    bad = [f"{key}={kwargs.get(key)!r}" for key in NEEDED_KEYS if not _is_count(kwargs.get(key))]
    if bad:
        raise ValueError(f"the model's configuration needs whole numbers of at least 1, got {', '.join(bad)}")
    heads = kwargs["num_attention_heads"]
    dense = _dense_layers(kwargs)
    return ModelSizes(
        vocab_size=kwargs["vocab_size"],
        hidden_size=kwargs["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=kwargs.get("num_key_value_heads") or heads,
        head_dim=kwargs.get("head_dim") or kwargs["hidden_size"] // heads,
        num_experts=kwargs["num_experts"],
        num_experts_per_tok=kwargs["num_experts_per_tok"],
        moe_intermediate_size=kwargs["moe_intermediate_size"],
        intermediate_size=kwargs.get("intermediate_size", 0) if dense else 0,
        max_position_embeddings=kwargs["max_position_embeddings"],
        num_hidden_layers=kwargs["num_hidden_layers"],
        dense_layers=dense,
        qk_norm=kwargs.get("qk_norm", "head"),
        tie_word_embeddings=kwargs.get("tie_word_embeddings", False),
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, CONFIG_KEYS, n=1)
    return f"{key} is unknown" + (f", did you mean {near[0]}?" if near else "")


def _dense_layers(kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without experts: those named, and all but every `decoder_sparse_step`-th."""
    named, step = kwargs.get("mlp_only_layers") or (), kwargs.get("decoder_sparse_step") or 1
    return tuple(i for i in range(kwargs["num_hidden_layers"]) if i in named or (i + 1) % step)
