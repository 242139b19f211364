"""A training state without a layout: every tensor whole, in safetensors files of which a reader maps what it asks for.

whole/training.json             AdamW's step, and of every tensor its shape and kinds
whole/state*.safetensors        tensors named KIND/NAME, float32
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modeling.shard_table import Ranges
from recipe.checkpoint.tensor_file import MAX_FILE_BYTES, TensorSpec, bytes_of, find_tensors, write_tensors
from recipe.checkpoint.training_state import (
    PIECE_BYTES,
    TrainingState,
    copy_overlap,
    empty_part,
    entries_of,
    everything,
    overlaps,
    read_pieces,
)
from recipe.shared.errors import CheckpointBrokenError

TRAINING_NAME = "training.json"
STEM = "state"
FORMAT_VERSION = 1


def write_whole(
    folder: Path,
    state: TrainingState,
    *,
    advance: Callable[[int], Any],
    piece_bytes: int = PIECE_BYTES,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> dict[str, str]:
    """Write a state into the new `folder`; return a checksum of what was read, by the keys in the files.

    One piece is in memory at a time. `advance` is called with the bytes of each piece written.
    """
    entries = {entry.key: entry for entry in entries_of(state)}
    digests = {}

    def pieces(spec: TensorSpec) -> Iterator[Tensor]:
        digest = hashlib.blake2b(digest_size=16)
        for piece in read_pieces(state, entries[spec.name], piece_bytes=piece_bytes):
            digest.update(bytes_of(piece))
            yield piece
            advance(piece.nbytes)
        digests[spec.name] = digest.hexdigest()

    folder.mkdir()
    specs = [TensorSpec(key, entry.shape, torch.float32) for key, entry in entries.items()]
    write_tensors(folder, specs, stem=STEM, pieces=pieces, max_file_bytes=max_file_bytes)
    tensors = {name: {"shape": list(shape), "kinds": list(state.kinds(name))} for name, shape in state.shapes().items()}
    content = {"format_version": FORMAT_VERSION, "step": state.step, "tensors": tensors}
    (folder / TRAINING_NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return digests


class WholeTensors:
    """The TrainingState in a folder that `write_whole` wrote. `num_bytes` counts what was read."""

    def __init__(self, folder: Path) -> None:
        """Raise CheckpointBrokenError unless the folder's files hold exactly what training.json says."""
        content = _read_content(folder / TRAINING_NAME)
        self.num_bytes = 0
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
        self.num_bytes += part.nbytes
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
