"""Every strategy, layout and number of active experts, under adversarial routing, against all experts on one rank."""

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from modeling.build import build_model
from modeling.dispatch import Dispatch, dispatch
from modeling.experts import GatherMoeExperts
from modeling.layout import ParallelLayout, divisors
from modeling.mesh import build_mesh, one_rank_mesh
from modeling.router import Routing, route
from modeling.shard_table import ShardTable
from modeling.sharding import cut, join
from modeling.wire import Wire
from tests.engine_runs import Case, slow, three_steps, train
from tests.ranks import run_ranks
from tests.referee import assert_runs_match, full_state, mixed_config, referee_run, tiny_config

NUM_TOKENS, NUM_EXPERTS, HIDDEN, WIDTH = 24, 8, 16, 16
STRATEGIES = ("gather_tokens", "gather_weights", "all_to_all")
ROUTINGS = ("random", "all to one", "last rank idle", "one expert idle", "ties", "padding")


class Answer(NamedTuple):
    """Output and every gradient, whole tensors."""

    out: Tensor
    x: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor


def valid_layouts(strategy: str, size: int) -> list[int]:
    """The ep that a strategy works with in a group of `size`."""
    return {"gather_tokens": divisors(size), "gather_weights": [1], "all_to_all": [size]}[strategy]


def make_config(num_active: int, *, backend: str, strategy: str) -> Any:
    return tiny_config(
        hidden_size=HIDDEN,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=num_active,
        moe_intermediate_size=WIDTH,
        experts_backend=backend,
        strategy=strategy,
    )


def choose(kind: str, num_active: int) -> tuple[Tensor, Tensor]:
    """Expert ids [T, A] and weights [T, A] of all tokens."""
    generator = torch.Generator().manual_seed(num_active)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator, dtype=torch.float64)
    if kind == "all to one":
        logits[:, : NUM_EXPERTS - num_active + 1] -= 100.0
        logits[:, 2] += 300.0
    elif kind == "last rank idle":
        logits[:, -NUM_EXPERTS // 4 :] -= 100.0
    elif kind == "one expert idle":
        logits[:, 3] -= 100.0
    elif kind == "ties":
        logits[:] = 0.0
    mask = torch.arange(NUM_TOKENS) % 3 > 0 if kind == "padding" else None
    routing = route(logits, num_active=num_active, renormalise=True, token_mask_t=mask)
    return routing.expert_ids_tA, routing.weights_tA


def whole_numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, the output's gradient, and both weights."""
    generator = torch.Generator().manual_seed(9)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return (
        draw(NUM_TOKENS, HIDDEN),
        draw(NUM_TOKENS, HIDDEN),
        draw(NUM_EXPERTS, 2 * WIDTH, HIDDEN) * 0.3,
        draw(NUM_EXPERTS, HIDDEN, WIDTH) * 0.3,
    )


@functools.cache
def reference(num_active: int, kind: str, dtype: torch.dtype) -> Answer:
    """Token by token and expert by expert, by autograd."""
    x, grad, gate_up, down = (tensor.requires_grad_(i != 1) for i, tensor in enumerate(whole_numbers(dtype)))
    ids, weights = choose(kind, num_active)
    weights = weights.to(dtype).detach().requires_grad_()
    rows = []
    for token in range(NUM_TOKENS):
        total = torch.zeros(HIDDEN, dtype=dtype)
        for slot in range(num_active):
            expert = int(ids[token, slot])
            if expert < NUM_EXPERTS:
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                total = total + weights[token, slot] * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    out = torch.stack(rows)
    out.backward(grad)
    zeros = torch.zeros_like(weights)
    found = (x.grad, weights.grad if weights.grad is not None else zeros, gate_up.grad, down.grad)
    return Answer(out.detach(), *found)


def sharded_answers(rank: int, world_size: int, backend: str, dtype: torch.dtype) -> dict[Any, Any]:
    """This rank's outputs and gradients of every case."""
    meshes = {1: one_rank_mesh()}
    if world_size > 1:
        layouts = [ParallelLayout(tp=world_size, ep=ep) for ep in divisors(world_size)]
        meshes = {layout.ep: build_mesh(layout, num_key_value_heads=2) for layout in layouts}
    answers = {}
    wire = Wire(overlap=True, num_chunks=2, regather=True, sum_dtype=None)
    for strategy, num_active, kind in itertools.product(STRATEGIES, (1, 2, 3, 8), ROUTINGS):
        for ep in valid_layouts(strategy, world_size):
            key = (strategy, num_active, kind, ep)
            answers[key] = one_answer(meshes[ep], wire, strategy, num_active, kind, backend, dtype)
    return answers


def one_answer(
    mesh: Any, wire: Wire, strategy: str, num_active: int, kind: str, backend: str, dtype: torch.dtype
) -> Any:
    size, rank = mesh.layout.tp, mesh.group_rank
    table = ShardTable(mesh.layout, 2, "none")
    x, grad, gate_up, down = whole_numbers(dtype)
    experts = GatherMoeExperts(make_config(num_active, backend=backend, strategy=strategy), mesh=mesh).to(dtype)
    for name, whole in (("gate_up_proj", gate_up), ("down_proj", down)):
        shard = table.shard(f"model.layers.0.mlp.experts.{name}", tuple(whole.shape), group_rank=rank)
        experts.get_parameter(name).data.copy_(cut(whole, shard))
    ids, weights = choose(kind, num_active)
    here = slice(rank * NUM_TOKENS // size, (rank + 1) * NUM_TOKENS // size)
    x_tD, weights_tA = x[here].requires_grad_(), weights.to(dtype)[here].detach().requires_grad_()
    routing = Routing(torch.empty(0), ids[here], weights_tA)
    out, _ = dispatch(Dispatch(x_tD, lambda: routing, experts, mesh, wire), strategy=strategy)
    out.backward(grad[here])
    return out.detach(), x_tD.grad, weights_tA.grad, experts.gate_up_proj.grad, experts.down_proj.grad


def join_answer(by_rank: list[Any], layout: ParallelLayout) -> Answer:
    table = ShardTable(layout, 2, "none")
    rows = [torch.cat([answer[i] for answer in by_rank]) for i in range(3)]
    shapes = {"gate_up_proj": (NUM_EXPERTS, 2 * WIDTH, HIDDEN), "down_proj": (NUM_EXPERTS, HIDDEN, WIDTH)}
    whole = []
    for i, (name, shape) in enumerate(shapes.items(), start=3):
        shards = [
            table.shard(f"model.layers.0.mlp.experts.{name}", shape, group_rank=rank) for rank in range(layout.tp)
        ]
        whole.append(join([(answer[i], shard) for answer, shard in zip(by_rank, shards, strict=True)]))
    return Answer(*rows, *whole)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [slow("loop", torch.float64, 1e-12), ("loop", torch.float32, 1e-5), ("grouped", torch.float32, 1e-5)],
    ids=["loop-float64", "loop-float32", "grouped-float32"],
)
def test_every_strategy_equals_one_rank(world_size: int, backend: str, dtype: torch.dtype, tolerance: float) -> None:
    by_rank = run_ranks(sharded_answers, world_size, backend, dtype)
    wanted = {
        (num_active, kind): reference(num_active, kind, torch.float64)
        for num_active, kind in itertools.product((1, 2, 3, 8), ROUTINGS)
    }
    for strategy, num_active, kind, ep in by_rank[0]:
        key = (strategy, num_active, kind, ep)
        got = join_answer([answers[key] for answers in by_rank], ParallelLayout(tp=world_size, ep=ep))
        for name, tensor in got._asdict().items():
            want = getattr(wanted[num_active, kind], name)
            scale = max(want.abs().max().item(), 1.0)
            error = (tensor.double() - want).abs().max().item()
            assert error <= tolerance * scale, (key, name, error)


def bitwise_differences(rank: int, world_size: int, backend: str, dtype: torch.dtype) -> list[str]:
    """Where overlap changes any bit of an output or gradient, cut in the same number of chunks."""
    different = []
    for strategy, ep in (("gather_tokens", world_size), ("gather_tokens", 1), ("gather_weights", 1)):
        mesh = build_mesh(ParallelLayout(tp=world_size, ep=ep), num_key_value_heads=2)
        for num_chunks, regather, kind in itertools.product((1, 3), (False, True), ("random", "last rank idle")):
            found = []
            for overlap in (False, True):
                wire = Wire(overlap, num_chunks, regather, torch.float32)
                found.append(one_answer(mesh, wire, strategy, 2, kind, backend, dtype))
            if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
                different.append(f"{strategy} ep={ep} {num_chunks} chunks, {regather=}, {kind}")
    return different


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("loop", torch.float32), ("grouped", torch.float32), ("loop", torch.bfloat16)],
    ids=["loop-float32", "grouped-float32", "loop-bfloat16"],
)
def test_overlap_changes_no_bit(backend: str, dtype: torch.dtype) -> None:
    assert run_ranks(bitwise_differences, 2, backend, dtype) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("strategy", "ep"), [("gather_tokens", 2), ("gather_weights", 1), ("all_to_all", 2)])
def test_training_matches_one_plain_process_with_every_strategy(strategy: str, ep: int, stage: int) -> None:
    case = Case(dp=2, tp=2, ep=ep, stage=stage, accumulation=3, checkpointing=stage == 3)
    config = mixed_config(strategy=strategy, overlap=True, overlap_chunks=2)
    state = full_state(config)
    got = train(config, state, case, **three_steps(config, case))
    assert_runs_match(got, referee_run(config, state, **three_steps(config, case)))


SMALL = {"num_hidden_layers": 1, "moe_intermediate_size": 16}  # hundreds of steps; T* is 144 tokens


def mixed_lengths(step: int) -> Tensor:
    """2 sequences of 32, which stay below T*, and 6, which do not, in turn; some ids come more often than others."""
    ids = torch.rand((2, 6)[step % 2], 32, generator=torch.Generator().manual_seed(step)).square() * 50
    return ids.long()


def losses_over_mixed_lengths(
    rank: int, world_size: int, strategy: str, num_steps: int
) -> tuple[list[float], set[str]]:
    """Plain AdamW in float64 on a model shared by two ranks; the strategies that its layers took."""
    torch.manual_seed(0)
    config = tiny_config(strategy=strategy, **SMALL)
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=1), num_key_value_heads=2)
    model = build_model(config, mesh=mesh, seed=3, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, taken = [], set()
    for step in range(num_steps):
        ids = mixed_lengths(step)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        taken.add(model.model.layers[0].mlp.strategy_for(torch.empty(ids.numel() // world_size, 32)))
    return losses, taken


@pytest.mark.slow
def test_switching_strategies_by_length_gives_the_curve_of_either_alone() -> None:
    curves = {}
    for strategy in ("gather_tokens", "gather_weights", "auto"):
        curves[strategy], taken = run_ranks(losses_over_mixed_lengths, 2, strategy, 200, timeout_s=120.0)[0]
        assert taken == ({"gather_tokens", "gather_weights"} if strategy == "auto" else {strategy})
    for strategy in ("gather_weights", "auto"):
        torch.testing.assert_close(curves[strategy], curves["gather_tokens"], atol=1e-5, rtol=0)
    assert curves["auto"][-1] < curves["auto"][0]


def worst_step_from_the_same_state(rank: int, world_size: int, num_steps: int) -> float:
    """Of all steps in float32, the largest difference that the strategy makes to a loss or a gradient."""
    config = tiny_config(strategy="gather_tokens", overlap=True, overlap_chunks=2, **SMALL)
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=1), num_key_value_heads=2)
    model = build_model(config, mesh=mesh, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    worst = 0.0
    for step in range(num_steps):
        ids = mixed_lengths(step)
        found = []
        for strategy in ("gather_weights", "gather_tokens"):
            for layer in model.model.layers:
                layer.mlp.strategy = strategy
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
        for one, other in zip(*found, strict=True):
            worst = max(worst, (one - other).abs().max().item() / max(1.0, other.abs().max().item()))
        optimizer.step()
    return worst


@pytest.mark.slow
def test_in_float32_every_step_from_the_same_state_is_the_same_step() -> None:
    """Trajectories of two orders of summation part after a hundred steps; steps do not."""
    for worst in run_ranks(worst_step_from_the_same_state, 2, 200, timeout_s=120.0):
        assert 0.0 < worst < 1e-5
