"""Every strategy, layout and number of active experts, under adversarial routing, against all experts on one rank."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.execution import Execution
from modeling.init import build_model
from modeling.layout import ParallelLayout, divisors
from modeling.mesh import build_mesh, one_rank_mesh
from tests.engine_runs import Case, slow, three_steps, train
from tests.moe_layers import ROUTINGS, choose, join_answer, make_layer, reference
from tests.ranks import run_ranks
from tests.referee import assert_runs_match, full_state, mixed_config, referee_run, tiny_config

STRATEGIES = ("gather_tokens", "gather_weights", "all_to_all")


def valid_layouts(strategy: str, size: int) -> list[int]:
    """The ep that a strategy works with in a group of `size`."""
    return {"gather_tokens": divisors(size), "gather_weights": [1], "all_to_all": [size]}[strategy]


def one_answer(mesh: Any, execution: Execution, num_active: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return make_layer(mesh, *choose(kind, num_active), execution=execution, dtype=dtype).run()


def sharded_answers(rank: int, world_size: int, backend: str, dtype: torch.dtype) -> dict[Any, Any]:
    """This rank's outputs and gradients of every case."""
    meshes = {1: one_rank_mesh()}
    if world_size > 1:
        layouts = [ParallelLayout(tp=world_size, ep=ep) for ep in divisors(world_size)]
        meshes = {layout.ep: build_mesh(layout, num_key_value_heads=2) for layout in layouts}
    answers = {}
    for strategy, num_active, kind in itertools.product(STRATEGIES, (1, 2, 3, 8), ROUTINGS):
        execution = Execution(strategy=strategy, experts_backend=backend, overlap=True, overlap_chunks=2, regather=True)
        for ep in valid_layouts(strategy, world_size):
            answers[strategy, num_active, kind, ep] = one_answer(meshes[ep], execution, num_active, kind, dtype)
    return answers


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
        combine_dtype = "float32" if strategy == "gather_tokens" else "auto"
        plain = Execution(strategy=strategy, experts_backend=backend, combine_dtype=combine_dtype)
        mesh = build_mesh(ParallelLayout(tp=world_size, ep=ep), num_key_value_heads=2)
        for num_chunks, regather, kind in itertools.product((1, 3), (False, True), ("random", "last rank idle")):
            execution = replace(plain, overlap_chunks=num_chunks, regather=regather)
            found = [one_answer(mesh, replace(execution, overlap=o), 2, kind, dtype) for o in (False, True)]
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
    execution = Execution(strategy=strategy, overlap=True, overlap_chunks=2)
    case = Case(dp=2, tp=2, ep=ep, stage=stage, accumulation=3, checkpointing=stage == 3, execution=execution)
    config = mixed_config()
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
    mesh, execution = (
        build_mesh(ParallelLayout(tp=world_size, ep=1), num_key_value_heads=2),
        Execution(strategy=strategy),
    )
    model = build_model(tiny_config(**SMALL), mesh=mesh, execution=execution, seed=3, dtype=torch.float64)
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
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=1), num_key_value_heads=2)
    execution = Execution(overlap=True, overlap_chunks=2)
    model = build_model(tiny_config(**SMALL), mesh=mesh, execution=execution, seed=3)
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
