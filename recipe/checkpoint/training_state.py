"""A training state: weights and moments as whole tensors, of which any part can be read; the arithmetic of parts.

The form without a layout is a folder of safetensors files, of which a reader maps what it asks for:

whole/training.json             AdamW's step, and of every tensor its shape and kinds
whole/state*.safetensors        tensors named KIND/NAME, float32
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modeling.shard_table import Ranges
from recipe.checkpoint.tensor_file import ELEMENT_BYTES, bytes_of, find_tensors, write_tensors
from recipe.shared.errors import CheckpointBrokenError

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHT, *MOMENTS)
NATIVE_FOLDER, WHOLE_FOLDER = "deepspeed", "whole"
PIECE_BYTES = 32 * 2**20  # of a tensor that are in memory at a time
TRAINING_NAME, STEM, FORMAT_VERSION = "training.json", "state", 1  # of the form without a layout


class TrainingState(Protocol):
    """Weights, moments and the step counter, whatever layout they were saved in."""

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


def read_pieces(state: TrainingState, entry: Entry) -> Iterator[Tensor]:
    """Read a tensor of a state in row-major order, in pieces of at most PIECE_BYTES."""
    numel, most = prod(entry.shape), max(1, PIECE_BYTES // ELEMENT_BYTES)
    # Whole rows, of the outermost dimension whose rows fit: each piece is then few boxes.
    row = next(size for size in (prod(entry.shape[dim:]) for dim in range(len(entry.shape) + 1)) if size <= most)
    step = most - most % max(1, row)
    for start in range(0, numel, step):
        for box in boxes_between(entry.shape, start, min(start + step, numel)):
            yield state.read(entry.name, kind=entry.kind, ranges=tuple((span,) for span in box))


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

    Whole rows that follow one another are one box; of a row that is cut, its rest is cut in turn.
    """
    if start >= end:
        return
    if not shape:
        yield ()
        return
    row_numel = prod(shape[1:])
    row, skipped = divmod(start, row_numel)
    if skipped or end - start < row_numel:
        stop = min(end, (row + 1) * row_numel)
        yield from (((row, row + 1), *box) for box in boxes_between(shape[1:], skipped, stop - row * row_numel))
    else:
        end_row = end // row_numel
        stop = end_row * row_numel
        yield ((row, end_row), *((0, size) for size in shape[1:]))
    yield from boxes_between(shape, stop, end)


def copy_overlap(target: Tensor, source: Tensor, by_dim: tuple[list[Overlap], ...]) -> int:
    """Write into `target` what `source` has of it, both parts of one whole tensor; return how many elements that are.

    `source` may also be a slice of a safetensors file. Only what is copied is read from it.
    """
    num_copied = 0
    for box in product(*by_dim):
        to = target[tuple(slice(dim.target, dim.target + dim.width) for dim in box)]
        to.copy_(source[tuple(slice(dim.source, dim.source + dim.width) for dim in box)])
        num_copied += to.numel()
    return num_copied


def write_whole(folder: Path, state: TrainingState, *, advance: Callable[[int], Any]) -> dict[str, str]:
    """Write a state into the new `folder`; return a checksum of what was read, by the keys in the files.

    One piece is in memory at a time. `advance` is called with the bytes of each piece written.
    """
    entries = {entry.key: entry for entry in entries_of(state)}
    digests: dict[str, str] = {}

    def pieces(key: str) -> Iterator[Tensor]:
        return _digested(state, entries[key], digests=digests, advance=advance)

    folder.mkdir()
    shapes = {key: entry.shape for key, entry in entries.items()}
    write_tensors(folder, shapes, stem=STEM, pieces=pieces)
    tensors = {name: {"shape": list(shape), "kinds": list(state.kinds(name))} for name, shape in state.shapes().items()}
    content = {"format_version": FORMAT_VERSION, "step": state.step, "tensors": tensors}
    (folder / TRAINING_NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return digests


def digests_of(state: TrainingState, *, advance: Callable[[int], Any]) -> dict[str, str]:
    """Return a checksum of each tensor's bytes by its key; `advance` is called with the bytes of each piece read."""
    digests: dict[str, str] = {}
    for entry in entries_of(state):
        for _ in _digested(state, entry, digests=digests, advance=advance):
            pass
    return digests


def _digested(
    state: TrainingState, entry: Entry, *, digests: dict[str, str], advance: Callable[[int], Any]
) -> Iterator[Tensor]:
    """Yield the pieces of a tensor; after the last one add its checksum to `digests`."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in read_pieces(state, entry):
        digest.update(bytes_of(piece))
        yield piece
        advance(piece.nbytes)
    digests[entry.key] = digest.hexdigest()


class WholeTensors:
    """The TrainingState in a folder that `write_whole` wrote."""

    def __init__(self, folder: Path) -> None:
        """Raise CheckpointBrokenError unless the folder's files hold exactly what training.json says."""
        content = _read_content(folder / TRAINING_NAME)
        self.step: float = content["step"]
        self._shapes = {name: tuple(tensor["shape"]) for name, tensor in content["tensors"].items()}
        self._kinds = {name: tuple(tensor["kinds"]) for name, tensor in content["tensors"].items()}
        try:
            self._files = find_tensors(folder, stem=STEM)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointBrokenError(folder, f"its tensors cannot be found ({error})") from error
        wanted = {f"{kind}/{name}" for name, kinds in self._kinds.items() for kind in kinds}
        missing, unused = sorted(wanted - self._files.keys()), sorted(self._files.keys() - wanted)
        if missing or unused:
            raise CheckpointBrokenError(
                folder / TRAINING_NAME,
                f"lists {len(wanted)} tensors, the files hold {len(self._files)}; missing {missing[:5]}, "
                f"not listed {unused[:5]}",
            )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def kinds(self, name: str) -> tuple[str, ...]:
        return self._kinds[name]

    def read(self, name: str, *, kind: str, ranges: tuple[Ranges, ...]) -> Tensor:
        """Read a part of a tensor, float32, into memory of its own; only its pages of the file are read."""
        key = f"{kind}/{name}"
        path = self._files[key]
        part = empty_part(ranges)
        try:
            with safe_open(path, framework="pt") as reader:
                source = reader.get_slice(key)
                if tuple(source.get_shape()) != self._shapes[name]:
                    raise CheckpointBrokenError(path, f"{key} is {source.get_shape()}, not {self._shapes[name]}")
                whole = everything(self._shapes[name])
                by_dim = tuple(overlaps(dim, all_of_it) for dim, all_of_it in zip(ranges, whole, strict=True))
                copy_overlap(part, source, by_dim)
        except (OSError, SafetensorError) as error:
            raise CheckpointBrokenError(path, f"{key} cannot be read ({error})") from error
        return part


def _read_content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointBrokenError(path, f"does not describe a training state ({error!r})") from error
    if version != FORMAT_VERSION:
        raise CheckpointBrokenError(path, f"format_version is {version!r}, this version reads {FORMAT_VERSION}")
    return content
