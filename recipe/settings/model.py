"""A preset, file, folder or hub name and overrides as the keyword arguments of a model's config, all checked.

Standard library only: the sizes are known before torch is loaded.
"""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from modeling.spec import (
    FLOATS,
    LOSS_SETTINGS,
    NEEDED,
    ROPE_THETA,
    RULES,
    ModelSizes,
    default_of,
    spec_of,
    value_faults,
)
from recipe.settings.flags import Arguments
from recipe.settings.model_files import ModelFile, read_model_file, with_origin, with_rope_parameters
from recipe.settings.model_source import CONFIG_NAME, HubError, HubModel, fetch_config, is_on_hub
from recipe.settings.presets import PRESETS

CONFIG_FLAG = "--config_name"

# What the weights of a model that is trained on are made of, so that no override can change it.
FIXED_BY_WEIGHTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "moe_intermediate_size", "intermediate_size", "qk_norm", "tie_word_embeddings"),
)
WHERE_EXPERTS_ARE = ("decoder_sparse_step", "mlp_only_layers")
# Equal experts whose weights sum to 1 are the dense layer they are made of.
SUM_TO_ONE: Mapping[str, Any] = {"norm_topk_prob": True, "routed_scaling_factor": 1.0}


class ModelSettings(NamedTuple):
    """Keyword arguments of GatherMoeConfig, and notes on what the run does otherwise than the file it read."""

    kwargs: dict[str, Any]
    notes: tuple[str, ...]


class _Base(NamedTuple):
    """The model before overrides; `file` is None for a preset."""

    kwargs: dict[str, Any]
    file: ModelFile | None


def read_model(arguments: Arguments, *, flag: str = CONFIG_FLAG) -> ModelSettings:
    """Read the model that --config_name or --model_name_or_path names, with --config_overrides applied.

    flag  what messages call the first of them, if a command has another name for it

    ValueError lists every setting that is unknown, missing, not available or not of its type; it is a HubError after
    the hub did not answer.
    """
    name = f"{flag} {arguments.config_name}"
    if arguments.model_name_or_path is not None:
        name = f"--model_name_or_path {arguments.model_name_or_path}"
    overrides = arguments.config_overrides
    faults = [*_override_faults(overrides), *_revision_faults(arguments)]
    kwargs: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    kind = ValueError
    try:
        base = _read_base(arguments, flag=flag)
    except ValueError as error:  # nothing is known about the model, so only the names of overrides can be checked
        faults.insert(0, str(error))
        kind = HubError if isinstance(error, HubError) else ValueError
    else:
        has_weights = arguments.model_name_or_path is not None
        known = {k: v for k, v in overrides.items() if k in RULES}
        kwargs = _overridden(base.kwargs, overrides=known, has_weights=has_weights)
        if base.file is not None:
            faults += [f"{base.file.file}: {fault}" for fault in base.file.faults]
            if has_weights:
                faults += _weights_faults(base, kwargs=kwargs, arguments=arguments)
            notes = tuple(_loss_notes(base.file, arguments=arguments))
        faults += value_faults(kwargs)
    if faults:
        lines = "\n".join(f"  - {fault}" for fault in faults)
        raise kind(f"the model ({name}) cannot be used:\n{lines}")
    return ModelSettings({k: float(v) if k in FLOATS else v for k, v in kwargs.items()}, notes)


def run_options(arguments: Arguments) -> dict[str, Any]:
    """Return the losses, keyword arguments of the model's configuration that the run's flags set."""
    return {key: getattr(arguments, key) for key in LOSS_SETTINGS}


def sizes_of(kwargs: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes of the config that `kwargs`, a preset's or as read, make."""
    assert not [key for key in NEEDED if key not in kwargs], "read_model comes first"
    return spec_of(kwargs).sizes


def _read_base(arguments: Arguments, *, flag: str) -> _Base:
    """Read the model named; ValueError if the name leads nowhere or to something that is no model's configuration."""
    if arguments.model_name_or_path is not None:
        path = _config_with_weights(arguments.model_name_or_path, arguments=arguments)
        file = read_model_file(path, dense=True, longest=arguments.config_overrides.get("max_position_embeddings"))
        if file.model_type is None:
            raise ValueError(f"{file.file} names no model_type, which says how its weights are named")
        return _Base(_upcycled(file, arguments=arguments), file)
    name = arguments.config_name
    assert name is not None, "parse_arguments wants a model"
    if name in PRESETS:
        return _Base(with_rope_parameters(PRESETS[name], theta=ROPE_THETA), None)
    path = Path(name)
    if not path.exists():
        nowhere = (
            f"{flag} {name} is neither a preset ({', '.join(PRESETS)}) nor a file or folder (looked from {Path.cwd()})"
        )
        path = _config_on_hub(name, arguments=arguments, nowhere=nowhere)
    file = read_model_file(path, longest=arguments.config_overrides.get("max_position_embeddings"))
    return _Base(file.kwargs, file)


def _config_with_weights(name: str, *, arguments: Arguments) -> Path:
    path = Path(name)
    if (path / CONFIG_NAME).is_file():
        return path
    if name in PRESETS:
        raise ValueError(f"{name} is a preset, which has no weights to start from; name it by {CONFIG_FLAG} {name}")
    if path.exists():
        raise ValueError(
            f"--model_name_or_path must be a folder that holds {CONFIG_NAME} and weights, and {name} is none"
        )
    nowhere = f"--model_name_or_path {name} is no folder (looked from {Path.cwd()})"
    return _config_on_hub(name, arguments=arguments, nowhere=nowhere)


def _config_on_hub(name: str, *, arguments: Arguments, nowhere: str) -> Path:
    try:
        return fetch_config(HubModel(name, arguments.model_revision))
    except HubError as error:
        raise HubError(f"{nowhere}, and {error}") from error


def _upcycled(file: ModelFile, *, arguments: Arguments) -> dict[str, Any]:
    """Return the settings of a file with weights; a dense model's become those of the experts made of it."""
    if not file.is_dense:
        return file.kwargs
    values = {
        **file.kwargs,
        # Where the flags are missing, which is a fault of its own, the rest is still checked.
        "num_experts": arguments.upcycle_num_experts or 8,
        "num_experts_per_tok": arguments.upcycle_top_k or 2,
        "moe_intermediate_size": file.kwargs.get("intermediate_size"),
        **SUM_TO_ONE,
    }
    return {key: value for key, value in values.items() if value is not None}


def _weights_faults(base: _Base, *, kwargs: Mapping[str, Any], arguments: Arguments) -> Iterator[str]:
    """Yield what clashes with weights that exist: a wish for experts, and overrides that would make another model."""
    file = base.file
    assert file is not None
    if file.is_dense and arguments.upcycle_num_experts is None:
        yield (
            f"{file.file} is a dense {file.model_type}; --upcycle_num_experts 8 --upcycle_top_k 2, say, make a mixture "
            "of experts of it"
        )
    if not file.is_dense and arguments.upcycle_num_experts is not None:
        yield f"{file.file} is a {file.model_type} with experts of its own; --upcycle_num_experts is for dense models"
    by_flags = {"num_experts": "upcycle_num_experts", "num_experts_per_tok": "upcycle_top_k"} if file.is_dense else {}
    rope = kwargs.get("rope_parameters")
    is_dynamic = isinstance(rope, Mapping) and rope.get("rope_type") == "dynamic"
    fixed = FIXED_BY_WEIGHTS if file.is_dense else (*FIXED_BY_WEIGHTS, *WHERE_EXPERTS_ARE)
    for key, value in arguments.config_overrides.items():
        if key in by_flags:
            yield f"--config_overrides {key} of a dense model that is upcycled is --{by_flags[key]}"
            continue
        default = default_of(key, base.kwargs)
        has, wanted = base.kwargs.get(key, default), default if value is None else value
        if key in fixed and wanted != has:
            yield f"--config_overrides {key}={value!r} cannot change weights that exist; {file.file} has {has!r}"
        elif key in SUM_TO_ONE and file.is_dense and wanted != SUM_TO_ONE[key]:
            yield (
                f"--config_overrides {key}={value!r} of a dense model that is upcycled is not available, only "
                f"{SUM_TO_ONE[key]!r}: with experts whose weights sum to something else than 1 it would not start as "
                "the model it is made of"
            )
        elif key == "max_position_embeddings" and is_dynamic and wanted != has:
            yield (
                f"--config_overrides {key}={value!r} would turn positions otherwise than the weights have learnt, "
                f"since a rotary embedding of type dynamic goes by it; {file.file} has {has!r}"
            )


def _overridden(kwargs: Mapping[str, Any], *, overrides: Mapping[str, Any], has_weights: bool) -> dict[str, Any]:
    """Apply overrides: null takes a setting back to its default, and a rope keeps what is not named anew.

    A rope that stretches the context of weights does so from the length they have learnt.
    """
    changed = {**kwargs, **overrides}
    before, rope = kwargs["rope_parameters"], overrides.get("rope_parameters")
    theta = overrides.get("rope_theta")
    if isinstance(before, Mapping):
        named = {} if theta is None else {"rope_theta": theta}
        if rope is None:
            changed["rope_parameters"] = {**before, **named}
        elif isinstance(rope, Mapping):
            changed["rope_parameters"] = {"rope_type": "default", "rope_theta": before["rope_theta"], **named, **rope}
            if has_weights:
                length = before.get("original_max_position_embeddings", kwargs.get("max_position_embeddings"))
                changed["rope_parameters"] = with_origin(changed["rope_parameters"], length=length)
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


def _revision_faults(arguments: Arguments) -> Iterator[str]:
    name = arguments.model_name_or_path or arguments.config_name or ""
    if arguments.model_revision is not None and (name in PRESETS or not is_on_hub(name)):
        yield f"--model_revision {arguments.model_revision} is for models on the hub, and {name} is none"


def _loss_notes(file: ModelFile, *, arguments: Arguments) -> Iterator[str]:
    """Yield a note for each loss setting of the run that differs from the file's."""
    for key, theirs in file.losses.items():
        ours = getattr(arguments, key)
        if ours != theirs:
            yield f"{key} is {ours} ({arguments.place(key)}), not the {theirs} that {file.file} names; --{key} sets it"
