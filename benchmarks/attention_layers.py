"""One attention layer, its tokens sharded over N ranks, in every way the literature splits it, and what each sends.

mode                   weights      what travels, forward (its conjugate backward)
heads-no-qk-norm       by heads     tokens gathered, outputs summed and scattered (2205.05198, §4.2.2)
heads                  by heads     the same, and one sum of squares per token for the norms of q and k (this project's)
heads-overlapped       by heads     the same, in chunks that travel beside the products
gather-qk              by heads     tokens, and for the norms q and k themselves in one gather, v projected meanwhile
gather-qk-one-by-one   by heads     tokens, then q, then k, each waited for
column-o               by heads     as heads, but o split by its outputs: the heads' outputs gathered, columns sent home
context                whole        k and v gathered; every rank attends with its own tokens' queries
ulysses                whole        q, k and v exchanged for heads, outputs exchanged back (2309.14509)

All but the first normalise q and k over their full width. In gather-qk a rank reads the statistics off the gathered
rows and normalises its own heads only. Whole weights have their gradients summed in one all-reduce, which is counted.
context gives every rank a contiguous part of the sequence, so the last one has most to do.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from modeling.attention import RotaryTables, rotary_tables, rotate
from modeling.comm import (
    Chunks,
    RowSplits,
    Transfer,
    exchange_rows,
    gather_tokens,
    scatter_tokens,
    start_gather,
    start_scatter,
    sum_gradients,
)
from modeling.layers import gather_linear, linear_scatter, rms_norm, split_rms_norms

EPS = 1e-5
NUM_CHUNKS = 4  # what cost.py chooses for these sizes at 1 Gbit/s


class Sizes(NamedTuple):
    """One sequence of `num_tokens`; the layer's sizes are those of benchmarks/peers.py."""

    num_tokens: int = 2048
    hidden: int = 512
    num_heads: int = 8
    num_kv_heads: int = 4
    head_size: int = 64


class Weights(NamedTuple):
    """q [HK, D], k and v [GK, D], o [D, HK], and the norms of q [HK] and k [GK], whole or a rank's part."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_norm: Tensor
    k_norm: Tensor


class Split(NamedTuple):
    """The dim of each weight that is split over the ranks; None where every rank holds the whole."""

    q: int | None
    k: int | None
    v: int | None
    o: int | None
    q_norm: int | None
    k_norm: int | None


class Problem(NamedTuple):
    """Tokens and the gradient of the output [T, D], and whole weights."""

    x: Tensor
    grad: Tensor
    weights: Weights


class Job(NamedTuple):
    """What a mode needs beside tokens and weights."""

    sizes: Sizes
    group: ProcessGroup | None
    size: int
    rank: int
    rotary: RotaryTables


class Traffic(NamedTuple):
    """Bytes one rank sends."""

    forward: float
    backward: float


class Flight:
    """A gather on its way, and in the backward its gradient's scatter."""

    there: Transfer
    back: Transfer

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group


class _StartGather(torch.autograd.Function):
    """Send off a gather. In the backward, receive the gradient that `_FinishGather` sent off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        out = x.new_empty(dist.get_world_size(flight.group) * x.shape[0], *x.shape[1:])
        flight.there = start_gather(x, flight.group, out=out)
        return out

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.back.finish(), None


class _FinishGather(torch.autograd.Function):
    """Receive it. What autograd runs between both backwards, here v's projection, overlaps the gradient's transfer."""

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.there.finish()
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.flight.back = start_scatter(grad, ctx.flight.group)
        return grad, None


def attend(q: Tensor, *, k: Tensor, v: Tensor, job: Job, first: int = 0) -> Tensor:
    """Causal attention of queries from position `first` on: q [s, hK], k and v [S, gK] from 0 on -> [s, hK]."""
    q, k, v = (x.unflatten(-1, (-1, job.sizes.head_size)).transpose(0, 1)[None] for x in (q, k, v))
    num_queries, num_keys = q.shape[2], k.shape[2]
    q = rotate(q, RotaryTables(*(table[:, first : first + num_queries] for table in job.rotary)))
    k = rotate(k, RotaryTables(*(table[:, :num_keys] for table in job.rotary)))
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    mask = None
    if first:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(first)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return out[0].transpose(0, 1).flatten(1)


def on_one_rank(x: Tensor, *, w: Weights, job: Job) -> Tensor:
    """The layer as any single process has it: x [T, D] -> [T, D]."""
    q, k = rms_norm(x @ w.q.t(), w.q_norm, eps=EPS), rms_norm(x @ w.k.t(), w.k_norm, eps=EPS)
    return attend(q, k=k, v=x @ w.v.t(), job=job) @ w.o.t()


def on_one_rank_without_norm(x: Tensor, *, w: Weights, job: Job) -> Tensor:
    return attend(x @ w.q.t(), k=x @ w.k.t(), v=x @ w.v.t(), job=job) @ w.o.t()


def heads_without_norm(x_tD: Tensor, *, w: Weights, job: Job) -> Tensor:
    x_TD = gather_tokens(x_tD, job.group)
    return scatter_tokens(on_one_rank_without_norm(x_TD, w=w, job=job), job.group)


def heads(x_tD: Tensor, *, w: Weights, job: Job) -> Tensor:
    return scatter_tokens(_own_heads(x_tD, w=w, job=job) @ w.o.t(), job.group)


def column_o(x_tD: Tensor, *, w: Weights, job: Job) -> Tensor:
    """o [D/N, HK] needs all heads, and its columns belong to tokens of all ranks."""
    columns_Td = _gather_channels(_own_heads(x_tD, w=w, job=job), job=job) @ w.o.t()
    return _exchange_channels(columns_Td, job=job)


def heads_overlapped(x_tD: Tensor, *, w: Weights, job: Job) -> Tensor:
    """With the project's own products, whose chunks travel while others are multiplied, forward and backward."""
    assert job.group is not None
    chunks = Chunks(x_tD.shape[0], job.group, num_chunks=NUM_CHUNKS, overlap=True)
    q, k, v = gather_linear(x_tD, [w.q, w.k, w.v], chunks=chunks)
    return linear_scatter(_attend_normed(q, k=k, v=v, w=w, job=job), w.o, chunks=chunks)


def _own_heads(x_tD: Tensor, *, w: Weights, job: Job) -> Tensor:
    """Attention of this rank's heads for all tokens, [T, hK]."""
    x_TD = gather_tokens(x_tD, job.group)
    return _attend_normed(x_TD @ w.q.t(), k=x_TD @ w.k.t(), v=x_TD @ w.v.t(), w=w, job=job)


def _attend_normed(q: Tensor, *, k: Tensor, v: Tensor, w: Weights, job: Job) -> Tensor:
    """q [T, hK], k and v [T, gK] of this rank's heads -> [T, hK], q and k normalised with all ranks' channels."""
    sizes = job.sizes
    q, k = split_rms_norms(
        (q, k),
        (w.q_norm, w.k_norm),
        full_widths=(sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size),
        shares=(1.0, 1.0),
        eps=EPS,
        group=job.group,
    )
    return attend(q, k=k, v=v, job=job)


def gather_qk(x_tD: Tensor, *, w: Weights, job: Job) -> Tensor:
    assert job.group is not None
    x_TD = gather_tokens(x_tD, job.group)
    q, k = x_TD @ w.q.t(), x_TD @ w.k.t()
    flight = Flight(job.group)
    arriving = _StartGather.apply(torch.cat([q, k], dim=1), flight)
    v = x_TD @ w.v.t()
    whole_NT = _FinishGather.apply(arriving, flight).unflatten(0, (job.size, -1))
    all_q, all_k = whole_NT.split([q.shape[1], k.shape[1]], dim=2)
    q, k = _norm_by_all(q, by_rank=all_q, weight=w.q_norm), _norm_by_all(k, by_rank=all_k, weight=w.k_norm)
    return scatter_tokens(attend(q, k=k, v=v, job=job) @ w.o.t(), job.group)


def gather_qk_one_by_one(x_tD: Tensor, *, w: Weights, job: Job) -> Tensor:
    x_TD = gather_tokens(x_tD, job.group)
    q, k = x_TD @ w.q.t(), x_TD @ w.k.t()
    all_q, all_k = (gather_tokens(own, job.group).unflatten(0, (job.size, -1)) for own in (q, k))
    q, k = _norm_by_all(q, by_rank=all_q, weight=w.q_norm), _norm_by_all(k, by_rank=all_k, weight=w.k_norm)
    return scatter_tokens(attend(q, k=k, v=x_TD @ w.v.t(), job=job) @ w.o.t(), job.group)


def _norm_by_all(own: Tensor, *, by_rank: Tensor, weight: Tensor) -> Tensor:
    """own [T, c] by the root mean square of all ranks' channels [N, T, c]."""
    return own * torch.rsqrt(by_rank.pow(2).mean((0, 2)) + EPS)[:, None] * weight


def context(x_tD: Tensor, *, w: Weights, job: Job) -> Tensor:
    w = Weights(*sum_gradients(list(w), job.group, upcast=False))
    q, k = rms_norm(x_tD @ w.q.t(), w.q_norm, eps=EPS), rms_norm(x_tD @ w.k.t(), w.k_norm, eps=EPS)
    first, end = job.rank * len(x_tD), (job.rank + 1) * len(x_tD)
    kv_T = gather_tokens(torch.cat([k, x_tD @ w.v.t()], dim=1), job.group)[:end]
    k, v = kv_T.chunk(2, dim=1)
    return attend(q, k=k, v=v, job=job, first=first) @ w.o.t()


def ulysses(x_tD: Tensor, *, w: Weights, job: Job) -> Tensor:
    w = Weights(*sum_gradients(list(w), job.group, upcast=False))
    q, k = rms_norm(x_tD @ w.q.t(), w.q_norm, eps=EPS), rms_norm(x_tD @ w.k.t(), w.k_norm, eps=EPS)
    parts = [x.chunk(job.size, dim=1) for x in (q, k, x_tD @ w.v.t())]
    to_rank = torch.cat([torch.cat(part, dim=1) for part in zip(*parts, strict=True)])
    mine_T = exchange_rows(to_rank, _equal_splits(job), job.group)
    q, k, v = mine_T.split([part[0].shape[1] for part in parts], dim=1)
    return _exchange_channels(attend(q, k=k, v=v, job=job), job=job) @ w.o.t()


def _gather_channels(x_Tc: Tensor, *, job: Job) -> Tensor:
    """All tokens' channels from every rank: [T, c] -> [T, C]."""
    return gather_tokens(x_Tc, job.group).unflatten(0, (job.size, -1)).transpose(0, 1).flatten(1)


def _exchange_channels(x_Tc: Tensor, *, job: Job) -> Tensor:
    """Some channels of all tokens -> all channels of this rank's tokens: [T, c] -> [t, C]."""
    return exchange_rows(x_Tc, _equal_splits(job), job.group).unflatten(0, (job.size, -1)).transpose(0, 1).flatten(1)


def _equal_splits(job: Job) -> RowSplits:
    rows = [job.sizes.num_tokens // job.size] * job.size
    return RowSplits(rows, rows)


class Mode(NamedTuple):
    """A way to do it, both functions (x, w=, job=), and how it splits the weights."""

    run: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    split: Split


BY_HEADS = Split(q=0, k=0, v=0, o=1, q_norm=0, k_norm=0)
WHOLE = Split(*[None] * 6)
MODES: Mapping[str, Mode] = {
    "heads-no-qk-norm": Mode(heads_without_norm, on_one_rank_without_norm, BY_HEADS),
    "heads": Mode(heads, on_one_rank, BY_HEADS),
    "heads-overlapped": Mode(heads_overlapped, on_one_rank, BY_HEADS),
    "gather-qk": Mode(gather_qk, on_one_rank, BY_HEADS),
    "gather-qk-one-by-one": Mode(gather_qk_one_by_one, on_one_rank, BY_HEADS),
    "column-o": Mode(column_o, on_one_rank, BY_HEADS._replace(o=0)),
    "context": Mode(context, on_one_rank, WHOLE),
    "ulysses": Mode(ulysses, on_one_rank, WHOLE),
}


def formula(name: str, sizes: Sizes, *, num_ranks: int) -> Traffic:
    """What a rank sends in fp32: a gather or scatter (N-1)/N of the whole, an all-reduce twice that."""
    tokens, hidden, num_heads, num_kv_heads, head_size = sizes
    share = 4 * (num_ranks - 1) / num_ranks
    q, k = num_heads * head_size, num_kv_heads * head_size
    x = share * tokens * hidden
    statistics_bytes = 2 * share * tokens * 2
    if name == "context":
        forward = share * tokens * 2 * k
    elif name == "ulysses":
        forward = share * tokens / num_ranks * (2 * q + 2 * k)
    elif name == "column-o":
        forward = x + statistics_bytes + share * tokens * q + x / num_ranks
    else:
        norms = {"heads-no-qk-norm": 0.0, "heads": statistics_bytes, "heads-overlapped": statistics_bytes}
        forward = 2 * x + norms.get(name, share * tokens * (q + k))
    num_weights = 2 * hidden * (q + k) + q + k
    return Traffic(forward, forward + (2 * share * num_weights if MODES[name].split == WHOLE else 0.0))


def check_sizes(sizes: Sizes, *, num_ranks: int) -> None:
    """Refuse what cannot be split; ValueError."""
    counts = {"tokens": sizes.num_tokens, "heads": sizes.num_heads, "key-value heads": sizes.num_kv_heads}
    uneven = [f"{count} {what}" for what, count in counts.items() if count % num_ranks]
    if uneven or num_ranks < 2:
        raise ValueError(
            f"{num_ranks} ranks cannot share {' and '.join(uneven) or 'a layer'} evenly; "
            f"take 2 or more that divide {sizes.num_kv_heads}, and tokens that are a multiple of them"
        )


def draw(sizes: Sizes) -> Problem:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(0)
    q, k = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    x, grad = (torch.randn(sizes.num_tokens, sizes.hidden, generator=generator) for _ in range(2))
    shapes = ((q, sizes.hidden), (k, sizes.hidden), (k, sizes.hidden), (sizes.hidden, q))
    matrices = [torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in shapes]
    norms = [1 + 0.2 * torch.randn(width, generator=generator) for width in (q, k)]
    return Problem(x, grad, Weights(*matrices, *norms))


def make_job(sizes: Sizes, *, group: ProcessGroup | None) -> Job:
    """This rank's place in the group; None is one rank alone."""
    angles = SimpleNamespace(head_dim=sizes.head_size, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    rotary = rotary_tables(angles, torch.arange(sizes.num_tokens)[None], dtype=torch.float32)
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    return Job(sizes, group, size, rank, rotary)
