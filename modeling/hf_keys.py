"""How our parameter names and shapes translate to the files other programs read: one tensor per expert matrix."""

import re
from typing import NamedTuple

from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming


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
