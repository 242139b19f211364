"""Tensor parallelism: what users of other trainers found wrong, each held against one plain process."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modeling.layout import LayoutRequest, ParallelLayout, check_layout
from modeling.mesh import build_mesh
from tests.engine_runs import Case, accumulate, join_shards, slow, start_engine, train, used_gradients
from tests.exports import export, read_export
from tests.ranks import run_ranks
from tests.referee import (
    Training,
    assert_all_match,
    full_state,
    mixed_config,
    random_batch,
    referee_model,
    referee_run,
    tiny_config,
)
from tests.resolving import TINY, faults_of, resolve

STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, slow(3)])
@pytest.mark.requirement("R-TP-01")
def test_replicated_parameters_stay_equal_and_right(stage: int) -> None:
    config = tiny_config(qk_norm="head")
    state, batches = full_state(config), [random_batch(seed=seed) for seed in (1, 2)]
    training = Training(learning_rate=0.1, adam_eps=None, weight_decay=0.0, num_steps=5, balance_coef=0.01)
    got = train(config, state, Case(dp=2, tp=2, ep=2, stage=stage), batches=batches, training=training)
    want = referee_run(config, state, batches=batches, training=training)
    assert_all_match(got.weights, want.weights)
    for name, weight in got.weights.items():
        assert (weight - state[name]).abs().max() > 1e-4, name


@pytest.mark.requirement("R-TP-01")
def test_replicated_parameters_stay_equal_under_adam_in_bf16() -> None:
    config = tiny_config(qk_norm="head")
    training = Training(learning_rate=0.1, num_steps=5, max_grad_norm=1.0)
    case = Case(dp=2, tp=2, ep=1, stage=2, bf16=True)
    train(config, full_state(config), case, batches=[random_batch()], training=training)


def _check_replicas(rank: int, world_size: int, case: Case, broken: tuple[str, int] | None) -> str | None:
    from recipe.checkpoint.native import check_replicas, full_precision_shard
    from recipe.shared.ranks import TorchRanks

    config = tiny_config(qk_norm="head")
    engine = start_engine(config, full_state(config), case)
    accumulate(engine, random_batch(), case)
    engine.update(learning_rate=0.01)
    check_replicas(engine, TorchRanks())
    if broken is None:
        return None
    name, broken_rank = broken
    if case.stage < 3:
        if rank == broken_rank:
            parameter = engine.model.get_parameter(name)
            parameter.data.view(-1)[-1] = torch.nextafter(parameter.data.view(-1)[-1], torch.tensor(torch.inf))
    else:
        # The optimizer's copy is shared by the ranks of a data-parallel group, which change it together.
        from deepspeed.utils import safe_set_full_fp32_param

        parameter = engine.model.get_parameter(name)
        change = 1e-6 if engine.mesh.group_rank == broken_rank % case.tp else 0.0
        safe_set_full_fp32_param(parameter, full_precision_shard(parameter) + change)
    with pytest.raises(RuntimeError) as caught:
        check_replicas(engine, TorchRanks())
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "name", "rank", "groups"),
    [
        (Case(tp=2, ep=2, stage=0), "model.norm.weight", 1, "ranks [0] and ranks [1]"),
        (Case(dp=2, tp=2, ep=2, stage=2), "model.layers.0.mlp.gate.weight", 3, "ranks [0, 1, 2] and ranks [3]"),
        (Case(dp=2, tp=2, ep=2, stage=1), "model.layers.1.mlp.experts.down_proj", 3, "ranks [1] and ranks [3]"),
        (Case(tp=4, ep=4, stage=1), "model.layers.1.self_attn.k_proj.weight", 2, "ranks [2] and ranks [3]"),
        (Case(dp=2, tp=2, ep=1, stage=3), "model.layers.0.self_attn.q_norm.weight", 1, "ranks [0, 2] and ranks [1, 3]"),
    ],
    ids=str,
)
@pytest.mark.requirement("R-TP-01")
def test_the_run_time_check_names_the_parameter_and_the_ranks(case: Case, name: str, rank: int, groups: str) -> None:
    messages = run_ranks(_check_replicas, case.dp * case.tp, case, (name, rank))
    assert all(f"the tensor {name!r} differs between {groups};" in message for message in messages), messages


@pytest.mark.requirement("R-TP-01")
def test_the_run_time_check_accepts_a_single_rank() -> None:
    assert run_ranks(_check_replicas, 1, Case(stage=2), None) == [None]


def _clip(
    rank: int, world_size: int, config: Any, state: Any, case: Case, factor: float
) -> tuple[float, dict[str, Tensor]]:
    """Clip gradients that were multiplied by `factor`; returns the reported norm and what the optimizer used."""

    def scale(model: Any) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * factor)

    training = Training(adam_eps=None, weight_decay=0.0, max_grad_norm=1.0)
    engine = start_engine(config, state, case, training=training, prepare=scale)
    return used_gradients(engine, random_batch(), case)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("norm", "used_norm"), [(50.0, 1.0), (0.5, 0.5)])
@pytest.mark.requirement("R-TP-02")
def test_clipping_scales_what_the_optimizer_uses(stage: int, norm: float, used_norm: float) -> None:
    config, case = tiny_config(), Case(tp=2, ep=2, stage=stage)
    state = full_state(config)
    unscaled = referee_run(config, state, batches=[random_batch()])
    factor = norm / unscaled.curves.norms[0]
    by_rank = run_ranks(_clip, 2, config, state, case, factor)
    used = join_shards([gradients for _, gradients in by_rank], config, case)
    assert [reported for reported, _ in by_rank] == pytest.approx([norm] * 2, abs=1e-4 * norm)
    got_norm = sum(gradient.double().square().sum().item() for gradient in used.values()) ** 0.5
    assert got_norm == pytest.approx(used_norm, abs=1e-4)
    share = factor * used_norm / norm
    assert_all_match(used, {name: gradient * share for name, gradient in unscaled.gradients.items()})


LAYOUTS = [Case(), Case(tp=2, ep=2), Case(tp=4, ep=4), Case(dp=2), Case(dp=2, tp=2, ep=2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: f"dp{case.dp}-tp{case.tp}")
@pytest.mark.parametrize("kind", ["experts only", "dense first layer"])
@pytest.mark.requirement("R-TP-04")
def test_curves_and_weights_do_not_depend_on_the_layout(kind: str, case: Case) -> None:
    config = tiny_config() if kind == "experts only" else mixed_config()
    state, batches = full_state(config), [random_batch(seed=seed) for seed in range(5)]
    training = Training(num_steps=5, max_grad_norm=0.5, balance_coef=0.1, z_coef=0.01)
    want = referee_run(config, state, batches=batches, training=training)
    got = train(config, state, case._replace(stage=2), batches=batches, training=training)
    assert min(want.curves.norms) > 0.5, "clipping is active"
    for name, curve in got.curves._asdict().items():
        torch.testing.assert_close(curve, getattr(want.curves, name), atol=1e-5, rtol=0, msg=name)
    assert_all_match(got.weights, want.weights)


@pytest.mark.parametrize("qk_norm", ["none", slow("head"), "full"])
@pytest.mark.requirement("R-TP-05")
def test_more_ranks_than_key_value_heads_match_one_process(qk_norm: str) -> None:
    config, case = tiny_config(qk_norm=qk_norm), Case(tp=4, ep=4, stage=2)
    state, batch = full_state(config), random_batch()
    got = train(config, state, case, batches=[batch])
    want = referee_run(config, state, batches=[batch])
    torch.testing.assert_close(got.curves.losses, want.curves.losses, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.curves.norms, want.curves.norms, atol=1e-5, rtol=0)
    assert_all_match(got.gradients, want.gradients)
    assert got.weights["model.layers.0.self_attn.k_proj.weight"].shape == (2 * 8, 32)


@pytest.mark.requirement("R-TP-05")
def test_a_checkpoint_of_replicated_heads_holds_each_once(tmp_path: Any) -> None:
    config = tiny_config()
    state = full_state(config)
    run_ranks(export, 4, config, state, Case(tp=4, ep=4, stage=2), tmp_path)
    found = read_export(tmp_path)
    for leaf in ("k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{leaf}.weight"
        assert torch.equal(found[name], state[name])


@pytest.mark.requirement("R-TP-05")
def test_heads_that_can_neither_be_split_nor_replicated_stop_the_start() -> None:
    sizes = tiny_config(num_attention_heads=6, num_key_value_heads=3).sizes
    message = "num_key_value_heads=3 can neither be split nor replicated over tp=2"
    with pytest.raises(ValueError, match=message):
        check_layout(LayoutRequest(sizes=sizes, layout=ParallelLayout(tp=2, ep=2), world_size=2))
    assert message in faults_of({"parallel": {"tp": 2}}, world=2, sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [2, slow(4)])
@pytest.mark.requirement("R-TP-06")
def test_an_odd_vocabulary_matches_one_process(tp: int, tied: bool, tmp_path: Any) -> None:
    config = tiny_config(vocab_size=51, tie_word_embeddings=tied)
    state, case = full_state(config), Case(tp=tp, ep=tp, stage=2)
    batch = random_batch(vocab_size=51)
    batch.ids[:, 3], batch.ids[:, 9] = 49, 50
    batch.labels[:, 3], batch.labels[:, 9] = 49, 50
    got = train(config, state, case, batches=[batch])
    want = referee_run(config, state, batches=[batch])
    torch.testing.assert_close(got.curves.losses, want.curves.losses, atol=1e-5, rtol=0)
    assert_all_match(got.gradients, want.gradients)
    last_rows = got.gradients["model.embed_tokens.weight"][49:]
    assert last_rows.shape == (2, 32)
    assert last_rows.abs().amax(1).min() > 1e-4
    assert not torch.equal(*last_rows)
    run_ranks(export, tp, config, state, case, tmp_path)
    exported = read_export(tmp_path)
    head = exported["model.embed_tokens.weight" if tied else "lm_head.weight"]
    stock = referee_model(config, state)
    hidden = stock.model(input_ids=batch.ids).last_hidden_state
    logits = hidden @ head.t()
    assert logits.shape == (8, 16, 51)
    torch.testing.assert_close(logits, stock(input_ids=batch.ids).logits, atol=1e-5, rtol=0)


@pytest.mark.requirement("R-TP-07")
def test_dropout_in_a_group_is_refused() -> None:
    """When the settings are resolved; test_model_errors.py has the model itself."""
    assert "attention_dropout=0.1 cannot be used with tp=2" in faults_of(
        {"parallel": {"tp": 2}}, dropout=0.1, sizes=TINY
    )


def _random_states(rank: int, world_size: int, num_workers: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Random state before and after three steps that a loader feeds, and the first ids of each step."""
    from recipe.data.loader import LoaderOptions, StepLoader
    from recipe.data.packing import PackedBlocks, Stretches
    from recipe.settings.arguments import parse_arguments
    from recipe.train.prepare import prepare_engine

    settings = resolve({"parallel": {"tp": 2}}, "--per_device_train_batch_size=2")
    run: Any = SimpleNamespace(
        arguments=parse_arguments(["--config_name=demo", "--output_dir=run", "--block_size=16", "--seed=100"]),
        settings=settings,
        config=tiny_config(),
        mesh=build_mesh(settings.layout, num_key_value_heads=2),
        world=SimpleNamespace(device="cpu"),
        model_folder=None,
        say=lambda line: None,
    )
    engine = prepare_engine(run)
    before = torch.get_rng_state()
    tokens = np.random.default_rng(0).integers(0, 50, 640)
    stretches = Stretches(np.array([0]), np.array([640]))
    blocks = PackedBlocks(tokens, stretches=stretches, block_size=16)
    options = LoaderOptions(num_sequences=2, seed=5, dp=2, dp_rank=engine.mesh.dp_rank, num_workers=num_workers)
    steps = StepLoader(blocks, options=options).steps(0)
    seen = []
    for _ in range(3):
        parts = next(steps).micro_batches
        engine.accumulate(parts, counts=engine.count(parts))
        engine.update(learning_rate=0.01)
        seen.append(parts[0].input_ids)
    steps.close()
    return before, torch.get_rng_state(), seen


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.requirement("R-TP-07")
def test_random_state_is_equal_in_a_group_and_untouched_by_the_loader(num_workers: int) -> None:
    ranks = run_ranks(_random_states, 4, num_workers)
    for before, after, _ in ranks:
        assert torch.equal(before, after)
    for first in (0, 2):
        assert torch.equal(ranks[first][1], ranks[first + 1][1])
        assert all(map(torch.equal, ranks[first][2], ranks[first + 1][2]))
    assert not torch.equal(ranks[0][1], ranks[2][1])
    assert not torch.equal(ranks[0][2][0], ranks[2][2][0])
