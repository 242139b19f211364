"""Files read strictly and written whole: a key given twice is an error, and a reader never sees half a file."""

import json
import math
import os
from pathlib import Path
from typing import Any


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; ValueError names the file and what is wrong with it."""
    text = read_text(path)
    try:
        content = json.loads(text, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold one JSON object")
    return content


def read_text(path: str | Path) -> str:
    """Read a file that a user has named; ValueError says why it cannot be."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist (looked from {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def write_json(path: Path, value: object) -> None:
    """Replace `path` in one step: a reader, or a crash, sees the old file or the new one."""
    replace_text(path, json_text(value, indent=2) + "\n")


def json_text(value: object, *, indent: int | None = None) -> str:
    """Format `value`; a number that is not finite becomes null, since JSON has no word for it."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def replace_text(path: Path, text: str) -> None:
    """Replace a text file in one step, after its content has reached the disk."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with staging.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f'the key "{key}" is given twice: {content[key]!r} and {value!r}')
        content[key] = value
    return content


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
