"""Between whole tensors and one rank's shards, by the ranges of the shard table."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .shard_table import Shard


def cut(full: Tensor, shard: Shard) -> Tensor:
    """The shard of a whole tensor, padded with zeros where the table pads; contiguous and its own memory."""
    local = full.new_zeros(shard.shape)
    part = full
    for dim, ranges in enumerate(shard.ranges):
        part = torch.cat([part.narrow(dim, start, end - start) for start, end in ranges], dim=dim)
    local[tuple(slice(0, size) for size in part.shape)] = part
    return local


def paste(full: Tensor, local: Tensor, shard: Shard) -> None:
    """Write a shard to its place in the whole tensor, in place and without its padding."""
    sizes = [sum(end - start for start, end in ranges) for ranges in shard.ranges]
    _paste(full, local[tuple(slice(0, size) for size in sizes)], shard.ranges)


def join(shards: Sequence[tuple[Tensor, Shard]]) -> Tensor:
    """The whole tensor from the shards of every rank of a group."""
    first, shard = shards[0]
    full = first.new_zeros(shard.full_shape)
    for local, place in shards:
        paste(full, local, place)
    return full


def _paste(full: Tensor, local: Tensor, ranges: tuple[tuple[tuple[int, int], ...], ...]) -> None:
    if not ranges:
        full.copy_(local)
        return
    dim = full.dim() - len(ranges)
    offset = 0
    for start, end in ranges[0]:
        width = end - start
        target, source = full.narrow(dim, start, width), local.narrow(dim, offset, width)
        _paste(target, source, ranges[1:])
        offset += width
