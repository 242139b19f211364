"""The model's configuration, a superset of what Mixtral, Qwen3-MoE and OLMoE can say."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from .layout import ModelSizes

QK_NORMS = ("none", "head", "full")
BALANCE_SCOPES = ("sequence", "micro_batch", "global_batch")
SCORE_FUNCTIONS = ("softmax", "sigmoid")


@strict
class GatherMoeConfig(PreTrainedConfig):
    """Configuration of a GatherMoe model; names and defaults follow Qwen3-MoE where both have them.

    qk_norm                RMS norm of queries and keys: "none" (Mixtral), "head" (Qwen3-MoE) or "full" width (OLMoE)
    score_function         experts are scored by a "softmax" over all, or a "sigmoid" each (DeepSeek-V3, 2412.19437)
    norm_topk_prob         the chosen experts' weights are scaled to sum to 1
    routed_scaling_factor  what their weights are multiplied by afterwards
    router_bias            every router has a bias that is added to its scores for the choice, not for the weights
    clip_qkv               bound for the elements of q, k and v, or None
    mlp_only_layers        indices of layers with a dense feed-forward of width `intermediate_size`
    decoder_sparse_step    only every n-th layer is a mixture of experts
    router_aux_loss_coef   weight of the load-balancing loss (Switch Transformer, 2101.03961, eq. 4), mean over layers
    router_z_loss_coef     weight of the router's z-loss (ST-MoE, 2202.08906, eq. 5), mean over tokens and layers
    logits_z_loss_coef     weight of the z-loss on the vocabulary's logits (PaLM, 2204.02311, §5), mean over targets
    balance_scope          what the balance loss is computed over: each "sequence", each "micro_batch", or the
                           "global_batch" up to the micro-batch (2501.11873)
    balance_bias_update_rate  how far the biases move in a step to even the load out (2408.15664); above 0 they exist
    capacity_factor        an expert takes so many times its even share of a training micro-batch, the rest is dropped
                           (Switch, 2101.03961, §2.2); None for no limit
    router_jitter_noise    half width of the uniform noise that a router's input is multiplied by in training
    """

    model_type = "gather_moe"
    # What Trainer's evaluation keeps of an output: the logits. It cannot gather the rest, and needs a list here.
    keys_to_ignore_at_inference = ["cache", "past_key_values", "lm_loss", "aux_loss", "z_loss", "sums"]  # noqa: RUF012
    attribute_map = {"num_local_experts": "num_experts"}  # noqa: RUF012

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 6144
    moe_intermediate_size: int = 768
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict[str, Any] | None = None
    attention_dropout: float | int = 0.0
    qk_norm: str = "head"
    clip_qkv: float | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    num_experts: int = 128
    num_experts_per_tok: int = 8
    score_function: str = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float | int = 1.0
    router_bias: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0
    logits_z_loss_coef: float = 0.0
    balance_scope: str = "sequence"
    balance_bias_update_rate: float | int = 0.0
    capacity_factor: float | int | None = None
    router_jitter_noise: float | int = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.mlp_only_layers is None:
            self.mlp_only_layers = []
        self.router_bias = self.router_bias or self.balance_bias_update_rate > 0
        super().__post_init__(**kwargs)
        _check_choices(self)
        _check_numbers(self)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Indices of the layers without experts."""
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_sparse(i))

    def is_sparse(self, layer_idx: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        on_step = (layer_idx + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and on_step and layer_idx not in (self.mlp_only_layers or ())

    @property
    def sizes(self) -> ModelSizes:
        """The numbers that layouts, plans and FLOP counts are made of."""
        dense = self.dense_layers
        assert self.head_dim is not None
        assert self.num_key_value_heads is not None
        return ModelSizes(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            moe_intermediate_size=self.moe_intermediate_size,
            intermediate_size=self.intermediate_size if dense else 0,
            max_position_embeddings=self.max_position_embeddings,
            num_hidden_layers=self.num_hidden_layers,
            dense_layers=dense,
            qk_norm=self.qk_norm,
            tie_word_embeddings=self.tie_word_embeddings,
        )


def _check_choices(config: GatherMoeConfig) -> None:
    choices = {
        "qk_norm": QK_NORMS,
        "balance_scope": BALANCE_SCOPES,
        "score_function": SCORE_FUNCTIONS,
        "hidden_act": ("silu",),
    }
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not known; choose one of {list(allowed)}")


def _check_numbers(config: GatherMoeConfig) -> None:
    if config.routed_scaling_factor <= 0:
        raise ValueError(f"routed_scaling_factor={config.routed_scaling_factor} must be above 0; 1 changes nothing")
    if config.balance_bias_update_rate < 0:
        raise ValueError(
            f"balance_bias_update_rate={config.balance_bias_update_rate} must be at least 0, which leaves biases as "
            "they are"
        )
    if config.capacity_factor is not None and config.capacity_factor <= 0:
        raise ValueError(f"capacity_factor={config.capacity_factor} must be above 0; None drops nothing")
    if not 0 <= config.router_jitter_noise <= 1:
        raise ValueError(f"router_jitter_noise={config.router_jitter_noise} must lie between 0, which is none, and 1")
    if config.num_experts > 0 and not 1 <= config.num_experts_per_tok <= config.num_experts:
        raise ValueError(
            f"num_experts_per_tok={config.num_experts_per_tok} must lie between 1 and num_experts={config.num_experts}"
        )
