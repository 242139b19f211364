"""Whether the disk has room for what a run will write, asked before hours are spent on it."""

import shutil
from pathlib import Path

from recipe.checkpoint.agreement import on_first
from recipe.checkpoint.errors import NotEnoughSpaceError
from recipe.ranks import Ranks


def free_bytes(path: Path) -> int:
    """The free bytes on the disk of `path`, which need not exist yet."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(existing).free


def check_free_space(path: Path, *, needed_bytes: int, ranks: Ranks) -> int:
    """Raise NotEnoughSpaceError on every rank unless `needed_bytes` are free; return the free bytes. Collective.

    While a checkpoint is written, the ones it will replace are still there: a run that keeps k needs room for k + 1.
    A quota that the file system does not report in its free space shows only when it is hit.
    """
    free = on_first(lambda: free_bytes(path), ranks=ranks)
    if free < needed_bytes:
        raise NotEnoughSpaceError(
            f"checkpoints in {path} need about {needed_bytes:,} bytes ({needed_bytes / 2**30:.2f} GiB), but only "
            f"{free:,} bytes ({free / 2**30:.2f} GiB) are free; free some space, keep fewer checkpoints or choose "
            "another output folder"
        )
    return free
