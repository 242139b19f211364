"""Mixture of experts: what users of other trainers found wrong, beside what test_parity.py holds to one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from modeling.mesh import ParallelMesh, one_rank_mesh
from modeling.router import GatherMoeRouter, Routing
from tests.engine_runs import (
    Case,
    accumulate,
    ds_config,
    gradient_shards,
    join_shards,
    make_mesh,
    model_with,
    slow,
    start_engine,
    train,
    weight_shards,
)
from tests.ranks import run_ranks
from tests.referee import (
    Batch,
    Tensors,
    Training,
    assert_all_match,
    assert_runs_match,
    full_state,
    gradients_of,
    random_batch,
    referee_run,
    tiny_config,
)

WEIGHTS, ROWS = Execution(strategy="gather_weights"), Execution(strategy="all_to_all")


def two_expert_routing() -> tuple[GatherMoeConfig, Tensors]:
    """A model whose tokens below 25 all go to expert 0 and whose others all go to expert 1, in every layer.

    Channel 0 carries the token's class, and neither attention nor experts write to it.
    """
    config = tiny_config(num_experts_per_tok=1, qk_norm="head", norm_topk_prob=False)
    state = full_state(config)
    state["model.embed_tokens.weight"][:25, 0] = 0.3
    state["model.embed_tokens.weight"][25:, 0] = -0.3
    for name, tensor in state.items():
        if name.endswith("o_proj.weight"):
            tensor[0] = 0
        elif name.endswith("experts.down_proj"):
            tensor[:, 0] = 0
        elif name.endswith("mlp.gate.weight"):
            tensor[2:] = 0
            tensor[0], tensor[1] = 0.02 * tensor[0], 0.02 * tensor[1]
            tensor[0, 0], tensor[1, 0] = 2, -2
    return config, state


def two_class_batch(*, first_class_first: bool, num_sequences: int = 4) -> Batch:
    """Half of the sequences go to expert 0 only, the other half to expert 1 only; with two dp ranks, one half each."""
    low = torch.randint(0, 25, (num_sequences // 2, 16), generator=torch.Generator().manual_seed(3))
    parts = [low, low.flip(1) + 25]
    ids = torch.cat(parts if first_class_first else parts[::-1])
    return Batch(ids, ids.clone())


@pytest.mark.parametrize(
    "case",
    [
        *(slow(Case(dp=2, stage=stage)) for stage in (0, 1, 3)),
        Case(dp=2, stage=2),
        Case(tp=2, ep=1, stage=2, execution=WEIGHTS),
        Case(tp=2, ep=2, stage=3, execution=ROWS),
        slow(Case(dp=2, tp=2, ep=1, stage=3, accumulation=2, execution=WEIGHTS)),
        slow(Case(dp=2, tp=2, ep=2, stage=2, accumulation=2, execution=ROWS)),
    ],
    ids=str,
)
@pytest.mark.requirement("R-MOE-01")
@pytest.mark.requirement("R-MOE-09")
def test_an_experts_gradient_does_not_depend_on_which_rank_used_it(case: Case) -> None:
    """Half of the sequences go to expert 0 alone, the others to expert 1 alone; experts 2 and 3 get nothing."""
    config, state = two_expert_routing()
    training = Training(num_steps=3)
    batch, swapped = (two_class_batch(first_class_first=first) for first in (True, False))
    got = train(config, state, case, batches=[batch], training=training)
    assert_runs_match(got, referee_run(config, state, batches=[batch], training=training))
    names = [name for name in got.gradients if ".experts." in name]
    assert len(names) == 4
    for name in names:
        assert got.gradients[name][:2].flatten(1).abs().amax(1).min() > 1e-4, "experts 0 and 1 are used"
        assert not got.gradients[name][2:].any(), "experts 2 and 3 take part with a gradient of exactly zero"
    if case.tp == 1:
        other = train(config, state, case, batches=[swapped], training=training)
        for name in names:
            # A sum of two ranks' parts does not depend on their order, so not even rounding may tell them apart.
            assert torch.equal(got.gradients[name], other.gradients[name]), name


def _order_of_gradients(rank: int, world_size: int, config: Any, state: Any, batch: Batch, case: Case) -> list[str]:
    arrived: list[str] = []

    def watch(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))

    engine = start_engine(config, state, case, prepare=watch)
    accumulate(engine, batch, case)
    return arrived


@pytest.mark.requirement("R-MOE-01")
def test_every_parameter_takes_part_in_an_order_that_routing_does_not_change() -> None:
    config, state = two_expert_routing()
    batch = two_class_batch(first_class_first=True)
    orders = run_ranks(_order_of_gradients, 2, config, state, batch, Case(dp=2))
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(state)


def _step_with_users_optimizer(
    rank: int, world_size: int, config: Any, state: Tensors, case: Case
) -> tuple[Tensors, Tensors]:
    from recipe.engine.engine import Engine

    model = model_with(config, state, make_mesh(config, case))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = Engine(model, ds_config=ds_config(case), optimizer=optimizer)
    before = weight_shards(engine)
    accumulate(engine, random_batch(), case)
    engine.update(learning_rate=0.1)
    return before, weight_shards(engine)


@pytest.mark.parametrize("stage", [2, slow(3)])
@pytest.mark.requirement("R-MOE-05")
def test_one_step_of_a_users_optimizer_changes_every_parameter(stage: int) -> None:
    config, case = tiny_config(qk_norm="head"), Case(tp=2, ep=2, stage=stage)
    state = full_state(config)
    by_rank = run_ranks(_step_with_users_optimizer, 2, config, state, case)
    before, after = (join_shards([result[i] for result in by_rank], config, case) for i in (0, 1))
    for name, tensor in after.items():
        changed = (tensor - before[name]).abs()
        # AdamW's first step moves whatever has a gradient by the learning rate; of experts, every single one.
        parts = changed if ".experts." in name else [changed]
        assert min(part.max().item() for part in parts) > 0.05, name


def _step_with_forgotten_experts(rank: int, world_size: int, config: Any, state: Any, case: Case) -> None:
    from recipe.engine.engine import Engine

    model = model_with(config, state, make_mesh(config, case))
    stale = [torch.nn.Parameter(p.detach().clone()) if ".experts." in n else p for n, p in model.named_parameters()]
    with pytest.raises(
        ValueError, match=r"4 trainable parameters .* no group .* \['model.layers.0.mlp.experts.gate_up_proj'"
    ):
        Engine(model, ds_config=ds_config(case), optimizer=torch.optim.AdamW(stale))


@pytest.mark.requirement("R-MOE-05")
def test_an_optimizer_of_discarded_experts_is_refused_by_name() -> None:
    config = tiny_config()
    run_ranks(_step_with_forgotten_experts, 2, config, full_state(config), Case(tp=2, ep=2))


@pytest.mark.requirement("R-MOE-05")
def test_the_start_counts_parameters_by_kind() -> None:
    from recipe.train.prepare import describe_parameters

    config = tiny_config()
    model = model_with(config, full_state(config), one_rank_mesh())
    model.lm_head.weight.requires_grad_(False)
    line = describe_parameters(model, config)
    assert line == (
        "model: 34,336 parameters, 22,048 active per token; trainable/held by this rank: 32,736/34,336 "
        "(experts 24,576/24,576, router 256/256, norms 160/160, attention 6,144/6,144, embedding and dense 1,600/3,200)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.requirement("R-MOE-08")
def test_every_zero_stage_gives_the_same_curves_in_bf16(stage: int, overlap: bool) -> None:
    config = tiny_config()
    state, batches = full_state(config), [random_batch(seed=seed) for seed in (1, 2)]
    training = Training(learning_rate=5e-3, num_steps=5, max_grad_norm=0.2, zero={"overlap_comm": overlap})
    got = train(config, state, Case(dp=2, stage=stage, bf16=True), batches=batches, training=training).curves
    want = referee_run(config, state, batches=batches, training=training).curves
    assert want.losses[0] - want.losses[-1] > 0.1, "a step that is not taken would be seen"
    torch.testing.assert_close(got.losses, want.losses, atol=1e-2, rtol=0)  # which not-a-number never is
    torch.testing.assert_close(got.norms, want.norms, atol=0, rtol=0.05)


@pytest.mark.requirement("R-MOE-09")
def test_ranks_may_route_to_different_experts_in_bf16_under_zero_3() -> None:
    config, state = two_expert_routing()
    batch, training = two_class_batch(first_class_first=True), Training(num_steps=3)
    want = referee_run(config, state, batches=[batch], training=training)
    got = train(config, state, Case(dp=2, stage=3, bf16=True), batches=[batch], training=training)
    torch.testing.assert_close(got.curves.losses, want.curves.losses, atol=2e-2, rtol=0)
    for name, gradient in got.gradients.items():
        error = (gradient - want.gradients[name]).norm() / want.gradients[name].norm()
        assert error < 0.05, f"{name}: {error}"


def _leaves(rank: int, world_size: int, config: Any, state: Any) -> list[str]:
    from deepspeed.utils import z3_leaf_module

    engine = start_engine(config, state, Case(stage=3))
    return [name for name, module in engine.model.named_modules() if z3_leaf_module(module)]


@pytest.mark.requirement("R-MOE-09")
def test_the_model_declares_its_zero_3_leaves_itself() -> None:
    config = tiny_config()
    assert run_ranks(_leaves, 1, config, full_state(config)) == [["model.layers.0", "model.layers.1"]]


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


def padded_batch(side: str, *, pad_id: int = 0) -> tuple[Batch, Batch, Batch]:
    """A sequence of five tokens alone, a full one of sixteen, and four: both, the short one padded, and two of padding.

    Split over two dp ranks, each has one of padding.
    """
    full = random_batch(seed=5, num_sequences=2)
    short_ids = full.ids[:1, :5]
    here = slice(0, 5) if side == "right" else slice(11, 16)
    ids, labels = torch.full((4, 16), pad_id), torch.full((4, 16), -100)
    mask = torch.zeros(4, 16, dtype=torch.bool)
    ids[0, here], ids[2], mask[0, here], mask[2] = short_ids[0], full.ids[1], True, True
    labels[mask] = ids[mask]
    labels[0, here.start] = -100  # nothing real comes before it
    return Batch(short_ids, short_ids), Batch(full.ids[1:], full.ids[1:]), Batch(ids, labels, mask)


def padded_pass(config: GatherMoeConfig, state: Tensors, batch: Batch, *, mesh: ParallelMesh | None = None) -> Any:
    """Outputs and gradients, the losses divided by the counts of the two sequences together."""
    model = model_with(config, state, mesh or one_rank_mesh())
    output = model(
        input_ids=batch.ids,
        labels=batch.labels,
        attention_mask=batch.mask,
        num_items_in_batch=4 + 15,
        num_tokens_in_batch=5 + 16,
        use_cache=False,
    )
    output.loss.backward()
    return output, gradients_of(model)


@pytest.mark.parametrize(("side", "pad_id"), [("left", 9), ("right", 0), ("right", 9)])
@pytest.mark.requirement("R-MOE-11")
def test_padding_is_not_routed_and_changes_nothing(side: str, pad_id: int) -> None:
    """Beside other sequences; and alone, where the balance loss is one of the micro-batch."""
    config = tiny_config(router_aux_loss_coef=0.1, router_z_loss_coef=0.01)
    state = full_state(config)
    short, full, all_four = padded_batch(side, pad_id=pad_id)
    here = slice(0, 5) if side == "right" else slice(11, 16)
    (one, one_grads), (two, two_grads), (got, got_grads) = (
        padded_pass(config, state, batch) for batch in (short, full, all_four)
    )
    assert one.sums.expert_counts.sum(1).tolist() == [10, 10]
    assert torch.equal(got.sums.expert_counts, one.sums.expert_counts + two.sums.expert_counts)
    torch.testing.assert_close(got.logits[0, here], one.logits[0], atol=1e-5, rtol=0)
    assert_all_match(got_grads, {name: one_grads[name] + two_grads[name] for name in one_grads})
    config.balance_scope = "micro_batch"
    padded = Batch(*(tensor[:1] for tensor in all_four[:3]))
    (want, want_grads), (got, got_grads) = (padded_pass(config, state, batch) for batch in (short, padded))
    for name in ("loss", "lm_loss", "aux_loss", "z_loss"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-6, rtol=0)
    assert_all_match(got_grads, want_grads)


def _pass_under_a_mesh(rank: int, world_size: int, config: Any, state: Any, case: Case, batch: Batch) -> Any:
    output, gradients = padded_pass(config, state, batch, mesh=make_mesh(config, case))
    return output.sums.expert_counts, gradients


def _pass_of_an_engine(rank: int, world_size: int, config: Any, state: Any, case: Case, batch: Batch) -> Any:
    """Its sequences have their padding at the end."""
    engine = start_engine(config, state, case, training=Training(balance_coef=0.1, z_coef=0.01))
    sums = accumulate(engine, batch, case)
    dist.all_reduce(sums.expert_counts, group=engine.mesh.dp_group)
    return sums.expert_counts, gradient_shards(engine)


@pytest.mark.parametrize(
    ("side", "run", "case"),
    [
        ("left", _pass_under_a_mesh, Case(tp=2, ep=2)),
        ("right", _pass_under_a_mesh, Case(tp=2, ep=1)),
        ("right", _pass_of_an_engine, Case(tp=2, ep=1, stage=2, execution=WEIGHTS)),
        slow("right", _pass_of_an_engine, Case(dp=2, tp=2, ep=2, stage=1)),
        slow("right", _pass_of_an_engine, Case(dp=2, tp=2, ep=2, stage=3, execution=ROWS)),
    ],
    ids=str,
)
@pytest.mark.requirement("R-MOE-11")
def test_padding_is_not_routed_on_several_ranks(side: str, run: Callable[..., Any], case: Case) -> None:
    config = tiny_config(router_aux_loss_coef=0.1, router_z_loss_coef=0.01, pad_token_id=9)
    state = full_state(tiny_config())
    *_, batch = padded_batch(side, pad_id=9)
    want, want_grads = padded_pass(config, state, batch)
    by_rank = run_ranks(run, case.num_ranks, config, state, case, batch)
    for counts, _ in by_rank:
        assert torch.equal(counts, want.sums.expert_counts)
    assert_all_match(join_shards([grads for _, grads in by_rank], config, case), want_grads)
