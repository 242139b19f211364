"""Open the training state of a checkpoint in whichever of its two forms it has it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.checkpoint.native_files import NativeFiles
from recipe.checkpoint.training_state import NATIVE_FOLDER, WHOLE_FOLDER, TrainingState
from recipe.checkpoint.whole import WholeTensors
from recipe.shared.errors import CheckpointBrokenError


def open_training_state(folder: Path, *, details: Mapping[str, Any]) -> TrainingState:
    """The state in a checkpoint's folder: DeepSpeed's files or whole tensors; `details` are those of its manifest.

    Needs no process group and no engine. Raises CheckpointBrokenError where neither form is there.
    """
    if (folder / NATIVE_FOLDER).is_dir():
        return NativeFiles(folder, details=details)
    if (folder / WHOLE_FOLDER).is_dir():
        return WholeTensors(folder / WHOLE_FOLDER)
    raise CheckpointBrokenError(folder, f"holds neither {NATIVE_FOLDER}/ nor {WHOLE_FOLDER}/")
