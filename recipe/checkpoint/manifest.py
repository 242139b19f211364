"""The manifest of a checkpoint: every file with its size and checksum. Written last, it means that all is there."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from recipe.shared.errors import CheckpointBrokenError
from recipe.shared.json_files import flush

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and checksum that a file must have."""

    size_bytes: int
    sha256: str  # hexadecimal, as the sha256sum command prints it


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All files of a checkpoint, and what its writer says of it."""

    step: int
    files: dict[str, FileRecord]  # by path relative to the checkpoint's folder, with forward slashes
    details: dict[str, Any] = field(default_factory=dict)  # the writer's own, kept as JSON

    @property
    def sizes_bytes(self) -> dict[str, int]:
        return {name: record.size_bytes for name, record in self.files.items()}


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every file below `folder` by relative path, sorted. ValueError for a link or a device."""
    sizes = {}
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(parent, name)
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise ValueError(f"{path} is neither a plain file nor a folder; a checkpoint holds nothing else")
            if path.is_file():
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    return dict(sorted(sizes.items()))


def share_of_files(sizes_bytes: dict[str, int], *, rank: int, world_size: int) -> list[str]:
    """Return this rank's share of the files: all ranks read about as many bytes, and every file has one reader."""
    loads_bytes = [0] * world_size
    mine = []
    for name in sorted(sizes_bytes, key=lambda name: (-sizes_bytes[name], name)):
        reader = loads_bytes.index(min(loads_bytes))
        # A file costs something even when it is empty, or one rank would get all the small ones.
        loads_bytes[reader] += sizes_bytes[name] + 4096
        if reader == rank:
            mine.append(name)
    return mine


def record_file(path: Path) -> FileRecord:
    """Flush a file to the disk and take its size and checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return FileRecord(size_bytes=os.fstat(file.fileno()).st_size, sha256=_sha256(file))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into `folder` and flush it and every folder's entries to the disk."""
    text = json.dumps({"format_version": FORMAT_VERSION, **asdict(manifest)}, indent=1)
    with (folder / MANIFEST_NAME).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    for parent, _, _ in os.walk(folder):
        flush(Path(parent))


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest. CheckpointBrokenError where it is absent, unreadable or of another checkpoint."""
    path = folder / MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointBrokenError(path, "missing, so the checkpoint was never completed") from error
    except (OSError, ValueError) as error:
        raise CheckpointBrokenError(path, f"not readable as JSON ({error})") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointBrokenError(path, f"format_version is {version!r}, this version reads {FORMAT_VERSION}")
    try:
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        return Manifest(step=content["step"], files=files, details=content["details"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointBrokenError(path, f"an entry is missing or malformed ({error!r})") from error


def file_faults(
    folder: Path, manifest: Manifest, *, names: list[str], checksums: bool
) -> Iterator[CheckpointBrokenError]:
    """Yield what is wrong with these files of a checkpoint; without `checksums` only existence and size count."""
    for name in names:
        path, record = folder / name, manifest.files[name]
        if not path.is_file():
            yield CheckpointBrokenError(path, "missing")
        elif path.stat().st_size != record.size_bytes:
            yield CheckpointBrokenError(path, f"has {path.stat().st_size} bytes instead of {record.size_bytes}")
        elif checksums:
            try:
                with path.open("rb") as file:
                    has_changed = _sha256(file) != record.sha256
            except OSError as error:
                yield CheckpointBrokenError(path, f"cannot be read ({error})")
                continue
            if has_changed:
                yield CheckpointBrokenError(path, "its content has changed since it was written (SHA-256 differs)")


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()
