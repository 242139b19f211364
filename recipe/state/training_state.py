"""What a checkpoint holds of the training: weights and moments as whole tensors, of which any part can be read."""

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from modeling.shard_table import Ranges

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHT, *MOMENTS)
NATIVE_FOLDER, WHOLE_FOLDER = "deepspeed", "whole"


class TrainingState(Protocol):
    """Weights, moments and the step counter, whatever layout they were saved in. `num_bytes` were read so far."""

    num_bytes: int

    @property
    def step(self) -> float:
        """AdamW's step counter; 0 where no step was taken, and then all moments are 0."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shape of every stored tensor, without the vocabulary's padding; tied parameters once."""
        ...

    def kinds(self, name: str) -> tuple[str, ...]:
        """KINDS for what is trained, the weight alone for frozen parameters and the routers' biases."""
        ...

    def read(self, name: str, *, kind: str, ranges: tuple[Ranges, ...]) -> Tensor:
        """A part of a whole tensor in float32 on the CPU: per dimension these index ranges, one after the other."""
        ...


def everything(shape: tuple[int, ...]) -> tuple[Ranges, ...]:
    """The ranges that cover a whole tensor."""
    return tuple(((0, size),) for size in shape)


def size_of(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


class Overlap(NamedTuple):
    """Indices along one dimension that two lists of ranges share: where they lie in the part of each."""

    target: int
    source: int
    width: int


def overlaps(target: Ranges, source: Ranges) -> list[Overlap]:
    """What a part made of the ranges `target` can take from one made of the ranges `source`, along one dimension."""
    found = []
    at_target = 0
    for target_start, target_end in target:
        at_source = 0
        for source_start, source_end in source:
            start, end = max(target_start, source_start), min(target_end, source_end)
            if start < end:
                found.append(Overlap(at_target + start - target_start, at_source + start - source_start, end - start))
            at_source += source_end - source_start
        at_target += target_end - target_start
    return found


def copy_overlap(target: Tensor, source: Tensor, by_dim: tuple[list[Overlap], ...]) -> None:
    """Write into `target` what `source` has of it; both are parts of one whole tensor."""
    for places in product(*by_dim):
        to = tuple(slice(place.target, place.target + place.width) for place in places)
        of = tuple(slice(place.source, place.source + place.width) for place in places)
        target[to].copy_(source[of])


def empty_part(ranges: tuple[Ranges, ...]) -> Tensor:
    """Room for a part, float32 on the CPU."""
    return torch.empty(tuple(size_of(dim) for dim in ranges), dtype=torch.float32)
