"""Numbers as people read them."""

from collections.abc import Callable

import pytest

from recipe.shared.units import duration, exact_size, sent_size, size


@pytest.mark.parametrize(
    ("say", "numbers", "words"),
    [
        (
            duration,
            (2e-6, 999.4e-6, 999.6e-6, 0.0123, 0.9999, 1.5, 1234.0),
            "2.00 µs, 999 µs, 1.00 ms, 12.3 ms, 1.00 s, 1.50 s, 1,234 s",
        ),
        (
            size,
            (0, 999, 1000, 5 * 2**10, 5 * 2**20, 2**30, 3 * 2**29, 2151 * 2**30, 2**60),
            "0 B, 999 B, 1 KiB, 5 KiB, 5 MiB, 1.0 GiB, 1.5 GiB, 2.1 TiB, 1024.0 PiB",
        ),
        (sent_size, (1.2345e9, 45.6e6, 7.8e3, 12), "1.23 GB, 45.6 MB, 7.8 kB, 12 B"),
        (exact_size, (3 * 2**29,), "1,610,612,736 bytes (1.50 GiB)"),
    ],
)
def test_numbers_have_about_three_digits_and_a_unit(
    say: Callable[[float], str], numbers: tuple[float, ...], words: str
) -> None:
    assert ", ".join(map(say, numbers)) == words
