"""The bytes a MoE layer puts on the wire, counted at the collectives, equal the formulas exactly."""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from modeling.cost import MoeTraffic, choose_strategy, tokens_where_weights_pay
from modeling.layout import ParallelLayout, divisors
from modeling.mesh import build_mesh
from modeling.moe import GatherMoeSparseBlock
from tests.parity import tiny_config
from tests.ranks import run_ranks

NUM_TOKENS = 48


class Ledger:
    """Counts what one rank sends in collectives, payload (floating point) apart from bytes and integers."""

    def __init__(self) -> None:
        self.payload = self.routing = 0.0

    def add(self, tensor: torch.Tensor, num_bytes: float, *, is_weight_gradient: bool = False) -> None:
        if tensor.is_floating_point() and not is_weight_gradient:
            self.payload += num_bytes
        else:
            self.routing += num_bytes

    def watch(self, size: int, num_active: int) -> Any:
        """Patch torch.distributed; a ring sends (N-1)/N of the larger side, an exchange all rows but a rank's own."""
        share, rank = (size - 1) / size, dist.get_rank()
        gather, scatter, exchange = dist.all_gather_single, dist.reduce_scatter_single, dist.all_to_all_single

        def gathered(out: Any, x: Any, **options: Any) -> Any:
            self.add(out, share * out.numel() * out.element_size())
            return gather(out, x, **options)

        def scattered(out: Any, x: Any, **options: Any) -> Any:
            narrow = x.shape[-1] == num_active
            self.add(x, share * x.numel() * x.element_size(), is_weight_gradient=narrow)
            return scatter(out, x, **options)

        def exchanged(out: Any, x: Any, receive: Any, send: Any, **options: Any) -> Any:
            rows = sum(send) - send[rank]
            self.add(x, rows * x[0:1].numel() * x.element_size())
            return exchange(out, x, receive, send, **options)

        return patch.multiple(
            dist, all_gather_single=gathered, reduce_scatter_single=scattered, all_to_all_single=exchanged
        )


def counted(rank: int, world_size: int, strategy: str, ep: int, num_active: int, dtype: Any) -> tuple[float, float]:
    """One forward and backward of the MoE layer, every expert with the same number of tokens."""
    config = tiny_config(num_experts=8, num_experts_per_tok=num_active, strategy=strategy)
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=ep), num_key_value_heads=2)
    torch.manual_seed(0)
    block = GatherMoeSparseBlock(config, mesh=mesh)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    block.to(dtype)
    # Token i prefers the experts i, i+1, ...: all ranks get and send equally much.
    tokens = torch.arange(NUM_TOKENS).chunk(world_size)[rank]
    x_tD = torch.zeros(len(tokens), config.hidden_size, dtype=dtype)
    x_tD[torch.arange(len(tokens)), tokens % 8] = 1.0
    with torch.no_grad():
        block.gate.weight.zero_()
        for expert in range(8):
            for token in range(8):
                block.gate.weight[expert, token] = -float((expert - token) % 8)
    ledger = Ledger()
    with ledger.watch(world_size, num_active):
        out, _ = block(x_tD.requires_grad_())
        out.float().sum().backward()
    return ledger.payload, ledger.routing


CASES = [
    (strategy, size, ep)
    for size in (2, 4)
    for strategy, eps in (("gather_tokens", divisors(size)), ("gather_weights", [1]), ("all_to_all", [size]))
    for ep in eps
]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("strategy", "size", "ep"), CASES)
def test_counted_bytes_equal_the_formula(strategy: str, size: int, ep: int, dtype: torch.dtype) -> None:
    for num_active in (1, 2):
        sizes = tiny_config(num_experts=8, num_experts_per_tok=num_active).sizes
        traffic = MoeTraffic(
            sizes=sizes,
            layout=ParallelLayout(tp=size, ep=ep),
            num_tokens=NUM_TOKENS,
            element_bytes=dtype.itemsize,
        )
        want = traffic.wire_bytes(strategy)
        by_rank = run_ranks(counted, size, strategy, ep, num_active, dtype)
        # The rows of an exchange differ from rank to rank; their mean is what the formula gives.
        payload, routing = (sum(column) / size for column in zip(*by_rank, strict=True))
        assert math.isclose(payload, want.payload, rel_tol=1e-12), (num_active, payload, want)
        assert math.isclose(routing, want.routing, rel_tol=1e-12), (num_active, routing, want)


def test_weights_travel_from_t_star_on() -> None:
    sizes = tiny_config(num_experts=8).sizes
    threshold = tokens_where_weights_pay(sizes)
    assert threshold == 0.75 * 3 * 8 * 32
    sliced = MoeTraffic(sizes=sizes, layout=ParallelLayout(tp=4, ep=1), num_tokens=int(threshold), element_bytes=2)
    assert choose_strategy(sliced) == "gather_tokens"
    assert choose_strategy(replace(sliced, num_tokens=int(threshold) + 1)) == "gather_weights"
    by_tokens, by_weights = (sliced.wire_bytes(name).payload for name in ("gather_tokens", "gather_weights"))
    assert by_tokens == by_weights, "T* is where both payloads are equal"


def test_rows_travel_where_few_experts_are_active_and_the_load_is_even() -> None:
    sizes = tiny_config(num_experts=8, num_experts_per_tok=1).sizes
    whole = MoeTraffic(sizes=sizes, layout=ParallelLayout(tp=4, ep=4), num_tokens=64, element_bytes=2)
    assert choose_strategy(whole) == "all_to_all"
    assert choose_strategy(replace(whole, rho=2.5)) == "gather_tokens"
    assert choose_strategy(replace(whole, layout=ParallelLayout(tp=4, ep=2))) == "gather_tokens"
    assert choose_strategy(replace(whole, layout=ParallelLayout())) == "gather_tokens"


def test_a_strategy_without_a_formula_is_refused() -> None:
    traffic = MoeTraffic(sizes=tiny_config().sizes, layout=ParallelLayout(tp=2), num_tokens=8, element_bytes=4)
    with pytest.raises(ValueError, match="strategy='magic' has no formula"):
        traffic.wire_bytes("magic")
