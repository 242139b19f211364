"""What can go wrong with checkpoints and run folders: one type and one exit code each, for scripts to tell apart."""

from pathlib import Path


class CheckpointError(Exception):
    """The base of the errors below. `exit_code` is what the entry script ends with."""

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


class RanksFailedError(CheckpointError):
    """Some ranks failed in a step that all ranks take; `failures` maps them to the type and text of their error."""

    exit_code = 17

    def __init__(self, failures: dict[int, str]) -> None:
        super().__init__(failures)
        self.failures = failures

    def __str__(self) -> str:
        return "; ".join(f"rank {rank}: {failure}" for rank, failure in sorted(self.failures.items()))


class UploadError(CheckpointError):
    """The trained weights could not be uploaded to the Hugging Face hub; they are where they were saved."""

    exit_code = 19

    def __init__(self, folder: Path, *, repository: str, reason: str) -> None:
        super().__init__(folder, repository, reason)
        self.folder, self.repository, self.reason = folder, repository, reason

    def __str__(self) -> str:
        return (
            f"the upload to {self.repository} failed: {self.reason}\n"
            f"the weights are safe in {self.folder}; upload them with: hf upload {self.repository} {self.folder}"
        )
