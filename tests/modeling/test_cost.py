"""What a MoE layer costs: the bytes that its collectives send equal the formulas, and sliced experts work equally."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from modeling.cost import MoeTraffic, choose_strategy, tokens_where_weights_pay
from modeling.execution import Execution
from modeling.layout import ParallelLayout, divisors
from modeling.mesh import build_mesh
from modeling.moe import GatherMoeSparseBlock
from recipe.dry_run.ledger import Ledger, Volume, widest_routing_row
from tests.engine_runs import slow
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


@pytest.mark.parametrize(
    ("strategy", "size", "ep", "options", "in_the_formula"),
    [
        *(
            (strategy, size, ep, {}, {})
            for size in (2, 4)
            for strategy, eps in (("gather_tokens", divisors(size)), ("gather_weights", [1]), ("all_to_all", [size]))
            for ep in eps
        ),
        ("gather_tokens", 2, 2, {"overlap": True, "overlap_chunks": 5}, {}),
        ("gather_tokens", 2, 2, {"overlap": True, "overlap_chunks": 3, "regather": True}, {"regather": True}),
        (
            *("gather_tokens", 2, 2),
            {"token_dtype": "float8_e4m3", "combine_dtype": "float32"},
            {"fp8_tokens": True, "sum_bytes": 4},
        ),
        (
            *("gather_tokens", 2, 2),
            {"token_dtype": "float8_e4m3", "regather": True},
            {"fp8_tokens": True, "regather": True},
        ),
    ],
    ids=str,
)
def test_counted_bytes_equal_the_formula(
    strategy: str, size: int, ep: int, options: dict[str, Any], in_the_formula: dict[str, Any]
) -> None:
    for num_active, dtype in ((1, torch.bfloat16), (2, torch.bfloat16 if options else torch.float32)):
        traffic = MoeTraffic(
            sizes=tiny_config(num_experts=8, num_experts_per_tok=num_active).sizes,
            layout=ParallelLayout(tp=size, ep=ep),
            num_tokens=NUM_TOKENS,
            element_bytes=dtype.itemsize,
            **in_the_formula,
        )
        want = traffic.wire_bytes(strategy)
        by_rank = run_ranks(counted, size, strategy, ep, num_active, dtype, options)
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


EXPERTS, ACTIVE, TOKENS = 8, 2, 24


def routings() -> dict[str, Tensor]:
    """Expert ids [T, A] that whole experts would suffer from."""
    token = torch.arange(TOKENS)[:, None]
    # Half of the tokens to one expert, half of the rest to the next.
    tail = (TOKENS / (TOKENS - token)).log2().long()
    return {
        "spread evenly": torch.cat([token % EXPERTS, (token + 3) % EXPERTS], dim=1),
        "all to the first rank's": torch.tensor([[0, 1]]).repeat(TOKENS, 1),
        "all to the last": torch.tensor([[EXPERTS - 1, EXPERTS - 2]]).repeat(TOKENS, 1),
        "a long tail": torch.cat([tail, tail + 1 + token % 3], dim=1),
        "one expert left out": torch.cat([1 + token % 7, 1 + (token + 1) % 7], dim=1),
    }


def router_flops(size: int) -> int:
    return 2 * (TOKENS // size) * tiny_config().hidden_size * EXPERTS


def grouped_flops(a: Tensor, b: Tensor, offsets: Tensor, *_: Any, **__: Any) -> int:
    """Of a grouped product only the rows before the last offset count: the others are never touched."""
    per_row = b.shape[1] * b.shape[2] if b.dim() == 3 else a.shape[0] * b.shape[1]
    return 2 * int(offsets[-1]) * per_row


grouped_flops._get_raw = True  # type: ignore[attr-defined]  # tensors, not their shapes


def work(rank: int, world_size: int, ep: int, backend: str, strategy: str) -> dict[str, tuple[int, int]]:
    """FLOPs of this rank's products by routing: forward, and forward and backward together."""
    config = tiny_config(num_experts=EXPERTS, num_experts_per_tok=ACTIVE)
    execution = Execution(experts_backend=backend, strategy=strategy)
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=ep), num_key_value_heads=2)
    torch.manual_seed(rank)
    block = GatherMoeSparseBlock(config, mesh=mesh, execution=execution)
    for parameter in block.experts.parameters():
        nn.init.normal_(parameter)
    # The first numbers of a token are its logits.
    nn.init.eye_(block.gate.weight)
    found = {}
    for name, ids_TA in routings().items():
        ids_tA = ids_TA.chunk(world_size)[rank]
        x_tD = torch.randn(len(ids_tA), config.hidden_size)
        x_tD[:, :EXPERTS] = 0.0
        x_tD.scatter_(1, ids_tA, torch.tensor([[3.0, 2.0]]).expand_as(ids_tA)).requires_grad_()
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_flops}) as counter:
            out, routing = block(x_tD)
            forward = counter.get_total_flops()
            out.square().sum().backward()
        assert torch.equal(routing.expert_ids_tA, ids_tA)
        found[name] = (forward, counter.get_total_flops())
    return found


@pytest.mark.parametrize("size", [2, slow(4)])
@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_sliced_experts_give_every_rank_the_same_work_for_every_routing(backend: str, size: int) -> None:
    by_rank = run_ranks(work, size, 1, backend, "gather_tokens")
    counts = {count for found in by_rank for count in found.values()}
    assert len(counts) == 1, by_rank
    ((forward, both),) = counts
    hidden, width = tiny_config().hidden_size, tiny_config().moe_intermediate_size
    # Three matrices, A * T rows, an N-th of the width each.
    assert forward == router_flops(size) + 2 * 3 * hidden * width * ACTIVE * TOKENS // size
    assert both == 3 * forward


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_whole_experts_do_not(backend: str) -> None:
    """All tokens to the first rank's experts: it does everything, the other nothing but route."""
    by_rank = run_ranks(work, 2, 2, backend, "gather_tokens")
    (first, _), (second, _) = (found["all to the first rank's"] for found in by_rank)
    even = by_rank[0]["spread evenly"][0]
    assert even == by_rank[1]["spread evenly"][0]
    assert second == router_flops(2)
    assert first - second == 2 * (even - second)


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_gathered_weights_give_every_rank_the_work_of_its_own_tokens(backend: str) -> None:
    by_rank = run_ranks(work, 2, 1, backend, "gather_weights")
    assert len({count for found in by_rank for count in found.values()}) == 1
