"""A decoder block has static shapes and shows the host no number, also on fake tensors in a group of 1,024 ranks."""

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
from modeling.init import build_model, shard_table
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh, one_rank_mesh
from modeling.noise import NoiseOrigin, token_counters
from tests.ranks import run_ranks
from tests.recording import Operator, Operators
from tests.referee import mixed_config, split_options
from tests.static_shapes import plain_inputs, static_shapes


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: int(x.sum()),
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), torch.zeros(())),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.long().bincount(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.tensor_split(x, torch.tensor([1, 2])),
    ],
)
def test_the_mode_refuses_what_a_graph_cannot_hold(read: Any) -> None:
    with pytest.raises(RuntimeError, match="depends on data"), static_shapes():
        read(torch.arange(4.0))


def test_the_mode_lets_static_operators_through() -> None:
    x = torch.arange(4.0)
    with static_shapes():
        assert x[torch.tensor([1, 2])].shape == (2,)
        assert x.repeat_interleave(2).shape == (8,)
        x[torch.tensor([0])] = 1.0
        x.masked_fill_(x > 2, 0.0)


def _refused(rank: int, _: int, ep: int, options: dict[str, Any]) -> str:
    """What the mode says of a forward and backward of a sparse block on this rank; nothing if it refuses nothing."""
    changes, execution = split_options(options)
    config = mixed_config(num_experts=4, num_experts_per_tok=2, mlp_only_layers=[], **changes)
    mesh = build_mesh(ParallelLayout(tp=2, ep=ep), num_key_value_heads=config.sizes.num_key_value_heads)
    model = build_model(config, mesh=mesh, execution=execution, seed=1)
    block = model.model.layers[1]
    num_tokens = 8
    tokens = rank * num_tokens + torch.arange(num_tokens)
    inputs = plain_inputs(config, block_size=num_tokens, dtype=torch.float32)
    noise_t = token_counters(tokens, origin=NoiseOrigin(1, 0), layer_idx=1) if config.router_jitter_noise else None
    own = OwnTokens(2, tokens // num_tokens, torch.arange(num_tokens) > 1, noise_t)
    x = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    try:
        with static_shapes():
            out, _, probs_BE, z_B, *_ = block(x, inputs=inputs, tokens=own)
            (out.square().sum() + probs_BE.square().sum() + z_B.sum()).backward()
    except RuntimeError as error:
        return str(error)
    assert all(p.grad is not None for p in (x, *block.parameters()))
    return ""


GROUPED = {"experts_backend": "grouped"}
ON_THE_HOST = "tolist depends on data"


@pytest.mark.parametrize(
    ("ep", "options", "refused"),
    [
        (2, GROUPED, ""),
        (1, GROUPED | {"qk_norm": "full"}, ""),
        (1, GROUPED | {"qk_norm": "none", "strategy": "gather_weights"}, ""),
        (2, GROUPED | {"score_function": "sigmoid", "router_bias": True, "router_jitter_noise": 0.1}, ""),
        (2, {"experts_backend": "loop"}, ON_THE_HOST),
        (1, {"experts_backend": "loop"}, ON_THE_HOST),
        (2, GROUPED | {"strategy": "all_to_all"}, ON_THE_HOST),
    ],
    ids=str,
)
def test_all_but_the_loop_and_an_exchange_of_rows_has_static_shapes(
    ep: int, options: dict[str, Any], refused: str
) -> None:
    assert run_ranks(_refused, 2, ep, options) == [refused] * 2


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[1:4], ids=str)
def test_the_first_and_the_last_rank_do_the_same(case: Case, alone: ProcessPoolExecutor) -> None:
    first, last = (alone.submit(trace, case, rank=rank, changes={}).result(timeout=60) for rank in (0, WORLD - 1))
    assert len(first.operators) > 100
    assert first == last
