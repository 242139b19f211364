"""Every collective against autograd on one process: what it returns, and what its backward sends where."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from modeling import comm
from modeling.comm import (
    all_gather_rows,
    gather_routing,
    gather_tokens,
    reduce_scatter_rows,
    scatter_tokens,
    sum_gradients,
    sum_over_group,
    total_over_group,
    wide,
)
from tests.ranks import run_ranks

WORLD = 2
ROWS, WIDTH = 6, 5


def everyones(name: str, *shape: int) -> list[Tensor]:
    """What each rank holds, known to all: float64, so that sums in another order are no excuse."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(WORLD)]


def transposed(x: Tensor) -> Tensor:
    """The same numbers in memory in another order, without gaps: what gloo would send as it lies there."""
    out = x.transpose(0, -1).contiguous().transpose(0, -1)
    assert not out.is_contiguous()
    return out


# Per rank, how its tensors lie in memory.
LAYOUTS = ((Tensor.contiguous, Tensor.contiguous), (transposed, transposed), (Tensor.contiguous, transposed))


def _check(rank: int, _: int, function: Callable[[list[Tensor]], list[Tensor]], ours: Callable[..., Tensor]) -> None:
    """Output and input gradient of `ours` equal those of `function` of all ranks' inputs, differentiated at once.

    The loss is the sum over ranks of a weighted sum of each rank's output.
    """
    inputs = [x.requires_grad_() for x in everyones("in", ROWS, WIDTH)]
    wants = function(inputs)
    factors = everyones("factor", *wants[0].shape)
    torch.autograd.backward(
        sum((want * factor).sum() for want, factor in zip(wants, factors, strict=True))  # type: ignore[arg-type]
    )
    for layout in (by_rank[rank] for by_rank in LAYOUTS):
        mine = layout(everyones("in", ROWS, WIDTH)[rank]).requires_grad_()
        got = ours(mine, dist.group.WORLD)
        torch.testing.assert_close(got, wants[rank].detach())
        got.backward(layout(factors[rank]))  # the gradient that arrives may lie in another order too
        torch.testing.assert_close(mine.grad, inputs[rank].grad)


def _gathered(xs: list[Tensor]) -> list[Tensor]:
    return [torch.cat(xs)] * WORLD


def _scattered(xs: list[Tensor]) -> list[Tensor]:
    return list(torch.stack(xs).sum(0).chunk(WORLD))


def _summed(xs: list[Tensor]) -> list[Tensor]:
    return [torch.stack(xs).sum(0)] * WORLD


@pytest.mark.parametrize(
    ("function", "ours"),
    [(_gathered, gather_tokens), (_scattered, scatter_tokens), (_summed, sum_over_group)],
    ids=["gather_tokens", "scatter_tokens", "sum_over_group"],
)
def test_collectives_match_autograd_on_one_process(function: Any, ours: Any) -> None:
    run_ranks(_check, WORLD, function, ours)


def _total(rank: int, _: int) -> None:
    """All ranks make the same scalar of the total, and it is one loss, not one per rank."""
    inputs = [x.requires_grad_() for x in everyones("in", ROWS, WIDTH)]
    torch.stack(inputs).sum(0).square().sum().backward()
    for layout in (by_rank[rank] for by_rank in LAYOUTS):
        mine = layout(everyones("in", ROWS, WIDTH)[rank]).requires_grad_()
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
    assert shared_a.dtype == shared_b.dtype == expected_dtype
    assert torch.equal(shared_b, torch.full((2, 4), 2.0, dtype=expected_dtype))
    factor = torch.arange(8.0).view(4, 2).t().to(expected_dtype)  # a transposed gradient for b
    ((shared_a * (rank + 1)).sum() + (shared_b * factor * (rank + 1)).sum()).backward()
    assert a.grad is not None
    assert b.grad is not None
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


def _one_all_reduce(rank: int, _: int) -> list[int]:
    """A parameter that takes no part, or is frozen, is summed along all the same: every rank sends the same bytes."""
    sizes = []
    original = dist.all_reduce

    def counting(x: Tensor, **options: Any) -> Any:
        sizes.append(x.numel())
        return original(x, **options)

    dist.all_reduce = counting
    try:
        used, unused, frozen = torch.ones(3).requires_grad_(), torch.ones(4).requires_grad_(), torch.ones(5)
        shared = sum_gradients([used, unused, frozen], dist.group.WORLD)
        (shared[0].sum() * (rank + 1)).backward()
    finally:
        dist.all_reduce = original
    assert used.grad is not None
    assert used.grad.tolist() == [3.0] * 3
    assert unused.grad is not None
    assert not unused.grad.any()
    assert frozen.grad is None
    return sizes


def test_all_shared_gradients_travel_in_one_all_reduce() -> None:
    assert run_ranks(_one_all_reduce, WORLD) == [[12], [12]]


def _rounded_once(rank: int, _: int) -> float:
    weight = torch.zeros(1, dtype=torch.bfloat16).requires_grad_()
    [shared] = sum_gradients([weight], dist.group.WORLD)
    (shared * (3 * 2.0**-10 + (rank == 0))).sum().backward()
    assert weight.grad is not None
    return weight.grad.item()


def test_low_precision_gradients_are_summed_in_float32() -> None:
    """1 + 3 * 2**-10 is 1 in bfloat16, and adding 3 * 2**-10 to that leaves 1; their sum is nearer to 1 + 2**-7."""
    assert run_ranks(_rounded_once, WORLD) == [1 + 2.0**-7] * WORLD


def _routing(rank: int, _: int, dtype: torch.dtype, num_active: int) -> tuple[list[int], str]:
    sent: list[int] = []
    original = comm.start_gather

    def counting(x: Tensor, group: Any) -> Any:
        sent.append(x.numel() * x.element_size())
        return original(x, group)

    ids = [torch.randint(0, 129, (ROWS, num_active), generator=torch.Generator().manual_seed(r)) for r in range(WORLD)]
    ids[0][0, 0] = 2**15 - 1  # the largest number of an expert that two bytes hold
    weights = [x.to(dtype).requires_grad_() for x in everyones("weights", ROWS, num_active)]
    factors = [x.to(dtype) for x in everyones("factor", ROWS * WORLD, num_active)]
    whole = torch.cat(weights)
    sum((whole * factor).sum() for factor in factors).backward()  # type: ignore[union-attr]
    for layout in (by_rank[rank] for by_rank in LAYOUTS):
        mine = layout(everyones("weights", ROWS, num_active)[rank].to(dtype)).requires_grad_()
        comm.start_gather = counting
        try:
            got = gather_routing(layout(ids[rank]), mine, dist.group.WORLD)
        finally:
            comm.start_gather = original
        assert torch.equal(got.expert_ids_TA, torch.cat(ids))
        assert got.expert_ids_TA.dtype == torch.int64
        assert not got.expert_ids_TA.requires_grad
        assert torch.equal(got.weights_TA, whole)
        got.weights_TA.backward(layout(factors[rank]))
        torch.testing.assert_close(mine.grad, weights[rank].grad)
    return sent, str(got.weights_TA.dtype)


@pytest.mark.parametrize(("dtype", "row_bytes"), [(torch.float32, 6), (torch.float64, 10)], ids=str)
@pytest.mark.parametrize("num_active", [2, 3])
def test_ids_and_weights_travel_together_in_few_bytes(dtype: torch.dtype, row_bytes: int, num_active: int) -> None:
    expected = [ROWS * num_active * row_bytes] * len(LAYOUTS)
    assert run_ranks(_routing, WORLD, dtype, num_active) == [(expected, str(dtype))] * WORLD


def _without_backward(rank: int, _: int) -> None:
    rows = [torch.arange(12).view(2, 6).t() + 100 * r for r in range(WORLD)]  # [6, 2], transposed
    assert torch.equal(all_gather_rows(rows[rank], dist.group.WORLD), torch.cat(rows))
    summed = torch.stack(rows).sum(0)
    assert torch.equal(reduce_scatter_rows(rows[rank], dist.group.WORLD), summed.chunk(WORLD)[rank])


def test_rows_of_any_type_are_gathered_and_scattered() -> None:
    run_ranks(_without_backward, WORLD)


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
    assert sum_gradients([narrow], None, upcast=False)[0] is narrow


def test_wide_is_float32_at_least() -> None:
    given = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    assert [wide(torch.zeros(1, dtype=dtype)).dtype for dtype in given] == [torch.float32] * 3 + [torch.float64]
