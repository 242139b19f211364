"""A progress bar over bytes, for work on files that takes minutes."""

from typing import Any

from tqdm import tqdm


def byte_bar(what: str, *, num_bytes: int, show: bool = True) -> "tqdm[Any]":
    """A bar to be used in a `with`, and moved on by update(bytes). It is shown on a terminal only."""
    return tqdm(
        total=num_bytes,
        desc=what,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        dynamic_ncols=True,
        disable=None if show else True,
    )
