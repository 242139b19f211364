"""A training state: weights and moments as whole tensors, of which any part can be read; the arithmetic of parts."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from modeling.shard_table import Ranges
from recipe.checkpoint.tensor_file import bytes_of

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHT, *MOMENTS)
NATIVE_FOLDER, WHOLE_FOLDER = "deepspeed", "whole"
ELEMENT_BYTES = 4  # of what a TrainingState gives, which is float32
PIECE_BYTES = 32 * 2**20


class TrainingState(Protocol):
    """Weights, moments and the step counter, whatever layout they were saved in. `num_bytes` were read so far."""

    num_bytes: int

    @property
    def step(self) -> float:
        """AdamW's step counter; 0 where no step was taken, and then all moments are 0."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the whole shape of every stored tensor, without the vocabulary's padding; tied parameters once."""
        ...

    def kinds(self, name: str) -> tuple[str, ...]:
        """Return KINDS for what is trained, the weight alone for frozen parameters and the routers' biases."""
        ...

    def read(self, name: str, *, kind: str, ranges: tuple[Ranges, ...]) -> Tensor:
        """Read a part of a whole tensor in float32 on the CPU: per dimension these index ranges, concatenated."""
        ...


class Entry(NamedTuple):
    """A tensor of a state: of a parameter or buffer, its weight or one of its moments."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES


def entries_of(state: TrainingState) -> list[Entry]:
    """Return every tensor that a state holds."""
    return [Entry(name, kind, shape) for name, shape in state.shapes().items() for kind in state.kinds(name)]


def read_pieces(state: TrainingState, entry: Entry, *, piece_bytes: int = PIECE_BYTES) -> Iterator[Tensor]:
    """Read a tensor of a state in row-major order, in pieces of at most `piece_bytes`."""
    numel, most = prod(entry.shape), max(1, piece_bytes // ELEMENT_BYTES)
    # Whole rows, of the outermost dimension whose rows fit: each piece is then few boxes.
    row = next(size for size in (prod(entry.shape[dim:]) for dim in range(len(entry.shape) + 1)) if size <= most)
    step = most - most % max(1, row)
    for start in range(0, numel, step):
        for box in boxes_between(entry.shape, start, min(start + step, numel)):
            yield state.read(entry.name, kind=entry.kind, ranges=tuple((span,) for span in box))


def digests_of(
    state: TrainingState, *, piece_bytes: int = PIECE_BYTES, advance: Callable[[int], Any]
) -> dict[str, str]:
    """Return a checksum of each tensor's bytes by its key; `advance` is called with the bytes of each piece read."""
    digests = {}
    for entry in entries_of(state):
        digest = hashlib.blake2b(digest_size=16)
        for piece in read_pieces(state, entry, piece_bytes=piece_bytes):
            digest.update(bytes_of(piece))
            advance(piece.nbytes)
        digests[entry.key] = digest.hexdigest()
    return digests


def everything(shape: tuple[int, ...]) -> tuple[Ranges, ...]:
    """Return the ranges that cover a whole tensor."""
    return tuple(((0, size),) for size in shape)


def size_of(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def empty_part(ranges: tuple[Ranges, ...]) -> Tensor:
    """Allocate a part, float32 on the CPU."""
    return torch.empty(tuple(size_of(dim) for dim in ranges), dtype=torch.float32)


class Overlap(NamedTuple):
    """`width` indices along one dimension that two lists of ranges share: where they start in the part of each."""

    target: int
    source: int
    width: int


def overlaps(target: Ranges, source: Ranges) -> list[Overlap]:
    """Return what a part with the ranges `target` can take from one with the ranges `source`, in one dimension."""
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
    """Return the indices number `start` to `end` of the concatenated `ranges`, as far as there are so many."""
    found = []
    at = 0
    for first, last in ranges:
        begin, stop = max(first, first + start - at), min(last, first + end - at)
        if begin < stop:
            found.append((begin, stop))
        at += last - first
    return tuple(found)


def boxes_between(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield elements `start` to `end` of a tensor in row-major order as boxes, in order: an index range per dimension.

    The whole rows are one box; a row that is cut at the beginning or at the end is cut in turn.
    """
    row_numel = prod(shape[1:])
    if start >= end:
        return
    if not shape:
        yield ()
        return
    first, last = -(-start // row_numel), end // row_numel  # the whole rows
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
    for box in product(*by_dim):
        to = tuple(slice(dim.target, dim.target + dim.width) for dim in box)
        of = tuple(slice(dim.source, dim.source + dim.width) for dim in box)
        target[to].copy_(source[of])


def copy_run(target: Tensor, run: Tensor, *, begin: int, shape: tuple[int, ...], box: Sequence[Overlap]) -> int:
    """Write into `target` what a run of elements has of a box of a tensor; return how many elements that are.

    The run has the elements from `begin` on, in row-major order, of a tensor of `shape`. `target` is the box of that
    tensor which `source` and `width` of `box` describe. Only elements of the run inside the box are read.
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
