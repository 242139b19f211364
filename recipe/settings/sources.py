"""The one value that a flag and a key of the DeepSpeed JSON agree on, where both mean the same thing.

"auto" or an absent key takes the flag. A key and a flag that were both given must be equal; every pair that is not
is recorded, with both values and both places.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from recipe.settings.deepspeed_keys import look_up
from recipe.settings.flags import Arguments, convert, flag_specs, same_value
from recipe.shared.json_files import read_json_object


def load_deepspeed_json(path: str | None) -> dict[str, Any]:
    """Read the DeepSpeed JSON at `path` as it stands; {} when no file was named.

    ValueError where the file is missing, is not a JSON object, or gives a key twice.
    """
    return {} if path is None else read_json_object(path)


class Found(NamedTuple):
    """A value and where it was set, or None for a default."""

    value: Any
    origin: str | None


class Sources:
    """The flags and the DeepSpeed JSON, and what was found while reading them.

    parallel  the "parallel" block of the JSON
    faults    every fault, in words
    notes     what each "auto" became
    """

    def __init__(self, arguments: Arguments, *, deepspeed_json: Mapping[str, Any]) -> None:
        self.arguments = arguments
        self.json = deepspeed_json
        self.parallel: Mapping[str, Any] = deepspeed_json.get("parallel") or {}
        self.file = arguments.ds_config or "the DeepSpeed configuration"
        self.faults: list[str] = []
        self.notes: list[str] = []
        self._specs = flag_specs()

    def take(self, flag: str, *, paths: tuple[str, ...]) -> Any:
        """Return the value of `flag`, which keys at the dotted `paths` may give instead; note what "auto" became."""
        found = self.read(flag, paths=paths)
        origin = found.origin or f"the default of --{flag}"
        self.notes += [
            f'"{path}": "auto" became {json.dumps(found.value)} ({origin})'
            for path in paths
            if look_up(self.json, path) == "auto"
        ]
        return found.value

    def read(self, flag: str, *, paths: tuple[str, ...]) -> Found:
        """Return the value with its origin, for one that may still be derived from others; no note of "auto"."""
        candidates = self.given(flag)
        for path in paths:
            value = look_up(self.json, path)
            if value not in (None, "auto"):
                origin = f'"{path}" in {self.file}'
                try:
                    candidates.append(Found(self._specs[flag].read(value), origin))
                except ValueError as error:
                    self.faults.append(f"{origin}: {error}")
        self.agree(candidates)
        return candidates[0] if candidates else Found(getattr(self.arguments, flag), None)

    def given(self, flag: str) -> list[Found]:
        """Return the flag's value if it was set, or nothing."""
        if flag not in self.arguments.given:
            return []
        return [Found(getattr(self.arguments, flag), f"--{flag} {self.arguments.place(flag)}")]

    def convert(self, value: object, *, kind: type, origin: str, advice: str = "") -> Any:
        """Read `value` as a `kind`; None, and a fault that ends with the advice, where it is none."""
        try:
            return convert(value, kind=kind)
        except ValueError as error:
            self.faults.append(f"{origin}: {error}{advice}")
            return None

    def agree(self, candidates: list[Found]) -> None:
        """Record a fault for every candidate that differs from the first."""
        for other in candidates[1:]:
            first = candidates[0]
            if not same_value(first.value, other.value):
                self.faults.append(
                    f"{first.origin} is {first.value}, but {other.origin} is {other.value}; "
                    'make them equal, or set the key to "auto"'
                )
