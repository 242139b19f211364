"""Turns the text or JSON value of a setting into the type it was declared with, or says why it cannot."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def convert(value: object, *, kind: type) -> Any:
    """`value` as a `kind` (str, int, float, bool, tuple of strings, dict); ValueError in words when it is not one."""
    converters = {str: _string, int: _integer, float: _number, bool: _truth, tuple: _strings, dict: _mapping}
    return converters[kind](value)


def same_value(left: object, right: object) -> bool:
    """Equal as settings: 1e-4 equals 0.0001, 1 equals 1.0, (0.9, 0.95) equals [0.9, 0.95]; true is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same_value(a, b) for a, b in zip(left, right, strict=True))
    return left == right


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text; put it in quotes")
    return value


def _integer(value: object) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a whole number") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _truth(value: object) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError(f"{value!r} is neither true nor false")


def _strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError(f"{value!r} is not a list of texts")


def _mapping(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is neither key=value,key=value nor a JSON object")
    if value.lstrip().startswith("{"):
        try:
            return dict(json.loads(value))
        except json.JSONDecodeError as error:
            raise ValueError(f"{value!r} is not a JSON object: {error}") from None
    return dict(_pair(part) for part in value.split(",") if part)


def _pair(text: str) -> tuple[str, Any]:
    """`num_experts=16` as ("num_experts", 16); a value that is not JSON stays the text it is."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{text!r} is not key=value")
    try:
        return key.strip(), json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value
