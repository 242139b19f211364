"""Every strategy, layout and number of active experts against all experts on one rank; overlap changes no bit."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from modeling import experts
from modeling.comm import ScatterInChunks
from modeling.execution import Execution
from modeling.init import build_model
from modeling.layout import ParallelLayout, divisors
from modeling.mesh import build_mesh, one_rank_mesh
from tests.engine_runs import slow
from tests.moe_layers import ROUTINGS, choose, join_answer, make_layer, reference, relative_errors
from tests.ranks import run_ranks
from tests.referee import mixed_config, split_options, tiny_config

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


@pytest.mark.parametrize("world_size", [1, 2, slow(4)])
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [("loop", torch.float64, 1e-12), ("grouped", torch.float32, 1e-5)],
    ids=["loop-float64", "grouped-float32"],
)
@pytest.mark.requirement("R-MOE-07")
def test_every_strategy_equals_one_rank(world_size: int, backend: str, dtype: torch.dtype, tolerance: float) -> None:
    by_rank = run_ranks(sharded_answers, world_size, backend, dtype)
    for strategy, num_active, kind, ep in by_rank[0]:
        key = (strategy, num_active, kind, ep)
        got = join_answer([answers[key] for answers in by_rank], ParallelLayout(tp=world_size, ep=ep))
        errors = relative_errors(got, reference(num_active, kind))
        assert max(errors.values()) <= tolerance, (key, errors)


class OwnRows(ScatterInChunks):
    """Keeps this rank's rows of its own gradient and drops what the other ranks found."""

    def add(self, k: int, partial: Tensor) -> None:
        self._out[self.chunks.rows(k)] = partial.chunk(self.chunks.size)[dist.get_rank(self.chunks.group)]


def scattered_by(scatter: type[ScatterInChunks], function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        with patch.object(experts, "ScatterInChunks", scatter):
            return function(*args)

    return wrapped


def drop_token_gradients(broken: pytest.MonkeyPatch) -> None:
    """In the experts' backward, not in their forward, where sums go home the same way."""
    routing_gradient = scattered_by(ScatterInChunks, experts._scatter_routing_gradient)
    broken.setattr(experts, "_scatter_routing_gradient", routing_gradient)
    broken.setattr(experts._Experts, "backward", staticmethod(scattered_by(OwnRows, experts._Experts.backward)))


def drop_routing_gradients(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(experts, "_scatter_routing_gradient", scattered_by(OwnRows, experts._scatter_routing_gradient))


def answer_without(
    rank: int, world_size: int, break_it: Callable[[pytest.MonkeyPatch], None], layout: ParallelLayout
) -> tuple[Tensor, ...]:
    with pytest.MonkeyPatch.context() as broken:
        break_it(broken)
        mesh = build_mesh(layout, num_key_value_heads=2)
        return one_answer(mesh, Execution(), 2, "random", torch.float32)


@pytest.mark.parametrize(("break_it", "wrong"), [(drop_token_gradients, "x"), (drop_routing_gradients, "weights")])
@pytest.mark.requirement("R-MOE-07")
def test_a_gradient_without_the_other_ranks_part_would_be_seen(
    break_it: Callable[[pytest.MonkeyPatch], None], wrong: str
) -> None:
    layout = ParallelLayout(tp=2, ep=2)
    got = join_answer(run_ranks(answer_without, 2, break_it, layout), layout)
    errors = relative_errors(got, reference(2, "random"))
    assert errors.pop(wrong) > 0.1
    assert max(errors.values()) < 1e-5


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


def gradients(
    ep: int, *, checkpointing: bool = False, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Tensor]:
    """Loss and all gradients of a model with dense and sparse layers, shared by two ranks."""
    changes, execution = split_options(options)
    config = mixed_config(router_aux_loss_coef=0.1, router_z_loss_coef=0.1, logits_z_loss_coef=0.01, **changes)
    config._attn_implementation = "sdpa"
    mesh = build_mesh(ParallelLayout(tp=2, ep=ep), num_key_value_heads=config.sizes.num_key_value_heads)
    model = build_model(config, mesh=mesh, execution=execution, seed=1, dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.randint(0, config.vocab_size, (2, 21), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    loss = model(input_ids=ids, labels=ids.masked_fill(mask == 0, -100), attention_mask=mask).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def changed_bits(rank: int, _: int, ep: int, options: dict[str, Any]) -> list[str]:
    """Which settings change a bit against those without overlap and recomputation."""
    plain = gradients(ep, overlap=False, **options)
    assert len(plain) > 20
    different = []
    for overlap, checkpointing, regather in itertools.product((False, True), repeat=3):
        found = gradients(ep, overlap=overlap, checkpointing=checkpointing, regather=regather, **options)
        if not all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)):
            different.append(f"{overlap=} {checkpointing=} {regather=}")
    return different


@pytest.mark.parametrize(
    ("ep", "options"),
    [
        (2, {"overlap_chunks": 1}),
        slow(2, {"overlap_chunks": 4, "dtype": torch.bfloat16, "combine_dtype": "float32"}),
        (1, {"overlap_chunks": 3, "experts_backend": "grouped", "qk_norm": "full"}),
        (1, {"strategy": "gather_weights", "overlap_chunks": 2}),
        slow(2, {"strategy": "all_to_all", "overlap_chunks": 2}),
    ],
    ids=["one chunk", "bf16", "grouped", "gather_weights", "all_to_all"],
)
@pytest.mark.requirement("R-GRAPH-03")
def test_overlap_recomputation_and_gathering_again_change_no_bit(ep: int, options: dict[str, Any]) -> None:
    assert run_ranks(changed_bits, 2, ep, options) == [[], []]


def check_numbers_of_chunks(rank: int, _: int) -> None:
    one = gradients(2, overlap=True, overlap_chunks=1, dtype=torch.float64)
    for num_chunks in (2, 5, 100):
        more = gradients(2, overlap=True, overlap_chunks=num_chunks, dtype=torch.float64)
        for got, want in zip(more, one, strict=True):
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


def test_the_number_of_chunks_changes_the_order_of_sums_alone() -> None:
    run_ranks(check_numbers_of_chunks, 2)


SMALL = {"num_hidden_layers": 1, "moe_intermediate_size": 16}  # T* is 144 tokens


def mixed_lengths(step: int) -> Tensor:
    """2 sequences of 32, which stay below T*, and 6, which do not, in turn; some ids come more often than others."""
    ids = torch.rand((2, 6)[step % 2], 32, generator=torch.Generator().manual_seed(step)).square() * 50
    return ids.long()


def losses_over_mixed_lengths(
    rank: int, world_size: int, strategy: str, num_steps: int
) -> tuple[list[float], set[str]]:
    """Plain AdamW in float64 on a model shared by two ranks; the strategies that its layers took."""
    torch.manual_seed(0)
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=1), num_key_value_heads=2)
    execution = Execution(strategy=strategy)
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
        curves[strategy], taken = run_ranks(losses_over_mixed_lengths, 2, strategy, 60)[0]
        assert taken == ({"gather_tokens", "gather_weights"} if strategy == "auto" else {strategy})
    for strategy in ("gather_weights", "auto"):
        torch.testing.assert_close(curves[strategy], curves["gather_tokens"], atol=1e-5, rtol=0)
    assert curves["auto"][-1] < curves["auto"][0]
