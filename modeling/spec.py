"""What a model is: its settings with their defaults and rules, the sizes that follow, and the types that can say it.

Standard library only: the configuration class, the settings of a run, the planner and the FLOP count all read this.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

NATIVE = "gather_moe"
ROPE_THETA = 10000.0
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
QK_NORMS = ("none", "head", "full")
SCORE_FUNCTIONS = ("softmax", "sigmoid")
BALANCE_SCOPES = ("sequence", "micro_batch", "global_batch")


class Rule(NamedTuple):
    """What a setting may be: `holds` decides, `says` completes "must be ...", `choices` are all values of a few."""

    holds: Callable[[Any], bool]
    says: str
    choices: tuple[str, ...] = ()


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(*choices: str) -> Rule:
    return Rule(lambda value: value in choices, f"one of {', '.join(choices)}", choices)


COUNT = Rule(lambda value: _is_whole(value) and value >= 1, "a whole number of at least 1")
COUNT_OR_NONE = Rule(lambda value: _is_whole(value) and value >= 0, "a whole number of at least 0")
EVEN = Rule(lambda value: _is_whole(value) and value >= 2 and value % 2 == 0, "an even whole number")
TRUTH = Rule(lambda value: isinstance(value, bool), "true or false")
POSITIVE = Rule(lambda value: _is_number(value) and value > 0, "a number above 0")
NOT_NEGATIVE = Rule(lambda value: _is_number(value) and value >= 0, "a number of at least 0")
SHARE = Rule(lambda value: _is_number(value) and 0 <= value < 1, "a number of at least 0 and below 1")
INDICES = Rule(
    lambda value: isinstance(value, list | tuple) and all(_is_whole(item) and item >= 0 for item in value),
    "a list of layer indices, like [0, 1]",
)
OBJECT = Rule(lambda value: isinstance(value, Mapping), "an object with rope_type and rope_theta")


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The numbers of a model that a layout depends on. All are counts of the whole model, not of a shard."""

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    intermediate_size: int  # width of the dense feed-forward layers; 0 where there are none
    max_position_embeddings: int
    num_hidden_layers: int
    dense_layers: tuple[int, ...] = ()
    qk_norm: str = "head"
    tie_word_embeddings: bool = False

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - len(self.dense_layers)


# Sizes that are settings of the same name.
_SIZES_OF_SETTINGS = tuple(f.name for f in fields(ModelSizes) if f.name not in ("intermediate_size", "dense_layers"))


def _setting(rule: Rule, default: Any = None, *, needed: bool = False) -> Any:
    return field(default=default, metadata={"rule": rule, "needed": needed})


@dataclass(kw_only=True, repr=False)
class ModelSpec:
    """The settings that make the function a model computes; names and defaults follow Qwen3-MoE where both have them.

    qk_norm                RMS norm of queries and keys: "none" (Mixtral), "head" (Qwen3-MoE) or "full" width (OLMoE)
    score_function         experts are scored by a "softmax" over all, or a "sigmoid" each (DeepSeek-V3, 2412.19437)
    norm_topk_prob         the chosen experts' weights are scaled to sum to 1
    routed_scaling_factor  what their weights are multiplied by afterwards
    router_bias            every router has a bias that is added to its scores for the choice, not for the weights
    clip_qkv               bound for the elements of q, k and v, or None
    mlp_only_layers        indices of layers with a dense feed-forward of width `intermediate_size`
    decoder_sparse_step    only every n-th layer is a mixture of experts
    """

    vocab_size: int = _setting(COUNT, 32000, needed=True)
    hidden_size: int = _setting(COUNT, 2048, needed=True)
    num_attention_heads: int = _setting(COUNT, 32, needed=True)
    num_hidden_layers: int = _setting(COUNT, 24, needed=True)
    num_experts: int = _setting(COUNT_OR_NONE, 128, needed=True)
    num_experts_per_tok: int = _setting(COUNT_OR_NONE, 8, needed=True)
    moe_intermediate_size: int = _setting(COUNT, 768, needed=True)
    max_position_embeddings: int = _setting(COUNT, 32768, needed=True)
    intermediate_size: int = _setting(COUNT, 6144)
    num_key_value_heads: int | None = _setting(COUNT)
    head_dim: int | None = _setting(EVEN)
    hidden_act: str = _setting(_one_of("silu"), "silu")
    initializer_range: float = _setting(NOT_NEGATIVE, 0.02)
    rms_norm_eps: float = _setting(POSITIVE, 1e-6)
    tie_word_embeddings: bool = _setting(TRUTH, False)
    rope_parameters: dict[str, Any] | None = _setting(OBJECT)  # noqa: RUF009
    attention_dropout: float | int = _setting(SHARE, 0.0)
    qk_norm: str = _setting(_one_of(*QK_NORMS), "head")
    clip_qkv: float | None = _setting(POSITIVE)
    decoder_sparse_step: int = _setting(COUNT, 1)
    mlp_only_layers: list[int] | None = _setting(INDICES)  # noqa: RUF009
    score_function: str = _setting(_one_of(*SCORE_FUNCTIONS), "softmax")
    norm_topk_prob: bool = _setting(TRUTH, True)
    routed_scaling_factor: float | int = _setting(POSITIVE, 1.0)
    router_bias: bool = _setting(TRUTH, False)

    def fill_in(self) -> None:
        """Set what follows from other settings where it is not named."""
        for name in ("num_key_value_heads", "head_dim", "mlp_only_layers"):
            if getattr(self, name) is None:
                setattr(self, name, default_of(name, vars(self)))

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Indices of the layers without experts: all but every `decoder_sparse_step`-th, and those named."""
        named, step, none = self.mlp_only_layers or (), self.decoder_sparse_step, self.num_experts == 0
        return tuple(i for i in range(self.num_hidden_layers) if none or (i + 1) % step or i in named)

    def is_sparse(self, layer_idx: int) -> bool:
        """Return whether a layer's feed-forward is a mixture of experts."""
        return layer_idx not in self.dense_layers

    @property
    def sizes(self) -> ModelSizes:
        """The numbers that layouts, plans and FLOP counts are made of."""
        dense = self.dense_layers
        same = {name: getattr(self, name) for name in _SIZES_OF_SETTINGS}
        return ModelSizes(**same, intermediate_size=self.intermediate_size if dense else 0, dense_layers=dense)


@dataclass(kw_only=True, repr=False)
class LossSpec:
    """How a model is trained to use its experts; a run sets these by flags of the same names.

    router_aux_loss_coef   weight of the load-balancing loss (Switch Transformer, 2101.03961, eq. 4), mean over layers
    router_z_loss_coef     weight of the router's z-loss (ST-MoE, 2202.08906, eq. 5), mean over tokens and layers
    logits_z_loss_coef     weight of the z-loss on the vocabulary's logits (PaLM, 2204.02311, §5), mean over targets
    balance_scope          what the balance loss is computed over: each "sequence", each "micro_batch", or the
                           "global_batch" up to the micro-batch (2501.11873)
    balance_bias_update_rate  how far the biases move in a step to even the load out (2408.15664); above 0 they exist
    router_jitter_noise    half width of the uniform noise that a router's input is multiplied by in training
    capacity_factor        an expert takes so many times its even share of a training micro-batch, the rest skips the
                           experts through the residual (Switch, 2101.03961, §2.2); None for no limit
    """

    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0
    logits_z_loss_coef: float = 0.0
    balance_scope: str = "sequence"
    balance_bias_update_rate: float | int = 0.0
    router_jitter_noise: float | int = 0.0
    capacity_factor: float | int | None = None


LOSS_SETTINGS = tuple(f.name for f in fields(LossSpec))
# The rule of every setting that a file or an override may give; files that are older than rope_parameters have a theta.
RULES: Mapping[str, Rule] = {**{f.name: f.metadata["rule"] for f in fields(ModelSpec)}, "rope_theta": POSITIVE}
DEFAULTS: Mapping[str, Any] = {f.name: f.default for f in fields(ModelSpec)}
NEEDED = tuple(f.name for f in fields(ModelSpec) if f.metadata["needed"])
FLOATS = tuple(f.name for f in fields(ModelSpec) if f.metadata["rule"] in (POSITIVE, NOT_NEGATIVE, SHARE))


def default_of(name: str, settings: Mapping[str, Any]) -> Any:
    """Return what a setting is where `settings` do not name it; None where what it follows from is not sound."""
    width: Any = settings.get("hidden_size")
    heads: Any = settings.get("num_attention_heads")
    if name == "num_key_value_heads":
        return heads
    if name == "head_dim":
        return width // heads if COUNT.holds(width) and COUNT.holds(heads) else None
    return [] if name == "mlp_only_layers" else DEFAULTS.get(name)


def spec_of(settings: Mapping[str, Any]) -> ModelSpec:
    """Return the model that keyword arguments of its configuration make; those of a run have no part in it."""
    spec = ModelSpec(**{name: value for name, value in settings.items() if name in DEFAULTS and value is not None})
    spec.fill_in()
    return spec


def value_faults(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield every setting that is missing or cannot be what it is. How settings fit the ranks: layout.py."""
    for key in NEEDED:
        if settings.get(key) is None:
            yield f"{key} is missing; it must be {RULES[key].says}"
    for key, value in settings.items():
        if value is not None and not RULES[key].holds(value):
            yield f"{key}={value!r} must be {RULES[key].says}"
    yield from _combined_faults(settings)
    yield from _rope_faults(settings.get("rope_parameters"))


def _combined_faults(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what cannot follow from two settings, each sound in itself."""
    head_dim = default_of("head_dim", settings)
    if settings.get("head_dim") is None and head_dim is not None and not EVEN.holds(head_dim):
        yield (
            f"hidden_size={settings['hidden_size']} over num_attention_heads={settings['num_attention_heads']} gives "
            f"head_dim={head_dim}, which must be {EVEN.says}"
        )
    layers: Any = settings.get("num_hidden_layers")
    named: Any = settings.get("mlp_only_layers")
    if COUNT.holds(layers) and INDICES.holds(named):
        beyond = [index for index in named if index >= layers]
        if beyond:
            yield f"mlp_only_layers names {beyond}, but num_hidden_layers={layers}: the last layer is {layers - 1}"


def _rope_faults(rope: Any) -> Iterator[str]:
    if not isinstance(rope, Mapping):
        return
    kind, theta, share = rope.get("rope_type", "default"), rope.get("rope_theta"), rope.get("partial_rotary_factor")
    if kind not in ROPE_TYPES:
        yield f"rope_type={kind!r} must be one of {', '.join(ROPE_TYPES)}"
    if not POSITIVE.holds(theta):
        yield f"rope_theta={theta!r} must be {POSITIVE.says}"
    if share not in (None, 1):
        yield f"partial_rotary_factor={share!r} is not available, only 1: all of a head is rotated"


def experts_per_token_faults(*, num_experts: int, num_experts_per_tok: int) -> Iterator[str]:
    """Yield a fault unless a token visits at least one expert, where there are any, and none of them twice."""
    if num_experts > 0 and not 1 <= num_experts_per_tok <= num_experts:
        yield f"num_experts_per_tok={num_experts_per_tok} must lie between 1 and num_experts={num_experts}"


Shapes = dict[str, tuple[int, ...]]


def layer_shapes(sizes: ModelSizes, *, is_dense: bool) -> Shapes:
    """Return the whole shapes of a layer's parameters by their names in it, in the order in which they are made."""
    hidden, head = sizes.hidden_size, sizes.head_dim
    query, key_value = sizes.num_attention_heads * head, sizes.num_key_value_heads * head
    shapes: Shapes = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
    }
    if sizes.qk_norm != "none":
        widths = (query, key_value) if sizes.qk_norm == "full" else (head, head)
        shapes |= {f"self_attn.{kind}_norm.weight": (width,) for kind, width in zip("qk", widths, strict=True)}
    if is_dense:
        width = sizes.intermediate_size
        shapes |= {f"mlp.{kind}_proj.weight": (width, hidden) for kind in ("gate", "up")}
        shapes["mlp.down_proj.weight"] = (hidden, width)
    else:
        width = sizes.moe_intermediate_size
        shapes["mlp.gate.weight"] = (sizes.num_experts, hidden)
        shapes["mlp.experts.gate_up_proj"] = (sizes.num_experts, 2 * width, hidden)
        shapes["mlp.experts.down_proj"] = (sizes.num_experts, hidden, width)
    return shapes | {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def outer_shapes(sizes: ModelSizes) -> Shapes:
    """Return the whole shapes of the parameters around the layers by their names in the model."""
    table = (sizes.vocab_size, sizes.hidden_size)
    head = {} if sizes.tie_word_embeddings else {"lm_head.weight": table}
    return {"model.embed_tokens.weight": table, "model.norm.weight": (sizes.hidden_size,), **head}


@dataclass(frozen=True, kw_only=True)
class StockType:
    """A published model type, as far as it can say what our model is.

    implied  what it always does and its files never say
    says     its names for our settings, beside those that all types share (`SHARED_NAMES`)
    """

    implied: Mapping[str, Any]
    says: Mapping[str, str]

    def can_say(self, spec: ModelSpec) -> bool:
        """Return whether a file of this type can make the model: what it has no name for changes nothing."""
        unsaid = {
            "head_dim": spec.head_dim is not None and spec.head_dim * spec.num_attention_heads == spec.hidden_size,
            "mlp_only_layers": not spec.dense_layers,
            "decoder_sparse_step": not spec.dense_layers,
            "clip_qkv": spec.clip_qkv is None,
        }
        plain = all(changes_nothing for name, changes_nothing in unsaid.items() if name not in self.says.values())
        return plain and all(getattr(spec, name) == value for name, value in self.implied.items())


def _names(*ours: str, **renamed: str) -> Mapping[str, str]:
    return {**renamed, **{name: name for name in ours}}


# Settings that every type has, under our names.
SHARED_NAMES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("num_experts_per_tok", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_parameters"),
    *("tie_word_embeddings", "attention_dropout", "router_aux_loss_coef"),
)
PLAIN_ROUTING: Mapping[str, Any] = {"score_function": "softmax", "routed_scaling_factor": 1.0, "router_bias": False}
STOCK_TYPES: Mapping[str, StockType] = {
    "mixtral": StockType(
        implied={**PLAIN_ROUTING, "qk_norm": "none", "norm_topk_prob": True},
        says=_names("head_dim", intermediate_size="moe_intermediate_size", num_local_experts="num_experts"),
    ),
    "qwen3_moe": StockType(
        implied={**PLAIN_ROUTING, "qk_norm": "head"},
        says=_names(
            *("intermediate_size", "moe_intermediate_size", "num_experts", "head_dim", "norm_topk_prob"),
            *("mlp_only_layers", "decoder_sparse_step"),
        ),
    ),
    "olmoe": StockType(
        implied={**PLAIN_ROUTING, "qk_norm": "full"},
        says=_names("num_experts", "norm_topk_prob", "clip_qkv", intermediate_size="moe_intermediate_size"),
    ),
}


def stock_type(spec: ModelSpec) -> str:
    """Return the stock model type that says everything of a model, or our own if none does."""
    fitting = [name for name, stock in STOCK_TYPES.items() if stock.can_say(spec)]
    return fitting[0] if fitting and spec.num_experts > 0 else NATIVE
