"""Whether the disk has room for what a run will write, asked before hours are spent on it."""

import shutil
from pathlib import Path

from recipe.shared.errors import NotEnoughSpaceError
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_first

WAYS_OUT = "free some space, keep fewer checkpoints or choose another output folder"


def free_bytes(path: Path) -> int:
    """The free bytes on the disk of `path`, which need not exist yet."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(existing).free


def check_free_space(
    path: Path, *, needed_bytes: int, ranks: Ranks, freed_bytes: int = 0, detail: str = "", ways_out: str = WAYS_OUT
) -> int:
    """Raise NotEnoughSpaceError on every rank unless `needed_bytes` are free; return the free bytes. Collective.

    `freed_bytes`, of which the first rank's count, will be free by then. The error holds `detail` beside the needed
    bytes, and ends with `ways_out`. A quota that the file system does not report in its free space shows only when it
    is hit.
    """
    free = on_first(lambda: free_bytes(path) + freed_bytes, ranks=ranks)
    if free < needed_bytes:
        included = f", the {freed_bytes:,} of the run that is overwritten included" if freed_bytes else ""
        raise NotEnoughSpaceError(
            f"checkpoints in {path} need about {needed_bytes:,} bytes ({needed_bytes / 2**30:.2f} GiB{detail}), but "
            f"only {free:,} bytes ({free / 2**30:.2f} GiB) are free{included}; {ways_out}"
        )
    return free
