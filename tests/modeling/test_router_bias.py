"""Balancing by the routers' biases: moved once per step by exact counts, kept in float32, saved, restored, exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.model import GatherMoeForCausalLM
from tests.engine_runs import Case, accumulate, make_mesh, micro_batches, start_engine
from tests.exports import export_engine, load_folder, open_in_clean_process, read_export, sample_ids
from tests.ranks import run_ranks
from tests.referee import Batch, Tensors, Training, full_state, mixed_config, random_batch, tiny_config
from tests.training import check_resume

RATE = 0.01
NAME = "mlp.gate.e_score_correction_bias"
PLAIN_SGD = Training(adam_eps=None, learning_rate=0.1, weight_decay=0.0)


def biased_config(**changes: Any) -> GatherMoeConfig:
    """Three layers, the first one dense."""
    values = {"score_function": "sigmoid", "norm_topk_prob": True, "balance_bias_update_rate": RATE, "vocab_size": 51}
    return mixed_config(**(values | changes))


def biases_of(model: Any) -> Tensor:
    """[L_moe, E], a copy."""
    return torch.stack([tensor.clone() for name, tensor in model.named_buffers() if name.endswith(NAME)])


def referee_biases(config: GatherMoeConfig, state: Tensors, batches: list[Batch]) -> list[Tensor]:
    """After every step of plain SGD in one process, by 2408.15664: bias_i += rate * sign(mean - count_i)."""
    model = GatherMoeForCausalLM(config)
    model.load_state_dict(state, strict=False)
    history, biases = [], torch.zeros_like(biases_of(model))
    for batch in batches:
        output = model.train()(input_ids=batch.ids, labels=batch.labels)
        model.zero_grad()
        output.loss.backward()
        for layer, counts in enumerate(output.sums.expert_counts.tolist()):
            mean = sum(counts) / len(counts)
            for expert, count in enumerate(counts):
                biases[layer, expert] += RATE * ((mean > count) - (mean < count))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
            for buffer, bias_E in zip(model.buffers(), biases, strict=True):
                buffer.copy_(bias_E)
        history.append(biases.clone())
    return history


def _train_biased(
    rank: int, world_size: int, config: GatherMoeConfig, state: Tensors, case: Case, batches: list[Batch]
) -> tuple[list[Tensor], set[torch.dtype]]:
    engine = start_engine(config, state, case, training=PLAIN_SGD)
    history = []
    for batch in batches:
        accumulate(engine, batch, case)
        engine.update(learning_rate=0.1)
        engine.evaluate(micro_batches(batch, case, dp_rank=engine.mesh.dp_rank))
        history.append(biases_of(engine.model))
    return history, {buffer.dtype for buffer in engine.model.buffers()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, stage=2, accumulation=3),
        Case(tp=2, ep=2, stage=3, accumulation=3, checkpointing=True),
        Case(dp=2, tp=2, ep=1, stage=1),
    ],
    ids=str,
)
def test_biases_move_once_per_step_by_the_choices_of_the_whole_batch(case: Case) -> None:
    config = biased_config()
    state = full_state(config)
    batches = [random_batch(seed=seed, num_sequences=12) for seed in (7, 8, 9)]
    want = referee_biases(config, state, batches)
    assert want[0].abs().max().item() == pytest.approx(RATE)
    assert want[2].abs().max() > want[0].abs().max()
    for history, dtypes in run_ranks(_train_biased, case.num_ranks, config, state, case, batches):
        assert dtypes == {torch.float32}
        for got, expected in zip(history, want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_biases_stay_in_float32_under_a_bf16_engine(stage: int) -> None:
    """Steps of 1 / 1000, of which bfloat16 would lose most behind the first bits."""
    config = biased_config(balance_bias_update_rate=0.001)
    case = Case(dp=2, stage=stage, bf16=True)
    batches = [random_batch(seed=seed) for seed in range(4)]
    for history, dtypes in run_ranks(_train_biased, 2, config, full_state(config), case, batches):
        assert dtypes == {torch.float32}
        steps = history[-1] / 0.001
        torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)
        assert (steps.round().abs() == 3).any() or (steps.round().abs() == 4).any()


def test_deepspeed_is_told_to_keep_the_biases_of_a_loaded_model_in_float32() -> None:
    """As a user's own Trainer with ZeRO-3 makes tensors in the training precision."""
    from deepspeed.runtime.keep_in_fp32 import buffers_to_keep_in_fp32, keep_in_fp32_pattern

    model = GatherMoeForCausalLM(biased_config())
    pattern = keep_in_fp32_pattern(model, "auto", torch.bfloat16)
    kept = buffers_to_keep_in_fp32(model, pattern)
    assert [id(buffer) for buffer in kept] == [id(buffer) for buffer in model.buffers()]
    assert len(kept) == 2


def _steps_without_effect(rank: int, world_size: int, config: Any, state: Tensors, case: Case) -> list[Tensor]:
    engine = start_engine(config, state, case, training=PLAIN_SGD)
    found = []
    empty = random_batch()
    empty.labels[:] = -100
    accumulate(engine, empty, case)
    engine.update(learning_rate=0.1)
    found.append(biases_of(engine.model))
    accumulate(engine, random_batch(), case)
    step = engine.ds.step

    def skipped() -> None:
        engine.ds.skipped_steps += 1
        engine.ds.optimizer.zero_grad()

    engine.ds.step = skipped
    engine.update(learning_rate=0.1)
    found.append(biases_of(engine.model))
    engine.ds.step = step
    engine.update(learning_rate=0.1)
    found.append(biases_of(engine.model))
    return found


def test_a_step_without_targets_or_left_out_moves_no_bias() -> None:
    config = biased_config()
    [found] = run_ranks(_steps_without_effect, 1, config, full_state(config), Case())
    assert not torch.stack(found).any()


def _dense(rank: int, world_size: int) -> int:
    config = tiny_config(num_experts=0, num_experts_per_tok=0, intermediate_size=48, balance_bias_update_rate=RATE)
    engine = start_engine(config, full_state(config), Case(), training=PLAIN_SGD)
    accumulate(engine, random_batch(), Case())
    engine.update(learning_rate=0.1)
    return len(list(engine.model.buffers()))


def test_a_model_without_routers_has_no_biases() -> None:
    assert run_ranks(_dense, 1) == [0]
    assert not list(GatherMoeForCausalLM(mixed_config()).buffers())


def some_biases(config: GatherMoeConfig) -> Tensors:
    generator = torch.Generator().manual_seed(4)
    return {f"model.layers.{i}.{NAME}": torch.randn(config.num_experts, generator=generator) for i in (1, 2)}


def _export_biased(
    rank: int, world_size: int, config: GatherMoeConfig, case: Case, folder: Path, dtype: torch.dtype
) -> None:
    engine = start_engine(config, full_state(config), case)
    for name, bias_E in some_biases(config).items():
        engine.model.get_buffer(name).copy_(bias_E)
    export_engine(engine, folder, dtype=dtype)


def _load_on(rank: int, world_size: int, config: GatherMoeConfig, case: Case, folder: Path) -> Tensors:
    model, _ = load_folder(config, folder, make_mesh(config, case))
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def biased_model(config: GatherMoeConfig) -> Any:
    model = GatherMoeForCausalLM(config)
    model.load_state_dict(full_state(config) | some_biases(config))
    return model.eval()


@pytest.mark.slow
def test_a_clean_process_and_a_new_run_open_the_export(tmp_path: Path) -> None:
    config, case, folder = biased_config(routed_scaling_factor=2.5), Case(tp=2, ep=2, stage=2), tmp_path / "hf"
    run_ranks(_export_biased, 2, config, case, folder, torch.float32)
    kind, logits, _ = open_in_clean_process(folder, sample_ids(), tmp_path, native=True)
    assert kind == "GatherMoeForCausalLM"
    torch.testing.assert_close(logits, biased_model(config)(sample_ids()).logits, atol=1e-4, rtol=0)
    values = json.loads((folder / "config.json").read_text())
    assert (values["score_function"], values["routed_scaling_factor"], values["router_bias"]) == ("sigmoid", 2.5, True)
    for biases in (read_export(folder), *run_ranks(_load_on, 2, config, case, folder)):
        for name, bias_E in some_biases(config).items():
            assert torch.equal(biases[name], bias_E)


def test_a_run_starts_without_biases_from_a_folder_that_has_none(tmp_path: Path) -> None:
    GatherMoeForCausalLM(biased_config(balance_bias_update_rate=0.0)).save_pretrained(tmp_path)
    [biases] = run_ranks(_load_on, 1, biased_config(), Case(), tmp_path)
    assert sorted(biases) == sorted(some_biases(biased_config()))
    assert not any(bias_E.any() for bias_E in biases.values())


def test_an_export_in_low_precision_keeps_the_biases_and_so_does_its_reader(tmp_path: Path) -> None:
    config = biased_config()
    run_ranks(_export_biased, 1, config, Case(), tmp_path, torch.bfloat16)
    found = read_export(tmp_path)
    model = GatherMoeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, bias_E in some_biases(config).items():
        assert torch.equal(found[name], bias_E)
        assert torch.equal(model.get_buffer(name), bias_E)


def test_a_saved_model_comes_back_with_its_biases(tmp_path: Path) -> None:
    config = biased_config()
    model = biased_model(config)
    model.save_pretrained(tmp_path)
    loaded, report = GatherMoeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert torch.equal(loaded(sample_ids()).logits, model(sample_ids()).logits)


def test_one_rank_resumes_biases_and_jitter_bitwise(tmp_path: Path) -> None:
    flags = {"balance_bias_update_rate": 0.01, "router_jitter_noise": 0.1, "logging_steps": 2}
    ds_config = {"zero_optimization": {"stage": 2}}
    check_resume(tmp_path, world_size=1, ds_config=ds_config, **flags, config_overrides="score_function=sigmoid")
    [file] = (tmp_path / "straight" / "checkpoints" / "step-5" / "deepspeed").glob("*model_states.pt")
    saved = torch.load(file, weights_only=False, map_location="cpu")["module"]
    biases = [tensor for name, tensor in saved.items() if name.endswith(NAME)]
    assert len(biases) == 2
    assert all(bias_E.any() for bias_E in biases)


@pytest.mark.slow
def test_four_ranks_resume_biases_and_jitter_bitwise(tmp_path: Path) -> None:
    ds_config = {"zero_optimization": {"stage": 3}, "parallel": {"tp": 2}}
    flags = {"balance_bias_update_rate": 0.01, "router_jitter_noise": 0.1, "bf16": True}
    flags |= {"balance_scope": "global_batch", "gradient_accumulation_steps": 2}
    check_resume(tmp_path, world_size=4, ds_config=ds_config, **flags)
