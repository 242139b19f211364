"""Reads the files settings come from, strictly: a key given twice or a file of another shape is an error."""

import json
from pathlib import Path
from typing import Any

ARGUMENT_FILE_SUFFIXES = (".json", ".yaml", ".yml")


def load_ds_config(path: str | None) -> dict[str, Any]:
    """The DeepSpeed JSON at `path` as it stands, or {} when no file was named.

    ValueError where the file is missing, is not a JSON object, or gives a key twice.
    """
    return {} if path is None else load_json_object(path)


def load_json_object(path: str) -> dict[str, Any]:
    """A file that holds one JSON object; ValueError names the file and what is wrong with it."""
    text = _read(path)
    try:
        content = json.loads(text, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold one JSON object")
    return content


def load_argument_file(path: str) -> dict[str, Any]:
    """Flags as `name: value`, from .json, .yaml or .yml."""
    if path.endswith(".json"):
        return load_json_object(path)
    import yaml

    try:
        content = yaml.safe_load(_read(path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold `flag: value` lines")
    return content


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist (looked from {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f'the key "{key}" is given twice: {content[key]!r} and {value!r}')
        content[key] = value
    return content
