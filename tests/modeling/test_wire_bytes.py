"""The bytes a MoE layer puts on the wire, counted at the collectives, equal the formulas exactly."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from modeling.cost import MoeTraffic, choose_strategy, tokens_where_weights_pay
from modeling.execution import Execution
from modeling.layout import ParallelLayout, divisors
from modeling.mesh import build_mesh
from modeling.moe import GatherMoeSparseBlock
from recipe.dry_run.ledger import Ledger, Volume, widest_routing_row
from tests.ranks import run_ranks
from tests.referee import tiny_config

NUM_TOKENS = 48


def counted(
    rank: int, world_size: int, strategy: str, ep: int, num_active: int, dtype: Any, options: dict[str, Any]
) -> Volume:
    """One forward and backward of the MoE layer, every expert with the same number of tokens."""
    config = tiny_config(num_experts=8, num_experts_per_tok=num_active)
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=ep), num_key_value_heads=2)
    torch.manual_seed(0)
    block = GatherMoeSparseBlock(config, mesh=mesh, execution=Execution(strategy=strategy, **options))
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
    with Ledger() as ledger:
        out, _ = block(x_tD.requires_grad_())
        out.float().sum().backward()
    return ledger.volume(narrow_bytes=widest_routing_row(num_active))


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
        by_rank = run_ranks(counted, size, strategy, ep, num_active, dtype, {})
        # The rows of an exchange differ from rank to rank; their mean is what the formula gives.
        payload, routing = (sum(column) / size for column in zip(*by_rank, strict=True))
        assert math.isclose(payload, want.payload, rel_tol=1e-12), (num_active, payload, want)
        assert math.isclose(routing, want.routing, rel_tol=1e-12), (num_active, routing, want)


@pytest.mark.parametrize(
    ("options", "in_the_formula"),
    [
        ({"overlap": True, "overlap_chunks": 5}, {}),
        ({"overlap": True, "overlap_chunks": 3, "regather": True}, {"regather": True}),
        ({"token_dtype": "float8_e4m3", "combine_dtype": "float32"}, {"fp8_tokens": True, "sum_bytes": 4}),
        ({"token_dtype": "float8_e4m3", "regather": True}, {"fp8_tokens": True, "regather": True}),
    ],
    ids=["chunks", "regather", "fp8 in, fp32 out", "fp8 twice"],
)
def test_options_of_the_wire_are_in_the_formula(options: dict[str, Any], in_the_formula: dict[str, Any]) -> None:
    traffic = MoeTraffic(
        sizes=tiny_config(num_experts=8, num_experts_per_tok=2).sizes,
        layout=ParallelLayout(tp=2, ep=2),
        num_tokens=NUM_TOKENS,
        element_bytes=2,
        **in_the_formula,
    )
    want = traffic.wire_bytes("gather_tokens")
    for payload, routing in run_ranks(counted, 2, "gather_tokens", 2, 2, torch.bfloat16, options):
        assert math.isclose(payload, want.payload, rel_tol=1e-12), (payload, want)
        assert math.isclose(routing, want.routing, rel_tol=1e-12), (routing, want)


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
