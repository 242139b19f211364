"""A checkpoint is saved by all ranks or by none, under its final name only when whole, and rotation goes by step."""

import errno
import hashlib
import json
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recipe.checkpoint import folders
from recipe.checkpoint.commit import Save, Writer, write_checkpoint
from recipe.checkpoint.files import Files
from recipe.checkpoint.find import verify_checkpoint
from recipe.checkpoint.folders import list_checkpoints
from recipe.checkpoint.manifest import share_of_files
from recipe.shared.errors import CheckpointWriteError
from recipe.shared.ranks import OneRank, Ranks, RanksMissingError, TorchRanks
from tests.ranks import run_ranks
from tests.thread_ranks import on_threads


def save(root: Path, step: int, *, keep: int | None = None, write: Writer | None = None) -> Path:
    def two_files(folder: Path, files: Files) -> None:
        (folder / "hf").mkdir()
        (folder / "hf" / "model.bin").write_bytes(bytes([step % 256]) * 10_000)
        (folder / "state.json").write_text(json.dumps({"step": step}))

    what = Save(root=root, step=step, keep=keep, details={"step": step})
    return write_checkpoint(what, ranks=OneRank(), write=write or two_files)


def write_file(name: str) -> Writer:
    def write(folder: Path, files: Files) -> None:
        (folder / name).write_bytes(b"x")

    return write


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps(root: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(root)]


def test_a_checkpoint_lists_its_files_with_size_and_checksum(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoints", 7)
    assert folder == tmp_path / "checkpoints" / "step-7"
    assert entries(folder) == ["hf", "manifest.json", "state.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    content = bytes([7]) * 10_000
    assert manifest["files"]["hf/model.bin"] == {
        "size_bytes": 10_000,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    assert (manifest["step"], manifest["format_version"], manifest["details"]) == (7, 1, {"step": 7})
    assert sorted(manifest["files"]) == ["hf/model.bin", "state.json"]


def test_latest_is_a_relative_link_to_the_last_one_saved(tmp_path: Path) -> None:
    for step in (3, 5):
        save(tmp_path / "old", step)
    assert os.readlink(tmp_path / "old" / "latest") == "step-5"
    (tmp_path / "old").rename(tmp_path / "moved")
    assert json.loads((tmp_path / "moved" / "latest" / "state.json").read_text()) == {"step": 5}
    assert entries(tmp_path / "moved") == ["latest", "step-3", "step-5"]


@pytest.mark.parametrize("latest", ["empty file", "dangling link"])
def test_r_ckpt_01_a_bad_latest_is_replaced_by_the_next_save(latest: str, tmp_path: Path) -> None:
    if latest == "empty file":
        (tmp_path / "latest").touch()
    else:
        (tmp_path / "latest").symlink_to("step-99")
    save(tmp_path, 1)
    assert os.readlink(tmp_path / "latest") == "step-1"


def test_a_folder_called_latest_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointWriteError, match=r"latest is a folder, but it must be free for a link"):
        save(tmp_path, 1)
    assert entries(tmp_path) == ["latest"]


def test_what_a_dead_run_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    for name in (".staging-step-4", ".discarded-step-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_bytes(b"x")
    (tmp_path / ".next-latest").symlink_to("step-4")
    save(tmp_path, 5)
    assert entries(tmp_path) == ["latest", "step-5"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "step-2" / "manifest.json").unlink()
    save(tmp_path, 2, write=write_file("only"))
    assert entries(tmp_path) == ["latest", "step-2"]
    assert entries(tmp_path / "step-2") == ["manifest.json", "only"]


def test_a_checkpoint_set_aside_for_a_new_one_that_never_came_is_put_back(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "step-2").rename(tmp_path / ".replaced-step-2")
    folders.tidy(tmp_path)
    assert entries(tmp_path) == ["latest", "step-2"]
    verify_checkpoint(tmp_path / "step-2", ranks=OneRank())


def test_r_ckpt_04_rotation_goes_by_step_number_not_by_name(tmp_path: Path) -> None:
    for step in (900, 1000, 9900, 10000):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [9900, 10000]


def test_r_ckpt_04_rotation_does_not_look_at_times(tmp_path: Path) -> None:
    for step in (900, 1000, 9900):
        save(tmp_path, step)
    os.utime(tmp_path / "step-900", (4e9, 4e9))
    save(tmp_path, 10000, keep=2)
    assert steps(tmp_path) == [9900, 10000]


def test_r_ckpt_04_the_checkpoint_just_written_is_never_deleted(tmp_path: Path) -> None:
    for step in (100, 2000, 3000):
        save(tmp_path, step)
    save(tmp_path, 1000, keep=1)  # training went back to an earlier step
    assert steps(tmp_path) == [1000, 2000, 3000]


def test_r_ckpt_04_a_broken_checkpoint_does_not_take_a_good_ones_place(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step-2" / "state.json").unlink()
    (tmp_path / "step-4" / "manifest.json").write_text("{")
    (tmp_path / "step-0").mkdir()  # without a manifest: somebody else's
    save(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [0, 3, 5]


@pytest.mark.parametrize("keep", [0, -1])
def test_r_ckpt_04_keeping_none_is_refused(keep: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"keep={keep} would delete .* keep at least 1, or None to keep all"):
        save(tmp_path, 1, keep=keep)


def _save_with_a_failing_rank(ranks: Ranks, root: Path, *, failing: int) -> None:
    def write(folder: Path, files: Files) -> None:
        (folder / f"rank{ranks.rank}.bin").write_bytes(b"x" * 1000)
        if ranks.rank == failing:
            with open("/dev/full", "wb", buffering=0) as file:
                file.write(b"x")

    write_checkpoint(Save(root=root, step=20, keep=1, details={}, expected_bytes=123_456), ranks=ranks, write=write)


@pytest.mark.parametrize("failing", [0, 2])
def test_r_ckpt_10_a_full_disk_on_one_rank_fails_all_alike_and_leaves_the_previous_checkpoint(
    failing: int, tmp_path: Path
) -> None:
    save(tmp_path, 10)
    errors = on_threads(3, lambda ranks: _save_with_a_failing_rank(ranks, tmp_path, failing=failing))
    assert [type(error) for error in errors] == [CheckpointWriteError] * 3
    assert len({str(error) for error in errors}) == 1
    message = str(errors[0])
    assert f"step-20 could not be saved in {tmp_path}: rank {failing}: OSError: [Errno {errno.ENOSPC}]" in message
    assert "3,000 bytes of about 123,456 needed were written when " in message
    assert "were still free; they have been removed. The other checkpoints are untouched: step-10" in message
    assert entries(tmp_path) == ["latest", "step-10"]
    assert os.readlink(tmp_path / "latest") == "step-10"
    verify_checkpoint(tmp_path / "step-10", ranks=OneRank())


@contextmanager
def small_files_only() -> Iterator[None]:
    """The kernel cuts every file off at 4096 bytes, as a quota does; not for longer than it takes, for it is meant for
    this whole process, its log included."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_r_ckpt_10_a_save_cut_off_by_the_system_removes_its_partial_files(tmp_path: Path) -> None:
    with small_files_only():
        save(tmp_path, 10, write=write_file("small"))
    message = r"File too large.* 4,096 bytes were written .* untouched: step-10"
    with pytest.raises(CheckpointWriteError, match=message), small_files_only():
        save(tmp_path, 20)
    assert entries(tmp_path) == ["latest", "step-10"]


def test_a_failed_first_save_says_that_there_is_no_other(tmp_path: Path) -> None:
    with pytest.raises(CheckpointWriteError, match=r"RuntimeError: no\. .*\. There is no other checkpoint"):
        save(tmp_path / "new", 1, write=_raise)
    assert entries(tmp_path / "new") == []


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError, match=r"could not be saved in .*file/checkpoints: rank 0: NotADirectory"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_partial_files_that_stay_are_admitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EBUSY, "busy", str(path))

    def write(folder: Path, files: Files) -> None:
        monkeypatch.setattr("recipe.checkpoint.folders.shutil.rmtree", refuse)
        _raise(folder, files)

    with pytest.raises(CheckpointWriteError, match=r"RuntimeError: no\. .* they could not all be removed .*busy"):
        save(tmp_path, 1, write=write)


def test_a_failure_after_the_rename_says_that_the_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "input/output error", str(target))

    monkeypatch.setattr("recipe.checkpoint.folders.os.replace", refuse)
    with pytest.raises(CheckpointWriteError, match=r"step-1 is complete, but the folder around it was not updated"):
        save(tmp_path, 1)
    verify_checkpoint(tmp_path / "step-1", ranks=OneRank())


def test_a_checkpoint_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointWriteError, match="no rank wrote a file"):
        save(tmp_path, 1, write=lambda folder, files: None)


def test_a_file_that_the_first_rank_does_not_see_is_named(tmp_path: Path) -> None:
    """As on a node whose file system is its own below the folder of the checkpoint."""

    def save_together(ranks: Ranks) -> None:
        def write(folder: Path, files: Files) -> None:
            elsewhere = tmp_path / "local" if ranks.rank else folder
            files.write(folder / f"rank{ranks.rank}", lambda path: (elsewhere / path.name).write_bytes(b"x"))

        write_checkpoint(Save(root=tmp_path / "root", step=1, keep=None, details={}), ranks=ranks, write=write)

    (tmp_path / "local").mkdir()
    for error in on_threads(2, save_together):
        assert isinstance(error, CheckpointWriteError)
        path = tmp_path / "root" / ".staging-step-1" / "rank1"
        assert f"{path}, written by rank 1, is not there on host " in str(error)
        assert "the output folder must be on a file system that all ranks share" in str(error)
    assert entries(tmp_path / "root") == []


def test_the_manifests_name_is_reserved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointWriteError, match=r"manifest.json was written into the checkpoint, but that name"):
        save(tmp_path, 1, write=write_file("manifest.json"))


def test_a_link_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointWriteError, match=r"link is neither a plain file nor a folder"):
        save(tmp_path, 1, write=lambda folder, files: (folder / "link").symlink_to("/etc/hostname"))


def test_ranks_at_different_steps_are_told_so(tmp_path: Path) -> None:
    def save_own_step(ranks: Ranks) -> None:
        write_checkpoint(Save(root=tmp_path, step=ranks.rank + 4, keep=None, details={}), ranks=ranks, write=_raise)

    for error in on_threads(2, save_own_step):
        assert type(error) is ValueError
        assert str(error) == "the ranks disagree on the step they are saving: {0: 4, 1: 5}"
    assert entries(tmp_path) == []


def test_a_folder_that_not_all_ranks_share_is_refused(tmp_path: Path) -> None:
    """Each rank gets a root of its own, as on nodes with local disks."""

    def save_locally(ranks: Ranks) -> None:
        root = tmp_path / f"disk{ranks.rank}"
        write_checkpoint(Save(root=root, step=1, keep=None, details={}), ranks=ranks, write=_raise)

    for error in on_threads(2, save_locally):
        assert isinstance(error, CheckpointWriteError)
        assert "rank 1: FileNotFoundError" in str(error)
        assert "the output folder must be on a file system that all ranks share" in str(error)


def test_files_are_shared_out_evenly_and_every_one_has_one_reader() -> None:
    sizes = {f"big{i}": 1_000_000 for i in range(4)} | {f"small{i}": 0 for i in range(8)} | {"odd": 300_000}
    shares = [share_of_files(sizes, rank=rank, world_size=4) for rank in range(4)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) == 1_300_000
    assert max(len(share) for share in shares) <= 4


def test_ranks_hash_in_parallel_and_write_one_manifest(tmp_path: Path) -> None:
    met = threading.Barrier(3)

    def save_together(ranks: Ranks) -> Path:
        def write(folder: Path, files: Files) -> None:
            met.wait(5)  # a collective of the writer's own
            (folder / f"rank{ranks.rank}.bin").write_bytes(bytes([ranks.rank]) * 5000)

        return write_checkpoint(Save(root=tmp_path, step=1, keep=None, details={"by": 3}), ranks=ranks, write=write)

    assert on_threads(3, save_together) == [tmp_path / "step-1"] * 3
    results = on_threads(3, lambda ranks: verify_checkpoint(tmp_path / "step-1", ranks=ranks))
    assert [sorted(manifest.files) for manifest in results] == [["rank0.bin", "rank1.bin", "rank2.bin"]] * 3


def _save_one_sided(rank: int, world_size: int, caller: int, root: str, released: str) -> str | None:
    message = None
    if rank == caller:
        save = Save(root=Path(root), step=3, keep=None, details={})
        with pytest.raises(RanksMissingError) as caught:
            write_checkpoint(save, ranks=TorchRanks(), write=_raise, meet_timeout_s=0.3)
        message = str(caught.value)
        Path(released).touch()
    else:
        while not Path(released).exists():
            threading.Event().wait(0.01)
        TorchRanks().meet("catching up", timeout_s=5.0)  # so that the next test starts with an equal count
    return message


@pytest.mark.parametrize("caller", [0, 1])
def test_r_ckpt_12_saving_from_one_rank_names_the_missing_one_in_time(caller: int, tmp_path: Path) -> None:
    root, released = tmp_path / "checkpoints", tmp_path / "released"
    messages = run_ranks(_save_one_sided, 2, caller, str(root), str(released), timeout_s=10.0)
    assert f"saving step-3: rank {caller} waited 0.3 s, but ranks [{1 - caller}] of 2 did not come" in messages[caller]
    assert not root.exists()


def _save_on_gloo(rank: int, world_size: int, root: str) -> int:
    import torch
    import torch.distributed as dist

    def write(folder: Path, files: Files) -> None:
        total = torch.ones(1)
        dist.all_reduce(total)
        (folder / f"rank{rank}.txt").write_text(str(int(total)))

    folder = write_checkpoint(Save(root=Path(root), step=1, keep=1, details={}), ranks=TorchRanks(), write=write)
    return len(verify_checkpoint(folder, ranks=TorchRanks()).files)


def test_a_real_group_saves_and_verifies_together(tmp_path: Path) -> None:
    assert run_ranks(_save_on_gloo, 2, str(tmp_path)) == [2, 2]
    assert (tmp_path / "latest" / "rank1.txt").read_text() == "2"


def _raise(folder: Path, files: Files) -> None:
    raise RuntimeError("no")
