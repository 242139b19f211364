"""Which sizes are measured; between them the planner interpolates."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """rows x widths of products up to max_flops, lengths x head_dims of attention, elements of passes, bytes sent."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    max_flops: float
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    elements: tuple[int, ...]
    sent_bytes: tuple[int, ...]


# What all passes hold per element of their largest size, smaller sizes included, in float32: all cases' tensors are
# there at once, so that they can be measured in turns. Counted on a CPU: 245 bytes, and a third more for smaller sizes.
PASS_BYTES = 320
# The same of products per number of the largest weight: eight of it and 22 thousand rows, smaller widths included.
WEIGHT_BYTES = 110
SHARE = 0.5  # of a rank's memory that either may take, one after the other


def sizes_for(device: str, *, quick: bool, memory_bytes: float) -> Sizes:
    """`quick` leaves out the large and every second one: for a first look, and for tests.

    What does not fit in a rank's memory is left out, too.
    """
    full = _fitting(_gpu() if device == "cuda" else _cpu(), room_bytes=SHARE * memory_bytes)
    if not quick:
        return full
    return Sizes(
        rows=full.rows[:-1:2],
        widths=full.widths[:-1:2],
        max_flops=full.max_flops / 64,
        lengths=full.lengths[:2],
        head_dims=full.head_dims[:1],
        elements=full.elements[:-1:2],
        sent_bytes=full.sent_bytes[::3],
    )


def _fitting(sizes: Sizes, *, room_bytes: float) -> Sizes:
    return replace(
        sizes,
        widths=_below(sizes.widths, (room_bytes / WEIGHT_BYTES) ** 0.5),
        elements=_below(sizes.elements, room_bytes / PASS_BYTES),
        # Five collectives, each with what is sent and what arrives.
        sent_bytes=_below(sizes.sent_bytes, room_bytes / 16),
    )


def _below(numbers: tuple[int, ...], most: float) -> tuple[int, ...]:
    """And the first three in any case."""
    return tuple(number for i, number in enumerate(numbers) if i < 3 or number <= most)


def _cpu() -> Sizes:
    return Sizes(
        rows=(4, 16, 64, 256, 1024, 4096),
        widths=(16, 64, 256, 512, 1024, 2048),
        max_flops=2**33,
        lengths=(64, 256, 1024, 4096),
        head_dims=(32, 64, 128),
        elements=(2**10, 2**13, 2**16, 2**19, 2**22, 2**24),
        sent_bytes=(2**10, 2**13, 2**16, 2**18, 2**20, 2**22, 2**24),
    )


def _gpu() -> Sizes:
    return Sizes(
        rows=(16, 64, 256, 1024, 4096, 16384),
        widths=(64, 256, 1024, 2048, 4096, 8192),
        max_flops=2**43,
        lengths=(512, 2048, 8192, 32768),
        head_dims=(64, 128),
        elements=(2**12, 2**16, 2**20, 2**24, 2**26, 2**28),
        sent_bytes=(2**12, 2**16, 2**20, 2**22, 2**24, 2**26, 2**28),
    )
