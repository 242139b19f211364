"""A state without a layout: any part of any tensor comes back, and a folder that is not whole is named as broken."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe.checkpoint.native_files import open_training_state
from recipe.checkpoint.training_state import Entry, digests_of, read_pieces
from recipe.checkpoint.whole import WholeTensors, write_whole
from recipe.shared.errors import CheckpointBrokenError
from tests.referee import mixed_config, tiny_config
from tests.states import MemoryState, details_of, ignore, read_all, save_whole, state_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state of two tensors in two files."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(8, 6, 5, generator=generator) for name in ("weight/a", "exp_avg/a")}
    tensors["weight/b"] = torch.arange(4.0)
    write_whole(tmp_path / "whole", MemoryState(tensors), advance=ignore, piece_bytes=100, max_file_bytes=1000)
    return tmp_path / "whole"


@pytest.mark.parametrize("max_elements", [1, 7, 30, 31, 100, 240])
@pytest.mark.parametrize("shape", [(8, 6, 5), (240,), (0, 3), ()], ids=str)
def test_pieces_follow_one_another_in_row_major_order(shape: tuple[int, ...], max_elements: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    state = MemoryState({"weight/a": tensor})
    pieces = [p.flatten() for p in read_pieces(state, Entry("a", "weight", shape), piece_bytes=4 * max_elements)]
    assert torch.equal(torch.cat([torch.empty(0), *pieces]), tensor.flatten())
    assert all(1 <= len(piece) <= max_elements for piece in pieces)
    assert len(pieces) <= 240 // min(max_elements, 30) + 8 * 6


@pytest.mark.parametrize("piece_bytes", [4000, 2**20])
def test_a_state_comes_back_bitwise(tmp_path: Path, piece_bytes: int) -> None:
    want = state_of(mixed_config(router_bias=True))
    written: list[int] = []
    digests = write_whole(tmp_path / "whole", want, advance=written.append, piece_bytes=piece_bytes)
    got = WholeTensors(tmp_path / "whole")
    assert (got.step, got.shapes()) == (3.0, want.shapes())
    assert got.kinds("model.layers.1.mlp.gate.e_score_correction_bias") == ("weight",)
    tensors = read_all(got)
    assert tensors.keys() == want.tensors.keys()
    for key, tensor in want.tensors.items():
        assert torch.equal(tensors[key], tensor), key
    assert sum(written) == got.num_bytes == sum(tensor.nbytes for tensor in want.tensors.values())
    assert len(set(digests.values())) == len(want.tensors)
    assert digests == digests_of(got, piece_bytes=piece_bytes + 1000, advance=ignore)


def test_any_ranges_are_read_and_nothing_else(folder: Path) -> None:
    state = WholeTensors(folder)
    whole = read_all(state)["exp_avg/a"]
    before = state.num_bytes
    part = state.read("a", kind="exp_avg", ranges=(((1, 3), (6, 8)), ((0, 6),), ((4, 5), (0, 2))))
    assert torch.equal(part, whole[[1, 2, 6, 7]][:, :, [4, 0, 1]])
    assert state.num_bytes - before == 4 * 6 * 3 * 4
    part.fill_(0)
    assert torch.equal(read_all(state)["exp_avg/a"], whole), "a part has memory of its own"


def test_a_checkpoint_with_such_a_folder_opens(tmp_path: Path) -> None:
    config = tiny_config()
    want = state_of(config)
    save_whole(tmp_path / "saved", want, details=details_of(config))
    assert read_all(open_training_state(tmp_path / "saved", details={})).keys() == want.tensors.keys()


def edit(folder: Path, **entries: Any) -> None:
    path = folder / "training.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.requirement("R-CKPT-05")
def test_a_missing_or_unlisted_tensor_is_an_error(folder: Path) -> None:
    tensors = json.loads((folder / "training.json").read_text())["tensors"]
    edit(folder, tensors={**tensors, "c": {"shape": [2], "kinds": ["weight", "exp_avg"]}})
    with pytest.raises(CheckpointBrokenError, match=r"lists 5 tensors, the files hold 3; missing \['exp_avg/c', 'wei"):
        WholeTensors(folder)
    edit(folder, tensors={"a": tensors["a"]})
    with pytest.raises(CheckpointBrokenError, match=r"lists 2 tensors, .* 3; missing \[\], not listed \['weight/b'\]"):
        WholeTensors(folder)


def test_what_is_no_such_folder_is_an_error_that_names_the_file(folder: Path) -> None:
    edit(folder, format_version=7)
    with pytest.raises(CheckpointBrokenError, match=r"training.json: format_version is 7, this version reads 1"):
        WholeTensors(folder)
    (folder / "training.json").write_text("[]")
    for wrong in (folder, folder / "elsewhere"):
        with pytest.raises(CheckpointBrokenError, match=r"training.json: does not describe a training state"):
            WholeTensors(wrong)


def test_tensors_that_cannot_be_read_are_an_error_that_names_the_file(folder: Path) -> None:
    tensors = json.loads((folder / "training.json").read_text())["tensors"]
    edit(folder, tensors={**tensors, "a": {"shape": [8, 6, 6], "kinds": ["weight", "exp_avg"]}})
    with pytest.raises(CheckpointBrokenError, match=r"-of-00002.safetensors: weight/a is \[8, 6, 5\], not \(8, 6, 6\)"):
        read_all(WholeTensors(folder))
    state = WholeTensors(folder)
    (folder / "state-00002-of-00002.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointBrokenError, match=r"00002-of-00002.safetensors: weight/b cannot be read \("):
        state.read("b", kind="weight", ranges=(((0, 4),),))
    (folder / "state.safetensors.index.json").unlink()
    with pytest.raises(CheckpointBrokenError, match=r"whole: its tensors cannot be found \("):
        WholeTensors(folder)


def test_a_single_file_may_also_come_from_the_library(folder: Path) -> None:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (folder / "state.safetensors.index.json").unlink()
    save_file(tensors, folder / "state.safetensors")
    got = read_all(WholeTensors(folder))
    assert all(torch.equal(got[key], tensor) for key, tensor in tensors.items())
