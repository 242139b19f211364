"""The safetensors of a Hugging Face folder, one file or many, read in parts: nothing outside a part is read."""

import itertools
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modeling.shard_table import Ranges
from recipe.hf.weights import INDEX_NAME

SINGLE_NAME = "model.safetensors"
# Tables of the rotary embedding, which older programs saved as buffers; they follow from the configuration.
FOLLOW_FROM_CONFIG = re.compile(r"(^|\.)rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")


class HfFolder:
    """Reads tensors of a folder by name; `num_bytes` counts what was read so far.

    ValueError where the folder holds no safetensors, or where they cannot be read or are not those of its index.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.num_bytes = 0
        self._open: dict[str, Any] = {}
        self._file_of = self._find_tensors()

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def check(self, wanted: set[str], *, allowed: Collection[str] = ()) -> None:
        """Raise ValueError unless all `wanted` tensors are there, and no others but `allowed` and rotary tables."""
        found = {name for name in self._file_of if not FOLLOW_FROM_CONFIG.search(name)}
        missing, unexpected = sorted(wanted - found), sorted(found - wanted - set(allowed))
        if missing or unexpected:
            raise ValueError(
                f"the weights in {self.path} are not those of its config.json: {len(missing)} are missing "
                f"{missing[:3]}, {len(unexpected)} are unexpected {unexpected[:3]}"
            )

    def read(self, name: str, ranges: tuple[Ranges, ...], *, expected: tuple[int, ...]) -> Tensor:
        """Read a part of a tensor, whose whole shape is `expected`: per dimension these ranges, concatenated."""
        try:
            part = self._reader(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{self.path / self._file_of[name]} does not hold {name}: {error}") from error
        if tuple(part.get_shape()) != expected:
            raise ValueError(f"{name} in {self.path} has the shape {part.get_shape()}, expected {list(expected)}")
        tensor = _join(part, ranges)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def _reader(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = _open_file(self.path / file)
        return self._open[file]

    def _find_tensors(self) -> dict[str, str]:
        """Map tensor name to file name, from the index or the single file."""
        index = self.path / INDEX_NAME
        if not index.exists():
            if not (self.path / SINGLE_NAME).exists():
                raise ValueError(f"{self.path} holds neither {INDEX_NAME} nor {SINGLE_NAME}")
            return dict.fromkeys(self._reader(SINGLE_NAME).keys(), SINGLE_NAME)
        file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if (self.path / SINGLE_NAME).exists() and set(file_of.values()) != {SINGLE_NAME}:
            raise ValueError(
                f"{self.path} holds both {INDEX_NAME} and {SINGLE_NAME}, and transformers opens the second alone; "
                "remove the one that is not the model, a left-over of an earlier save, say"
            )
        missing = missing_files(self.path)
        if missing:
            raise ValueError(f"{index} names {len(missing)} files that are not there: {missing[:3]}")
        return file_of


def missing_files(folder: Path) -> list[str]:
    """Return the files of weights that a folder lacks: of its index, or the single one where it has no index."""
    index = folder / INDEX_NAME
    names = [SINGLE_NAME]
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return [name for name in names if not (folder / name).exists()]


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path} ({path.stat().st_size:,} bytes) cannot be read as safetensors: {error}; where git fetched the "
            "folder, `git lfs pull` brings the files themselves"
        ) from error


def _join(part: Any, ranges: tuple[Ranges, ...]) -> Tensor:
    """Read several ranges of a safetensors slice, which by itself gives one range per dimension."""
    several = [dim for dim, parts in enumerate(ranges) if len(parts) > 1]
    assert len(several) <= 1, "no parameter is cut in several blocks of two dimensions"
    pieces: list[Tensor] = [part[tuple(slice(*r) for r in choice)] for choice in itertools.product(*ranges)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=several[0])
