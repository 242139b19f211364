"""What users of other trainers found wrong in their MoE layers holds for every way tokens meet their experts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from modeling.execution import Execution
from modeling.router import GatherMoeRouter, Routing
from tests.engine_runs import Case, accumulate, gradient_shards, join_shards, slow, start_engine, train
from tests.moe_layers import one_process_pass, padded_batch, two_class_batch, two_expert_routing
from tests.ranks import run_ranks
from tests.referee import Tensors, Training, assert_all_match, full_state, random_batch, referee_run, tiny_config

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


def _padded(rank: int, world_size: int, config: Any, state: Tensors, case: Case) -> Any:
    training = Training(balance_coef=0.1, z_coef=0.01)
    engine = start_engine(config, state, case, training=training)
    sums = accumulate(engine, padded_batch(pad_with_a_real_token=True)[2], case)
    dist.all_reduce(sums.expert_counts, group=engine.mesh.dp_group)
    return sums.expert_counts, gradient_shards(engine)


@pytest.mark.parametrize(
    ("strategy", "case"),
    [
        ("gather_weights", Case(tp=2, ep=1, stage=2)),
        ("all_to_all", Case(tp=2, ep=2, stage=3)),
        slow("gather_weights", Case(dp=2, tp=2, ep=1, stage=1)),
        slow("all_to_all", Case(dp=2, tp=2, ep=2)),
    ],
    ids=str,
)
@pytest.mark.requirement("R-MOE-11")
def test_padding_is_not_routed_in_any_strategy(strategy: str, case: Case) -> None:
    config = tiny_config(router_aux_loss_coef=0.1, router_z_loss_coef=0.01)
    case = case._replace(execution=Execution(strategy=strategy))
    state = full_state(config)
    want, want_grads = one_process_pass(config, state, padded_batch(pad_with_a_real_token=True)[2])
    by_rank = run_ranks(_padded, case.dp * case.tp, config, state, case)
    for counts, _ in by_rank:
        assert torch.equal(counts, want.sums.expert_counts)
    assert_all_match(join_shards([grads for _, grads in by_rank], config, case), want_grads)


def _router_types(rank: int, world_size: int, config: Any, state: Tensors, case: Case) -> list[set[torch.dtype]]:
    seen: list[set[torch.dtype]] = []

    def note(router: Any, args: Any, routing: Routing) -> None:
        seen.append({routing.logits_tE.dtype, routing.weights_tA.dtype})

    def watch(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, GatherMoeRouter):
                module.register_forward_hook(note)

    engine = start_engine(config, state, case, prepare=watch)
    accumulate(engine, random_batch(), case)
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    return seen


@pytest.mark.parametrize(("strategy", "ep"), [("gather_weights", 1), ("all_to_all", 2)])
@pytest.mark.requirement("R-MOE-10")
def test_a_bf16_engine_routes_in_float32_in_every_strategy(strategy: str, ep: int) -> None:
    config, case = tiny_config(), Case(tp=2, ep=ep, stage=2, bf16=True, execution=Execution(strategy=strategy))
    for seen in run_ranks(_router_types, 2, config, full_state(config), case):
        assert seen == [{torch.float32}] * 2
