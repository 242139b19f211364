"""Write a checkpoint anew without its layout: offline, in one process, in bounded memory, every tensor compared.

Nothing of DeepSpeed's stays: the state becomes whole tensors, and all other files are carried over as they are.
"""

import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path

from recipe.checkpoint.find import Checkpoint, find_checkpoint
from recipe.checkpoint.folders import check_free_space, step_in_name
from recipe.checkpoint.inspect_checkpoint import sizes_in
from recipe.checkpoint.manifest import MANIFEST_NAME, Manifest, file_sizes, read_manifest, record_file, write_manifest
from recipe.checkpoint.native_files import open_training_state
from recipe.checkpoint.training_state import (
    NATIVE_FOLDER,
    WHOLE_FOLDER,
    TrainingState,
    WholeTensors,
    digests_of,
    entries_of,
    write_whole,
)
from recipe.shared.errors import CheckpointBrokenError, CheckpointWriteError
from recipe.shared.flops import count_parameters
from recipe.shared.json_files import flush
from recipe.shared.ranks import OneRank
from recipe.shared.units import byte_bar

WAYS_OUT = "free some space or name a folder on another disk"
# At the top of a checkpoint, what becomes whole tensors, and DeepSpeed's scripts that read nothing else.
LEFT_OUT = (NATIVE_FOLDER, WHOLE_FOLDER, "zero_to_fp32.py", "zero_to_torch.py")
FORMAT = "whole"  # under "format" in the details
BUFFER = "e_score_correction_bias"  # the stored tensors that are not parameters


def reshard(given: Path, *, out: Path, say: Callable[[str], None]) -> tuple[int, int]:
    """Write the checkpoint that `given` names to `out`, for any layout to resume from; `out` appears when complete.

    Returns how many tensors were read, and how many were read back. `given` is a checkpoint, or a run folder or folder
    of checkpoints, of which the newest complete one is taken. It is compared with its manifest before anything is read
    from it. At most PIECE_BYTES of a tensor are in memory at a time.

    Raises ValueError where `out` cannot be written to, NotEnoughSpaceError, the errors of find_checkpoint, and
    CheckpointWriteError where a file could not be written or a tensor is read back with other bytes than were read.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists already; name a folder that does not")
    checkpoint = _find(given, say=say)
    _check_target(out, checkpoint)
    state = open_training_state(checkpoint.folder, details=checkpoint.details)
    _check_is_whole_model(state, checkpoint)
    manifest = read_manifest(checkpoint.folder)
    carried = [name for name in manifest.files if Path(name).parts[0] not in LEFT_OUT]
    state_bytes = sum(entry.num_bytes for entry in entries_of(state))
    needed_bytes = state_bytes + sum(manifest.sizes_bytes[name] for name in carried)
    check_free_space(out.parent, needed_bytes=needed_bytes, ranks=OneRank(), ways_out=WAYS_OUT)
    staging = out.with_name(f".reshard-{out.name}")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        for name in carried:
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.folder / name, staging / name)
        whole = staging / WHOLE_FOLDER
        with byte_bar("writing", num_bytes=state_bytes) as bar:
            read = write_whole(whole, state, advance=bar.update)
        with byte_bar("comparing", num_bytes=state_bytes) as bar:
            read_back = digests_of(WholeTensors(whole), advance=bar.update)
        _check_same(read, read_back)
        _seal(staging, source=manifest, carried=carried)
        staging.rename(out)
        flush(out.parent)
    except OSError as error:
        raise CheckpointWriteError(f"{out} could not be written: {error}; what was written is removed") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return len(read), len(read_back)


def _find(given: Path, *, say: Callable[[str], None]) -> Checkpoint:
    say(f"comparing {given} with its manifest")
    said: list[str] = []
    checkpoint = find_checkpoint(given, resume=str(given.absolute()), ranks=OneRank(), say=said.append)
    assert checkpoint is not None, "only resume=None and auto can give none"
    for line in said[:-1]:  # the last one speaks of resuming
        say(line)
    say(f"reading step {checkpoint.step} from {checkpoint.folder}, which is complete")
    return checkpoint


def _check_target(out: Path, checkpoint: Checkpoint) -> None:
    named = step_in_name(out)
    if named not in (None, checkpoint.step):
        raise ValueError(
            f"{out.name} would name step {named}, but {checkpoint.folder} is of step {checkpoint.step}; "
            f"call it step-{checkpoint.step} or anything else"
        )
    if out.resolve().is_relative_to(checkpoint.folder.resolve()):
        raise ValueError(f"{out} lies inside the checkpoint that is read; name a folder outside of it")


def _check_is_whole_model(state: TrainingState, checkpoint: Checkpoint) -> None:
    """Compare the parameters found with the count that follows from the model's settings alone."""
    sizes = sizes_in(checkpoint.details)
    if sizes is None:
        raise CheckpointBrokenError(checkpoint.folder / MANIFEST_NAME, "its details say nothing of the model")
    expected = count_parameters(sizes).total
    found = sum(prod(shape) for name, shape in state.shapes().items() if not name.endswith(BUFFER))
    if found != expected:
        raise CheckpointBrokenError(
            checkpoint.folder, f"its files hold {found:,} parameters, but a model of its settings has {expected:,}"
        )


def _check_same(read: dict[str, str], read_back: dict[str, str]) -> None:
    different = sorted(key for key in read.keys() | read_back.keys() if read.get(key) != read_back.get(key))
    if different:
        raise CheckpointWriteError(
            f"{len(read)} tensors were read and {len(read_back)} read back, of which {len(different)} differ: "
            f"{different[:5]}"
        )


def _seal(staging: Path, *, source: Manifest, carried: list[str]) -> None:
    files = {name: record_file(staging / name) for name in file_sizes(staging)}
    changed = [name for name in carried if files[name] != source.files[name]]
    if changed:
        raise CheckpointWriteError(f"{len(changed)} files were not copied as they are: {changed[:5]}")
    write_manifest(staging, Manifest(step=source.step, files=files, details={**source.details, "format": FORMAT}))
