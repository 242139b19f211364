"""Hardware by its name in the table or by the path of a probe's file."""

from pathlib import Path

from recipe.plan.hardware_file import read_hardware
from recipe.plan.hardware_table import names_with_aliases, table_entry
from recipe.plan.hardware_values import Hardware, Link

__all__ = ["Hardware", "Link", "find_hardware"]


def find_hardware(name: str, *, device: str | None = None) -> Hardware:
    """A GPU of the table by its name ("a100-80g", "h100", ...), "cpu", or what a probe wrote to the file `name`.

    Raises ValueError for what is neither, a file that cannot be used, and another device than `device`.
    """
    if name.endswith(".json") or Path(name).is_file():
        found = read_hardware(Path(name))
    else:
        entry = table_entry(name)
        if entry is None:
            raise ValueError(
                f"hardware {name!r} is not known; choose one of {names_with_aliases()}, or the path of a file "
                "that `gather-moe probe` wrote"
            )
        found = entry
    if device is not None and found.device != device:
        raise ValueError(f"hardware {name!r} is a {found.device}, but the plan is for device {device}")
    return found
