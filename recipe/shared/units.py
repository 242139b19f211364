"""Numbers as people read them: bytes, seconds, tables of them, and a bar over the bytes of work that takes minutes."""

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

MIB = 2**20
GIB = 2**30
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(num_bytes: float) -> str:
    """Bytes in the unit that leaves at most three digits before the point, with a tenth from GiB on: 5 MiB, 1.5 GiB."""
    power = 0
    while power < len(BYTE_UNITS) - 1 and num_bytes >= 999.5 * 2 ** (10 * power):
        power += 1
    return f"{num_bytes / 2 ** (10 * power):.{1 if power > 2 else 0}f} {BYTE_UNITS[power]}"


def exact_size(num_bytes: int, *, detail: str = "") -> str:
    """All digits and the GiB they come to, with `detail` behind those: 1,073,741,824 bytes (1.00 GiB)."""
    return f"{num_bytes:,} bytes ({num_bytes / GIB:.2f} GiB{detail})"


def sent_size(num_bytes: float) -> str:
    """Bytes on a link with three digits, in powers of 1000 as links are: 1.23 GB, 45.6 MB, 789 B."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale * 0.9995:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.3g} B"


def duration(seconds: float) -> str:
    """Seconds in µs, ms or s, with three digits or all of whole seconds: 45.6 ms, 1,234 s."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def _three_digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:,.0f}"


def aligned(rows: Sequence[Sequence[str]], *, left: Collection[int]) -> Iterator[str]:
    """Yield rows of a table as lines: each column as wide as its widest cell, to the right but for those of `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(cells)).rstrip()


def byte_bar(what: str, *, num_bytes: int, show: bool = True) -> "tqdm[Any]":
    """Return a progress bar over bytes, to be used in a `with` and moved on by update(bytes); on a terminal only."""
    from tqdm import tqdm

    return tqdm(
        total=num_bytes,
        desc=what,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        dynamic_ncols=True,
        disable=None if show else True,
    )
