"""How a preset, a file or a folder and overrides become the keyword arguments of a model's config, all of them checked.

Standard library only: the sizes are known before torch is loaded.
"""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from modeling.layout import ModelSizes
from recipe.settings.flags import Arguments
from recipe.settings.model_files import LOSS_SETTINGS, ModelFile, read_model_file, with_rope_parameters
from recipe.settings.model_values import FLOATS, NEEDED, RULES, value_faults
from recipe.settings.presets import PRESETS

# What the model's configuration takes where a setting is not named; a test holds it against the class.
DEFAULTS: Mapping[str, Any] = {"intermediate_size": 6144, "qk_norm": "head", "tie_word_embeddings": False}
ROPE_THETA = 10000.0


class ModelSettings(NamedTuple):
    """kwargs: keyword arguments of GatherMoeConfig. notes: what the run does otherwise than the file it read."""

    kwargs: dict[str, Any]
    notes: tuple[str, ...]


class _Base(NamedTuple):
    """The model before overrides; `file` is None for a preset."""

    kwargs: dict[str, Any]
    file: ModelFile | None


def read_model(arguments: Arguments) -> ModelSettings:
    """The model that --config_name or --model_name_or_path names, with --config_overrides applied.

    ValueError lists every setting that is unknown, missing, not available or not of its type.
    """
    name = f"--config_name {arguments.config_name}"
    if arguments.model_name_or_path is not None:
        name = f"--model_name_or_path {arguments.model_name_or_path}"
    overrides = arguments.config_overrides
    faults = list(_override_faults(overrides))
    kwargs: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    try:
        base = _read_base(arguments)
    except ValueError as error:  # nothing is known about the model, so only the names of overrides can be checked
        faults.insert(0, str(error))
    else:
        kwargs = _overridden(base.kwargs, overrides={k: v for k, v in overrides.items() if k in RULES})
        if base.file is not None:
            faults += [f"{base.file.file}: {fault}" for fault in base.file.faults]
            notes = tuple(_loss_notes(base.file, arguments=arguments))
        faults += value_faults(kwargs)
    if faults:
        lines = "\n".join(f"  - {fault}" for fault in faults)
        raise ValueError(f"the model ({name}) cannot be used:\n{lines}")
    return ModelSettings({k: float(v) if k in FLOATS else v for k, v in kwargs.items()}, notes)


def sizes_of(kwargs: Mapping[str, Any]) -> ModelSizes:
    """The sizes a layout depends on, those of the config that the same `kwargs` make; of a preset, or as read."""
    assert not [key for key in NEEDED if key not in kwargs], "read_model comes first"
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
        intermediate_size=kwargs.get("intermediate_size", DEFAULTS["intermediate_size"]) if dense else 0,
        max_position_embeddings=kwargs["max_position_embeddings"],
        num_hidden_layers=kwargs["num_hidden_layers"],
        dense_layers=dense,
        qk_norm=kwargs.get("qk_norm", DEFAULTS["qk_norm"]),
        tie_word_embeddings=kwargs.get("tie_word_embeddings", DEFAULTS["tie_word_embeddings"]),
    )


def _dense_layers(kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without experts: those named, and all but every `decoder_sparse_step`-th. All, where there are none."""
    named, step = kwargs.get("mlp_only_layers") or (), kwargs.get("decoder_sparse_step", 1)
    without = kwargs["num_experts"] == 0
    return tuple(i for i in range(kwargs["num_hidden_layers"]) if without or i in named or (i + 1) % step)


def _read_base(arguments: Arguments) -> _Base:
    """ValueError where the name leads nowhere, or to something that is no model's configuration."""
    if arguments.model_name_or_path is not None:
        file = read_model_file(_folder_with_weights(arguments.model_name_or_path))
        if file.model_type is None:
            raise ValueError(f"{file.file} names no model_type, which says how its weights are named")
        return _Base(file.kwargs, file)
    name = arguments.config_name
    assert name is not None, "parse_arguments wants a model"
    if name in PRESETS:
        return _Base(with_rope_parameters(PRESETS[name], theta=ROPE_THETA), None)
    if not Path(name).exists():
        raise ValueError(
            f"--config_name {name} is neither a preset ({', '.join(PRESETS)}) nor a file or folder (looked from "
            f"{Path.cwd()}); what is on the hub must be downloaded first: hf download {name} --local-dir DIR"
        )
    file = read_model_file(Path(name))
    return _Base(file.kwargs, file)


def _folder_with_weights(name: str) -> Path:
    folder = Path(name)
    if (folder / "config.json").is_file():
        return folder
    if name in PRESETS:
        raise ValueError(f"{name} is a preset, which has no weights to start from; name it by --config_name {name}")
    raise ValueError(
        f"--model_name_or_path must be a folder that holds config.json and weights, and {name} is none (looked from "
        f"{Path.cwd()}); what is on the hub must be downloaded first: hf download {name} --local-dir DIR"
    )


def _overridden(kwargs: Mapping[str, Any], *, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`kwargs` with `overrides`. null takes a setting back to its default; a rope keeps what is not named anew."""
    changed = {**kwargs, **overrides}
    before, rope = kwargs["rope_parameters"], overrides.get("rope_parameters")
    theta = overrides.get("rope_theta")
    if isinstance(before, Mapping):
        named = {} if theta is None else {"rope_theta": theta}
        if rope is None:
            changed["rope_parameters"] = {**before, **named}
        elif isinstance(rope, Mapping):
            changed["rope_parameters"] = {"rope_type": "default", "rope_theta": before["rope_theta"], **named, **rope}
    changed.pop("rope_theta", None)
    return {key: value for key, value in changed.items() if value is not None}


def _override_faults(overrides: Mapping[str, Any]) -> Iterator[str]:
    for key, value in overrides.items():
        if key in LOSS_SETTINGS:
            yield f"--config_overrides {key} is a setting of the run; use --{key}"
        elif key not in RULES:
            near = difflib.get_close_matches(key, RULES, n=1)
            yield f"--config_overrides {key} is unknown" + (f"; did you mean {near[0]}?" if near else "")
        elif value is None and key.startswith("rope"):
            yield f"--config_overrides {key}=None must be {RULES[key].says}"
    rope = overrides.get("rope_parameters")
    if "rope_theta" in overrides and isinstance(rope, Mapping) and "rope_theta" in rope:
        yield "--config_overrides rope_theta and rope_parameters with a rope_theta name the same setting; keep one"


def _loss_notes(file: ModelFile, *, arguments: Arguments) -> Iterator[str]:
    """Losses belong to the run; where the file names another value than the run uses, that is said."""
    for key, theirs in file.losses.items():
        ours = getattr(arguments, key)
        if ours != theirs:
            yield f"{key} is {ours} ({arguments.place(key)}), not the {theirs} that {file.file} names; --{key} sets it"
