"""Files written piece by piece are what the safetensors library reads, however the pieces and files are cut."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from recipe.checkpoint.tensor_file import DTYPE_NAMES, TensorSpec, find_tensors, write_tensors


def specs_of(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def write(folder: Path, tensors: dict[str, Tensor], *, max_file_bytes: int = 2**20, size: int = 5) -> int:
    """Written `size` elements at a time."""
    return write_tensors(
        folder,
        specs_of(tensors),
        stem="state",
        pieces=lambda spec: tensors[spec.name].flatten().split(size),
        max_file_bytes=max_file_bytes,
    )


def test_the_library_reads_every_dtype_back(tmp_path: Path) -> None:
    tensors = {f"of {name}": torch.arange(21).view(3, 7).to(dtype) for dtype, name in reversed(DTYPE_NAMES.items())}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    assert write(tmp_path, tensors) == 1
    loaded = load_file(tmp_path / "state.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    assert find_tensors(tmp_path, stem="state") == dict.fromkeys(tensors, tmp_path / "state.safetensors")
    with safe_open(tmp_path / "state.safetensors", framework="pt") as reader:
        assert reader.metadata() == {"format": "pt"}


def test_large_states_are_shared_out_over_files_with_an_index(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((10,), float(number)) for number in range(5)}
    tensors["large"] = torch.arange(100.0)
    assert write(tmp_path, tensors, max_file_bytes=90) == 4
    files = find_tensors(tmp_path, stem="state")
    held = {path.name: sorted(name for name in files if files[name] == path) for path in sorted(set(files.values()))}
    assert held == {
        "state-00001-of-00004.safetensors": ["t0", "t1"],
        "state-00002-of-00004.safetensors": ["t2", "t3"],
        "state-00003-of-00004.safetensors": ["t4"],
        "state-00004-of-00004.safetensors": ["large"],
    }
    for name, path in files.items():
        assert torch.equal(load_file(path)[name], tensors[name])
    index = json.loads((tmp_path / "state.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 600}


def test_pieces_are_taken_one_at_a_time(tmp_path: Path) -> None:
    """Each one is in the file, or its buffer, before the next is asked for: it can be freed, or changed."""
    room = torch.empty(4096)

    def pieces(spec: TensorSpec) -> list[Tensor]:
        return (room.fill_(number) for number in range(3))  # type: ignore[return-value]

    write_tensors(tmp_path, [TensorSpec("a", (3, 4096), torch.float32)], stem="state", pieces=pieces)
    loaded = load_file(tmp_path / "state.safetensors")["a"]
    assert torch.equal(loaded, torch.arange(3.0)[:, None].expand(3, 4096))


def test_pieces_that_are_not_what_was_announced_are_refused(tmp_path: Path) -> None:
    spec = TensorSpec("a", (2, 3), torch.float32)
    with pytest.raises(ValueError, match=r"a of shape \(2, 3\) has 24 bytes, but its pieces 20"):
        write_tensors(tmp_path, [spec], stem="state", pieces=lambda spec: [torch.zeros(5)])
    with pytest.raises(ValueError, match=r"a was to be torch.float32, but a piece of it is torch.float64"):
        write_tensors(tmp_path, [spec], stem="state", pieces=lambda spec: [torch.zeros(6).double()])
    with pytest.raises(ValueError, match=r"z is of torch.complex64, which the format has no name for"):
        write_tensors(tmp_path, [TensorSpec("z", (2,), torch.complex64)], stem="state", pieces=lambda spec: [])


def test_another_file_is_not_taken_for_tensors(tmp_path: Path) -> None:
    (tmp_path / "state.safetensors").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"state.safetensors is no safetensors file \("):
        find_tensors(tmp_path, stem="state")
