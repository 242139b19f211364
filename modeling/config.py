"""The model as transformers sees it: its configuration, a superset of what Mixtral, Qwen3-MoE and OLMoE can say, and
how its parameters translate to the files other programs read, with one tensor per expert matrix.
"""

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.utils import logging

from .execution import Execution
from .spec import BALANCE_SCOPES, RULES, LossSpec, ModelSpec, experts_per_token_faults


@strict
class GatherMoeConfig(PreTrainedConfig, ModelSpec, LossSpec):
    """Configuration of a GatherMoe model: the settings and losses of spec.py. How a step runs is execution.py's."""

    model_type = "gather_moe"
    # What Trainer's evaluation keeps of an output: the logits. It cannot gather the rest, and needs a list here.
    keys_to_ignore_at_inference = ["cache", "past_key_values", "lm_loss", "aux_loss", "z_loss", "sums"]  # noqa: RUF012
    attribute_map = {"num_local_experts": "num_experts"}  # noqa: RUF012

    use_cache: bool = True
    output_router_logits: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.fill_in()
        self.router_bias = self.router_bias or self.balance_bias_update_rate > 0
        _drop_execution(kwargs)
        super().__post_init__(**kwargs)
        for fault in _faults(self):
            raise ValueError(fault)


def _drop_execution(values: dict[str, Any]) -> None:
    """Take out how a step is executed, which configurations of earlier versions say; warn where that had an effect."""
    for option in fields(Execution):
        value = values.pop(option.name, option.default)
        if value != option.default:
            logging.get_logger(__name__).warning(
                f"{option.name}={value!r} in a GatherMoeConfig has no effect: how a step is executed is no part of the "
                f"model; give the model execution=Execution({option.name}={value!r})"
            )


def _faults(config: GatherMoeConfig) -> Iterator[str]:
    """Yield every setting that has a value it cannot have."""
    choices = {name: rule.choices for name, rule in RULES.items() if rule.choices} | {"balance_scope": BALANCE_SCOPES}
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            yield f"{name}={getattr(config, name)!r} is not known; choose one of {list(allowed)}"
    capacity, rate = config.capacity_factor, config.balance_bias_update_rate
    bounds = {
        "routed_scaling_factor": (config.routed_scaling_factor > 0, "be above 0; 1 changes nothing"),
        "balance_bias_update_rate": (rate >= 0, "be at least 0, which leaves biases as they are"),
        "capacity_factor": (capacity is None or capacity > 0, "be above 0; None drops nothing"),
        "router_jitter_noise": (0 <= config.router_jitter_noise <= 1, "lie between 0, which is none, and 1"),
    }
    for name, (holds, says) in bounds.items():
        if not holds:
            yield f"{name}={getattr(config, name)} must {says}"
    yield from experts_per_token_faults(num_experts=config.num_experts, num_experts_per_tok=config.num_experts_per_tok)


class FileTensor(NamedTuple):
    """A tensor on disk, as a part of one of our parameters.

    expert  which expert of the stacked parameter, or None for the whole parameter
    half    0 for gate and 1 for up of the fused projection, or None
    """

    name: str
    expert: int | None = None
    half: int | None = None


def expert_weight_conversions() -> list[WeightConverter | WeightRenaming]:
    """What transformers' loader has to know: stack the experts, and put gate before up."""
    return [
        WeightConverter(
            source_patterns=["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
            target_patterns="mlp.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns="mlp.experts.*.down_proj.weight",
            target_patterns="mlp.experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ]


def file_tensors(name: str, *, num_experts: int, model_type: str) -> list[FileTensor]:
    """The tensors on disk that one of our parameters becomes in a checkpoint of `model_type`."""
    stacked = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)", name)
    if stacked:
        prefix = _rename(stacked[1], model_type)
        names = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (f"{prefix}.{{}}.{leaf}.weight" for leaf in names)
        experts = range(num_experts)
        if stacked[2] == "down_proj":
            return [FileTensor(down.format(e), e) for e in experts]
        return [FileTensor(n.format(e), e, half) for e in experts for half, n in enumerate((gate, up))]
    return [FileTensor(_rename(name, model_type))]


def _rename(name: str, model_type: str) -> str:
    return name.replace(".mlp.", ".block_sparse_moe.") if model_type == "mixtral" else name
