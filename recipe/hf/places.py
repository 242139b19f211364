"""In which tensors of a Hugging Face folder each of our parameters is found, whichever way its experts are stored.

Three ways: a tensor per matrix of an expert, as published; all experts of a layer stacked in one, under our own names,
as transformers keeps them in memory and saves them with `save_original_format=False`; and a dense model's feed-forward,
of which every expert is made (sparse upcycling, 2212.05055).
"""

import re
from collections.abc import Container
from typing import Literal, NamedTuple

from modeling.hf_keys import FileTensor, file_tensors
from recipe.settings.model_files import DENSE_TYPES

Style = Literal["per expert", "stacked", "dense"]
_EXPERTS = re.compile(r"(?P<mlp>.*\.mlp)\.experts\.(?P<matrix>gate_up_proj|down_proj)")
_ROUTER = re.compile(r".*\.mlp\.gate\.\w+")


class Place(NamedTuple):
    """A tensor of a folder and what it is of our parameter.

    experts  which experts it is for; None for a parameter that is no stack of experts
    half     0 for gate and 1 for up of the fused projection, or None for all rows
    stacked  it has a dimension for the experts in front, and both halves, as our parameter has
    """

    tensor: str
    experts: tuple[int, ...] | None = None
    half: int | None = None
    stacked: bool = False


class Source(NamedTuple):
    """A folder's way to store `num_experts` experts."""

    model_type: str
    style: Style
    num_experts: int

    def places(self, name: str) -> list[Place]:
        """The tensors that our parameter `name` is read from; none for a router where there are no experts yet."""
        experts, every = _EXPERTS.fullmatch(name), tuple(range(self.num_experts))
        if self.style == "per expert":
            targets = file_tensors(name, num_experts=self.num_experts, model_type=self.model_type)
            return [_place(target) for target in targets]
        if self.style == "dense" and _ROUTER.fullmatch(name):
            return []
        if experts is None:
            return [Place(name)]
        if self.style == "stacked":
            return [Place(name, every, stacked=True)]
        halves = {"gate_proj": 0, "up_proj": 1} if experts["matrix"] == "gate_up_proj" else {"down_proj": None}
        return [Place(f"{experts['mlp']}.{matrix}.weight", every, half) for matrix, half in halves.items()]


def find_source(names: Container[str], *, wanted: list[str], model_type: str, num_experts: int) -> Source:
    """How a folder with the tensors `names` stores the parameters `wanted` of a model of `model_type`."""
    style: Style = "dense" if model_type in DENSE_TYPES else "per expert"
    if style == "per expert" and any(_EXPERTS.fullmatch(name) and name in names for name in wanted):
        style = "stacked"
    return Source(model_type, style, num_experts)


def _place(target: FileTensor) -> Place:
    return Place(target.name, None if target.expert is None else (target.expert,), target.half)
