"""Buffers of dead runs go, those of live ones stay, and a full /dev/shm is an error before any work."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from recipe.launch.start import SharedMemoryError, check_room, remove_dead_buffers


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def _buffer(folder: Path, name: str) -> Path:
    path = folder / f"deepspeed_allreduce_buffer_{name}"
    path.write_bytes(bytes(2**20))
    return path


@pytest.mark.requirement("R-LAUNCH-02")
def test_buffers_of_dead_runs_are_removed_and_named(tmp_path: Path) -> None:
    dead = [_buffer(tmp_path, name) for name in ("0_127.0.0.1_29500_0", "0_127.0.0.1_29500_1")]
    other = tmp_path / "sem.other"
    other.write_bytes(b"x")
    said: list[str] = []
    assert remove_dead_buffers(tmp_path, say=said.append) == [path.name for path in dead]
    assert list(tmp_path.iterdir()) == [other]
    assert said == [
        f"removed what dead runs left in {tmp_path} (2 MiB): "
        "deepspeed_allreduce_buffer_0_127.0.0.1_29500_0, deepspeed_allreduce_buffer_0_127.0.0.1_29500_1"
    ]


@pytest.mark.requirement("R-LAUNCH-02")
def test_a_buffer_that_a_process_has_mapped_stays(tmp_path: Path) -> None:
    live, dead = _buffer(tmp_path, "live"), _buffer(tmp_path, "dead")
    mapped = torch.from_file(str(live), shared=True, size=2**20, dtype=torch.uint8)  # keeps no descriptor open
    assert remove_dead_buffers(tmp_path, say=print) == [dead.name]
    del mapped
    assert remove_dead_buffers(tmp_path, say=print) == [live.name]


@pytest.mark.requirement("R-LAUNCH-02")
def test_a_buffer_that_a_process_has_open_stays(tmp_path: Path) -> None:
    """A run that has created its buffer and not mapped it yet."""
    live = _buffer(tmp_path, "live")
    with live.open("r+b"):
        assert remove_dead_buffers(tmp_path, say=print) == []
    assert live.exists()


@pytest.mark.requirement("R-LAUNCH-02")
def test_nothing_is_said_when_there_is_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    assert remove_dead_buffers(tmp_path, say=said.append) == []
    assert said == []


@pytest.mark.requirement("R-LAUNCH-02")
def test_a_nearly_full_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _buffer(tmp_path, "of_somebody")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(1000 * 2**20, 951 * 2**20, 49 * 2**20))
    message = r"is nearly full: 49 of 1000 MiB are free; .*deepspeed_allreduce_buffer_of_somebody \(1 MiB\)"
    with pytest.raises(SharedMemoryError, match=message):
        check_room(tmp_path)


@pytest.mark.requirement("R-LAUNCH-02")
def test_a_small_empty_folder_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(64 * 2**20, 0, 64 * 2**20))
    check_room(tmp_path)
