"""Transfers and collectives against autograd on one process: what they return, what they send, and tokens in 8 bits."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modeling import comm, mesh
from modeling.comm import (
    FP8_LARGEST,
    Chunks,
    GatherInChunks,
    ScatterInChunks,
    Transfer,
    cut_in_chunks,
    gather_routing,
    gather_tokens,
    pack_fp8,
    scatter_tokens,
    start_gather,
    start_in_turn,
    start_scatter,
    sum_gradients,
    sum_over_group,
    tokens_again,
    total_over_group,
    unpack_fp8,
    wide,
)
from modeling.cost import LINKS, MAX_CHUNKS, choose_num_chunks
from modeling.execution import Execution
from modeling.layers import gather_linear, linear_scatter
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh
from modeling.moe import GatherMoeSparseBlock
from modeling.router import Routing
from tests.engine_runs import slow
from tests.ranks import run_ranks
from tests.recording import Collective, Operators
from tests.referee import tiny_config

TOKENS, HIDDEN = 7, 4  # per rank; 7 tokens do not divide into 2 or 3 chunks


def everyones(world_size: int, *shape: int, seed: int = 5) -> list[Tensor]:
    """What each rank holds, known to all: float64, so that sums in another order are no excuse."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(world_size)]


def _orders(rank: int, world_size: int, num_chunks: int) -> None:
    chunks = Chunks(TOKENS, dist.group.WORLD, num_chunks, False)
    rows = torch.arange(world_size * TOKENS)
    ordered = chunks.to_chunk_order(rows)
    assert torch.equal(chunks.to_token_order(ordered), rows)
    for k in range(num_chunks):
        want = torch.cat([torch.arange(TOKENS)[chunks.rows(k)] + r * TOKENS for r in range(world_size)])
        assert len(want) >= TOKENS // num_chunks * world_size
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


@pytest.mark.parametrize(
    ("world_size", "num_chunks", "overlap"),
    [(2, 1, False), (2, 1, True), (2, 3, False), (2, 3, True), (2, TOKENS, True), slow(4, 2, True)],
)
def test_tokens_arrive_and_sums_come_home(world_size: int, num_chunks: int, overlap: bool) -> None:
    run_ranks(_gathers_and_scatters, world_size, num_chunks, overlap)


def _any_layout(rank: int, world_size: int) -> None:
    rows = [torch.arange(12).view(2, 6).t() + 100 * r for r in range(world_size)]  # [6, 2], transposed
    first, second = start_gather(rows[rank], dist.group.WORLD), start_scatter(rows[rank], dist.group.WORLD)
    # Finished in another order than they were started in.
    assert torch.equal(second.finish(), torch.stack(rows).sum(0).chunk(world_size)[rank])
    assert torch.equal(first.finish(), torch.cat(rows))


def test_transfers_take_tensors_of_any_type_and_layout() -> None:
    run_ranks(_any_layout, 2)


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


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_tokens_are_cut_by_what_is_sent_or_as_told_and_never_below_a_token(world_size: int) -> None:
    sent_bytes = (world_size - 1) * 2048 * 512 * 4
    assert run_ranks(_cut, world_size) == [[1, choose_num_chunks(sent_bytes, device="cpu"), 5, 3, 1]] * world_size


WORLD = 2
ROWS, WIDTH = 6, 5


def named(name: str, *shape: int) -> list[Tensor]:
    """What each of two ranks holds under a name."""
    return everyones(WORLD, *shape, seed=sum(map(ord, name)))


def transposed(x: Tensor) -> Tensor:
    """The same numbers in memory in another order, without gaps: what gloo would send as it lies there."""
    out = x.transpose(0, -1).contiguous().transpose(0, -1)
    assert not out.is_contiguous()
    return out


# Per rank, how its tensors lie in memory.
LAYOUTS = ((Tensor.contiguous, Tensor.contiguous), (transposed, transposed), (Tensor.contiguous, transposed))


# What each rank is given, from what all of them have, and our function for it.
COLLECTIVES: dict[str, tuple[Callable[[list[Tensor]], list[Tensor]], Callable[..., Tensor]]] = {
    "gather_tokens": (lambda xs: [torch.cat(xs)] * WORLD, gather_tokens),
    "scatter_tokens": (lambda xs: list(torch.stack(xs).sum(0).chunk(WORLD)), scatter_tokens),
    "sum_over_group": (lambda xs: [torch.stack(xs).sum(0)] * WORLD, sum_over_group),
}


def _check(rank: int, _: int, name: str) -> None:
    """Output and input gradient of ours equal those of the plain function, differentiated for all ranks at once.

    The loss is the sum over ranks of a weighted sum of each rank's output.
    """
    function, ours = COLLECTIVES[name]
    inputs = [x.requires_grad_() for x in named("in", ROWS, WIDTH)]
    wants = function(inputs)
    factors = named("factor", *wants[0].shape)
    torch.autograd.backward(sum((want * factor).sum() for want, factor in zip(wants, factors, strict=True)))
    for layout in (by_rank[rank] for by_rank in LAYOUTS):
        mine = layout(named("in", ROWS, WIDTH)[rank]).requires_grad_()
        got = ours(mine, dist.group.WORLD)
        torch.testing.assert_close(got, wants[rank].detach())
        got.backward(layout(factors[rank]))  # the gradient that arrives may lie in another order too
        torch.testing.assert_close(mine.grad, inputs[rank].grad)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_match_autograd_on_one_process(name: str) -> None:
    run_ranks(_check, WORLD, name)


def _total(rank: int, _: int) -> None:
    """All ranks make the same scalar of the total, and it is one loss, not one per rank."""
    inputs = [x.requires_grad_() for x in named("in", ROWS, WIDTH)]
    torch.stack(inputs).sum(0).square().sum().backward()
    for layout in (by_rank[rank] for by_rank in LAYOUTS):
        mine = layout(named("in", ROWS, WIDTH)[rank]).requires_grad_()
        total = total_over_group(mine, dist.group.WORLD)
        torch.testing.assert_close(total, torch.stack(inputs).sum(0).detach())
        total.square().sum().backward()
        torch.testing.assert_close(mine.grad, inputs[rank].grad)


def test_total_over_group_is_one_loss_for_all_ranks() -> None:
    run_ranks(_total, WORLD)


def _sum_gradients(rank: int, _: int, dtype: torch.dtype, upcast: bool) -> None:
    a, b = (torch.ones(3, dtype=dtype).requires_grad_(), torch.full((2, 4), 2.0, dtype=dtype).requires_grad_())
    shared_a, shared_b = sum_gradients([a, b], dist.group.WORLD, upcast=upcast)
    expected_dtype = torch.float32 if upcast and dtype == torch.bfloat16 else dtype
    assert (shared_a.dtype, shared_b.dtype) == (dtype, expected_dtype)  # a norm computes in float32 by itself
    assert torch.equal(shared_b, torch.full((2, 4), 2.0, dtype=expected_dtype))
    factor = torch.arange(8.0).view(4, 2).t().to(expected_dtype)  # a transposed gradient for b
    ((shared_a * (rank + 1)).sum() + (shared_b * factor * (rank + 1)).sum()).backward()
    assert (a.grad.dtype, b.grad.dtype) == (dtype, dtype)
    torch.testing.assert_close(a.grad, torch.full((3,), 3.0, dtype=dtype))
    torch.testing.assert_close(b.grad, (3 * factor).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "upcast"),
    [(torch.float64, True), (torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)],
    ids=str,
)
def test_gradients_of_shared_parameters_are_summed(dtype: torch.dtype, upcast: bool) -> None:
    run_ranks(_sum_gradients, WORLD, dtype, upcast)


def _one_all_reduce(rank: int, _: int) -> list[Collective]:
    """A parameter that takes no part, or is frozen, is summed along all the same: every rank sends the same bytes."""
    used, unused, frozen = torch.ones(3).requires_grad_(), torch.ones(4).requires_grad_(), torch.ones(5)
    with Operators() as seen:
        shared = sum_gradients([used, unused, frozen], dist.group.WORLD)
        (shared[0].sum() * (rank + 1)).backward()
    assert used.grad.tolist() == [3.0] * 3
    assert not unused.grad.any()
    assert frozen.grad is None
    return seen.collectives


def test_all_shared_gradients_travel_in_one_all_reduce() -> None:
    assert run_ranks(_one_all_reduce, WORLD) == [[Collective("all_reduce", 12 * 4)]] * WORLD


def _rounded_once(rank: int, world_size: int) -> tuple[float, float]:
    """A sum over the ranks that comes home, and the gradient of a shared parameter: 1 + 9 * 2**-10."""
    part = 3 * 2.0**-10 if rank else 1.0
    parts = torch.full((world_size, 1), part, dtype=torch.bfloat16)
    weight = torch.zeros(1, dtype=torch.bfloat16).requires_grad_()
    [shared] = sum_gradients([weight], dist.group.WORLD)
    (shared * part).sum().backward()
    return start_scatter(parts, dist.group.WORLD).finish().item(), weight.grad.item()


def test_sums_in_bfloat16_are_rounded_once() -> None:
    """That is nearest to 1 + 2**-7; added one by one each part would be lost."""
    assert run_ranks(_rounded_once, 4) == [(1 + 2.0**-7, 1 + 2.0**-7)] * 4


def _routing(rank: int, _: int, dtype: torch.dtype, num_active: int) -> list[Collective]:
    seen = Operators()
    ids = [torch.randint(0, 129, (ROWS, num_active), generator=torch.Generator().manual_seed(r)) for r in range(WORLD)]
    ids[0][0, 0] = 2**15 - 1  # the largest number of an expert that two bytes hold
    weights = [x.to(dtype).requires_grad_() for x in named("weights", ROWS, num_active)]
    factors = [x.to(dtype) for x in named("factor", ROWS * WORLD, num_active)]
    whole = torch.cat(weights)
    sum((whole * factor).sum() for factor in factors).backward()
    for layout in (by_rank[rank] for by_rank in LAYOUTS):
        mine = layout(named("weights", ROWS, num_active)[rank].to(dtype)).requires_grad_()
        with seen:
            got = gather_routing(layout(ids[rank]), mine, dist.group.WORLD)
        assert torch.equal(got.expert_ids_TA, torch.cat(ids))
        assert got.expert_ids_TA.dtype == torch.int64
        assert not got.expert_ids_TA.requires_grad
        assert torch.equal(got.weights_TA, whole)
        got.weights_TA.backward(layout(factors[rank]))
        torch.testing.assert_close(mine.grad, weights[rank].grad)
        assert got.weights_TA.dtype == dtype
    return seen.collectives


@pytest.mark.parametrize(("dtype", "row_bytes"), [(torch.float32, 6), (torch.float64, 10)], ids=str)
@pytest.mark.parametrize("num_active", [2, 3])
def test_ids_and_weights_travel_together_in_few_bytes(dtype: torch.dtype, row_bytes: int, num_active: int) -> None:
    expected = [Collective("all_gather", WORLD * ROWS * num_active * row_bytes)] * len(LAYOUTS)
    assert run_ranks(_routing, WORLD, dtype, num_active) == [expected] * WORLD


def test_a_group_of_one_sends_nothing() -> None:
    x = torch.randn(4, 2, requires_grad=True)
    ids = torch.zeros(4, 2, dtype=torch.int64)
    for function in (gather_tokens, scatter_tokens, sum_over_group, total_over_group):
        assert function(x, None) is x
    routing = gather_routing(ids, x, None)
    assert routing.expert_ids_TA is ids
    assert routing.weights_TA is x
    narrow = x.detach().bfloat16().requires_grad_()
    assert sum_gradients([narrow], None)[0].dtype == torch.float32
    assert sum_gradients([narrow[0]], None)[0].dtype == torch.bfloat16
    assert sum_gradients([narrow], None, upcast=False)[0] is narrow


def test_wide_is_float32_at_least() -> None:
    given = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    assert [wide(torch.zeros(1, dtype=dtype)).dtype for dtype in given] == [torch.float32] * 3 + [torch.float64]


def rounded(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    unpack_fp8(pack_fp8(x), out=out)
    return out


def relative_rms(got: Tensor, want: Tensor) -> float:
    return ((got - want).square().mean() / want.square().mean()).sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_8_bits_can_hold_comes_back_as_it_was(dtype: torch.dtype) -> None:
    x = torch.tensor([[FP8_LARGEST, 1.0, -0.875, 0.0], [2.0**-6, -(2.0**-7), 2.0**-9, 0.0], [0.0] * 4], dtype=dtype)
    assert torch.equal(rounded(x), x)
    assert pack_fp8(x).shape == (3, 4 + 4)
    assert rounded(x).dtype == dtype


def test_tokens_of_any_size_keep_their_precision() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for scale in (1e-30, 1e-3, 1e4, 1e30):
        assert relative_rms(rounded(x * scale) / scale, x) < 0.03, scale


def test_an_empty_token_stays_empty_where_denormals_are_flushed() -> None:
    try:
        torch.set_flush_denormal(True)
        assert torch.equal(rounded(torch.zeros(2, 8)), torch.zeros(2, 8))
    finally:
        torch.set_flush_denormal(False)


def test_the_errors_are_those_of_the_docstring() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2048, 512, generator=generator)
    gate_up = torch.randn(1536, 512, generator=generator) / 512**0.5
    down = torch.randn(512, 768, generator=generator) / 768**0.5

    def expert(x: Tensor) -> Tensor:
        gate, up = (x @ gate_up.t()).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ down.t()

    in_bf16 = x.bfloat16().float()
    assert relative_rms(rounded(x), x) == pytest.approx(0.026, abs=5e-4)
    assert relative_rms(in_bf16, x) == pytest.approx(0.0017, abs=5e-5)
    assert relative_rms(expert(rounded(x)), expert(x)) == pytest.approx(0.038, abs=1e-3)
    assert relative_rms(expert(in_bf16), expert(x)) == pytest.approx(0.0024, abs=1e-4)


def _as_routed(routing: Routing, *_: Any, **__: Any) -> Routing:
    return routing


def _layer(rank: int, world_size: int, num_chunks: int, regather: bool) -> None:
    """A layer with 8-bit tokens is the exact layer on rounded tokens, forward and in every gradient."""
    found = []
    options: dict[str, Any] = {"overlap": True, "overlap_chunks": num_chunks, "regather": regather}
    for token_dtype in ("float8_e4m3", "auto"):
        mesh = build_mesh(ParallelLayout(tp=world_size, ep=world_size), num_key_value_heads=2)
        execution = Execution(**options, token_dtype=token_dtype)
        block = GatherMoeSparseBlock(tiny_config(num_experts=4), mesh=mesh, execution=execution)
        generator = torch.Generator().manual_seed(3)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, generator=generator)
        x = torch.randn(10, block.sizes.hidden_size, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        # Tokens are routed before they are rounded.
        block.gate.forward = partial(_as_routed, block.gate(x.detach()))
        tokens = x if token_dtype != "auto" else x + (rounded(x.detach()) - x.detach())
        out, _ = block(tokens)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in block.experts.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("num_chunks", "regather"), [(1, False), (3, True)])
def test_a_layer_works_on_rounded_tokens(num_chunks: int, regather: bool) -> None:
    run_ranks(_layer, 2, num_chunks, regather)


def test_gathers_in_turn_start_the_first_chunk_of_each_before_the_second_of_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[str, float]] = []

    def record(x: Tensor, group: Any, *, out: Tensor) -> None:
        started.append((str(x.dtype), x[0, 0].item()))

    monkeypatch.setattr(comm, "start_gather", record)
    monkeypatch.setattr(comm.dist, "get_world_size", lambda group: 2)
    chunks = Chunks(6, group=cast(Any, "a group"), num_chunks=3, overlap=True)
    rows = torch.arange(6.0)[:, None]
    gathers = [GatherInChunks(rows.to(dtype), chunks) for dtype in (torch.float32, torch.float64)]
    assert [number for _, number in started] == [0, 0]  # each begins by itself
    start_in_turn(*gathers)
    assert [number for _, number in started] == [0, 0, 2, 2, 4, 4]
    assert [dtype for dtype, _ in started] == ["torch.float32", "torch.float64"] * 3
    waiting = Chunks(6, group=cast(Any, "a group"), num_chunks=3)
    start_in_turn(GatherInChunks(rows, waiting))
    assert len(started) == 6  # without overlap each waits for its turn


def test_nccl_groups_of_a_layer_go_before_queued_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of data parallelism do not: nothing waits for them."""
    made: list[tuple[list[int], Any]] = []
    nccl = SimpleNamespace(
        get_world_size=lambda: 8,
        get_rank=lambda: 0,
        get_backend=lambda: "nccl",
        ProcessGroupNCCL=SimpleNamespace(Options=lambda **options: options),
        new_group=lambda ranks, pg_options: made.append((ranks, pg_options)),
    )
    monkeypatch.setattr(mesh, "dist", nccl)
    mesh.build_mesh(ParallelLayout(dp=2, tp=4), num_key_value_heads=2)
    urgent = {"is_high_priority_stream": True}
    assert [options for ranks, options in made if ranks in ([0, 1, 2, 3], [4, 5, 6, 7], [0, 1], [2, 3])] == [urgent] * 4
    assert [options for ranks, options in made if ranks == [0, 4]] == [None]
