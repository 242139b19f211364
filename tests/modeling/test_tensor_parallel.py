"""Tensor parallelism: what users of other trainers found wrong, beside what test_parity.py holds to one process."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modeling.mesh import build_mesh
from tests.engine_runs import Case, accumulate, join_shards, slow, start_engine, train, used_gradients
from tests.ranks import run_ranks
from tests.referee import Tensors, Training, assert_all_match, full_state, random_batch, tiny_config
from tests.resolving import resolve


@pytest.mark.requirement("R-TP-01")
def test_replicated_parameters_stay_equal_under_adam_in_bf16() -> None:
    """`train` asserts it."""
    config = tiny_config(qk_norm="head")
    training = Training(learning_rate=0.1, num_steps=5, max_grad_norm=1.0)
    case = Case(dp=2, tp=2, ep=1, stage=2, bf16=True)
    train(config, full_state(config), case, batches=[random_batch()], training=training)


def _check_replicas(rank: int, world_size: int, case: Case, broken: list[tuple[str, int]]) -> list[str]:
    """What the check says after a step, each time one rank has changed its copy of a tensor."""
    from deepspeed.utils import safe_set_full_fp32_param

    from recipe.checkpoint.native import check_replicas, full_precision_shard
    from recipe.shared.ranks import TorchRanks

    config = tiny_config(qk_norm="head", router_bias=True)
    engine = start_engine(config, full_state(config), case)
    accumulate(engine, random_batch(), case)
    engine.update(learning_rate=0.01)
    check_replicas(engine, TorchRanks())
    tensors = {**dict(engine.model.named_parameters()), **dict(engine.model.named_buffers())}
    messages = []
    for name, broken_rank in broken:
        tensor = tensors[name]
        kept = tensor.detach().clone()
        if case.stage < 3:
            if rank == broken_rank:
                tensor.data.view(-1)[-1] = torch.nextafter(kept.view(-1)[-1], torch.tensor(torch.inf))
        else:
            # The optimizer's copy is shared by the ranks of a data-parallel group, which change it together.
            change = 1e-6 * (engine.mesh.group_rank == broken_rank % case.tp)
            safe_set_full_fp32_param(tensor, full_precision_shard(tensor) + change)
        with pytest.raises(RuntimeError) as caught:
            check_replicas(engine, TorchRanks())
        messages.append(str(caught.value))
        if case.stage < 3:
            tensor.data.copy_(kept)
    return messages


@pytest.mark.parametrize(
    ("case", "broken", "groups"),
    [
        (Case(stage=2), [], []),
        (
            Case(tp=2, ep=2, stage=0),
            [("model.norm.weight", 1), ("model.layers.1.mlp.gate.e_score_correction_bias", 1)],
            ["ranks [0] and ranks [1]"] * 2,
        ),
        slow(
            Case(dp=2, tp=2, ep=2, stage=2),
            [("model.layers.0.mlp.gate.weight", 3), ("model.layers.1.mlp.experts.down_proj", 3)],
            ["ranks [0, 1, 2] and ranks [3]", "ranks [1] and ranks [3]"],
        ),
        slow(Case(tp=4, ep=4, stage=1), [("model.layers.1.self_attn.k_proj.weight", 2)], ["ranks [2] and ranks [3]"]),
        slow(
            Case(dp=2, tp=2, ep=1, stage=3),
            [("model.layers.0.self_attn.q_norm.weight", 1)],
            ["ranks [0, 2] and ranks [1, 3]"],
        ),
    ],
    ids=str,
)
@pytest.mark.requirement("R-TP-01")
def test_the_run_time_check_names_the_tensor_and_the_ranks(
    case: Case, broken: list[tuple[str, int]], groups: list[str]
) -> None:
    for messages in run_ranks(_check_replicas, case.num_ranks, case, broken):
        assert len(messages) == len(broken)
        for message, (name, _), ranks in zip(messages, broken, groups, strict=True):
            assert f"the tensor {name!r} differs between {ranks};" in message


SCALES = (4.0, 2.0**-6)  # of gradients with a norm of about 17


def _clip_known_gradients(
    rank: int, world_size: int, config: Any, state: Tensors, case: Case
) -> list[tuple[float, Tensors]]:
    """Every parameter's gradient is its weight, scaled; the norms reported, and what the optimizer used."""
    now = {"scale": 1.0}

    def force(model: Any) -> None:
        for parameter in model.parameters():
            weight = parameter.detach().clone()
            parameter.register_hook(lambda gradient, weight=weight: (now["scale"] * weight).to(gradient.dtype))

    training = Training(adam_eps=None, weight_decay=0.0, max_grad_norm=1.0)
    engine = start_engine(config, state, case, training=training, prepare=force)
    found = []
    for scale in SCALES:
        now["scale"] = scale
        found.append(used_gradients(engine, random_batch(), case))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "bf16"), [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
)
@pytest.mark.requirement("R-TP-02")
@pytest.mark.requirement("R-MOE-03")
def test_clipping_counts_every_gradient_once_and_scales_what_the_optimizer_uses(stage: int, bf16: bool) -> None:
    config, case = tiny_config(), Case(tp=2, ep=2, stage=stage, bf16=bf16)
    state = {name: tensor.bfloat16().float() for name, tensor in full_state(config).items()}
    squares = {name: tensor.double().square().sum().item() for name, tensor in state.items()}
    norm = sum(squares.values()) ** 0.5
    without_experts = sum(square for name, square in squares.items() if ".experts." not in name) ** 0.5
    assert without_experts < 0.9 * norm
    steps = zip(*run_ranks(_clip_known_gradients, 2, config, state, case), strict=True)
    for scale, by_rank in zip(SCALES, steps, strict=True):
        assert [reported for reported, _ in by_rank] == pytest.approx([norm * scale] * 2, rel=1e-4)
        used = join_shards([gradients for _, gradients in by_rank], config, case)
        share = min(scale, 1.0 / norm)
        assert_all_match(used, {name: tensor * share for name, tensor in state.items()})


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
