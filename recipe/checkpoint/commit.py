"""Save a checkpoint so that it exists on all ranks or on none, and never half, whatever dies at whatever moment.

The ranks write into a hidden staging folder, check in, take sizes and checksums together, and only when all of them
succeeded does rank 0 rename it to step-N. Until that rename the earlier checkpoints and `latest` are untouched.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipe.checkpoint.agreement import check_all_see, on_every, on_first
from recipe.checkpoint.errors import CheckpointError, CheckpointWriteError
from recipe.checkpoint.folders import (
    LATEST,
    list_checkpoints,
    point_latest,
    publish,
    rotate,
    staging_folder,
    step_folder,
    tidy,
)
from recipe.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    file_sizes,
    record_file,
    share_of_files,
    write_manifest,
)
from recipe.checkpoint.space import free_bytes
from recipe.ranks import Ranks


def write_checkpoint(
    root: Path,
    *,
    step: int,
    ranks: Ranks,
    write: Callable[[Path], None],
    keep: int | None,
    details: dict[str, Any],
    expected_bytes: int | None = None,
    meet_timeout_s: float = 300.0,
) -> Path:
    """Save root/step-N, point root/latest at it, and delete all but the newest `keep` (None keeps all). Collective.

    Every rank must call it, with the same step: never under `if rank == 0`. Ranks that do not come within
    `meet_timeout_s` are named in a RanksMissingError. `write(folder)` is called on every rank, may use collectives of
    its own and puts this rank's files anywhere below `folder`, which all ranks share. A rank whose write fails must
    still take part in those collectives before it raises, or the others wait for it there.

    `details` (JSON) is stored in the manifest, where find_checkpoint returns it. `expected_bytes` is only reported
    when a save fails.

    Raises CheckpointWriteError, the same on every rank, after removing what was written.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} would delete the checkpoint just written; keep at least 1, or None to keep all")
    ranks.meet(f"saving step-{step}", timeout_s=meet_timeout_s)
    steps = ranks.gather(step)
    if len(set(steps)) > 1:
        raise ValueError(f"the ranks disagree on the step they are saving: {dict(enumerate(steps))}")
    try:
        _stage(root, step=step, ranks=ranks, write=write, details=details)
        on_first(lambda: publish(root, step), ranks=ranks)
    except CheckpointError as error:
        aftermath = on_first(lambda: _clean_up(root, step, expected_bytes), ranks=ranks)
        raise CheckpointWriteError(f"step-{step} could not be saved in {root}: {error}. {aftermath}") from error
    saved = step_folder(root, step)
    try:
        on_first(lambda: _settle(root, step=step, keep=keep), ranks=ranks)
    except CheckpointError as error:
        raise CheckpointWriteError(f"{saved} is complete, but the folder around it was not updated: {error}") from error
    return saved


def _stage(root: Path, *, step: int, ranks: Ranks, write: Callable[[Path], None], details: dict[str, Any]) -> None:
    """Fill the staging folder and seal it with a manifest."""
    staging = staging_folder(root, step)
    on_first(lambda: _open_staging(root, staging), ranks=ranks)
    check_all_see(staging, ranks=ranks)
    on_every(lambda: write(staging), ranks=ranks)
    sizes_bytes = on_first(lambda: _written_sizes(staging), ranks=ranks)
    mine = share_of_files(sizes_bytes, rank=ranks.rank, world_size=ranks.world_size)
    shares = on_every(lambda: {name: record_file(staging / name) for name in mine}, ranks=ranks)
    records: dict[str, FileRecord] = {name: record for share in shares for name, record in share.items()}
    manifest = Manifest(step=step, files=dict(sorted(records.items())), details=details)
    on_first(lambda: write_manifest(staging, manifest), ranks=ranks)


def _open_staging(root: Path, staging: Path) -> None:
    latest = root / LATEST
    if latest.is_dir() and not latest.is_symlink():
        raise ValueError(f"{latest} is a folder, but it must be free for a link to the newest checkpoint; rename it")
    tidy(root)
    staging.mkdir(parents=True)


def _written_sizes(staging: Path) -> dict[str, int]:
    sizes_bytes = file_sizes(staging)
    if not sizes_bytes:
        raise ValueError("no rank wrote a file")
    if MANIFEST_NAME in sizes_bytes:
        raise ValueError(f"{MANIFEST_NAME} was written into the checkpoint, but that name belongs to its manifest")
    return sizes_bytes


def _settle(root: Path, *, step: int, keep: int | None) -> None:
    """Bring the folder up to date with the checkpoint that was just published."""
    point_latest(root, step)
    tidy(root)
    if keep is not None:
        rotate(root, keep=keep, written=step)


def _clean_up(root: Path, step: int, expected_bytes: int | None) -> str:
    """Remove what a failed save left, and say in words how things stand."""
    staging = staging_folder(root, step)
    written_bytes = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
    free = free_bytes(root)
    try:
        tidy(root)
        removed = "they have been removed"
    except OSError as error:
        removed = f"they could not all be removed ({error})"
    expected = "" if expected_bytes is None else f" of about {expected_bytes:,} needed"
    others = ", ".join(path.name for _, path in list_checkpoints(root))
    untouched = f"The other checkpoints are untouched: {others}" if others else "There is no other checkpoint"
    return f"{written_bytes:,} bytes{expected} were written when {free:,} were still free; {removed}. {untouched}"
