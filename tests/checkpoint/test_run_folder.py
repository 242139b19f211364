"""What a start finds in its output folder: one run at a time, none lost by accident, the newest whole checkpoint."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from recipe.checkpoint.find import Checkpoint, find_checkpoint, verify_checkpoint
from recipe.checkpoint.folders import check_free_space
from recipe.checkpoint.run_folder import RunFolder, claim_run_folder
from recipe.shared.errors import (
    CheckpointBrokenError,
    CheckpointError,
    CheckpointMissingError,
    FolderInUseError,
    NoCompleteCheckpointError,
    NotEnoughSpaceError,
    RanksFailedError,
)
from recipe.shared.ranks import OneRank
from tests.saves import entries, save
from tests.thread_ranks import on_threads

PROJECT = Path(__file__).parents[2]
CLAIM = """
import pathlib, sys, time
from recipe.checkpoint.run_folder import claim_run_folder
from recipe.shared.ranks import OneRank
folder = claim_run_folder(pathlib.Path(sys.argv[1]), ranks=OneRank(), resume=None, overwrite=False)
print("claimed", flush=True)
time.sleep(60)
"""


def claim(path: Path, *, resume: str | None = None, overwrite: bool = False) -> RunFolder:
    return claim_run_folder(path, ranks=OneRank(), resume=resume, overwrite=overwrite)


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """The folder of a finished run, with a file of the user's own in it."""
    path = tmp_path / "run"
    save(path / "checkpoints", 5)
    for name in ("run.json", "metrics.jsonl", "notes.txt"):
        (path / name).write_text("{}")
    return path


def test_a_new_folder_is_made_and_one_with_other_things_in_it_is_free(tmp_path: Path) -> None:
    with claim(tmp_path / "deep" / "run") as folder:
        assert folder.path.is_dir()
        assert folder.checkpoints == tmp_path / "deep" / "run" / "checkpoints"
    (tmp_path / "deep" / "run" / "notes.txt").touch()
    claim(tmp_path / "deep" / "run").release()  # nor does the lock file count as a run


def test_a_used_folder_is_refused_with_the_ways_out(used: Path) -> None:
    want = (
        f"{used} already holds a run (run.json, metrics.jsonl, checkpoints); continue it with "
        "--resume_from_checkpoint auto, discard it with --overwrite_output_dir, or choose another --output_dir"
    )
    save(used.parent / "other", 1)
    for resume in (None, str(used.parent / "other" / "step-1")):
        with pytest.raises(FolderInUseError, match=re.escape(want)):
            claim(used, resume=resume)
    claim(used, resume="auto").release()  # the refusals did not keep the lock


@pytest.mark.parametrize("resume", ["auto", "run/checkpoints/step-5", "run/checkpoints/latest", "run"])
def test_resuming_continues_a_used_folder(resume: str, used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(used.parent)
    (used / "checkpoints" / ".staging-step-6").mkdir()
    claim(used, resume=resume).release()
    assert entries(used / "checkpoints") == ["latest", "step-5"], "what a dead run left is removed"


def test_overwriting_deletes_the_old_run_and_nothing_else_once_it_is_asked_to(used: Path) -> None:
    said: list[str] = []
    with claim(used, overwrite=True) as folder:
        assert (used / "checkpoints" / "step-5").is_dir(), "a new run that cannot start must not cost the old one"
        folder.discard_old_run(ranks=OneRank(), say=said.append)
    assert entries(used) == [".lock", "notes.txt"]
    assert said == [f"overwriting {used}: deleting run.json, metrics.jsonl, checkpoints"]


def test_two_live_runs_never_share_a_folder_and_a_killed_one_frees_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM, tmp_path], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        staging = tmp_path / "checkpoints" / ".staging-step-1"
        staging.mkdir(parents=True)
        with pytest.raises(FolderInUseError, match=rf"is the output folder of a live run: .*\"pid\": {other.pid}, "):
            claim(tmp_path, resume="auto")
        assert staging.is_dir(), "the live run's save was disturbed"
        other.send_signal(signal.SIGKILL)
        other.wait()
    claim(tmp_path, resume="auto").release()


def test_a_folder_that_cannot_be_made_and_a_file_system_without_locks_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RanksFailedError, match=r"rank 0: NotADirectoryError: .*file/run"):
        claim(tmp_path / "file" / "run")
    refusal = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    with (
        patch("recipe.checkpoint.run_folder.fcntl.flock", side_effect=refusal),
        pytest.raises(CheckpointError, match=r"cannot be locked against a second run \(.*No locks available\)"),
    ):
        claim(tmp_path)


def test_every_rank_is_refused_alike_and_only_rank_0_locks(used: Path) -> None:
    errors = on_threads(3, lambda ranks: claim_run_folder(used, ranks=ranks, resume=None, overwrite=False))
    assert [type(error) for error in errors] == [FolderInUseError] * 3
    folders = on_threads(3, lambda ranks: claim_run_folder(used, ranks=ranks, resume="auto", overwrite=False))
    folders[1].release()
    folders[2].release()
    with pytest.raises(FolderInUseError, match="live run"):
        claim(used, resume="auto")
    folders[0].release()
    claim(used, resume="auto").release()


@pytest.mark.requirement("R-CKPT-10")
def test_a_disk_that_is_too_small_is_refused_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = os.statvfs(tmp_path)
    free_bytes = check_free_space(tmp_path / "new", needed_bytes=0, ranks=OneRank(), ways_out="")
    assert abs(free_bytes - disk.f_bavail * disk.f_frsize) < 1 << 30
    monkeypatch.setattr("recipe.checkpoint.folders.shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    path = tmp_path / "not" / "yet" / "made"
    assert check_free_space(path, needed_bytes=1 << 20, ranks=OneRank(), ways_out="") == 1 << 20
    errors = on_threads(2, lambda ranks: check_free_space(path, needed_bytes=3 << 29, ranks=ranks, ways_out="tidy up"))
    assert [type(error) for error in errors] == [NotEnoughSpaceError] * 2
    assert str(errors[1]) == (
        f"checkpoints in {path} need about 1,610,612,736 bytes (1.50 GiB), but only 1,048,576 bytes (0.00 GiB) are "
        "free; tidy up"
    )


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


def damage_both_files(folder: Path) -> None:
    cut_in_half(folder)
    delete_a_file(folder)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "hf/model.bin: has 5000 bytes instead of 10000": cut_in_half,
    "hf/model.bin: has 5000 bytes instead of 10000 (and 1 more of its 2 files are broken)": damage_both_files,
    "state.json: missing": delete_a_file,
    "hf/model.bin: its content has changed since it was written (SHA-256 differs)": flip_a_bit,
    "manifest.json: missing, so the checkpoint was never completed": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json: not readable as JSON": lambda folder: os.truncate(folder / "manifest.json", 40),
    "manifest.json: is of step 3, not of step-10": rename_the_folder,
    "manifest.json: format_version is 9, this version reads 1": lambda folder: edit_manifest(folder, format_version=9),
    "manifest.json: an entry is missing or malformed": lambda folder: edit_manifest(folder, files=None),
}


def test_auto_takes_the_newest_by_step_number_and_without_a_resume_nothing_is_taken(root: Path) -> None:
    os.utime(root / "step-9", (4e9, 4e9))
    found, said = find(root)
    assert found == Checkpoint(10, root / "step-10", {"step": 10})
    assert said == [f"resuming from {root / 'step-10'}"]
    assert find(root, None) == (None, [])


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


@pytest.mark.parametrize(
    ("given", "latest", "reason"),
    [
        ("step-11", "step-10", "it does not exist"),
        ("step-10/hf", "step-10", "it holds neither manifest.json nor any step-N folder"),
        ("latest", None, "it is a file, not a folder"),
        ("latest", "step-77", "it links to step-77, which is gone"),
    ],
)
@pytest.mark.requirement("R-CKPT-01", "R-CKPT-02")
def test_a_path_without_a_checkpoint_stops_and_a_bad_latest_does_not_matter_to_auto(
    given: str, latest: str | None, reason: str, root: Path
) -> None:
    (root / "latest").unlink()
    if latest is None:
        (root / "latest").touch()
    else:
        (root / "latest").symlink_to(latest)
    with pytest.raises(CheckpointMissingError, match=f"{root / given} cannot be resumed from: {reason}"):
        find(root, str(root / given))
    assert find(root)[0].step == 10


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
