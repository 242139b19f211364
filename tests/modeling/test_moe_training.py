"""Mixture-of-experts correctness: what users of other trainers found wrong, each held against one plain process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from modeling.mesh import one_rank_mesh
from tests.engine_runs import (
    Case,
    accumulate,
    ds_config,
    join_shards,
    make_mesh,
    model_with,
    slow,
    start_engine,
    train,
    used_gradients,
    weight_shards,
)
from tests.exports import export, read_export
from tests.moe_layers import two_class_batch, two_expert_routing
from tests.ranks import run_ranks
from tests.referee import Batch, Tensors, Training, assert_all_match, full_state, random_batch, referee_run, tiny_config
from tests.tuning import train_in_trainer

STAGES = [0, 1, 2, 3]
GROUPS = [
    Case(),
    Case(tp=2, ep=2),
    slow(Case(tp=4, ep=4)),
    slow(Case(dp=2, tp=2, ep=2)),
    slow(Case(dp=2, tp=2, ep=1)),
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.requirement("R-MOE-01")
def test_an_experts_gradient_does_not_depend_on_which_rank_used_it(stage: int) -> None:
    config, state = two_expert_routing()
    case, training = Case(dp=2, stage=stage), Training()
    batch, swapped = (two_class_batch(first_class_first=first) for first in (True, False))
    want = referee_run(config, state, batches=[batch], training=training)
    got, other = (train(config, state, case, batches=[b], training=training) for b in (batch, swapped))
    assert_all_match(got.gradients, want.gradients)
    for name in (name for name in got.gradients if ".experts." in name):
        gradient = got.gradients[name]
        # A sum of two ranks' parts does not depend on their order, so not even rounding may tell them apart.
        assert torch.equal(gradient, other.gradients[name]), name
        assert gradient[:2].flatten(1).abs().amax(1).min() > 1e-4, "experts 0 and 1 are used"
        assert not gradient[2:].any(), "experts 2 and 3 take part with a gradient of exactly zero"


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


@pytest.mark.parametrize("case", GROUPS, ids=lambda case: f"dp{case.dp}-tp{case.tp}-ep{case.ep}")
@pytest.mark.requirement("R-MOE-02")
def test_expert_gradients_do_not_depend_on_the_layout(case: Case) -> None:
    config = tiny_config()
    state, batch = full_state(config), random_batch()
    want = referee_run(config, state, batches=[batch])
    for stage in (1, 2):
        got = train(config, state, case._replace(stage=stage), batches=[batch])
        assert_all_match(got.gradients, want.gradients)
    experts = [gradient for name, gradient in want.gradients.items() if ".experts." in name]
    assert len(experts) == 4
    assert min(gradient.abs().max() for gradient in experts) > 1e-3, "a factor of two would be seen"


SHARED, EXPERT = "model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.experts.down_proj"


def _clip_forced_gradients(
    rank: int, world_size: int, config: Any, state: Tensors, case: Case
) -> tuple[float, Tensors]:
    """Four shared gradients of 3 and four of 4 in one rank's expert, all others 0; returns what the optimizer used."""

    def force(model: Any) -> None:
        for name, parameter in model.named_parameters():
            forced = torch.zeros_like(parameter)
            if name == "model.norm.weight":
                forced[:4] = 3.0
            elif name == EXPERT and rank % case.tp == 1:
                forced[0, 0, :4] = 4.0
            parameter.register_hook(lambda gradient, forced=forced: forced.to(gradient.dtype))

    training = Training(adam_eps=None, weight_decay=0.0, max_grad_norm=1.0)
    engine = start_engine(config, state, case, training=training, prepare=force)
    return used_gradients(engine, random_batch(), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "bf16"), [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
)
@pytest.mark.requirement("R-MOE-03")
def test_clipping_counts_expert_gradients(stage: int, bf16: bool) -> None:
    config, case = tiny_config(), Case(tp=2, ep=2, stage=stage, bf16=bf16)
    # Weights of zero, so that the change in a weight is the gradient to the last bit.
    state = {name: torch.zeros_like(tensor) for name, tensor in full_state(config).items()}
    by_rank = run_ranks(_clip_forced_gradients, 2, config, state, case)
    used = join_shards([gradients for _, gradients in by_rank], config, case)
    for norm, _ in by_rank:
        assert norm == pytest.approx(10.0, abs=1e-4), "6.0 is the norm without experts"
    assert sum(gradient.square().sum().item() for gradient in used.values()) ** 0.5 == pytest.approx(1.0, abs=1e-4)
    assert used[EXPERT][2, 0, :4].tolist() == pytest.approx([0.4] * 4, abs=1e-4)
    assert used["model.norm.weight"][:4].tolist() == pytest.approx([0.3] * 4, abs=1e-4)


def numbered_experts(config: GatherMoeConfig) -> Tensors:
    state = full_state(config)
    for name, tensor in state.items():
        if ".experts." in name:
            tensor.copy_(torch.arange(1.0, 1 + config.num_experts)[:, None, None].expand_as(tensor))
    return state


def _resume_numbered_experts(rank: int, world_size: int, config: Any, state: Any, case: Case, folder: Path) -> None:
    from recipe.checkpoint.native import load_native, save_native

    save_native(start_engine(config, state, case), folder, rank_state={})
    dist.barrier()
    other = start_engine(config, full_state(config), case)
    load_native(other, folder)
    first = other.mesh.ep_rank * config.num_experts // case.ep
    for name, shard in weight_shards(other).items():
        if ".experts." in name:
            for expert, weights in enumerate(shard, start=first):
                assert (weights == expert + 1).all(), (name, expert)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, ep=2, stage=2),
        Case(tp=2, ep=1, stage=1),
        slow(Case(dp=2, tp=2, ep=2, stage=3)),
        slow(Case(tp=4, ep=2)),
        slow(Case(tp=4, ep=4)),
    ],
    ids=lambda case: f"dp{case.dp}-tp{case.tp}-ep{case.ep}-zero{case.stage}",
)
@pytest.mark.requirement("R-MOE-04")
def test_a_checkpoint_holds_every_expert_once_and_in_its_place(case: Case, tmp_path: Path) -> None:
    config, ranks = tiny_config(), case.dp * case.tp
    state = numbered_experts(config)
    run_ranks(export, ranks, config, state, case, tmp_path)
    found = read_export(tmp_path)
    for layer in range(2):
        for leaf, shape in (("w1", (32, 32)), ("w2", (32, 32)), ("w3", (32, 32))):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts"
            experts = {n.removeprefix(prefix + "."): t for n, t in found.items() if n.startswith(prefix) and leaf in n}
            assert sorted(experts) == [f"{e}.{leaf}.weight" for e in range(4)]
            for expert in range(4):
                assert torch.equal(experts[f"{expert}.{leaf}.weight"], torch.full(shape, expert + 1.0))
    run_ranks(_resume_numbered_experts, ranks, config, state, case, tmp_path)


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


@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, 3])
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


@pytest.mark.requirement("R-MOE-05")
def test_one_step_of_hugging_faces_trainer_changes_every_parameter(tmp_path: Path) -> None:
    config = tiny_config(qk_norm="head")
    model = model_with(config, full_state(config), one_rank_mesh())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train_in_trainer(model, random_batch(), folder=tmp_path, learning_rate=0.1, weight_decay=0.0)
    for name, parameter in model.named_parameters():
        changed = (parameter.detach() - before[name]).abs()
        parts = changed if ".experts." in name else [changed]
        assert min(part.max().item() for part in parts) > 0.05, name


def _initial_shards(rank: int, world_size: int, config: Any, case: Case) -> Tensors:
    from modeling.init import build_model

    model = build_model(config, mesh=make_mesh(config, case), seed=1234)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "case", [Case(tp=2, ep=2), Case(tp=4, ep=4), Case(tp=4, ep=1), Case(dp=2, tp=2, ep=2)], ids=str
)
@pytest.mark.requirement("R-MOE-06")
def test_no_two_experts_or_shards_start_equal_and_replicas_do(case: Case) -> None:
    from modeling.init import build_model

    config = tiny_config()
    alone = dict(build_model(config, mesh=one_rank_mesh(), seed=1234).named_parameters())
    shards = run_ranks(_initial_shards, case.dp * case.tp, config, case)
    whole = join_shards(shards, config, case)  # asserts that replicas are bitwise equal
    for name, tensor in whole.items():
        assert torch.equal(tensor, alone[name]), name
        if tensor.dim() == 1:
            continue
        rows = tensor.flatten(0, -2) if tensor.dim() == 3 else tensor
        assert len(rows.unique(dim=0)) == len(rows), f"{name} has equal rows"
        local = [shards[rank][name] for rank in range(case.tp)]
        distinct = {part.numpy().tobytes() for part in local}
        num_copies = {"k_proj": case.tp // 2, "v_proj": case.tp // 2, "mlp.gate": case.tp}
        copies = next((n for key, n in num_copies.items() if key in name), 1)
        assert len(distinct) == case.tp // copies, name


OVERLAPS = [(0, False), *((stage, overlap) for stage in (1, 2, 3) for overlap in (False, True))]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "overlap"), OVERLAPS)
@pytest.mark.requirement("R-MOE-08")
def test_every_zero_stage_gives_the_same_curves(stage: int, overlap: bool) -> None:
    config = tiny_config()
    state, batches = full_state(config), [random_batch(seed=seed) for seed in (1, 2)]
    zero = {"overlap_comm": overlap} if stage else {}
    training = Training(num_steps=5, max_grad_norm=0.2, balance_coef=0.01, z_coef=0.001, zero=zero)
    got = train(config, state, Case(dp=2, tp=2, ep=2, stage=stage), batches=batches, training=training).curves
    want = referee_run(config, state, batches=batches, training=training).curves
    assert want.losses[0] - want.losses[-1] > 0.01, "the model learns the batch of steps 0, 2 and 4"
    for name, curve in want._asdict().items():
        torch.testing.assert_close(getattr(got, name), curve, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "overlap"), OVERLAPS[1:])
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


@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, 3])
@pytest.mark.requirement("R-MOE-09")
def test_ranks_may_route_to_different_experts(stage: int) -> None:
    config, state = two_expert_routing()
    batch, training = two_class_batch(first_class_first=True), Training(num_steps=3)
    want = referee_run(config, state, batches=[batch], training=training)
    got = train(config, state, Case(dp=2, stage=stage), batches=[batch], training=training)
    torch.testing.assert_close(got.curves.losses, want.curves.losses, atol=1e-5, rtol=0)
    assert_all_match(got.gradients, want.gradients)
    assert_all_match(got.weights, want.weights)


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


EVERY_WAY = pytest.mark.parametrize(
    ("strategy", "case"),
    [
        ("gather_weights", Case(tp=2, ep=1, stage=2)),
        ("all_to_all", Case(tp=2, ep=2, stage=3)),
        slow("gather_weights", Case(dp=2, tp=2, ep=1, stage=3, accumulation=2)),
        slow("gather_weights", Case(dp=2, tp=2, ep=1, stage=1, checkpointing=True)),
        slow("all_to_all", Case(dp=2, tp=2, ep=2, stage=2, accumulation=2)),
        slow("all_to_all", Case(dp=2, tp=2, ep=2, stage=1, checkpointing=True)),
        slow("auto", Case(tp=2, ep=1, stage=2)),
        slow("auto", Case(tp=2, ep=2, stage=2)),
    ],
    ids=str,
)


@EVERY_WAY
@pytest.mark.requirement("R-MOE-02", "R-MOE-03")
def test_gradients_and_their_norm_do_not_depend_on_the_strategy(strategy: str, case: Case) -> None:
    """Three clipped steps with both auxiliary losses; a factor of a number of ranks anywhere would be seen."""
    config, case = tiny_config(), case._replace(execution=Execution(strategy=strategy))
    state, batches = full_state(config), [random_batch(seed=seed) for seed in (1, 2)]
    training = Training(num_steps=3, max_grad_norm=0.2, balance_coef=0.1, z_coef=0.01)
    want = referee_run(config, state, batches=batches, training=training)
    got = train(config, state, case, batches=batches, training=training)
    assert_all_match(got.gradients, want.gradients)
    assert_all_match(got.weights, want.weights)
    for name, curve in want.curves._asdict().items():
        assert getattr(got.curves, name) == pytest.approx(curve, abs=1e-5), name


@EVERY_WAY
@pytest.mark.requirement("R-MOE-01", "R-MOE-09")
def test_experts_without_tokens_take_part_in_every_strategy(strategy: str, case: Case) -> None:
    """Half of the sequences go to expert 0 alone, the others to expert 1 alone; experts 2 and 3 get nothing."""
    config, state = two_expert_routing()
    case = case._replace(execution=Execution(strategy=strategy))
    batch, training = two_class_batch(first_class_first=True), Training(num_steps=2)
    want = referee_run(config, state, batches=[batch], training=training)
    got = train(config, state, case, batches=[batch], training=training)
    assert_all_match(got.gradients, want.gradients)
    assert_all_match(got.weights, want.weights)
    for name, gradient in got.gradients.items():
        if ".experts." in name:
            assert gradient[:2].flatten(1).abs().amax(1).min() > 1e-4
            assert not gradient[2:].any()
