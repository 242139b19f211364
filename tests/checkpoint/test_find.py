"""Resuming takes the newest complete checkpoint and never, in silence, an older one or none."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.checkpoint.find import Checkpoint, find_checkpoint, verify_checkpoint
from recipe.shared.errors import (
    CheckpointBrokenError,
    CheckpointError,
    CheckpointMissingError,
    NoCompleteCheckpointError,
)
from recipe.shared.ranks import OneRank
from tests.saves import save
from tests.thread_ranks import on_threads


def find(root: Path, resume: str | None = "auto") -> tuple[Any, list[str]]:
    said: list[str] = []
    return find_checkpoint(root, resume=resume, ranks=OneRank(), say=said.append), said


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Complete checkpoints of the steps 9 and 10 in a run folder."""
    for step in (9, 10):
        save(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "hf" / "model.bin").read_bytes())
    content[777] ^= 1
    (folder / "hf" / "model.bin").write_bytes(content)


def rename_the_folder(folder: Path) -> None:
    save(folder.parent.parent / "other", 3).rename(folder.with_name("moved"))
    folder.rename(folder.parent.parent / "gone")
    folder.with_name("moved").rename(folder)


def edit_manifest(folder: Path, **entries: Any) -> None:
    content = json.loads((folder / "manifest.json").read_text()) | entries
    (folder / "manifest.json").write_text(json.dumps(content))


def cut_in_half(folder: Path) -> None:
    os.truncate(folder / "hf" / "model.bin", 5000)


def delete_a_file(folder: Path) -> None:
    (folder / "state.json").unlink()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "hf/model.bin: has 5000 bytes instead of 10000": cut_in_half,
    "state.json: missing": delete_a_file,
    "hf/model.bin: its content has changed since it was written (SHA-256 differs)": flip_a_bit,
    "manifest.json: missing, so the checkpoint was never completed": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json: not readable as JSON": lambda folder: os.truncate(folder / "manifest.json", 40),
    "manifest.json: is of step 3, not of step-10": rename_the_folder,
    "manifest.json: format_version is 9, this version reads 1": lambda folder: edit_manifest(folder, format_version=9),
    "manifest.json: an entry is missing or malformed": lambda folder: edit_manifest(folder, files=None),
}


def test_auto_takes_the_newest_by_step_number(root: Path) -> None:
    os.utime(root / "step-9", (4e9, 4e9))
    found, said = find(root)
    assert found == Checkpoint(10, root / "step-10", {"step": 10})
    assert said == [f"resuming from {root / 'step-10'}"]


@pytest.mark.parametrize("reason", DAMAGES)
@pytest.mark.requirement("R-CKPT-01")
def test_a_broken_checkpoint_is_passed_over_by_auto_and_stops_where_it_is_named(reason: str, root: Path) -> None:
    DAMAGES[reason](root / "step-10")
    found, said = find(root)
    assert found.folder == root / "step-9"
    assert said[0].startswith(f"passing over step-10, which is broken: {root / 'step-10'}/{reason}")
    assert said[1:] == [f"resuming from {root / 'step-9'}"]
    with pytest.raises(CheckpointBrokenError) as caught:
        find(root, str(root / "step-10"))
    assert str(caught.value).startswith(f"{root / 'step-10'}/{reason}")


def test_a_file_that_cannot_be_read_counts_as_broken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("recipe.checkpoint.manifest._sha256", fail)
    with pytest.raises(CheckpointBrokenError, match=r"model.bin: cannot be read \(.*Input/output error\)"):
        verify_checkpoint(root / "step-10", ranks=OneRank())


def test_sizes_alone_can_be_verified_and_several_faults_are_counted(root: Path) -> None:
    flip_a_bit(root / "step-10")
    verify_checkpoint(root / "step-10", ranks=OneRank(), checksums=False)
    cut_in_half(root / "step-10")
    with pytest.raises(CheckpointBrokenError, match=r"5000 bytes instead of 10000$"):
        verify_checkpoint(root / "step-10", ranks=OneRank(), checksums=False)
    delete_a_file(root / "step-10")
    with pytest.raises(CheckpointBrokenError, match=r"instead of 10000 \(and 1 more of its 2 files are broken\)"):
        verify_checkpoint(root / "step-10", ranks=OneRank())


@pytest.mark.requirement("R-CKPT-01")
def test_every_rank_hears_of_a_fault_that_one_rank_found(root: Path) -> None:
    flip_a_bit(root / "step-10")
    errors = on_threads(3, lambda ranks: verify_checkpoint(root / "step-10", ranks=ranks))
    assert [type(error) for error in errors] == [CheckpointBrokenError] * 3
    assert len({str(error) for error in errors}) == 1
    said: list[int] = []
    found = on_threads(
        3, lambda ranks: find_checkpoint(root, resume="auto", ranks=ranks, say=lambda line: said.append(ranks.rank))
    )
    assert found == [Checkpoint(9, root / "step-9", {"step": 9})] * 3
    assert set(said) == {0}


@pytest.mark.parametrize("state", ["empty file", "dangling"])
@pytest.mark.requirement("R-CKPT-01")
def test_a_bad_latest_does_not_matter_to_auto_and_stops_when_named(state: str, root: Path) -> None:
    latest = root / "latest"
    latest.unlink()
    if state == "empty file":
        latest.touch()
    else:
        latest.symlink_to("step-77")
    reason = {"empty file": "it is a file, not a folder", "dangling": "it links to step-77, which is gone"}[state]
    assert find(root)[0].step == 10
    with pytest.raises(CheckpointMissingError, match=rf"{latest} cannot be resumed from: {reason}"):
        find(root, str(latest))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("checkpoints/step-11", "step-11 cannot be resumed from: it does not exist"),
        ("checkpoints/step-10/hf", "it holds neither manifest.json nor any step-N folder"),
    ],
)
@pytest.mark.requirement("R-CKPT-02")
def test_a_path_without_a_checkpoint_stops(given: str, match: str, root: Path) -> None:
    with pytest.raises(CheckpointMissingError, match=match):
        find(root, str(root.parent / given))


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.requirement("R-CKPT-02")
def test_auto_on_a_first_run_starts_at_step_0_and_says_so(made: bool, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    if made:
        root.mkdir()
    assert find(root) == (None, [f"no checkpoint in {root} yet: starting at step 0"])


@pytest.mark.requirement("R-CKPT-02")
def test_auto_with_only_broken_checkpoints_stops_and_lists_the_reasons(root: Path) -> None:
    delete_a_file(root / "step-9")
    cut_in_half(root / "step-10")
    with pytest.raises(NoCompleteCheckpointError) as caught:
        find(root)
    assert str(caught.value).startswith(f"no checkpoint in {root} is complete:")
    assert "step-9/state.json: missing" in str(caught.value)
    assert "step-10/hf/model.bin: has 5000 bytes instead of 10000" in str(caught.value)


@pytest.mark.requirement("R-CKPT-02")
def test_the_ways_to_fail_have_exit_codes_of_their_own() -> None:
    kinds = (CheckpointError, CheckpointMissingError, CheckpointBrokenError, NoCompleteCheckpointError)
    codes = {kind.exit_code for kind in kinds}
    assert len(codes) == len(kinds)
    assert not codes & {0, 1, 2}


def test_no_resume_starts_afresh_whatever_is_there(root: Path) -> None:
    assert find(root, None) == (None, [])


@pytest.mark.parametrize("given", ["checkpoints/step-10", "checkpoints/latest", "checkpoints", ".", "the-good-one"])
def test_a_checkpoint_its_link_its_folder_its_run_and_a_copy_can_be_named(given: str, root: Path) -> None:
    want = root / "step-10"
    if given == "the-good-one":
        want = want.rename(root.parent / given)
    found, said = find(root, str(root.parent / given))
    assert (found.step, found.folder.resolve(), found.details) == (10, want, {"step": 10})
    assert said == [f"resuming from {found.folder}"]


def test_going_back_says_that_newer_checkpoints_will_win_later(root: Path) -> None:
    found, said = find(root, str(root / "step-9"))
    assert found.step == 9
    assert said[1] == (
        f'{root} also holds step-10, which a later start with "auto" would prefer until training has passed them; '
        "move them away if they are of no use"
    )
