"""A decoder block on fake tensors in a fake group of 1,024 ranks: it traces without values, each rank alike."""

from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from modeling.config import GatherMoeConfig
from modeling.cost import MoeTraffic
from modeling.decoder import GatherMoeDecoderLayer, OwnTokens
from modeling.execution import Execution
from modeling.init import shard_table
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh, one_rank_mesh
from tests.recording import Operator, Operators
from tests.referee import mixed_config
from tests.static_shapes import plain_inputs, static_shapes

pytestmark = pytest.mark.slow

WORLD, BATCH, BLOCK, HIDDEN = 1024, 2, 8192, 64
TOKENS = BATCH * BLOCK


class Case(NamedTuple):
    """A layout of the 1,024 ranks."""

    strategy: str
    tp: int
    ep: int

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(dp=WORLD // self.tp, tp=self.tp, ep=self.ep)

    def execution(self, **changes: Any) -> Execution:
        return Execution(**{"experts_backend": "grouped", "strategy": self.strategy, **changes})

    def config(self, **changes: Any) -> GatherMoeConfig:
        """As many heads and experts as ranks share them, slices of experts no thinner than a product of bf16 needs."""
        values = {
            "hidden_size": HIDDEN,
            "num_attention_heads": self.tp,
            "num_key_value_heads": 4,
            "num_experts": max(self.tp, 16),
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 8 * self.layout.etp,
            "mlp_only_layers": [],
            "max_position_embeddings": BLOCK,
        }
        return mixed_config(**(values | changes))


CASES = [
    Case("gather_tokens", tp=8, ep=8),
    Case("gather_tokens", tp=8, ep=1),
    Case("gather_tokens", tp=8, ep=4),
    Case("gather_weights", tp=8, ep=1),
    Case("gather_tokens", tp=64, ep=16),
    Case("gather_weights", tp=64, ep=1),
    Case("gather_tokens", tp=1024, ep=1024),
    Case("gather_tokens", tp=1024, ep=1),
    Case("gather_tokens", tp=1024, ep=128),
]


class Trace(NamedTuple):
    """What one rank's forward and backward of the block did. Shapes by name, of parameters as the table says."""

    operators: list[Operator]
    moved_bytes: int
    out: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    want_shapes: dict[str, tuple[int, ...]]


def trace(case: Case, *, rank: int, changes: dict[str, Any]) -> Trace:
    """Run the block as this rank of the fake group, in bf16; whatever needs a value raises."""
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    torch.set_default_dtype(torch.bfloat16)
    try:
        options = dict(changes)
        qk_norm = {"qk_norm": options.pop("qk_norm")} if "qk_norm" in options else {}
        return _trace(case, case.config(**qk_norm), case.execution(**options))
    finally:
        torch.set_default_dtype(torch.float32)
        dist.destroy_process_group()


def _trace(case: Case, config: GatherMoeConfig, execution: Execution) -> Trace:
    mesh = build_mesh(case.layout, num_key_value_heads=config.num_key_value_heads)
    num_tokens = TOKENS // case.tp
    with FakeTensorMode():
        block = GatherMoeDecoderLayer(config, layer_idx=1, mesh=mesh, execution=execution)
        x = torch.randn(num_tokens, HIDDEN, requires_grad=True)
        tokens = mesh.group_rank * num_tokens + torch.arange(num_tokens)
        own = OwnTokens(BATCH, tokens // BLOCK, torch.ones(num_tokens, dtype=torch.bool))
        inputs = plain_inputs(config, block_size=BLOCK, dtype=torch.bfloat16)
        with static_shapes(), Operators() as seen:
            out, *statistics = block(x, inputs=inputs, tokens=own)
            torch.stack([y.float().square().sum() for y in (out, *statistics) if y.requires_grad]).sum().backward()
    assert x.grad is not None
    shapes, want = {"x": tuple(x.grad.shape)}, {"x": (num_tokens, HIDDEN)}
    table = shard_table(config, mesh)
    with FakeTensorMode():
        alone = GatherMoeDecoderLayer(config, layer_idx=1, mesh=one_rank_mesh(), execution=Execution())
        whole = dict(alone.named_parameters())
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        shapes[name] = tuple(parameter.grad.shape)
        shard = table.shard(f"model.layers.1.{name}", tuple(whole[name].shape), group_rank=mesh.group_rank)
        want[name] = shard.shape
    return Trace(seen.called, seen.num_bytes("all_gather", "reduce_scatter"), tuple(out.shape), shapes, want)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        *((case, {}) for case in CASES),
        *((CASES[i], {"qk_norm": "full"}) for i in (0, 4)),
        *((CASES[i], {"overlap": True, "overlap_chunks": 3}) for i in (0, 1, 3, 8)),
        *((CASES[i], {"regather": True}) for i in (0, 1)),
    ],
    ids=str,
)
def test_a_block_of_1024_ranks_needs_no_value(case: Case, changes: dict[str, Any], alone: ProcessPoolExecutor) -> None:
    got = alone.submit(trace, case, rank=5, changes=changes).result(timeout=60)
    assert got.out == (TOKENS // case.tp, HIDDEN)
    assert got.shapes == got.want_shapes
    # The larger side of each transfer; the formulas count what a ring sends of it.
    traffic = MoeTraffic(sizes=case.config().sizes, layout=case.layout, num_tokens=TOKENS, element_bytes=2)
    experts = traffic.wire_bytes(case.strategy).total * case.tp / (case.tp - 1)
    # Attention gathers and scatters all tokens, forward and backward; what is gathered again comes twice more.
    tokens = (4 + 2 * changes.get("regather", False)) * TOKENS * HIDDEN * 2
    assert got.moved_bytes == pytest.approx(tokens + experts, rel=1e-12)


@pytest.mark.parametrize("case", CASES[1:4], ids=str)
def test_the_first_and_the_last_rank_do_the_same(case: Case, alone: ProcessPoolExecutor) -> None:
    first, last = (alone.submit(trace, case, rank=rank, changes={}).result(timeout=60) for rank in (0, WORLD - 1))
    assert len(first.operators) > 100
    assert first == last


@pytest.mark.parametrize("changes", [{"experts_backend": "loop"}, {"strategy": "all_to_all"}], ids=str)
def test_what_reads_counts_on_the_host_is_found(changes: dict[str, Any], alone: ProcessPoolExecutor) -> None:
    with pytest.raises(RuntimeError, match="depends on data"):
        alone.submit(trace, CASES[0], rank=5, changes=changes).result(timeout=60)
