"""Bytes and seconds as people read them."""

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: float) -> str:
    """In the unit that leaves at most three digits before the point, and parts of the two largest units."""
    power = 0
    while power < len(BYTE_UNITS) - 1 and num_bytes >= 999.5 * 2 ** (10 * power):
        power += 1
    return f"{num_bytes / 2 ** (10 * power):.{1 if power > 2 else 0}f} {BYTE_UNITS[power]}"


def duration(seconds: float) -> str:
    """In µs, ms or s, with three digits or all of whole seconds."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def _three_digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:,.0f}"
