"""A checkpoint without a layout, made offline: every tensor equal, all else carried over, or nothing there."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from recipe.checkpoint import whole
from recipe.checkpoint.find import find_checkpoint
from recipe.checkpoint.manifest import read_manifest
from recipe.checkpoint.reshard import Pieces, reshard
from recipe.checkpoint.tensor_file import write_tensors
from recipe.checkpoint.whole import WholeTensors
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
from tests.states import details_of, ignore, read_all, save_whole, state_of

SMALL = Pieces(piece_bytes=4000, max_file_bytes=100_000)


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
    done = reshard(saved, out=tmp_path / "out", say=said.append, pieces=SMALL)
    want, got = read_all(WholeTensors(saved / "whole")), read_all(WholeTensors(tmp_path / "out" / "whole"))
    assert want.keys() == got.keys()
    assert all(torch.equal(got[key], tensor) for key, tensor in want.items())
    assert (done.num_read, done.num_read_back) == (len(want), len(want))
    assert len(list((tmp_path / "out" / "whole").glob("*.safetensors"))) > 3
    before, after = read_manifest(saved), read_manifest(tmp_path / "out")
    assert after.step == 3
    assert after.details == {**before.details, "format": "whole"}
    for name in ("ranks/rank-00000.pt", "hf/config.json", "expert_counts.json"):
        assert after.files[name] == before.files[name]
    assert sum(after.sizes_bytes.values()) == done.num_bytes
    assert said == [f"comparing {saved} with its manifest", f"reading step 3 from {saved}, which is complete"]
    assert entries(tmp_path) == ["out"]
    found = find_checkpoint(tmp_path / "run", resume=str(tmp_path / "out"), ranks=OneRank(), say=ignore)
    assert found is not None
    assert (found.step, found.folder) == (3, tmp_path / "out")


def test_a_folder_may_be_called_auto(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that means something else where a run is resumed."""
    monkeypatch.chdir(source.parent)
    source.rename("auto")
    assert reshard(Path("auto"), out=Path("out"), say=ignore).source == source.with_name("auto")


def test_of_a_run_folder_the_newest_complete_checkpoint_is_taken(source: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(source, source.with_name("step-4"))
    said: list[str] = []
    done = reshard(source.parent.parent, out=tmp_path / "step-3", say=said.append)
    assert done.source == source
    assert said[1].startswith(f"passing over step-4, which is broken: {broken}/manifest.json: is of step 3, not of")
    assert len(said) == 3


def test_the_command_prints_both_counts(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["reshard", str(saved), str(out)]) == 0
    num = len(read_all(WholeTensors(saved / "whole")))
    said = capsys.readouterr().out.splitlines()
    assert said[2:] == [
        f"{num} tensors read, {num} read back and found equal",
        f"wrote {out}; continue in any layout with --resume_from_checkpoint {out}",
    ]
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


def test_a_damaged_source_is_refused_before_it_is_read(source: Path, tmp_path: Path) -> None:
    (source / "ranks" / "rank-00000.pt").write_bytes(b"another's own")
    with pytest.raises(CheckpointBrokenError, match=r"rank-00000.pt: has 13 bytes instead of 12"):
        reshard(source, out=tmp_path / "out", say=ignore)


def remake(source: Path, *, leave_out: str = "", **details: Any) -> None:
    """The same checkpoint with details changed, or without a tensor and without a word of it."""
    state, manifest = state_of(mixed_config(router_bias=True)), read_manifest(source)
    state.tensors = {key: tensor for key, tensor in state.tensors.items() if leave_out not in key or not leave_out}
    shutil.rmtree(source)
    changed = {name: value for name, value in {**manifest.details, **details}.items() if value is not None}
    save_whole(source, state, details=changed)


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
    def forget_one(folder: Path, specs: Any, **options: Any) -> int:
        return write_tensors(folder, specs[1:], **options)

    with patch.object(whole, "write_tensors", forget_one):
        assert main(["reshard", str(saved), str(tmp_path / "out")]) == 12
    assert "missing ['weight/model.embed_tokens.weight'], not listed []" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def copy_half(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes()[:5])


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (
            patch.object(whole, "write_tensors", side_effect=OSError(errno.ENOSPC, "No space left on device")),
            r"out could not be written: .* No space left on device; what was",
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
