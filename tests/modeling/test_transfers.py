"""Started and chunked transfers: order of rows, sums, products around them, against one rank with everything."""

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modeling.comm import (
    Chunks,
    GatherInChunks,
    ScatterInChunks,
    Transfer,
    cut_in_chunks,
    start_gather,
    start_scatter,
    tokens_again,
)
from modeling.cost import LINKS, MAX_CHUNKS, choose_num_chunks
from modeling.execution import Execution
from modeling.linear import gather_linear, linear_scatter
from tests.ranks import run_ranks

TOKENS, HIDDEN = 7, 4  # per rank; 7 tokens do not divide into 2 or 3 chunks


def everyones(world_size: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What each rank holds, known to all."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world_size)]


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7])
def test_chunks_cover_every_token_once(num_chunks: int) -> None:
    chunks = Chunks(TOKENS, None, num_chunks, False)
    tokens = torch.arange(TOKENS)
    parts = [tokens[chunks.rows(k)] for k in range(num_chunks)]
    assert torch.equal(torch.cat(parts), tokens)
    assert min(len(part) for part in parts) >= TOKENS // num_chunks


def _orders(rank: int, world_size: int, num_chunks: int) -> None:
    chunks = Chunks(TOKENS, dist.group.WORLD, num_chunks, False)
    rows = torch.arange(world_size * TOKENS)
    ordered = chunks.to_chunk_order(rows)
    assert torch.equal(chunks.to_token_order(ordered), rows)
    for k in range(num_chunks):
        want = torch.cat([torch.arange(TOKENS)[chunks.rows(k)] + r * TOKENS for r in range(world_size)])
        assert torch.equal(ordered[chunks.gathered_rows(k)], want)
        assert torch.equal(chunks.pick(rows, k), want)


def _gathers_and_scatters(rank: int, world_size: int, num_chunks: int, overlap: bool) -> None:
    _orders(rank, world_size, num_chunks)
    chunks = Chunks(TOKENS, dist.group.WORLD, num_chunks, overlap)
    rows = everyones(world_size, TOKENS, HIDDEN)
    whole = torch.cat(rows)
    gather = GatherInChunks(rows[rank], chunks)
    for k in range(num_chunks):
        assert torch.equal(gather.chunk(k), chunks.pick(whole, k))
    assert torch.equal(gather.all(), chunks.to_chunk_order(whole))
    assert torch.equal(tokens_again(gather.all(), chunks).chunk(num_chunks - 1), gather.chunk(num_chunks - 1))
    assert torch.equal(GatherInChunks(rows[rank], chunks).all(), chunks.to_chunk_order(whole))
    partials = everyones(world_size, world_size * TOKENS, HIDDEN)
    scatter = ScatterInChunks(torch.empty(TOKENS, HIDDEN, dtype=torch.float64), chunks)
    for k in range(num_chunks):
        scatter.add(k, chunks.pick(partials[rank], k))
    torch.testing.assert_close(scatter.finish(), torch.stack(partials).sum(0).chunk(world_size)[rank])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_tokens_arrive_and_sums_come_home(num_chunks: int, overlap: bool) -> None:
    run_ranks(_gathers_and_scatters, 2, num_chunks, overlap)


@pytest.mark.slow
def test_tokens_arrive_and_sums_come_home_on_four_ranks() -> None:
    run_ranks(_gathers_and_scatters, 4, 2, True)


def _any_layout(rank: int, world_size: int) -> None:
    rows = [torch.arange(12.0).view(2, 6).t() + 100 * r for r in range(world_size)]  # [6, 2], transposed
    first, second = start_gather(rows[rank], dist.group.WORLD), start_scatter(rows[rank], dist.group.WORLD)
    # Finished in another order than they were started in.
    assert torch.equal(second.finish(), torch.stack(rows).sum(0).chunk(world_size)[rank])
    assert torch.equal(first.finish(), torch.cat(rows))


def test_transfers_take_tensors_of_any_layout() -> None:
    run_ranks(_any_layout, 2)


def _rounded_once(rank: int, world_size: int) -> float:
    parts = torch.full((world_size, 1), 1.0 if rank == 0 else 3 * 2.0**-10, dtype=torch.bfloat16)
    return start_scatter(parts, dist.group.WORLD).finish().item()


def test_partial_sums_in_bfloat16_are_rounded_once() -> None:
    """1 + 9 * 2**-10 is nearest to 1 + 2**-7; added one by one each part would be lost."""
    assert run_ranks(_rounded_once, 4) == [1 + 2.0**-7] * 4


def _products(rank: int, world_size: int, num_chunks: int, overlap: bool, regather: bool) -> None:
    """Both products and all gradients equal those of one rank with all tokens and all weights."""
    x, in_weights = everyones(world_size, TOKENS, HIDDEN), everyones(2 * world_size, 3, HIDDEN)
    y, out_weights = everyones(1, world_size * TOKENS, 3 * world_size)[0], everyones(world_size, HIDDEN, 3)
    grad_in, grad_out = everyones(2 * world_size, world_size * TOKENS, 3), everyones(world_size, TOKENS, HIDDEN)
    chunks = Chunks(TOKENS, dist.group.WORLD, num_chunks, overlap, regather)

    whole_x = torch.cat(x).requires_grad_()
    want = [whole_x @ w.requires_grad_().t() for w in in_weights]
    torch.autograd.backward(want, grad_in)
    mine_x, mine = x[rank].clone().requires_grad_(), slice(2 * rank, 2 * rank + 2)
    weights = [w.detach().clone().requires_grad_() for w in in_weights[mine]]
    got = gather_linear(mine_x, weights, chunks=chunks)
    torch.autograd.backward(got, grad_in[mine])
    torch.testing.assert_close(got, want[mine])
    torch.testing.assert_close([w.grad for w in weights], [w.grad for w in in_weights[mine]])
    torch.testing.assert_close(mine_x.grad, whole_x.grad.chunk(world_size)[rank])

    whole_y, whole_out = y.clone().requires_grad_(), torch.cat(out_weights, dim=1).requires_grad_()
    out = whole_y @ whole_out.t()
    out.backward(torch.cat(grad_out))
    mine_y = y.chunk(world_size, dim=1)[rank].clone().requires_grad_()
    weight = out_weights[rank].clone().requires_grad_()
    got_out = linear_scatter(mine_y, weight, chunks=chunks)
    got_out.backward(grad_out[rank])
    torch.testing.assert_close(got_out, out.chunk(world_size)[rank])
    torch.testing.assert_close(weight.grad, whole_out.grad.chunk(world_size, dim=1)[rank])
    torch.testing.assert_close(mine_y.grad, whole_y.grad.chunk(world_size, dim=1)[rank])


@pytest.mark.parametrize(("num_chunks", "overlap", "regather"), [(1, False, False), (2, True, True), (3, True, False)])
def test_products_around_transfers_equal_those_of_one_rank(num_chunks: int, overlap: bool, regather: bool) -> None:
    run_ranks(_products, 2, num_chunks, overlap, regather)


class Watch(TorchDispatchMode):
    """Writes down, in order, what starts, what is finished, and what is multiplied."""

    NAMES: ClassVar = {"_allgather_base_": "gather", "alltoall_base_": "scatter", "mm": "multiply"}

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.events.append(self.NAMES[name])
        return func(*args, **(kwargs or {}))

    def take(self) -> str:
        taken, self.events = " ".join(self.events), []
        return taken


def _order_of_events(rank: int, _: int, overlap: bool, frozen: bool) -> list[str]:
    """Of both products in two chunks, forward and backward."""
    chunks = Chunks(TOKENS, dist.group.WORLD, 2, overlap, regather=True)
    x = torch.ones(TOKENS, HIDDEN).requires_grad_()
    weights = [torch.ones(shape).requires_grad_(not frozen) for shape in ((3, HIDDEN), (HIDDEN, 3))]
    finish = Transfer.finish
    with pytest.MonkeyPatch.context() as patch, Watch() as watch:
        patch.setattr(Transfer, "finish", lambda transfer: watch.events.append("finish") or finish(transfer))
        [out] = gather_linear(x, [weights[0]], chunks=chunks)
        seen = [watch.take()]
        home = linear_scatter(out, weights[1], chunks=chunks)
        seen.append(watch.take())
        [grad_out, *_] = torch.autograd.grad(home.sum(), [out] if frozen else [out, weights[1]], retain_graph=True)
        seen.append(watch.take())
        torch.autograd.grad(out, [x] if frozen else [x, weights[0]], grad_out)
        return [*seen, watch.take()]


@pytest.mark.parametrize("frozen", [False, True])
def test_products_run_while_transfers_are_under_way(frozen: bool) -> None:
    of_weight = [] if frozen else ["multiply"]
    expected = [
        "gather gather finish multiply finish multiply",
        "multiply scatter multiply scatter finish finish",
        " ".join(["gather gather finish multiply finish multiply", *of_weight]),
        # Tokens are gathered again while their gradients are made, and these travel while the weight's is.
        " ".join(["gather gather multiply scatter multiply scatter finish finish", *of_weight, "finish finish"]),
    ]
    assert run_ranks(_order_of_events, 2, True, frozen) == [expected] * 2


def test_without_overlap_each_transfer_is_waited_for() -> None:
    for seen in run_ranks(_order_of_events, 2, False, False):
        for events in seen:
            starts = [i for i, event in enumerate(events.split()) if event in ("gather", "scatter")]
            assert starts
            assert all(events.split()[i + 1] == "finish" for i in starts)


@pytest.mark.parametrize("device", list(LINKS))
def test_more_chunks_for_more_bytes_and_one_where_more_would_not_pay(device: str) -> None:
    link = LINKS[device]

    def cost(sent_bytes: float, num_chunks: int) -> float:
        return sent_bytes / num_chunks / link.bytes_per_s + num_chunks * link.chunk_s

    chosen = []
    for exponent in range(8, 36):
        num = choose_num_chunks(2.0**exponent, device=device)
        # No power of two within the limit is cheaper by more than what rounding to one costs.
        assert cost(2.0**exponent, num) <= 1.07 * min(cost(2.0**exponent, 2**i) for i in range(4))
        chosen.append(num)
    assert chosen[0] == 1
    assert chosen[-1] == MAX_CHUNKS
    assert chosen == sorted(chosen)


def _cut(rank: int, world_size: int) -> list[int]:
    """Of 2048 tokens without and with overlap, in as many chunks as told, of three tokens, of none, and on one rank."""
    x, group = torch.empty(2048, 512), dist.group.WORLD
    five = Execution(overlap=True, overlap_chunks=5)
    assert cut_in_chunks(x[:0], group, Execution(overlap=True)).rows(0) == slice(0, 0)
    cut = [cut_in_chunks(x, group, execution) for execution in (Execution(), Execution(overlap=True), five)]
    cut += [cut_in_chunks(x[:3], group, five), cut_in_chunks(x, None, five)]
    return [chunks.num_chunks for chunks in cut]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tokens_are_cut_by_what_is_sent_or_as_told_and_never_below_a_token(world_size: int) -> None:
    sent_bytes = (world_size - 1) * 2048 * 512 * 4
    assert run_ranks(_cut, world_size) == [[1, choose_num_chunks(sent_bytes, device="cpu"), 5, 3, 1]] * world_size
