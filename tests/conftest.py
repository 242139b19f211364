"""Settings every test shares: CPU, offline, few threads, and nothing left behind."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch, deepspeed or transformers are imported anywhere: they read these once.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("LOCAL_SIZE", None)

import pytest

from tests.ranks import end_pools


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """No test may leave a rank running or a buffer in shared memory."""
    before = _shared_memory()
    yield
    end_pools()
    left = {name for name in _shared_memory() - before if name.startswith(("deepspeed", "torch_", "gather"))}
    assert not left, f"tests left these in /dev/shm: {sorted(left)}"
