"""What a checkpoint holds of the training: weights and moments as whole tensors, of which any part can be read."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
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


def cut(ranges: Ranges, start: int, end: int) -> Ranges:
    """Of the indices that `ranges` list one after the other, number `start` to `end`, as far as there are so many."""
    found = []
    at = 0
    for first, last in ranges:
        begin, stop = max(first, first + start - at), min(last, first + end - at)
        if begin < stop:
            found.append((begin, stop))
        at += last - first
    return tuple(found)


def boxes_between(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Elements `start` to `end` of a tensor in row-major order as parts of it, in order: an index range per dimension.

    The whole rows are one part; a row that is cut at the beginning or at the end is cut in turn.
    """
    row_numel = prod(shape[1:])
    first, last = -(-start // row_numel), end // row_numel  # the whole rows
    if start >= end:
        return
    if first > last:
        rest = boxes_between(shape[1:], start - last * row_numel, end - last * row_numel)
        yield from (((last, first), *box) for box in rest)
        return
    if start < first * row_numel:
        rest = boxes_between(shape[1:], start - (first - 1) * row_numel, row_numel)
        yield from (((first - 1, first), *box) for box in rest)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    if last * row_numel < end:
        yield from (((last, last + 1), *box) for box in boxes_between(shape[1:], 0, end - last * row_numel))


def copy_overlap(target: Tensor, source: Tensor, by_dim: tuple[list[Overlap], ...]) -> None:
    """Write into `target` what `source` has of it; both are parts of one whole tensor."""
    for places in product(*by_dim):
        to = tuple(slice(place.target, place.target + place.width) for place in places)
        of = tuple(slice(place.source, place.source + place.width) for place in places)
        target[to].copy_(source[of])


def copy_run(target: Tensor, run: Tensor, *, begin: int, shape: tuple[int, ...], box: Sequence[Overlap]) -> int:
    """Write into `target` what a run of elements has of a part of a tensor; returns how many elements that are.

    The run has those from `begin` on, in row-major order, of a tensor of `shape`, of which `target` is to be the part
    that the `source` and `width` of `box` say. Nothing else of the run is touched.
    """
    end, row_numel = begin + run.numel(), prod(shape[1:])
    (_, source, width), inner = box[0], box[1:]
    first, last = max(source, -(-begin // row_numel)), min(source + width, end // row_numel)
    num_copied = 0
    if first < last:
        rows = run[first * row_numel - begin : last * row_numel - begin].view(last - first, *shape[1:])
        rows = rows[(slice(None), *(slice(dim.source, dim.source + dim.width) for dim in inner))]
        target[first - source : last - source].copy_(rows)
        num_copied += rows.numel()
    # Rows that the run has a part of: its first one and its last one, which may be the same.
    cut_rows = {row for row, cut_off in ((begin // row_numel, begin), (end // row_numel, end)) if cut_off % row_numel}
    for row in sorted(row for row in cut_rows if source <= row < source + width):
        start, stop = max(begin, row * row_numel), min(end, (row + 1) * row_numel)
        part = run[start - begin : stop - begin]
        num_copied += copy_run(target[row - source], part, begin=start - row * row_numel, shape=shape[1:], box=inner)
    return num_copied


def empty_part(ranges: tuple[Ranges, ...]) -> Tensor:
    """Room for a part, float32 on the CPU."""
    return torch.empty(tuple(size_of(dim) for dim in ranges), dtype=torch.float32)
