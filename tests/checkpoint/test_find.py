"""Resuming takes the newest complete checkpoint and never, in silence, an older one or none."""

import json
import os
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
from tests.checkpoint.test_commit import save
from tests.thread_ranks import on_threads


def find(root: Path, resume: str | None = "auto") -> tuple[Checkpoint | None, list[str]]:
    said: list[str] = []
    return find_checkpoint(root, resume=resume, ranks=OneRank(), say=said.append), said


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Complete checkpoints of the steps 9 and 10 in a run folder."""
    for step in (9, 10):
        save(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def cut_in_half(folder: Path) -> str:
    os.truncate(folder / "hf" / "model.bin", 5000)
    return "hf/model.bin: has 5000 bytes instead of 10000"


def delete_a_file(folder: Path) -> str:
    (folder / "state.json").unlink()
    return "state.json: missing"


def flip_a_bit(folder: Path) -> str:
    content = bytearray((folder / "hf" / "model.bin").read_bytes())
    content[777] ^= 1
    (folder / "hf" / "model.bin").write_bytes(content)
    return "hf/model.bin: its content has changed since it was written (SHA-256 differs)"


def delete_the_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json: missing, so the checkpoint was never completed"


def cut_the_manifest(folder: Path) -> str:
    os.truncate(folder / "manifest.json", 40)
    return "manifest.json: not readable as JSON"


def rename_the_folder(folder: Path) -> str:
    save(folder.parent.parent / "other", 3).rename(folder.with_name("moved"))
    folder.rename(folder.parent.parent / "gone")
    folder.with_name("moved").rename(folder)
    return "manifest.json: is of step 3, not of step-10"


def age_the_format(folder: Path) -> str:
    edit_manifest(folder, format_version=99)
    return "manifest.json: format_version is 99, this version reads 1"


def drop_an_entry(folder: Path) -> str:
    edit_manifest(folder, files=None)
    return "manifest.json: an entry is missing or malformed"


def edit_manifest(folder: Path, **entries: Any) -> None:
    content = json.loads((folder / "manifest.json").read_text()) | entries
    (folder / "manifest.json").write_text(json.dumps(content))


DAMAGES = [
    cut_in_half,
    delete_a_file,
    flip_a_bit,
    delete_the_manifest,
    cut_the_manifest,
    rename_the_folder,
    age_the_format,
    drop_an_entry,
]


def test_auto_takes_the_newest_by_step_number(root: Path) -> None:
    os.utime(root / "step-9", (4e9, 4e9))
    found, said = find(root)
    assert found == Checkpoint(10, root / "step-10", {"step": 10})
    assert said == [f"resuming from {root / 'step-10'}"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_r_ckpt_01_auto_passes_over_a_broken_checkpoint_and_says_why(damage: Any, root: Path) -> None:
    reason = damage(root / "step-10")
    found, said = find(root)
    assert found is not None
    assert found.folder == root / "step-9"
    assert said[0].startswith(f"passing over step-10, which is broken: {root / 'step-10'}/{reason}")
    assert said[1:] == [f"resuming from {root / 'step-9'}"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_r_ckpt_01_a_broken_checkpoint_named_outright_stops_with_the_file(damage: Any, root: Path) -> None:
    reason = damage(root / "step-10")
    with pytest.raises(CheckpointBrokenError) as caught:
        find(root, str(root / "step-10"))
    assert str(caught.value).startswith(f"{root / 'step-10'}/{reason}")


def test_a_file_that_cannot_be_read_counts_as_broken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("recipe.checkpoint.manifest._sha256", fail)
    with pytest.raises(CheckpointBrokenError, match=r"model.bin: cannot be read \(.*Input/output error\)"):
        verify_checkpoint(root / "step-10", ranks=OneRank())


def test_sizes_alone_can_be_verified(root: Path) -> None:
    flip_a_bit(root / "step-10")
    verify_checkpoint(root / "step-10", ranks=OneRank(), checksums=False)
    cut_in_half(root / "step-10")
    with pytest.raises(CheckpointBrokenError, match="5000 bytes instead of 10000"):
        verify_checkpoint(root / "step-10", ranks=OneRank(), checksums=False)


def test_several_faults_are_counted(root: Path) -> None:
    cut_in_half(root / "step-10")
    delete_a_file(root / "step-10")
    with pytest.raises(CheckpointBrokenError, match=r"instead of 10000 \(and 1 more of its 2 files are broken\)"):
        verify_checkpoint(root / "step-10", ranks=OneRank())


def test_r_ckpt_01_every_rank_hears_of_a_fault_that_one_rank_found(root: Path) -> None:
    flip_a_bit(root / "step-10")
    said: list[tuple[int, str]] = []
    errors = on_threads(3, lambda ranks: verify_checkpoint(root / "step-10", ranks=ranks))
    assert [type(error) for error in errors] == [CheckpointBrokenError] * 3
    assert len({str(error) for error in errors}) == 1
    found = on_threads(
        3,
        lambda ranks: find_checkpoint(
            root, resume="auto", ranks=ranks, say=lambda line: said.append((ranks.rank, line))
        ),
    )
    assert found == [Checkpoint(9, root / "step-9", {"step": 9})] * 3
    assert {rank for rank, _ in said} == {0}


@pytest.mark.parametrize("state", ["empty file", "dangling"])
def test_r_ckpt_01_a_bad_latest_does_not_matter_to_auto_and_stops_when_named(state: str, root: Path) -> None:
    latest = root / "latest"
    latest.unlink()
    if state == "empty file":
        latest.touch()
        reason = "it is a file, not a folder"
    else:
        latest.symlink_to("step-77")
        reason = "it links to step-77, which is gone"
    found, _ = find(root)
    assert found is not None
    assert found.step == 10
    with pytest.raises(CheckpointMissingError, match=rf"{latest} cannot be resumed from: {reason}"):
        find(root, str(latest))


def test_r_ckpt_02_a_path_that_does_not_exist_stops(root: Path) -> None:
    with pytest.raises(CheckpointMissingError, match=r"step-11 cannot be resumed from: it does not exist"):
        find(root, str(root / "step-11"))


def test_r_ckpt_02_an_explicit_folder_without_checkpoints_stops(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissingError, match=r"it holds neither manifest.json nor any step-N folder"):
        find(tmp_path, str(tmp_path))


@pytest.mark.parametrize("made", [True, False])
def test_r_ckpt_02_auto_on_a_first_run_starts_at_step_0_and_says_so(made: bool, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    if made:
        root.mkdir()
    found, said = find(root)
    assert found is None
    assert said == [f"no checkpoint in {root} yet: starting at step 0"]


def test_r_ckpt_02_auto_with_only_broken_checkpoints_stops_and_lists_the_reasons(root: Path) -> None:
    reasons = [delete_a_file(root / "step-9"), cut_in_half(root / "step-10")]
    with pytest.raises(NoCompleteCheckpointError) as caught:
        find(root)
    assert str(caught.value).startswith(f"no checkpoint in {root} is complete:")
    assert all(reason in str(caught.value) for reason in reasons)


def test_r_ckpt_02_the_ways_to_fail_have_exit_codes_of_their_own() -> None:
    kinds: list[type[CheckpointError]] = [
        CheckpointError,
        CheckpointMissingError,
        CheckpointBrokenError,
        NoCompleteCheckpointError,
    ]
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert not set(codes) & {0, 1, 2}


def test_no_resume_starts_afresh_whatever_is_there(root: Path) -> None:
    assert find(root, None) == (None, [])


@pytest.mark.parametrize("given", ["checkpoints/step-10", "checkpoints/latest", "checkpoints", "."])
def test_a_checkpoint_its_link_its_folder_and_its_run_can_be_named(given: str, root: Path) -> None:
    found, said = find(root, str(root.parent / given))
    assert found is not None
    assert (found.step, found.folder.resolve(), found.details) == (10, root / "step-10", {"step": 10})
    assert said == [f"resuming from {found.folder}"]


def test_a_checkpoint_may_have_been_copied_under_another_name(root: Path) -> None:
    (root / "step-10").rename(root.parent / "the-good-one")
    found, _ = find(root, str(root.parent / "the-good-one"))
    assert found is not None
    assert found.step == 10


def test_going_back_says_that_newer_checkpoints_will_win_later(root: Path) -> None:
    found, said = find(root, str(root / "step-9"))
    assert found is not None
    assert found.step == 9
    assert said[1] == (
        f'{root} also holds step-10, which a later start with "auto" would prefer until training has passed them; '
        "move them away if they are of no use"
    )
