"""Communication over a group: collectives in chunks that overlap with work, and collectives with a backward.

The first half has no autograd. A tensor whose rows are this rank's tokens is gathered or scattered in `num_chunks`
pieces, so that one piece's products run while the next piece travels. Piece k holds the k-th part of every rank's rows,
rank by rank; gathered pieces are concatenated in one buffer, which is then ordered by chunk, rank and token ("chunk
order") instead of by rank and token ("token order"). With one chunk both orders are the same.

In the second half the gradient of each function is its conjugate collective (2205.05198, §4.2). These functions take
the group last and are the identity for `group=None`, the group of one rank. Inputs are made contiguous: gloo silently
mixes up the elements of others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .cost import chunk_bound, settle_num_chunks
from .execution import Execution

Result = TypeVar("Result")
Changed = TypeVar("Changed")

FP8_LARGEST = 448.0  # of float8_e4m3fn
FP8_SCALE_BYTES = 4

_SCOPE: ContextVar[str] = ContextVar("scope", default="other")


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name what runs inside, as a context manager or a decorator; the innermost scope counts.

    A microsecond around a whole collective, and nothing where a CUDA graph is replayed or the code is compiled.
    """
    if torch.compiler.is_compiling():  # which cannot follow a context variable
        yield
        return
    token = _SCOPE.set(name)
    try:
        yield
    finally:
        _SCOPE.reset(token)


def current_scope() -> str:
    """The innermost scope of the code that is running, "other" outside of any."""
    return _SCOPE.get()


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or as it is where it is wider already."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def at_least_one(count: Tensor | int) -> Tensor | int:
    """Return a count to divide by; a Python number stays one, which no device has to be told."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


class Transfer(Generic[Result]):
    """A started collective. `finish` waits for it and returns its result; every transfer must be finished."""

    def __init__(self, work: Any, result: Callable[[], Result]) -> None:
        self._work, self._result = work, result

    def finish(self) -> Result:
        self._work.wait()
        return self._result()

    def then(self, change: Callable[[Result], Changed]) -> "Transfer[Changed]":
        """Return the same transfer, whose result is changed on arrival."""
        return Transfer(self._work, lambda: change(self._result()))


def start_gather(x: Tensor, group: ProcessGroup, *, out: Tensor | None = None) -> Transfer[Tensor]:
    """Start to gather all ranks' rows in rank order: [t, ...] -> [T, ...], into `out` where given."""
    result = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:]) if out is None else out
    # The name before torch 2.13, which warns from then on.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(result, x.detach().contiguous(), group=group, async_op=True)
    return Transfer(work, lambda: result)


def start_scatter(x: Tensor, group: ProcessGroup, *, out: Tensor | None = None) -> Transfer[Tensor]:
    """Start to sum the ranks' parts of this rank's rows: [T, ...] -> [t, ...], into `out` where given."""
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


def _sum_parts(parts: Tensor, out: Tensor) -> Tensor:
    """Sum over the first dim in its order, in float32 at least and rounded once."""
    if out.dtype in (torch.bfloat16, torch.float16):
        return out.copy_(parts.float().sum(0))
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part
    return out


def all_gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather [t, ...] -> [T, ...] and wait."""
    return start_gather(x, group).finish()


def reduce_scatter_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum and scatter [T, ...] -> [t, ...] and wait."""
    return start_scatter(x, group).finish()


class RowSplits(NamedTuple):
    """How many rows this rank sends to each rank of the group, and receives from each; host integers."""

    send: list[int]
    receive: list[int]

    def turned(self) -> "RowSplits":
        """Return the splits of the way back."""
        return RowSplits(self.receive, self.send)


def all_to_all_rows(x: Tensor, splits: RowSplits, group: ProcessGroup) -> Tensor:
    """Send rows to the ranks they belong to and wait: [sum(send), ...] -> [sum(receive), ...], both in rank order."""
    out = x.new_empty(sum(splits.receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), splits.receive, splits.send, group=group)
    return out


class GatheredRouting(NamedTuple):
    """Routing of all T tokens of the group: ids [T, A] int64, weights [T, A] float32 or wider."""

    expert_ids_TA: Tensor
    weights_TA: Tensor


@scope("routing")
def start_routing(ids_tA: Tensor, weights_tA: Tensor, group: ProcessGroup) -> Transfer[GatheredRouting]:
    """Start to gather ids and weights in one collective of bytes: 2 per id, 4 (8 for float64) per weight.

    Neither gloo nor NCCL carries int16, hence the bytes.
    """
    id_bytes = ids_tA.to(torch.int16).contiguous().view(torch.uint8)
    weight_bytes = weights_tA.detach().contiguous().view(torch.uint8)

    def unpack(both: Tensor) -> GatheredRouting:
        ids, weights = both.tensor_split([id_bytes.shape[1]], dim=1)
        ids_TA = ids.view(torch.int16).long()
        return GatheredRouting(ids_TA, weights.contiguous().view(weights_tA.dtype))

    return start_gather(torch.cat([id_bytes, weight_bytes], dim=1), group).then(unpack)


@dataclass(frozen=True)
class Chunks:
    """How `num_tokens` rows per rank travel: cut equally, the first chunks a row longer where they do not divide.

    group     None for the group of one rank, where nothing travels
    overlap   the next transfer travels while a chunk is worked on; otherwise each is waited for as it is started
    regather  the backward gathers the tokens again instead of keeping them
    """

    num_tokens: int
    group: ProcessGroup | None = None
    num_chunks: int = 1
    overlap: bool = False
    regather: bool = False

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def rows(self, k: int) -> slice:
        """Return where chunk k is among this rank's rows."""
        return slice(self._bound(k), self._bound(k + 1))

    def gathered_rows(self, k: int) -> slice:
        """Return where chunk k is among all ranks' rows in chunk order."""
        return slice(self.size * self._bound(k), self.size * self._bound(k + 1))

    def _bound(self, k: int) -> int:
        return chunk_bound(k, num_rows=self.num_tokens, num_chunks=self.num_chunks)

    def to_chunk_order(self, x: Tensor) -> Tensor:
        """Reorder [T, ...] from token order to chunk order."""
        if self.num_chunks == 1:
            return x
        return torch.cat([self.pick(x, k) for k in range(self.num_chunks)])

    def to_token_order(self, x: Tensor) -> Tensor:
        """Reorder [T, ...] from chunk order to token order."""
        if self.num_chunks == 1:
            return x
        parts = [x[self.gathered_rows(k)].unflatten(0, (self.size, -1)) for k in range(self.num_chunks)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def pick(self, x: Tensor, k: int) -> Tensor:
        """Pick chunk k [N * c, ...] of [T, ...] in token order."""
        return x if self.num_chunks == 1 else x.unflatten(0, (self.size, -1))[:, self.rows(k)].flatten(0, 1)


def cut_in_chunks(
    x_tD: Tensor, group: ProcessGroup | None, execution: Execution, *, again_bytes: float = 0.0
) -> Chunks:
    """Settle how tensors of the shape and type of x_tD [t, D] travel: as told, or in as many chunks as pay.

    again_bytes  what the work on every chunk reads again
    """
    num_tokens = x_tD.shape[0]
    if group is None:
        return Chunks(num_tokens)
    num_chunks = settle_num_chunks(
        num_tokens,
        # A ring passes on what every other rank has.
        sent_bytes=(dist.get_world_size(group) - 1) * x_tD.numel() * x_tD.element_size(),
        device=x_tD.device.type,
        overlap=execution.overlap,
        wanted=execution.overlap_chunks,
        again_bytes=again_bytes,
    )
    return Chunks(num_tokens, group, num_chunks, execution.overlap, execution.regather)


class GatherInChunks:
    """All ranks' rows, chunk by chunk, in one buffer in chunk order. With overlap the first one is started here.

    The others follow when the first is asked for, or with `start_rest`: what is short and urgent can go between.
    """

    def __init__(self, x: Tensor, chunks: Chunks, *, has_arrived: bool = False) -> None:
        """x is this rank's rows [t, ...]; with `has_arrived` all rows [T, ...] in chunk order, and nothing travels."""
        self.chunks, self._x = chunks, x
        self._travels = chunks.group is not None and not has_arrived
        self._received = x.new_empty(chunks.size * x.shape[0], *x.shape[1:]) if self._travels else x
        self.buffer = self._received
        self._started: list[Transfer[Tensor]] = []
        self._num_finished = 0
        if chunks.overlap:
            self._start(1)

    def start_rest(self) -> None:
        """Start all chunks, where they overlap."""
        self.start_up_to(self.chunks.num_chunks)

    def start_up_to(self, num: int) -> None:
        """Start the first `num` chunks, where they overlap."""
        if self.chunks.overlap:
            self._start(num)

    def chunk(self, k: int) -> Tensor:
        """Wait for chunk k [N * c, ...]; chunks are taken in order."""
        self.start_rest()
        for i in range(self._num_finished, k + 1):
            self._receive(i)
        self._num_finished = max(self._num_finished, k + 1)
        return self.buffer[self.chunks.gathered_rows(k)]

    def all(self) -> Tensor:
        """Wait for everything, [T, ...] in chunk order."""
        self.chunk(self.chunks.num_chunks - 1)
        return self.buffer

    def _start(self, num: int) -> None:
        if not self._travels:
            return
        assert self.chunks.group is not None
        for k in range(len(self._started), num):
            out = self._received[self.chunks.gathered_rows(k)]
            self._started.append(start_gather(self._x[self.chunks.rows(k)], self.chunks.group, out=out))

    def _receive(self, k: int) -> None:
        if self._travels:
            self._start(k + 1)
            self._started[k].finish()


def start_in_turn(*gathers: GatherInChunks) -> None:
    """Start all chunks of gathers that overlap, the first of each before the second of any."""
    for num in range(1, gathers[0].chunks.num_chunks + 1):
        for gather in gathers:
            gather.start_up_to(num)


class Fp8GatherInChunks(GatherInChunks):
    """A gather of tokens [t, D] in 8 bits per number; whole numbers again on arrival, this rank's own included.

    e4m3 with a float32 scale per token: the largest number of a token becomes e4m3's largest, 448, so nothing overflows
    (FP8 formats, 2209.05433, §3). For normally distributed tokens the rounding error is 2.6 % of the root mean square,
    and 3.8 % after an expert with random weights; with bfloat16 it is 0.17 % and 0.24 % (test_comm.py measures all
    four). Only the way to the experts is rounded: sums home, and every gradient, travel as they are, and the gradient
    of the rounding is taken for 1.
    """

    def __init__(self, x_tD: Tensor, chunks: Chunks) -> None:
        super().__init__(pack_fp8(x_tD.detach()), chunks)
        self.buffer = x_tD.new_empty(chunks.size * x_tD.shape[0], x_tD.shape[1])

    def _receive(self, k: int) -> None:
        super()._receive(k)
        here = self.chunks.gathered_rows(k)
        unpack_fp8(self._received[here], out=self.buffer[here])


def pack_fp8(x_tD: Tensor) -> Tensor:
    """Pack [t, D] in bytes [t, D + 4] uint8: the numbers of each token, then its scale."""
    scale_t1 = (x_tD.float().abs().amax(dim=1, keepdim=True) / FP8_LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (x_tD.float() / scale_t1).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([numbers, scale_t1.view(torch.uint8)], dim=1)


def unpack_fp8(packed: Tensor, *, out: Tensor) -> None:
    """Unpack bytes [T, D + 4] into `out` [T, D], in its type."""
    width = packed.shape[1] - FP8_SCALE_BYTES
    numbers, scale = packed.tensor_split([width], dim=1)
    scale_T1 = scale.contiguous().view(torch.float32)
    torch.mul(numbers.contiguous().view(torch.float8_e4m3fn).float(), scale_T1, out=out)


def start_tokens(x_tD: Tensor, chunks: Chunks, *, fp8: bool = False) -> GatherInChunks:
    """Start to gather all ranks' tokens [t, D], in 8 bits per number or as they are."""
    return Fp8GatherInChunks(x_tD, chunks) if fp8 else GatherInChunks(x_tD, chunks)


def tokens_to_keep(tokens: GatherInChunks, x_tD: Tensor) -> Tensor:
    """Return what a backward needs in order to have all tokens: this rank's, or all if they are not gathered again."""
    return x_tD if tokens.chunks.regather else tokens.all()


def tokens_again(kept: Tensor, chunks: Chunks, *, fp8: bool = False) -> GatherInChunks:
    """Return all tokens in the backward, from what `tokens_to_keep` kept: on their way again, or here already."""
    return start_tokens(kept, chunks, fp8=fp8) if chunks.regather else GatherInChunks(kept, chunks, has_arrived=True)


class ScatterInChunks:
    """Sums over the ranks, chunk by chunk, each sent as soon as it is added."""

    def __init__(self, out: Tensor, chunks: Chunks) -> None:
        """`out` [t, ...] receives the sums."""
        self.chunks, self._out = chunks, out
        self._started: list[Transfer[Tensor]] = []

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


def gather_tokens(x_tD: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather all ranks' rows in rank order: [t, ...] -> [T, ...]. Backward: the gradients are summed and scattered."""
    return _collective(x_tD, group, all_gather_rows, back=reduce_scatter_rows, part="experts")


def scatter_tokens(partial_TD: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the ranks and keep own rows: [T, ...] -> [t, ...]. Backward: the gradients are gathered."""
    return _collective(partial_TD, group, reduce_scatter_rows, back=all_gather_rows, part="embedding")


def sum_over_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum all ranks' x, for every rank's own use. Backward: the gradients are summed too."""
    return _collective(x, group, _all_reduce, back=_all_reduce, part="qk_norm")


def total_over_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum all ranks' x, from which every rank derives the same scalar. Backward: its gradient as it is, unsummed."""
    return _collective(x, group, _all_reduce, back=lambda grad, _: grad, part="statistics")


def exchange_rows(x: Tensor, splits: RowSplits, group: ProcessGroup | None) -> Tensor:
    """Send rows to the ranks they belong to: [sum(send), ...] -> [sum(receive), ...]. Backward: the way back."""
    return _collective(
        x,
        group,
        lambda x, group: all_to_all_rows(x, splits, group),
        back=lambda grad, group: all_to_all_rows(grad, splits.turned(), group),
        part="experts",
    )


def sum_gradients(parameters: list[Tensor], group: ProcessGroup | None, *, upcast: bool = True) -> list[Tensor]:
    """Return the same values, whose gradients are summed over the group in one all-reduce.

    For parameters that every rank holds whole but uses on its own tokens only. Gradients are summed in float32, and
    matrices come back in it, so that theirs are made in it, too; a norm's weight goes by its tokens' type in either.
    `upcast=False` keeps the type throughout, for large matrices.
    """
    if group is None:
        return [_upcast(p) for p in parameters] if upcast else parameters
    return list(_SumGradients.apply(group, upcast, *parameters))


def gather_routing(ids_tA: Tensor, weights_tA: Tensor, group: ProcessGroup | None) -> GatheredRouting:
    """Gather as `start_routing` does. Backward: the weights' gradients are summed and scattered."""
    if group is None:
        return GatheredRouting(ids_tA, weights_tA)
    return GatheredRouting(*_GatherRouting.apply(ids_tA, weights_tA, group))


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _collective(
    x: Tensor,
    group: ProcessGroup | None,
    there: Callable[[Tensor, ProcessGroup], Tensor],
    *,
    back: Callable[[Tensor, ProcessGroup], Tensor],
    part: str,
) -> Tensor:
    return x if group is None else _Collective.apply(x, group, there, back, part)


class _Collective(torch.autograd.Function):
    """A collective whose gradient takes the way `back`, both under the scope `part`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, there: Any, back: Any, part: str) -> Tensor:
        ctx.group, ctx.back, ctx.part = group, back, part
        with scope(part):
            return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with scope(ctx.part):
            return ctx.back(grad, ctx.group), None, None, None, None


def _upcast(parameter: Tensor) -> Tensor:
    return wide(parameter) if parameter.dim() > 1 else parameter


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, upcast: bool, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.dtypes = [p.dtype for p in parameters]
        ctx.upcast = upcast
        return tuple((_upcast(p) if upcast else p).view_as(p) for p in parameters)

    @staticmethod
    @scope("replicated")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([wide(g).flatten() if ctx.upcast else g.flatten() for g in grads])
        dist.all_reduce(flat, group=ctx.group)
        parts = flat.split([g.numel() for g in grads])
        sums = [p.view_as(g).to(dtype) for p, g, dtype in zip(parts, grads, ctx.dtypes, strict=True)]
        return None, None, *sums


class _GatherRouting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_tA: Tensor, weights_tA: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.group = group
        ids_TA, weights_TA = start_routing(ids_tA, weights_tA, group).finish()
        ctx.mark_non_differentiable(ids_TA)
        return ids_TA, weights_TA

    @staticmethod
    @scope("routing")
    def backward(ctx: Any, _: Tensor, grad_TA: Tensor) -> tuple[None, Tensor, None]:
        return None, reduce_scatter_rows(grad_TA, ctx.group), None
