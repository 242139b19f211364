"""Safetensors files: how one or many are named and indexed, and how they are written piece by piece.

What they hold is known in advance, so no tensor has to be in memory as a whole.

A file is eight bytes with the length of its header, the header, JSON with each tensor's offsets, and the numbers.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

MAX_FILE_BYTES = 2 * 2**30
INDEX_SUFFIX = ".safetensors.index.json"
# Names as the format has them.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT_BYTES = 8


class TensorSpec(NamedTuple):
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: Path,
    specs: Sequence[TensorSpec],
    *,
    stem: str,
    pieces: Callable[[TensorSpec], Iterable[Tensor]],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> int:
    """Write `stem`.safetensors, or several such files and an index, into `folder`; returns the number of files.

    `pieces` gives a tensor's elements on the CPU, in row-major order and in any number of parts, of which one is in
    memory at a time. A file holds at most `max_file_bytes` of numbers, but for a tensor that is larger by itself.
    Raises ValueError where a dtype has no name in the format, or where the pieces are not what the spec says.
    """
    files = _share_out(specs, max_file_bytes=max_file_bytes)
    names = file_names(len(files), stem=stem)
    for name, held in zip(names, files, strict=True):
        with (folder / name).open("wb") as file:
            file.write(_header(held))
            for spec in held:
                _write_pieces(file, spec, pieces(spec))
    if len(files) > 1:
        file_of = {spec.name: name for name, held in zip(names, files, strict=True) for spec in held}
        write_index(folder, stem=stem, file_of=file_of, total_bytes=sum(spec.num_bytes for spec in specs))
    return len(files)


def file_names(num_files: int, *, stem: str) -> list[str]:
    """Return the names of the files that together hold tensors, as readers of Hugging Face folders expect them."""
    if num_files == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)]


def write_index(folder: Path, *, stem: str, file_of: Mapping[str, str], total_bytes: int) -> None:
    """Write which file holds which tensor; for more than one file."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(file_of.items()))}
    (folder / f"{stem}{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def find_tensors(folder: Path, *, stem: str) -> dict[str, Path]:
    """Return the file of each tensor that `write_tensors` wrote; OSError or ValueError where there is none to read."""
    index = folder / f"{stem}{INDEX_SUFFIX}"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    path = folder / f"{stem}.safetensors"
    try:
        with safe_open(path, framework="pt") as reader:
            return dict.fromkeys(reader.keys(), path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file ({error})") from error


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a CPU tensor's bytes in row-major order, copied only where the tensor is not contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data


def _share_out(specs: Sequence[TensorSpec], *, max_file_bytes: int) -> list[list[TensorSpec]]:
    """Return the tensors of each file, wide types first: each tensor must start at a multiple of its element's size."""
    files: list[list[TensorSpec]] = []
    room_bytes = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        if spec.dtype not in DTYPE_NAMES:
            raise ValueError(f"{spec.name} is of {spec.dtype}, which the format has no name for")
        if not files or spec.num_bytes > room_bytes:
            files.append([])
            room_bytes = max_file_bytes
        files[-1].append(spec)
        room_bytes -= spec.num_bytes
    return files


def _header(held: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in held:
        end = offset + spec.num_bytes
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _write_pieces(file: BinaryIO, spec: TensorSpec, pieces: Iterable[Tensor]) -> None:
    num_bytes = 0
    for piece in pieces:
        if piece.dtype != spec.dtype:
            raise ValueError(f"{spec.name} was to be {spec.dtype}, but a piece of it is {piece.dtype}")
        num_bytes += piece.numel() * piece.element_size()
        file.write(bytes_of(piece))
    if num_bytes != spec.num_bytes:
        raise ValueError(f"{spec.name} of shape {spec.shape} has {spec.num_bytes} bytes, but its pieces {num_bytes}")
