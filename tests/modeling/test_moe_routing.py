"""The router and the way of tokens to their experts and back: what users of other trainers found wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from modeling import experts
from modeling.comm import ScatterInChunks
from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from modeling.mesh import one_rank_mesh
from modeling.moe import GatherMoeSparseBlock
from modeling.router import GatherMoeRouter, Routing
from tests.engine_runs import Case, accumulate, gradient_shards, join_shards, make_mesh, model_with, slow, start_engine
from tests.moe_layers import one_process_pass, padded_batch
from tests.ranks import run_ranks
from tests.referee import Batch, Tensors, Training, assert_all_match, full_state, random_batch, tiny_config
from tests.resolving import faults_of


def _block_gradients(
    config: GatherMoeConfig, state: Tensors, x_tD: Tensor, cotangent_tD: Tensor, mesh: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one MoE block: the gradient for its input, that for the routing weights at a fixed routing, and its output."""
    block = GatherMoeSparseBlock(config, mesh=mesh, execution=Execution())
    model = model_with(config, state, mesh)
    block.load_state_dict(model.model.layers[0].mlp.state_dict())
    x_tD = x_tD.clone().requires_grad_()
    out_tD, routing = block(x_tD)
    (out_tD * cotangent_tD).sum().backward()
    weights_tA = routing.weights_tA.detach().requires_grad_()
    fixed = Routing(routing.logits_tE, routing.expert_ids_tA, weights_tA)
    block.gate.forward = lambda *_, **__: fixed  # type: ignore[method-assign]
    (block(x_tD.detach()).out_tD * cotangent_tD).sum().backward()
    assert x_tD.grad is not None
    assert weights_tA.grad is not None
    return x_tD.grad, weights_tA.grad, out_tD.detach()


class _OwnRows(ScatterInChunks):
    """Keeps this rank's rows of its own gradient and drops what the other ranks found."""

    def add(self, k: int, partial: Tensor) -> None:
        self._out[self.chunks.rows(k)] = partial.chunk(self.chunks.size)[dist.get_rank(self.chunks.group)]


def _drop_token_gradients(patch: pytest.MonkeyPatch) -> None:
    """In the experts' backward, not in their forward, where sums go home the same way."""
    backward, routing_gradient = experts._Experts.backward, experts._scatter_routing_gradient

    def with_all_ranks(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(experts, "ScatterInChunks", ScatterInChunks)
            return routing_gradient(*args)

    def with_own_rows(ctx: Any, grad_tD: Tensor) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(experts, "ScatterInChunks", _OwnRows)
            inside.setattr(experts, "_scatter_routing_gradient", with_all_ranks)
            return backward(ctx, grad_tD)

    patch.setattr(experts._Experts, "backward", staticmethod(with_own_rows))


def _drop_routing_gradients(patch: pytest.MonkeyPatch) -> None:
    routing_gradient = experts._scatter_routing_gradient

    def with_own_rows(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(experts, "ScatterInChunks", _OwnRows)
            return routing_gradient(*args)

    patch.setattr(experts, "_scatter_routing_gradient", with_own_rows)


def _check_block_gradients(
    rank: int, world_size: int, config: Any, state: Tensors, case: Case, break_it: Callable[[Any], None] | None
) -> tuple[bool, bool, bool]:
    """Whether input gradient, routing weights' gradient and output are those of a single rank."""
    generator = torch.Generator().manual_seed(11)
    x_TD, cotangent_TD = (torch.randn(24, 32, generator=generator) for _ in range(2))
    want = _block_gradients(config, state, x_TD, cotangent_TD, one_rank_mesh())
    with pytest.MonkeyPatch.context() as patch:
        if break_it is not None:
            break_it(patch)
        mine = [part.chunk(world_size)[rank] for part in (x_TD, cotangent_TD)]
        got = _block_gradients(config, state, *mine, make_mesh(config, case))
    first, second, third = (
        torch.allclose(a, b.chunk(world_size)[rank], atol=1e-5, rtol=0) for a, b in zip(got, want, strict=True)
    )
    return first, second, third


@pytest.mark.parametrize("ep", [2, 1])
@pytest.mark.requirement("R-MOE-07")
def test_gradients_of_the_input_and_of_the_gates_match_one_rank(ep: int) -> None:
    config = tiny_config()
    case = Case(tp=2, ep=ep)
    assert run_ranks(_check_block_gradients, 2, config, full_state(config), case, None) == [(True, True, True)] * 2


@pytest.mark.parametrize(
    ("break_it", "holds"),
    [(_drop_token_gradients, (False, True, True)), (_drop_routing_gradients, (False, False, True))],
)
@pytest.mark.requirement("R-MOE-07")
def test_would_notice_a_backward_that_drops_the_other_ranks_part(
    break_it: Callable[[Any], None], holds: tuple[bool, bool, bool]
) -> None:
    config = tiny_config()
    case = Case(tp=2, ep=2)
    assert run_ranks(_check_block_gradients, 2, config, full_state(config), case, break_it) == [holds] * 2


def _check_routers(rank: int, world_size: int, config: Any, state: Any, case: Case) -> int:
    checked = 0

    def check(router: Any, args: tuple[Tensor], kwargs: dict[str, Any], routing: Routing) -> None:
        nonlocal checked
        [x_tD], weight_ED = args, router.weight
        assert (x_tD.dtype, weight_ED.dtype) == (torch.bfloat16, torch.bfloat16)
        assert (routing.logits_tE.dtype, routing.weights_tA.dtype) == (torch.float32, torch.float32)
        logits_tE = x_tD.float() @ weight_ED.float().t()
        torch.testing.assert_close(routing.logits_tE, logits_tE, atol=1e-6, rtol=0)
        rounded_tE = (x_tD @ weight_ED.t()).float()
        assert (rounded_tE - logits_tE).abs().max() > 1e-4, "logits computed in bf16 would be seen"
        chosen = logits_tE.softmax(-1).topk(2)
        assert torch.equal(routing.expert_ids_tA, chosen.indices)
        weights_tA = chosen.values / chosen.values.sum(-1, keepdim=True)
        torch.testing.assert_close(routing.weights_tA, weights_tA, atol=1e-6, rtol=0)
        checked += 1

    def watch(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, GatherMoeRouter):
                module.register_forward_hook(check, with_kwargs=True)

    engine = start_engine(config, state, case, prepare=watch)
    accumulate(engine, random_batch(), case)
    return checked


WEIGHTS, ROWS = Execution(strategy="gather_weights"), Execution(strategy="all_to_all")


@pytest.mark.parametrize(
    "case",
    [
        *(slow(Case(tp=2, ep=2, stage=stage)) for stage in (1, 2, 3)),
        Case(tp=2, ep=1, stage=2, execution=WEIGHTS),
        Case(tp=2, ep=2, stage=2, execution=ROWS),
    ],
    ids=str,
)
@pytest.mark.requirement("R-MOE-10")
def test_a_bf16_engine_routes_in_float32(case: Case) -> None:
    config, case = tiny_config(), case._replace(bf16=True)
    assert run_ranks(_check_routers, 2, config, full_state(config), case) == [2, 2]


@pytest.mark.requirement("R-MOE-10")
def test_bf16_without_zero_is_refused() -> None:
    assert "bf16" in faults_of({"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}})


@pytest.mark.parametrize("pad_with_a_real_token", [False, True])
@pytest.mark.requirement("R-MOE-11")
def test_padding_is_not_routed_and_changes_nothing(pad_with_a_real_token: bool) -> None:
    config = tiny_config(router_aux_loss_coef=0.1, router_z_loss_coef=0.01)
    state = full_state(config)
    short, full, both = padded_batch(pad_with_a_real_token=pad_with_a_real_token)
    (one, one_grads), (two, two_grads), (got, got_grads) = (
        one_process_pass(config, state, batch) for batch in (short, full, both)
    )
    assert one.sums.expert_counts.sum(1).tolist() == [10, 10]
    assert torch.equal(got.sums.expert_counts, one.sums.expert_counts + two.sums.expert_counts)
    torch.testing.assert_close(got.logits[0, :5], one.logits[0], atol=1e-5, rtol=0)
    assert_all_match(got_grads, {name: one_grads[name] + two_grads[name] for name in one_grads})


def _padded_pass(rank: int, world_size: int, config: Any, state: Any, case: Case, batch: Batch) -> Any:
    training = Training(balance_coef=0.1, z_coef=0.01)
    engine = start_engine(config, state, case, training=training)
    sums = accumulate(engine, batch, case)
    dist.all_reduce(sums.expert_counts, group=engine.mesh.dp_group)
    return sums.expert_counts, gradient_shards(engine)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(tp=2, ep=2, stage=2), Case(tp=2, ep=1), Case(dp=2, tp=2, ep=2, stage=1)),
        Case(tp=2, ep=1, stage=2, execution=WEIGHTS),
        Case(tp=2, ep=2, stage=3, execution=ROWS),
        slow(Case(dp=2, tp=2, ep=1, stage=1, execution=WEIGHTS)),
        slow(Case(dp=2, tp=2, ep=2, execution=ROWS)),
    ],
    ids=str,
)
@pytest.mark.requirement("R-MOE-11")
def test_padding_is_not_routed_on_several_ranks(case: Case) -> None:
    config = tiny_config(router_aux_loss_coef=0.1, router_z_loss_coef=0.01)
    state = full_state(config)
    batch = padded_batch(pad_with_a_real_token=True)[2]
    want, want_grads = one_process_pass(config, state, batch)
    by_rank = run_ranks(_padded_pass, case.dp * case.tp, config, state, case, batch)
    for counts, _ in by_rank:
        assert torch.equal(counts, want.sums.expert_counts)
    assert_all_match(join_shards([grads for _, grads in by_rank], config, case), want_grads)
