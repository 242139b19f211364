"""Sliced experts: every rank multiplies equally much, whatever the routing is. Whole experts: not at all."""

import pytest
import torch
from torch import Tensor, nn

from modeling.execution import Execution
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh
from modeling.moe import GatherMoeSparseBlock
from tests.ranks import run_ranks
from tests.recording import ProductFlops
from tests.referee import tiny_config

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
        with ProductFlops() as counter:
            out, routing = block(x_tD)
            forward = counter.flops
            out.square().sum().backward()
        assert torch.equal(routing.expert_ids_tA, ids_tA)
        found[name] = (forward, counter.flops)
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
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
