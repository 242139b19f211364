"""Collectives under way: started now, finished where their result is needed, whole or in chunks. No autograd here.

A tensor whose rows are this rank's tokens is gathered or scattered in `num_chunks` pieces, so that one piece's products
run while the next piece travels. Piece k holds the k-th part of every rank's rows, rank by rank; gathered pieces lie
behind each other in one buffer, which is then ordered by chunk, rank and token ("chunk order") instead of by rank and
token ("token order"). With one chunk both orders are the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .cost import chunk_bound


class Transfer:
    """A started collective. `finish` waits for it and returns its result; every transfer must be finished."""

    def __init__(self, work: Any, result: Callable[[], Tensor]) -> None:
        self._work, self._result = work, result

    def finish(self) -> Tensor:
        self._work.wait()
        return self._result()


class RowSplits(NamedTuple):
    """How many rows this rank sends to each rank of the group, and receives from each; host integers."""

    send: list[int]
    receive: list[int]

    def turned(self) -> "RowSplits":
        """The way back."""
        return RowSplits(self.receive, self.send)


def start_gather(x: Tensor, group: ProcessGroup, *, out: Tensor | None = None) -> Transfer:
    """[t, ...] -> [T, ...]: all ranks' rows in rank order, into `out` where given."""
    result = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:]) if out is None else out
    # The name before torch 2.13, which warns from then on.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(result, x.detach().contiguous(), group=group, async_op=True)
    return Transfer(work, lambda: result)


def start_scatter(x: Tensor, group: ProcessGroup, *, out: Tensor | None = None) -> Transfer:
    """[T, ...] -> [t, ...]: the sum over the ranks of this rank's rows, into `out` where given."""
    size = dist.get_world_size(group)
    result = x.new_empty(x.shape[0] // size, *x.shape[1:]) if out is None else out
    sent = x.detach().contiguous()
    if dist.get_backend(group) == "gloo":
        # Its own reduce-scatter is an all-reduce inside and sends twice as much, in the type of x throughout.
        parts = torch.empty_like(sent)
        work = dist.all_to_all_single(parts, sent, group=group, async_op=True)
        return Transfer(work, lambda: _sum_parts(parts.view(size, *result.shape), result))
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work = scatter(result, sent, group=group, async_op=True)
    return Transfer(work, lambda: result)


def all_gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """[t, ...] -> [T, ...], waited for."""
    return start_gather(x, group).finish()


def reduce_scatter_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """[T, ...] -> [t, ...], waited for."""
    return start_scatter(x, group).finish()


def all_to_all_rows(x: Tensor, splits: RowSplits, group: ProcessGroup) -> Tensor:
    """Rows to whom they belong, waited for: [sum(send), ...] -> [sum(receive), ...], both in rank order."""
    out = x.new_empty(sum(splits.receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), splits.receive, splits.send, group=group)
    return out


def one_chunk(num_tokens: int) -> "Chunks":
    """All tokens at once, on the group of one rank."""
    return Chunks(num_chunks=1, overlap=False, num_tokens=num_tokens, group=None)


class Chunks(NamedTuple):
    """How `num_tokens` rows per rank are cut: equally, the first ones a row longer where they do not divide.

    overlap  the next transfer travels while a chunk is worked on; otherwise each is waited for as it is started
    group    None for the group of one rank, where nothing travels
    """

    num_chunks: int
    overlap: bool
    num_tokens: int
    group: ProcessGroup | None

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def rows(self, k: int) -> slice:
        """Chunk k among this rank's rows."""
        return slice(self._bound(k), self._bound(k + 1))

    def gathered_rows(self, k: int) -> slice:
        """Chunk k among all ranks' rows in chunk order."""
        return slice(self.size * self._bound(k), self.size * self._bound(k + 1))

    def _bound(self, k: int) -> int:
        return chunk_bound(k, num_rows=self.num_tokens, num_chunks=self.num_chunks)

    def to_chunk_order(self, x: Tensor) -> Tensor:
        """[T, ...] in token order -> chunk order."""
        if self.num_chunks == 1:
            return x
        return torch.cat([self.pick(x, k) for k in range(self.num_chunks)])

    def to_token_order(self, x: Tensor) -> Tensor:
        """[T, ...] in chunk order -> token order."""
        if self.num_chunks == 1:
            return x
        parts = [x[self.gathered_rows(k)].unflatten(0, (self.size, -1)) for k in range(self.num_chunks)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def pick(self, x: Tensor, k: int) -> Tensor:
        """Chunk k of [T, ...] in token order: [N * c, ...]."""
        return x if self.num_chunks == 1 else x.unflatten(0, (self.size, -1))[:, self.rows(k)].flatten(0, 1)


class GatherInChunks:
    """All ranks' rows, chunk by chunk, in one buffer in chunk order. With overlap the first one is started here.

    The others follow when the first is asked for, or with `start_rest`: what is short and urgent can go between.
    """

    def __init__(self, x: Tensor, chunks: Chunks) -> None:
        self.chunks = chunks
        self.buffer = x if chunks.group is None else x.new_empty(chunks.size * x.shape[0], *x.shape[1:])
        self._x = x
        self._started: list[Transfer] = []
        self._num_finished = 0
        if chunks.overlap:
            self._start(1)

    def start_rest(self) -> None:
        """Start all chunks, where they overlap."""
        if self.chunks.overlap:
            self._start(self.chunks.num_chunks)

    def chunk(self, k: int) -> Tensor:
        """Chunk k [N * c, ...], which has then arrived; chunks are taken in order."""
        self.start_rest()
        if self.chunks.group is not None:
            for i in range(self._num_finished, k + 1):
                self._start(i + 1)
                self._started[i].finish()
            self._num_finished = max(self._num_finished, k + 1)
        return self.buffer[self.chunks.gathered_rows(k)]

    def all(self) -> Tensor:
        """Everything, [T, ...] in chunk order."""
        self.chunk(self.chunks.num_chunks - 1)
        return self.buffer

    def _start(self, num: int) -> None:
        if self.chunks.group is None:
            return
        for k in range(len(self._started), num):
            out = self.buffer[self.chunks.gathered_rows(k)]
            self._started.append(start_gather(self._x[self.chunks.rows(k)], self.chunks.group, out=out))


class KeptChunks(NamedTuple):
    """What a GatherInChunks once brought, all of it here."""

    buffer: Tensor
    chunks: Chunks

    def start_rest(self) -> None:
        """Nothing: all has arrived."""

    def chunk(self, k: int) -> Tensor:
        return self.buffer[self.chunks.gathered_rows(k)]

    def all(self) -> Tensor:
        return self.buffer


GatheredChunks = GatherInChunks | KeptChunks


class TokenTransfer(NamedTuple):
    """How tokens come to the experts and their sums go home.

    gather      the tokens on their way
    regather    what gathers them again in the backward; None: they are kept
    sum_dtype   in which partial sums travel; None: in the tokens' own
    weights_TA  all ranks' routing weights in token order, without a gradient; None where this rank's are all
    """

    gather: GatherInChunks
    regather: type[GatherInChunks] | None
    sum_dtype: torch.dtype | None
    weights_TA: Tensor | None = None


class ScatterInChunks:
    """Sums over the ranks, chunk by chunk, each sent as soon as it is added."""

    def __init__(self, out: Tensor, chunks: Chunks) -> None:
        """`out` [t, ...] receives the sums."""
        self.chunks, self._out = chunks, out
        self._started: list[Transfer] = []

    def add(self, k: int, partial: Tensor) -> None:
        """Send off chunk k [N * c, ...]: this rank's parts for every rank's rows."""
        if self.chunks.group is None:
            self._out = partial
            return
        transfer = start_scatter(partial, self.chunks.group, out=self._out[self.chunks.rows(k)])
        if self.chunks.overlap:
            self._started.append(transfer)
        else:
            transfer.finish()

    def finish(self) -> Tensor:
        for transfer in self._started:
            transfer.finish()
        return self._out


def _sum_parts(parts: Tensor, out: Tensor) -> Tensor:
    """The sum over the first dim in its order, in float32 at least and rounded once."""
    if out.dtype in (torch.bfloat16, torch.float16):
        return out.copy_(parts.float().sum(0))
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part
    return out
