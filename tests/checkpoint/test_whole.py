"""A state without a layout: files that any reader opens, any part of any tensor, made offline, damage named."""

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipe.checkpoint.find import find_checkpoint
from recipe.checkpoint.manifest import read_manifest
from recipe.checkpoint.reshard import reshard
from recipe.checkpoint.tensor_file import find_tensors, write_tensors
from recipe.checkpoint.training_state import Entry, WholeTensors, digests_of, read_pieces, write_whole
from recipe.cli import main
from recipe.shared.errors import (
    CheckpointBrokenError,
    CheckpointMissingError,
    CheckpointWriteError,
    NotEnoughSpaceError,
)
from recipe.shared.ranks import OneRank
from tests.referee import mixed_config
from tests.saves import entries
from tests.states import MemoryState, assert_same, details_of, ignore, pieces_of, read_all, save_whole, state_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state of two tensors in two files."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(8, 6, 5, generator=generator) for name in ("weight/a", "exp_avg/a")}
    tensors["weight/b"] = torch.arange(4.0)
    with pieces_of(100, file_bytes=1000):
        write_whole(tmp_path / "whole", MemoryState(tensors), advance=ignore)
    return tmp_path / "whole"


@pytest.mark.parametrize("max_elements", [1, 7, 30, 31, 100, 240])
@pytest.mark.parametrize("shape", [(8, 6, 5), (240,), (0, 3), ()], ids=str)
def test_pieces_follow_one_another_in_row_major_order(shape: tuple[int, ...], max_elements: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    state = MemoryState({"weight/a": tensor})
    with pieces_of(4 * max_elements):
        pieces = [piece.flatten() for piece in read_pieces(state, Entry("a", "weight", shape))]
    assert torch.equal(torch.cat([torch.empty(0), *pieces]), tensor.flatten())
    assert all(1 <= len(piece) <= max_elements for piece in pieces)
    assert len(pieces) <= 240 // min(max_elements, 30) + 8 * 6


@pytest.mark.parametrize("piece_bytes", [4000, 2**20])
def test_a_state_comes_back_bitwise(tmp_path: Path, piece_bytes: int) -> None:
    want = state_of(mixed_config(router_bias=True))
    written: list[int] = []
    with pieces_of(piece_bytes):
        digests = write_whole(tmp_path / "whole", want, advance=written.append)
    got = WholeTensors(tmp_path / "whole")
    assert (got.step, got.shapes()) == (3.0, want.shapes())
    assert got.kinds("model.layers.1.mlp.gate.e_score_correction_bias") == ("weight",)
    assert_same(read_all(got), want.tensors)
    assert sum(written) == sum(tensor.nbytes for tensor in want.tensors.values())
    assert len(set(digests.values())) == len(want.tensors)
    with pieces_of(piece_bytes + 1000):
        assert digests == digests_of(got, advance=ignore)


def test_any_ranges_are_read(folder: Path) -> None:
    state = WholeTensors(folder)
    whole = read_all(state)["exp_avg/a"]
    part = state.read("a", kind="exp_avg", ranges=(((1, 3), (6, 8)), ((0, 6),), ((4, 5), (0, 2))))
    assert torch.equal(part, whole[[1, 2, 6, 7]][:, :, [4, 0, 1]])
    part.fill_(0)
    assert torch.equal(read_all(state)["exp_avg/a"], whole), "a part has memory of its own"


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
    (folder / "state.safetensors").write_bytes(b"something else")
    with pytest.raises(CheckpointBrokenError, match=r"cannot be found \(.*state.safetensors is no safetensors file \("):
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


def write(folder: Path, tensors: dict[str, Tensor]) -> int:
    """Written five elements at a time."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return write_tensors(folder, shapes, stem="state", pieces=lambda name: tensors[name].flatten().split(5))


def test_the_library_reads_every_shape_back(tmp_path: Path) -> None:
    tensors = {"matrix": torch.arange(21.0).view(3, 7), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}
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
    with pieces_of(20, file_bytes=90):
        assert write(tmp_path, tensors) == 4
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

    def pieces(name: str) -> list[Tensor]:
        return (room.fill_(number) for number in range(3))  # type: ignore[return-value]

    write_tensors(tmp_path, {"a": (3, 4096)}, stem="state", pieces=pieces)
    loaded = load_file(tmp_path / "state.safetensors")["a"]
    assert torch.equal(loaded, torch.arange(3.0)[:, None].expand(3, 4096))


def test_pieces_that_are_not_what_was_announced_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a of shape \(2, 3\) has 24 bytes, but its pieces 20"):
        write_tensors(tmp_path, {"a": (2, 3)}, stem="state", pieces=lambda name: [torch.zeros(5)])
    with pytest.raises(ValueError, match=r"a was to be torch.float32, but a piece of it is torch.float64"):
        write_tensors(tmp_path, {"a": (2, 3)}, stem="state", pieces=lambda name: [torch.zeros(6).double()])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of step 3 in a run folder."""
    config = mixed_config(router_bias=True)
    folder = tmp_path_factory.mktemp("saved") / "run" / "checkpoints" / "step-3"
    return save_whole(folder, state_of(config), details=details_of(config, dp=2, tp=2, ep=2))


@pytest.fixture
def source(saved: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return shutil.copytree(saved, tmp_path / "run" / "checkpoints" / "step-3")


def test_every_tensor_and_file_is_carried_over(saved: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with pieces_of(4000, file_bytes=100_000):
        counts = reshard(saved, out=tmp_path / "out", say=said.append)
    want, got = read_all(WholeTensors(saved / "whole")), read_all(WholeTensors(tmp_path / "out" / "whole"))
    assert_same(got, want)
    assert counts == (len(want), len(want))
    assert len(list((tmp_path / "out" / "whole").glob("*.safetensors"))) > 3
    before, after = read_manifest(saved), read_manifest(tmp_path / "out")
    assert after.step == 3
    assert after.details == {**before.details, "format": "whole"}
    for name in ("ranks/rank-00000.pt", "hf/config.json", "expert_counts.json"):
        assert after.files[name] == before.files[name]
    assert said == [f"comparing {saved} with its manifest", f"reading step 3 from {saved}, which is complete"]
    assert entries(tmp_path) == ["out"]
    found = find_checkpoint(tmp_path / "run", resume=str(tmp_path / "out"), ranks=OneRank(), say=ignore)
    assert found is not None
    assert (found.step, found.folder) == (3, tmp_path / "out")


def test_of_a_run_folder_the_newest_complete_checkpoint_is_taken_even_of_one_called_auto(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word that means something else where a run is resumed."""
    broken = shutil.copytree(source, source.with_name("step-4"))
    monkeypatch.chdir(source.parent.parent.rename(tmp_path / "auto").parent)
    source, broken = (Path.cwd() / "auto" / "checkpoints" / path.name for path in (source, broken))
    said: list[str] = []
    reshard(Path("auto"), out=tmp_path / "step-3", say=said.append)
    assert said[1].startswith(f"passing over step-4, which is broken: {broken}/manifest.json: is of step 3, not of")
    assert said[2:] == [f"reading step 3 from {source}, which is complete"]


def test_the_command_says_where_it_wrote_and_writes_over_nothing(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["reshard", str(saved), str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"wrote {out}; continue in any layout with --resume_from_checkpoint {out}"
    assert main(["reshard", str(saved), str(out)]) == 2
    assert capsys.readouterr().err == f"gather-moe reshard: {out} exists already; name a folder that does not\n"


def test_a_folder_that_cannot_be_written_to_is_refused_first(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for out, match in [
        (tmp_path / "step-7", r"step-7 would name step 7, but .*step-3 is of step 3; call it step-3 or any"),
        (saved / "hf" / "in", "in lies inside the checkpoint that is read; name a folder outside of it"),
        (tmp_path / "dangling", "dangling exists already"),
    ]:
        with pytest.raises(ValueError, match=match):
            reshard(saved, out=out, say=ignore)
    with pytest.raises(CheckpointMissingError, match="nowhere"):
        reshard(tmp_path / "nowhere", out=tmp_path / "out", say=ignore)
    full = SimpleNamespace(free=1000)
    with (
        patch("recipe.checkpoint.folders.shutil.disk_usage", return_value=full),
        pytest.raises(NotEnoughSpaceError, match=r"only 1,000 bytes .* free; free some space or name a folder on"),
    ):
        reshard(saved, out=tmp_path / "out", say=ignore)
    assert not (tmp_path / "out").exists()


def remake(source: Path, *, leave_out: str = "", **details: Any) -> None:
    """The same checkpoint with details changed, or without a tensor and without a word of it."""
    state, manifest = state_of(mixed_config(router_bias=True)), read_manifest(source)
    state.tensors = {key: tensor for key, tensor in state.tensors.items() if leave_out not in key or not leave_out}
    shutil.rmtree(source)
    changed = {name: value for name, value in {**manifest.details, **details}.items() if value is not None}
    save_whole(source, state, details=changed)


def test_a_damaged_source_is_refused_before_it_is_read(source: Path, tmp_path: Path) -> None:
    (source / "ranks" / "rank-00000.pt").write_bytes(b"another's own")
    with pytest.raises(CheckpointBrokenError, match=r"rank-00000.pt: has 13 bytes instead of 12"):
        reshard(source, out=tmp_path / "out", say=ignore)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"leave_out": "layers.2.mlp.experts.down_proj"},
            "step-3: its files hold 58,768 parameters, but a model of its settings has 66,960",
        ),
        ({"model.num_hidden_layers": 2}, "hold 66,960 parameters, but a model of its settings has 38,976"),
        ({"model.vocab_size": None}, "manifest.json: its details say nothing of the model"),
    ],
)
@pytest.mark.requirement("R-CKPT-05")
def test_a_source_without_all_parameters_of_its_model_or_with_more_is_refused(
    changes: dict[str, Any], match: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remake(source, **changes)
    assert main(["reshard", str(source), str(tmp_path / "out")]) == 12
    assert match in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.requirement("R-CKPT-05")
def test_a_tensor_that_is_read_back_otherwise_fails_the_command(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that gives other bytes than it was given."""
    right = WholeTensors.read

    def spoil(self: WholeTensors, name: str, *, kind: str, ranges: Any) -> torch.Tensor:
        part = right(self, name, kind=kind, ranges=ranges)
        if ".reshard-out" in str(self._files[f"{kind}/{name}"]) and (name, kind) == ("lm_head.weight", "exp_avg"):
            part.view(-1)[-1] *= 1 + 2**-20
        return part

    with patch.object(WholeTensors, "read", spoil):
        assert main(["reshard", str(saved), str(tmp_path / "out")]) == 14
    num = len(read_all(WholeTensors(saved / "whole")))
    error = capsys.readouterr().err
    assert f"{num} tensors were read and {num} read back, of which 1 differ: ['exp_avg/lm_head.weight']" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.requirement("R-CKPT-05")
def test_a_tensor_that_is_not_written_fails_the_command(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def forget_one(folder: Path, shapes: dict[str, tuple[int, ...]], **options: Any) -> int:
        return write_tensors(folder, dict([*shapes.items()][1:]), **options)

    with patch("recipe.checkpoint.training_state.write_tensors", forget_one):
        assert main(["reshard", str(saved), str(tmp_path / "out")]) == 12
    assert "missing ['weight/model.embed_tokens.weight'], not listed []" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def copy_half(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes()[:5])


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (
            patch("recipe.checkpoint.training_state.write_tensors", side_effect=OSError(errno.ENOSPC, "No space left")),
            r"out could not be written: .* No space left; what was",
        ),
        (
            patch("recipe.checkpoint.reshard.shutil.copyfile", copy_half),
            r"2 files were not copied as they are: \['hf/config.json', 'ranks",
        ),
    ],
    ids=["a full disk", "files that change"],
)
def test_what_cannot_be_written_or_copied_leaves_nothing_behind(
    fault: Any, match: str, saved: Path, tmp_path: Path
) -> None:
    left_by_a_killed_one = tmp_path / ".reshard-out" / "whole"
    left_by_a_killed_one.mkdir(parents=True)
    with fault, pytest.raises(CheckpointWriteError, match=match):
        reshard(saved, out=tmp_path / "out", say=ignore)
    assert list(tmp_path.iterdir()) == []
