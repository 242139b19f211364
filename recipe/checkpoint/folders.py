"""The names inside a folder of checkpoints, and changes to it that may be cut short anywhere.

A run can die between any two of these renames: what it leaves is either valid or put right by tidy().

step-20/             a checkpoint; it appears under this name only when complete
latest -> step-20    a relative link, replaced in one rename
.staging-step-30/    a checkpoint being written
.replaced-step-20/   the step-20 that a new step-20 replaces
.discarded-step-10/  a checkpoint being deleted
"""

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from recipe.checkpoint.manifest import MANIFEST_NAME, Manifest, file_faults, read_manifest
from recipe.shared.errors import CheckpointBrokenError, NotEnoughSpaceError
from recipe.shared.json_files import flush
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_first
from recipe.shared.units import exact_size

CHECKPOINTS_NAME = "checkpoints"  # the folder of checkpoints in a run folder
LATEST = "latest"
_NEXT_LATEST = ".next-latest"
_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]*)")


class StepFolder(NamedTuple):
    """A folder named like a checkpoint, complete or not."""

    step: int
    path: Path


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def staging_folder(root: Path, step: int) -> Path:
    return root / f".staging-step-{step}"


def step_in_name(path: Path) -> int | None:
    """Return the N of a folder named step-N, None for any other name."""
    match = _STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def list_checkpoints(root: Path) -> list[StepFolder]:
    """Return every step-N folder in `root`, broken ones too, by rising step number; none without a `root`."""
    if not root.is_dir():
        return []
    found = [(step_in_name(path), path) for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    return sorted(StepFolder(step, path) for step, path in found if step is not None)


def tidy(root: Path) -> None:
    """Finish or undo what was left half done. For the run that owns `root`, between saves: staging folders go, too."""
    if not root.is_dir():
        return
    for path in root.glob(".replaced-step-*"):
        original = root / path.name.removeprefix(".replaced-")
        if original.exists():
            shutil.rmtree(path)
        else:
            path.rename(original)
    for pattern in (".staging-step-*", ".discarded-step-*"):
        for path in root.glob(pattern):
            shutil.rmtree(path)
    (root / _NEXT_LATEST).unlink(missing_ok=True)


def publish(root: Path, step: int) -> None:
    """Give the finished staging folder its name. An older checkpoint of the same step is set aside, for tidy()."""
    target, replaced = step_folder(root, step), root / f".replaced-step-{step}"
    if target.exists():
        # Two renames, because a folder cannot be renamed over a full one. Dying between them, the old one is
        # put back by tidy(); dying later, it is deleted there.
        target.rename(replaced)
    staging_folder(root, step).rename(target)
    flush(root)


def point_latest(root: Path, step: int) -> None:
    """Let `latest` name this step. A reader sees the old or the new target, never none."""
    link = root / _NEXT_LATEST
    link.unlink(missing_ok=True)
    link.symlink_to(step_folder(root, step).name)
    os.replace(link, root / LATEST)
    flush(root)


def path_of_step(root: Path, step: int) -> Path:
    """Return the path of this step: `latest` where that leads there, else its own name."""
    latest, own = root / LATEST, step_folder(root, step)
    return latest if latest.resolve() == own.resolve() else own


def rotate(root: Path, *, keep: int, written: int) -> None:
    """Delete all but the newest `keep` checkpoints.

    Newest by step number, whatever the names sort like and whenever the folders were touched. The step just `written`
    stays in any case, and so does everything newer. A checkpoint with a file missing or cut short does not count as one
    of the `keep`; a step folder without a manifest was not made here and is left alone.
    """
    ours = [folder for folder in list_checkpoints(root) if (folder.path / MANIFEST_NAME).is_file()]
    kept = [folder.step for folder in ours if _looks_whole(folder.path)][-keep:]
    for folder in ours:
        if folder.step not in kept and folder.step < written:
            # Under another name first, so that a run killed half-way leaves no folder that still looks like one.
            doomed = folder.path.with_name(f".discarded-{folder.path.name}")
            folder.path.rename(doomed)
            shutil.rmtree(doomed)


def _looks_whole(path: Path) -> bool:
    """Return whether every file is there with its size. Contents are not read, so this is cheap after every save."""
    try:
        manifest: Manifest = read_manifest(path)
    except CheckpointBrokenError:
        return False
    return next(file_faults(path, manifest, names=list(manifest.files), checksums=False), None) is None


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of `path`, which need not exist yet."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(existing).free


def check_free_space(
    path: Path, *, needed_bytes: int, ranks: Ranks, ways_out: str, freed_bytes: int = 0, detail: str = ""
) -> int:
    """Raise NotEnoughSpaceError on every rank unless `needed_bytes` are free; return the free bytes. Collective.

    `freed_bytes`, as the first rank counts them, are added to what is free now. The error shows `detail` beside the
    needed bytes, and ends with `ways_out`. A quota that the file system does not report as free space shows only when
    it is hit.
    """
    free = on_first(lambda: free_bytes(path) + freed_bytes, ranks=ranks)
    if free < needed_bytes:
        included = f", the {freed_bytes:,} of the run that is overwritten included" if freed_bytes else ""
        raise NotEnoughSpaceError(
            f"checkpoints in {path} need about {exact_size(needed_bytes, detail=detail)}, but "
            f"only {exact_size(free)} are free{included}; {ways_out}"
        )
    return free
