"""What transfers are held against: the links of a GPU of the table, of a probed machine, or one given number."""

from recipe.plan.hardware import find_hardware
from recipe.profile.transfers import Links


def read_links(hardware: str | None, *, bytes_per_s: float | None) -> Links:
    """`bytes_per_s` wins. Nothing is known where neither is given.

    Raises ValueError for hardware that is not known, a rate that is none, and both at once.
    """
    if hardware is not None and bytes_per_s is not None:
        raise ValueError(f"--hardware {hardware} and --link_bytes_per_s {bytes_per_s:g} both name a link; keep one")
    if bytes_per_s is not None:
        if not 0 < bytes_per_s < float("inf"):
            raise ValueError(f"--link_bytes_per_s {bytes_per_s:g} must be above 0, like 300e9 for 300 GB/s")
        return Links(within=bytes_per_s, between=bytes_per_s)
    if hardware is None:
        return Links()
    found = find_hardware(hardware)
    return Links(
        within=None if found.intra is None else found.intra.bytes_per_s,
        between=None if found.inter is None else found.inter.bytes_per_s,
        ranks_per_node=found.ranks_per_node,
    )
