"""Safetensors files: how one or many are named and indexed, and how they are written piece by piece.

What they hold is known in advance, so no tensor has to be in memory as a whole.

A file is eight bytes with the length of its header, the header, JSON with each tensor's offsets, and the numbers.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

MAX_FILE_BYTES = 2 * 2**30
INDEX_SUFFIX = ".safetensors.index.json"
ELEMENT_BYTES = 4  # of a float32
ALIGNMENT_BYTES = 8


def write_tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], *, stem: str, pieces: Callable[[str], Iterable[Tensor]]
) -> int:
    """Write float32 tensors of these shapes, by name, into `folder`; returns the number of files.

    That is `stem`.safetensors, or several such files and an index. `pieces` gives the elements of the tensor of a name
    on the CPU, in row-major order and in any number of parts, of which one is in memory at a time. A file holds at most
    MAX_FILE_BYTES of numbers, but for a tensor that is larger by itself. Raises ValueError where the pieces are not
    what was announced.
    """
    sizes_bytes = {name: prod(shape) * ELEMENT_BYTES for name, shape in shapes.items()}
    files = _share_out(sizes_bytes)
    file_of: dict[str, str] = {}
    for file_name, held in zip(file_names(len(files), stem=stem), files, strict=True):
        with (folder / file_name).open("wb") as file:
            file.write(_header({name: shapes[name] for name in held}))
            for name in held:
                _write_pieces(file, pieces(name), name=name, shape=shapes[name])
        file_of |= dict.fromkeys(held, file_name)
    if len(files) > 1:
        write_index(folder, stem=stem, file_of=file_of, total_bytes=sum(sizes_bytes.values()))
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


def _share_out(sizes_bytes: Mapping[str, int]) -> list[list[str]]:
    """Return the names of the tensors of each file."""
    files: list[list[str]] = []
    room_bytes = 0
    for name, num_bytes in sizes_bytes.items():
        if not files or num_bytes > room_bytes:
            files.append([])
            room_bytes = MAX_FILE_BYTES
        files[-1].append(name)
        room_bytes -= num_bytes
    return files


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + prod(shape) * ELEMENT_BYTES
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _write_pieces(file: BinaryIO, pieces: Iterable[Tensor], *, name: str, shape: tuple[int, ...]) -> None:
    num_bytes, num_written = prod(shape) * ELEMENT_BYTES, 0
    for piece in pieces:
        if piece.dtype != torch.float32:
            raise ValueError(f"{name} was to be torch.float32, but a piece of it is {piece.dtype}")
        num_written += file.write(bytes_of(piece))
    if num_written != num_bytes:
        raise ValueError(f"{name} of shape {shape} has {num_bytes} bytes, but its pieces {num_written}")
