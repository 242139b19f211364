"""One run at a time in an output folder, no run by accident over another, and a look at the disk beforehand."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from recipe.checkpoint.folders import check_free_space
from recipe.checkpoint.run_folder import RunFolder, claim_run_folder
from recipe.shared.errors import CheckpointError, FolderInUseError, NotEnoughSpaceError, RanksFailedError
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
    with pytest.raises(FolderInUseError, match=re.escape(want)):
        claim(used)
    claim(used, resume="auto").release()  # the refusal did not keep the lock


@pytest.mark.parametrize("resume", ["auto", "run/checkpoints/step-5", "run/checkpoints/latest", "run"])
def test_resuming_continues_a_used_folder(resume: str, used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(used.parent)
    (used / "checkpoints" / ".staging-step-6").mkdir()
    claim(used, resume=resume).release()
    assert entries(used / "checkpoints") == ["latest", "step-5"], "what a dead run left is removed"


def test_resuming_from_elsewhere_does_not_open_a_used_folder(used: Path) -> None:
    save(used.parent / "other", 1)
    with pytest.raises(FolderInUseError, match="already holds a run"):
        claim(used, resume=str(used.parent / "other" / "step-1"))


def test_overwriting_deletes_the_old_run_and_nothing_else_once_it_is_asked_to(used: Path) -> None:
    with pytest.raises(ValueError, match=r"would delete what resume_from_checkpoint=auto continues; give only one"):
        claim(used, resume="auto", overwrite=True)
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
    monkeypatch.setattr("recipe.checkpoint.folders.shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    path = tmp_path / "not" / "yet" / "made"
    assert check_free_space(path, needed_bytes=1 << 20, ranks=OneRank()) == 1 << 20
    errors = on_threads(2, lambda ranks: check_free_space(path, needed_bytes=3 << 29, ranks=ranks))
    assert [type(error) for error in errors] == [NotEnoughSpaceError] * 2
    assert str(errors[1]) == (
        f"checkpoints in {path} need about 1,610,612,736 bytes (1.50 GiB), but only 1,048,576 bytes (0.00 GiB) are "
        "free; free some space, keep fewer checkpoints or choose another output folder"
    )


@pytest.mark.requirement("R-CKPT-10")
def test_the_free_space_is_that_of_the_paths_own_disk(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    got = check_free_space(tmp_path / "new", needed_bytes=0, ranks=OneRank())
    assert abs(got - free.f_bavail * free.f_frsize) < 1 << 30
