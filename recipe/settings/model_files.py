"""A config.json, ours or of a stock type, read as keyword arguments of our model's config.

A setting that our model cannot express is an error, never dropped. Everything else that transformers writes is known
here by name: it has no bearing on the function, or only one value that changes nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from modeling.execution import Execution
from modeling.spec import LOSS_SETTINGS, NATIVE, ROPE_THETA, RULES, STOCK_TYPES
from recipe.shared.json_files import read_json_object


@dataclass(frozen=True, kw_only=True)
class FileType:
    """How the files of a type differ from ours.

    renamed  its names for our settings
    implied  what it always does and never says
    absent   what it takes for a setting that its file leaves out, where ours takes something else
    lacks    settings of ours that it does not have
    theta    base of its rotary embedding where the file names none
    window   width of its sliding window where the file names none
    window_is_off  a window is in use only where use_sliding_window says so; other types take no notice of that
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    theta: float = ROPE_THETA
    window: int | None = None
    window_is_off: bool = False


def _stock(name: str, **differs: Any) -> FileType:
    """One of the published types with experts; what it can say and implies is in spec.py."""
    stock = STOCK_TYPES[name]
    renamed = {theirs: ours for theirs, ours in stock.says.items() if theirs != ours}
    return FileType(renamed={**EXPERTS_RENAMED, **renamed}, implied=stock.implied, **differs)


EXPERTS_RENAMED = {"num_local_experts": "num_experts"}
FILE_TYPES: Mapping[str, FileType] = {
    NATIVE: FileType(renamed=EXPERTS_RENAMED),
    "mixtral": _stock("mixtral", absent={"num_key_value_heads": 8, "rms_norm_eps": 1e-5}, theta=1e6),
    "qwen3_moe": _stock("qwen3_moe", absent={"num_key_value_heads": 4, "norm_topk_prob": False}, window_is_off=True),
    "olmoe": _stock("olmoe", absent={"norm_topk_prob": False, "rms_norm_eps": 1e-5}),
}

NOT_OF_DENSE = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
    *("norm_topk_prob", "score_function", "routed_scaling_factor", "router_bias", "clip_qkv"),
)


def _dense(qk_norm: str, **differs: Any) -> FileType:
    return FileType(implied={"qk_norm": qk_norm}, lacks=NOT_OF_DENSE, **differs)


# Types without experts. A mixture of copies of their feed-forward is the same function where its weights sum to 1.
DENSE_TYPES: Mapping[str, FileType] = {
    "llama": _dense("none"),
    "mistral": _dense("none", absent={"num_key_value_heads": 8}, window=4096),
    "qwen3": _dense("head", absent={"num_key_value_heads": 32, "head_dim": 128}, window_is_off=True),
}

# Say nothing about the function the model computes, or are the tokenizer's or the run's to say.
WITHOUT_EFFECT = (
    *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_experts_implementation"),
    *("_name_or_path", "architectures", "attn_implementation", "auto_map", "dtype"),
    *("experts_implementation", "finetuning_task", "id2label", "label2id", "max_window_layers", "model_type"),
    *("name_or_path", "num_labels", "output_router_logits", "prefix", "task_specific_params", "tf_legacy_loss"),
    *("tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "use_bfloat16", "use_cache"),
    *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id"),
    *(option.name for option in fields(Execution)),  # native files of earlier versions name some of them
    *("is_llama_config", "transformers.js_config"),  # of published dense models
)

# Configurations once held the settings of text generation, too; transformers takes them out again when it reads one.
GENERATION = (
    *("assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens"),
    *("diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
    *("encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
    *("forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length"),
    *("no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups", "num_beams"),
    *("num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty"),
    *("return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p", "typical_p"),
)

# Settings our model has only one value for, under any of its spellings.
ONLY_VALUE: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("add_cross_attention", "attention_bias", "is_decoder", "is_encoder_decoder"), (False, None)),
    **dict.fromkeys(("mlp_bias", "output_attentions", "output_hidden_states", "rope_interleaved"), (False, None)),
    **dict.fromkeys(("tie_encoder_decoder", "use_sliding_window"), (False, None)),
    **dict.fromkeys(("return_dict", "tie_last_hidden_states"), (True, None)),
    **dict.fromkeys(("partial_rotary_factor", "pretraining_tp"), (1, None)),
    **dict.fromkeys(("cross_attention_hidden_size", "problem_type", "quantization_config"), (None,)),
    "chunk_size_feed_forward": (0, None),
    "per_layer_config": (None, {}),
    "pruned_heads": ({}, None),
}

# Types of rotary embeddings that are stretched from a length, max_position_embeddings where they name no other.
STRETCHED = ("yarn", "longrope", "llama3")

# Read by rules of their own.
APART = ("sliding_window", "layer_types", "rope_scaling")


class ModelFile(NamedTuple):
    """The content of a config.json.

    model_type  its type, None where it names none and is taken for ours
    kwargs      settings of the model under our names, without those that are null
    losses      the loss settings it names, which a run sets by its own flags
    faults      everything in it that our model cannot express
    """

    file: Path
    model_type: str | None
    kwargs: dict[str, Any]
    losses: dict[str, Any]
    faults: list[str]

    @property
    def is_dense(self) -> bool:
        """Return whether it is of a type without experts."""
        return self.model_type in DENSE_TYPES


def read_model_file(path: Path, *, dense: bool = False, longest: object = None) -> ModelFile:
    """Read a JSON file or a folder's config.json, of one of the dense types only where `dense` says so.

    `longest` replaces the file's own max_position_embeddings where a sliding window has to fit it.

    ValueError where it is missing, no JSON object, or of a type that cannot be read.
    """
    file = path / "config.json" if path.is_dir() else path
    content = read_json_object(str(file))
    model_type = content.get("model_type", NATIVE)
    types = {**FILE_TYPES, **(DENSE_TYPES if dense else {})}
    if not isinstance(model_type, str) or model_type not in types:
        raise ValueError(f"{file} holds a {model_type!r}; configurations can be read of {', '.join(types)}")
    stock = types[model_type]
    left_out = (*WITHOUT_EFFECT, *GENERATION, *LOSS_SETTINGS, *ONLY_VALUE, *APART)
    named = {key: value for key, value in content.items() if key not in left_out}
    renamed = {stock.renamed.get(key, key): value for key, value in named.items()}
    kwargs = {**stock.absent, **{key: value for key, value in renamed.items() if key in RULES}, **stock.implied}
    kwargs = {key: value for key, value in kwargs.items() if value is not None and key not in stock.lacks}
    if isinstance(content.get("rope_scaling"), Mapping):
        kwargs.setdefault("rope_parameters", _rope_from_scaling(content["rope_scaling"]))
    kwargs = with_rope_parameters(kwargs, theta=stock.theta)
    length = kwargs.get("max_position_embeddings")
    kwargs["rope_parameters"] = _with_factor(with_origin(kwargs["rope_parameters"], length=length), length=length)
    return ModelFile(
        file=file,
        model_type=content.get("model_type"),
        kwargs=kwargs,
        losses={key: content[key] for key in LOSS_SETTINGS if content.get(key) is not None},
        faults=[
            *_one_value_faults(content),
            *_attention_faults(content, stock=stock, longest=longest or content.get("max_position_embeddings")),
            *_name_faults(named, stock=stock),
            *_rope_faults(content),
        ],
    )


def with_rope_parameters(kwargs: Mapping[str, Any], *, theta: float) -> dict[str, Any]:
    """Put `rope_theta`, as older files have it, or else `theta` into `rope_parameters`."""
    values = dict(kwargs)
    plain = {"rope_type": "default", "rope_theta": values.pop("rope_theta", theta)}
    rope = values.get("rope_parameters", {})
    # Something else than an object stays as it is, to be found by the rules of spec.py.
    values["rope_parameters"] = {**plain, **rope} if isinstance(rope, Mapping) else rope
    return values


def with_origin(rope: Any, *, length: object) -> Any:
    """Return a stretched rope with the `length` that it is stretched from, if it names none.

    transformers takes max_position_embeddings then, of which another value would turn all positions otherwise.
    """
    if not isinstance(rope, Mapping) or rope.get("rope_type") not in STRETCHED or length is None:
        return rope
    return {"original_max_position_embeddings": length, **rope}


def _with_factor(rope: Any, *, length: object) -> Any:
    """Return a longrope with the factor that transformers derives from max_position_embeddings, if it names none."""
    if not isinstance(rope, Mapping) or rope.get("rope_type") != "longrope" or rope.get("factor") is not None:
        return rope
    origin = rope.get("original_max_position_embeddings")
    if not isinstance(length, int) or not isinstance(origin, int) or origin < 1:
        return rope
    return {**rope, "factor": length / origin}


def _rope_from_scaling(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_scaling` of older files, which called the type `type`, as `rope_parameters`."""
    rest = {key: value for key, value in scaling.items() if key not in ("type", "rope_type")}
    return {"rope_type": scaling.get("rope_type", scaling.get("type", "default")), **rest}


def _one_value_faults(content: Mapping[str, Any]) -> Iterator[str]:
    for key, allowed in ONLY_VALUE.items():
        if key in content and content[key] not in allowed:
            yield f"{key}={content[key]!r} is not available, only {allowed[0]!r}"


def _attention_faults(content: Mapping[str, Any], *, stock: FileType, longest: object) -> Iterator[str]:
    """Yield windows that attention would see; one that the longest sequence fits into changes nothing."""
    # A width that is not in use is written out all the same by some files.
    in_use = not stock.window_is_off or content.get("use_sliding_window")
    window = content.get("sliding_window", stock.window) if in_use else None
    fits = isinstance(window, int) and isinstance(longest, int) and window >= longest
    if window is not None and not fits:
        yield (
            f"sliding_window={window!r} is not available, only None or what no sequence is longer than "
            f"(max_position_embeddings={longest!r}; --config_overrides can lower it)"
        )
    kinds = content.get("layer_types")
    harmless = {"full_attention", "sliding_attention"} if fits else {"full_attention"}
    if kinds is not None and set(kinds) - harmless:
        yield f"layer_types={kinds!r} is not available, only full_attention"


def _name_faults(named: Mapping[str, Any], *, stock: FileType) -> Iterator[str]:
    """Yield settings nobody knows, two spellings of one that differ, and those that the type does not have."""
    for key, value in named.items():
        ours = stock.renamed.get(key, key)
        if ours not in RULES or ours in stock.lacks:
            yield f"{key} is unknown"
        elif key != ours and named.get(ours, value) != value:
            yield f"{key}={value!r} and {ours}={named[ours]!r} name the same setting"
        elif stock.implied.get(ours, value) != value:
            yield f"{key}={value!r} is not available in this type, only {stock.implied[ours]!r}"


def _rope_faults(content: Mapping[str, Any]) -> Iterator[str]:
    rope, theta, scaling = content.get("rope_parameters"), content.get("rope_theta"), content.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, Mapping):
        yield f"rope_scaling={scaling!r} must be an object with rope_type and its factors"
    elif scaling is not None and not {"type", "rope_type"} & scaling.keys():
        yield f"rope_scaling={scaling!r} names no rope_type"
    elif scaling is not None and rope is not None and not _is_same_rope(scaling, rope):
        yield "rope_scaling and rope_parameters name the same setting and differ; keep one"
    inside = rope.get("rope_theta") if isinstance(rope, Mapping) else None
    if theta is not None and inside is not None and inside != theta:
        yield f"rope_theta={theta!r} and rope_parameters with rope_theta={inside!r} name the same setting"


def _is_same_rope(scaling: Mapping[str, Any], rope: object) -> bool:
    """Return whether both are the same; the base of the angles, which files keep apart, may be in the second alone."""
    if not isinstance(rope, Mapping):
        return False
    theta = rope.get("rope_theta")
    return {"rope_theta": theta, **_rope_from_scaling(scaling)} == {"rope_theta": theta, **_rope_from_scaling(rope)}
