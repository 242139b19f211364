"""Every exit code of a run in one table, and an error type for each that scripts may want to tell apart."""

from collections.abc import Mapping
from pathlib import Path

COMPLETE = 0
FAULT = 1
USER_ERROR = 2
STOPPED = 18
STOPPED_EARLY = 20

EXIT_CODES: Mapping[int, str] = {
    COMPLETE: "trained to the end",
    FAULT: "an unexpected error, with its traceback",
    USER_ERROR: "a mistake in flags, JSON, model, data or launcher variables, or ranks that did not meet",
    10: "another error of the output folder or its checkpoints",
    11: "the path to resume from is missing",
    12: "the checkpoint to resume from is broken",
    13: "no checkpoint to resume from is complete",
    14: "a checkpoint could not be saved",
    15: "the output folder is in use",
    16: "the run's checkpoints would not fit on the disk",
    17: "some ranks failed in a step that all ranks take",
    STOPPED: "told to stop by SIGTERM or Ctrl-C: the checkpoint of that step is saved",
    19: "training ended well, the upload to the hub did not: the message says where the weights are",
    STOPPED_EARLY: "told to stop before the first step: there was nothing to save",
    130: "Ctrl-C a second time: ended at once",
}


class RunError(Exception):
    """An error that ends a run with a message and an exit code of its own, the same on every rank."""

    exit_code = USER_ERROR


class CheckpointError(RunError):
    """The base of what goes wrong with run folders and checkpoints."""

    exit_code = 10


class CheckpointMissingError(CheckpointError, ValueError):
    """The path to resume from does not exist or holds no checkpoint."""

    exit_code = 11


class CheckpointBrokenError(CheckpointError):
    """A checkpoint is incomplete or damaged: `file` is the first fault, `reason` what is wrong with it."""

    exit_code = 12

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(file, reason)
        self.file = file
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class NoCompleteCheckpointError(CheckpointError):
    """There are checkpoints to resume from, but every one of them is broken."""

    exit_code = 13


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be saved."""

    exit_code = 14


class FolderInUseError(CheckpointError, ValueError):
    """The output folder belongs to another run, alive or finished."""

    exit_code = 15


class NotEnoughSpaceError(CheckpointError):
    """The checkpoints of this run would not fit on the disk."""

    exit_code = 16


class RanksFailedError(RunError):
    """Some ranks failed in a step that all ranks take; `failures` maps them to the type and text of their error."""

    exit_code = 17

    def __init__(self, failures: dict[int, str]) -> None:
        super().__init__(failures)
        self.failures = failures

    def __str__(self) -> str:
        return "; ".join(f"rank {rank}: {failure}" for rank, failure in sorted(self.failures.items()))


class UploadError(RunError):
    """The trained weights could not be uploaded to the Hugging Face hub; they are where they were saved."""

    exit_code = 19

    def __init__(self, folder: Path, repository: str, reason: str) -> None:
        super().__init__(folder, repository, reason)
        self.folder, self.repository, self.reason = folder, repository, reason

    def __str__(self) -> str:
        return (
            f"the upload to {self.repository} failed: {self.reason}\n"
            f"the weights are safe in {self.folder}; upload them with: hf upload {self.repository} {self.folder}"
        )
