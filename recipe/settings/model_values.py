"""What each setting of a model may be: its type and its range, checked before anything is built from it."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """`holds` decides, `says` completes "must be ..."."""

    holds: Callable[[Any], bool]
    says: str


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(*choices: str) -> Rule:
    return Rule(lambda value: value in choices, f"one of {', '.join(choices)}")


_COUNT = Rule(_is_count, "a whole number of at least 1")
_COUNT_OR_NONE = Rule(lambda value: _is_whole(value) and value >= 0, "a whole number of at least 0")
_TRUTH = Rule(lambda value: isinstance(value, bool), "true or false")
_POSITIVE = Rule(lambda value: _is_number(value) and value > 0, "a number above 0")
_NOT_NEGATIVE = Rule(lambda value: _is_number(value) and value >= 0, "a number of at least 0")
_SHARE = Rule(lambda value: _is_number(value) and 0 <= value < 1, "a number of at least 0 and below 1")
_INDICES = Rule(
    lambda value: isinstance(value, list | tuple) and all(_is_whole(item) and item >= 0 for item in value),
    "a list of layer indices, like [0, 1]",
)

# Every setting that a file or an override may give, under the names of the model's own configuration.
RULES: Mapping[str, Rule] = {
    "vocab_size": _COUNT,
    "hidden_size": _COUNT,
    "num_hidden_layers": _COUNT,
    "num_attention_heads": _COUNT,
    "num_key_value_heads": _COUNT,
    "head_dim": Rule(lambda value: _is_whole(value) and value >= 2 and value % 2 == 0, "an even whole number"),
    "num_experts": _COUNT_OR_NONE,
    "num_experts_per_tok": _COUNT_OR_NONE,
    "moe_intermediate_size": _COUNT,
    "intermediate_size": _COUNT,
    "max_position_embeddings": _COUNT,
    "decoder_sparse_step": _COUNT,
    "mlp_only_layers": _INDICES,
    "norm_topk_prob": _TRUTH,
    "score_function": _one_of("softmax", "sigmoid"),
    "routed_scaling_factor": _POSITIVE,
    "router_bias": _TRUTH,
    "tie_word_embeddings": _TRUTH,
    "qk_norm": _one_of("none", "head", "full"),
    "hidden_act": _one_of("silu"),
    "rms_norm_eps": _POSITIVE,
    "initializer_range": _NOT_NEGATIVE,
    "attention_dropout": _SHARE,
    "clip_qkv": _POSITIVE,
    "rope_theta": _POSITIVE,
    "rope_parameters": Rule(lambda value: isinstance(value, Mapping), "an object with rope_type and rope_theta"),
}
NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
)
FLOATS = ("rms_norm_eps", "initializer_range", "attention_dropout", "clip_qkv", "routed_scaling_factor")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def value_faults(kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Every setting that is missing or cannot be what it is. How settings fit each other and the ranks: layout.py."""
    for key in NEEDED:
        if kwargs.get(key) is None:
            yield f"{key} is missing; it must be {RULES[key].says}"
    for key, value in kwargs.items():
        if value is not None and not RULES[key].holds(value):
            yield f"{key}={value!r} must be {RULES[key].says}"
    yield from _combined_faults(kwargs)
    yield from _rope_faults(kwargs.get("rope_parameters"))


def _combined_faults(kwargs: Mapping[str, Any]) -> Iterator[str]:
    """What follows from two settings, each sound in itself."""
    width: Any = kwargs.get("hidden_size")
    heads: Any = kwargs.get("num_attention_heads")
    layers: Any = kwargs.get("num_hidden_layers")
    named: Any = kwargs.get("mlp_only_layers")
    if kwargs.get("head_dim") is None and _is_count(width) and _is_count(heads):
        derived = width // heads
        if not RULES["head_dim"].holds(derived):
            yield (
                f"hidden_size={width} over num_attention_heads={heads} gives head_dim={derived}, which must be "
                f"{RULES['head_dim'].says}"
            )
    if _is_count(layers) and _INDICES.holds(named):
        beyond = [index for index in named if index >= layers]
        if beyond:
            yield f"mlp_only_layers names {beyond}, but num_hidden_layers={layers}: the last layer is {layers - 1}"


def _rope_faults(rope: Any) -> Iterator[str]:
    if not isinstance(rope, Mapping):
        return
    kind, theta, share = rope.get("rope_type", "default"), rope.get("rope_theta"), rope.get("partial_rotary_factor")
    if kind not in ROPE_TYPES:
        yield f"rope_type={kind!r} must be one of {', '.join(ROPE_TYPES)}"
    if not _POSITIVE.holds(theta):
        yield f"rope_theta={theta!r} must be {_POSITIVE.says}"
    if share not in (None, 1):
        yield f"partial_rotary_factor={share!r} is not available, only 1: all of a head is rotated"
