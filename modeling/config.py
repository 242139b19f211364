"""The model's configuration, a superset of what Mixtral, Qwen3-MoE and OLMoE can say."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from .layout import STRATEGIES
from .spec import BALANCE_SCOPES, RULES, LossSpec, ModelSpec, experts_per_token_faults

EXPERTS_BACKENDS = ("auto", "loop", "grouped", "triton")
COMBINE_DTYPES = ("auto", "float32")
TOKEN_DTYPES = ("auto", "float8_e4m3")


@strict
class GatherMoeConfig(PreTrainedConfig, ModelSpec, LossSpec):
    """Configuration of a GatherMoe model: the settings and losses of spec.py, and how a step is executed.

    strategy               how tokens meet experts that several ranks share, see dispatch.py; "auto" is what sends least
    experts_backend        "auto" is "loop" on CPU; on a GPU "grouped", or "triton" where that would wait for the host
    overlap                transfers between the ranks are cut in chunks that travel while others are worked on
    overlap_chunks         how many; None is as many as pay (cost.py)
    regather               gathered tokens are gathered again in the backward instead of kept
    token_dtype            in which tokens travel to the experts: "auto" is the model's, or "float8_e4m3" (fp8.py)
    resident_experts       slots on every rank for copies of other ranks' experts, see expert_copies.py; 0 is none
    combine_dtype          in which the ranks' parts of the experts' sums travel: "auto" is the model's, or "float32"
    """

    model_type = "gather_moe"
    # What Trainer's evaluation keeps of an output: the logits. It cannot gather the rest, and needs a list here.
    keys_to_ignore_at_inference = ["cache", "past_key_values", "lm_loss", "aux_loss", "z_loss", "sums"]  # noqa: RUF012
    attribute_map = {"num_local_experts": "num_experts"}  # noqa: RUF012

    use_cache: bool = True
    output_router_logits: bool = False
    experts_backend: str = "auto"
    strategy: str = "gather_tokens"
    overlap: bool = False
    overlap_chunks: int | None = None
    regather: bool = False
    token_dtype: str = "auto"
    combine_dtype: str = "auto"
    resident_experts: int = 0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.fill_in()
        self.router_bias = self.router_bias or self.balance_bias_update_rate > 0
        super().__post_init__(**kwargs)
        _check_choices(self)
        _check_numbers(self)


def _check_choices(config: GatherMoeConfig) -> None:
    choices = {
        **{name: rule.choices for name, rule in RULES.items() if rule.choices},
        "balance_scope": BALANCE_SCOPES,
        "experts_backend": EXPERTS_BACKENDS,
        "strategy": STRATEGIES,
        "token_dtype": TOKEN_DTYPES,
        "combine_dtype": COMBINE_DTYPES,
    }
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not known; choose one of {list(allowed)}")


def _check_numbers(config: GatherMoeConfig) -> None:
    if config.overlap_chunks is not None and config.overlap_chunks < 1:
        raise ValueError(f"overlap_chunks={config.overlap_chunks} must be at least 1; None chooses")
    if config.resident_experts < 0:
        raise ValueError(f"resident_experts={config.resident_experts} must be at least 0, which makes no copies")
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
    if config.strategy != "gather_tokens" and (config.token_dtype, config.combine_dtype) != ("auto", "auto"):
        raise ValueError(
            f"token_dtype={config.token_dtype!r} and combine_dtype={config.combine_dtype!r} are for "
            f"strategy='gather_tokens', not {config.strategy!r}; use 'auto' for both"
        )
    for fault in experts_per_token_faults(
        num_experts=config.num_experts, num_experts_per_tok=config.num_experts_per_tok
    ):
        raise ValueError(fault)
