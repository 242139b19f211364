"""Where a flag and a key of the DeepSpeed JSON mean the same thing, finds the one value both agree on.

"auto" or an absent key takes the flag. A key and a flag that were both given must be equal; every pair that is not
is recorded, with both values and both places.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from recipe.settings.deepspeed_keys import look_up
from recipe.settings.flags import Arguments, flag_specs, same_value
from recipe.shared.json_files import read_json_object


def load_deepspeed_json(path: str | None) -> dict[str, Any]:
    """Read the DeepSpeed JSON at `path` as it stands; {} when no file was named.

    ValueError where the file is missing, is not a JSON object, or gives a key twice.
    """
    return {} if path is None else read_json_object(path)


class Found(NamedTuple):
    """A value and the place it was set in, or None for a default."""

    value: Any
    place: str | None


class Sources:
    """The two sources, and what was found while reading them.

    faults  every fault, in words
    notes   what each "auto" became
    """

    def __init__(self, arguments: Arguments, *, ds_config: Mapping[str, Any]) -> None:
        self.arguments = arguments
        self.ds_config = ds_config
        self.file = arguments.ds_config or "the DeepSpeed configuration"
        self.faults: list[str] = []
        self.notes: list[str] = []
        self._specs = flag_specs()

    def take(self, flag: str, *, paths: tuple[str, ...]) -> Any:
        """The value of `flag`, which the keys at the dotted `paths` may give instead; notes what "auto" became."""
        found = self.read(flag, paths=paths)
        origin = found.place or f"the default of --{flag}"
        self.notes += [
            f'"{path}": "auto" became {json.dumps(found.value)} ({origin})'
            for path in paths
            if look_up(self.ds_config, path) == "auto"
        ]
        return found.value

    def read(self, flag: str, *, paths: tuple[str, ...]) -> Found:
        """The same with the place it was set in, for values that may still be derived from others."""
        candidates: list[Found] = []
        if flag in self.arguments.given:
            candidates.append(Found(getattr(self.arguments, flag), f"--{flag} {self.arguments.place(flag)}"))
        for path in paths:
            value = look_up(self.ds_config, path)
            if value not in (None, "auto"):
                candidates += self._converted(path, value=value, flag=flag)
        self.agree(candidates)
        return candidates[0] if candidates else Found(getattr(self.arguments, flag), None)

    def agree(self, candidates: list[Found]) -> None:
        """Record a fault for every candidate that differs from the first."""
        for other in candidates[1:]:
            first = candidates[0]
            if not same_value(first.value, other.value):
                self.faults.append(
                    f"{first.place} is {first.value}, but {other.place} is {other.value}; "
                    'make them equal, or set the key to "auto"'
                )

    def _converted(self, path: str, *, value: Any, flag: str) -> list[Found]:
        place = f'"{path}" in {self.file}'
        try:
            return [Found(self._specs[flag].read(value), place)]
        except ValueError as error:
            self.faults.append(f"{place}: {error}")
            return []
