"""Choose the checkpoint to resume from, after every byte of it has been compared with its manifest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from recipe.checkpoint.folders import CHECKPOINTS_NAME, StepFolder, list_checkpoints, step_in_name
from recipe.checkpoint.manifest import MANIFEST_NAME, Manifest, file_faults, read_manifest, share_of_files
from recipe.shared.errors import CheckpointBrokenError, CheckpointMissingError, NoCompleteCheckpointError
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_every, on_first

AUTO = "auto"


class Checkpoint(NamedTuple):
    """A checkpoint that was found complete."""

    step: int
    folder: Path
    details: dict[str, Any]  # those of its `Save`


def find_checkpoint(root: Path, *, resume: str | None, ranks: Ranks, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint that `resume` asks for, or None to start at step 0. Collective; the same on all ranks.

    None    start afresh
    "auto"  the newest complete checkpoint in `root`; broken ones are named and passed over; with none at all, None
    a path  a checkpoint (`latest` too), or a folder of checkpoints, or a run folder with `checkpoints` in it, of
            which the newest complete one is taken

    `say` is called on rank 0. Raises CheckpointMissingError where a given path leads nowhere, CheckpointBrokenError
    where it leads to a broken checkpoint, NoCompleteCheckpointError where all the candidates are broken.
    """
    if resume is None:
        return None
    say_once = say if ranks.rank == 0 else (lambda line: None)
    if resume == AUTO:
        candidates = on_first(lambda: list_checkpoints(root), ranks=ranks)
        if not candidates:
            say_once(f"no checkpoint in {root} yet: starting at step 0")
            return None
        return _newest_complete(root, candidates, ranks=ranks, say=say_once)
    given = Path(resume)
    candidates = on_first(lambda: _candidates_at(given), ranks=ranks)
    if candidates:
        return _newest_complete(given, candidates, ranks=ranks, say=say_once)
    folder = on_first(given.resolve, ranks=ranks)
    manifest = verify_checkpoint(folder, ranks=ranks)
    say_once(f"resuming from {folder}")
    newer = [path.name for step, path in on_first(lambda: list_checkpoints(root), ranks=ranks) if step > manifest.step]
    if newer and folder.parent == root.resolve():
        say_once(
            f'{root} also holds {", ".join(newer)}, which a later start with "auto" would prefer until training has '
            "passed them; move them away if they are of no use"
        )
    return Checkpoint(manifest.step, folder, manifest.details)


def verify_checkpoint(folder: Path, *, ranks: Ranks) -> Manifest:
    """Compare a checkpoint with its manifest, the files shared out over the ranks. Collective.

    Raises the same CheckpointBrokenError on every rank.
    """

    def read() -> Manifest:
        manifest, named = read_manifest(folder), step_in_name(folder)
        if named not in (None, manifest.step):
            raise CheckpointBrokenError(folder / MANIFEST_NAME, f"is of step {manifest.step}, not of {folder.name}")
        return manifest

    manifest = on_first(read, ranks=ranks)
    mine = share_of_files(manifest.sizes_bytes, rank=ranks.rank, world_size=ranks.world_size)
    found = on_every(lambda: list(file_faults(folder, manifest, names=mine, checksums=True)), ranks=ranks)
    faults = sorted((fault for share in ranks.gather(found) for fault in share), key=lambda fault: fault.file)
    if faults:
        more = f" (and {len(faults) - 1} more of its {len(manifest.files)} files are broken)" if faults[1:] else ""
        raise CheckpointBrokenError(faults[0].file, faults[0].reason + more)
    return manifest


def _newest_complete(
    where: Path, candidates: list[StepFolder], *, ranks: Ranks, say: Callable[[str], None]
) -> Checkpoint:
    reasons = []
    for folder in reversed(candidates):
        try:
            manifest = verify_checkpoint(folder.path, ranks=ranks)
        except CheckpointBrokenError as error:
            reasons.append(str(error))
            say(f"passing over {folder.path.name}, which is broken: {error}")
        else:
            say(f"resuming from {folder.path}")
            return Checkpoint(manifest.step, folder.path, manifest.details)
    raise NoCompleteCheckpointError(
        f"no checkpoint in {where} is complete:\n" + "\n".join(f"  - {reason}" for reason in reasons)
    )


def _candidates_at(given: Path) -> list[StepFolder]:
    """Return the checkpoints below a path the user gave; none where the path itself is a checkpoint."""
    if given.is_symlink() and not given.exists():
        raise CheckpointMissingError(f"{given} cannot be resumed from: it links to {given.readlink()}, which is gone")
    if not given.exists():
        raise CheckpointMissingError(f"{given} cannot be resumed from: it does not exist")
    if not given.is_dir():
        raise CheckpointMissingError(f"{given} cannot be resumed from: it is a file, not a folder")
    return checkpoints_below(given, purpose="resumed from")


def checkpoints_below(folder: Path, *, purpose: str) -> list[StepFolder]:
    """Return the checkpoints in a folder of them or in a run folder; none where the folder itself is a checkpoint.

    CheckpointMissingError, "cannot be" followed by `purpose`, where there is none.
    """
    if (folder / MANIFEST_NAME).exists() or step_in_name(folder.resolve()) is not None:
        return []
    found = list_checkpoints(folder) or list_checkpoints(folder / CHECKPOINTS_NAME)
    if not found:
        raise CheckpointMissingError(
            f"{folder} cannot be {purpose}: it holds neither {MANIFEST_NAME} nor any step-N folder"
        )
    return found
