"""Predicted peaks of memory beside the storages that live: in real steps under the engine, and on fake tensors."""

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from modeling.config import GatherMoeConfig
from modeling.init import build_model
from modeling.layout import ParallelLayout
from recipe.dry_run.dry_run import trace_micro_batch
from recipe.dry_run.fake_world import fake_world
from recipe.dry_run.live_memory import LiveMemory
from recipe.plan.job import Job
from recipe.plan.memory import moments, predict_memory
from tests import engine_runs
from tests.engine_runs import Case
from tests.ranks import run_ranks
from tests.referee import Training, random_batch, split_options, tiny_config

MODEL = {"vocab_size": 512, "hidden_size": 128, "num_experts": 8, "moe_intermediate_size": 128}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}
BOUND = 0.08  # of what the plan and the storages may differ by
NUM_SEQUENCES, BLOCK_SIZE, BUCKET = 4, 512, 100_000


class Peak(NamedTuple):
    """Of the first rank's second step: bytes at the fullest moment, by kind, and the rank's load over the mean."""

    num_bytes: int
    by_kind: Counter[str]
    rho: float


class Measured(NamedTuple):
    model: dict[str, Any]
    case: Case
    zero: dict[str, Any] = {}  # noqa: RUF012
    num_sequences: int = NUM_SEQUENCES
    block_size: int = BLOCK_SIZE
    document_length: int | None = None


def config_of(measured: Measured) -> GatherMoeConfig:
    return tiny_config(**(MODEL | split_options(measured.model)[0]))


def job_of(measured: Measured, *, rho: float = 1.0, device: str = "cpu") -> Job:
    """The same step as the planner has it; `rho` is the first rank's load over the mean."""
    case, (changes, execution) = measured.case, split_options(measured.model)
    return Job(
        model=MODEL | {"num_hidden_layers": 2, "num_experts_per_tok": 2, "qk_norm": "none"} | changes,
        layout=ParallelLayout(dp=case.dp, tp=case.tp, ep=case.ep),
        num_sequences=measured.num_sequences,
        block_size=measured.block_size,
        accumulation=case.accumulation,
        execution=replace(execution, experts_backend="loop") if execution.experts_backend == "auto" else execution,
        zero={"stage": case.stage, "reduce_bucket_size": BUCKET, **measured.zero},
        precision="bf16" if case.bf16 else "fp32",
        recompute=case.checkpointing,
        device=device,
        attention_length=measured.document_length,
        rho=rho,
    )


def measure(rank: int, world_size: int, measured: Measured) -> Peak:
    """The second step of a run, the first in which the optimizer has its states."""
    from recipe.engine.engine import Engine, build_optimizer
    from recipe.settings.training import OptimizerOptions

    torch.manual_seed(0)
    case, config, memory = measured.case, config_of(measured), LiveMemory()
    num_sequences = measured.num_sequences * case.dp * case.accumulation
    adam = OptimizerOptions(learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1, max_grad_norm=1.0)
    with memory:
        mesh, (_, execution) = engine_runs.make_mesh(config, case), split_options(measured.model)
        model = build_model(config, mesh=mesh, execution=execution, seed=0)
        if case.checkpointing:
            model.gradient_checkpointing_enable()
        zero = {"reduce_bucket_size": BUCKET, **measured.zero}
        settings = engine_runs.ds_config(case, Training(max_grad_norm=1.0, zero=zero))
        engine = Engine(model, ds_config=settings, optimizer=build_optimizer(model, adam))
        memory.name_gradients(model.parameters())
        sizes = {"num_sequences": num_sequences, "vocab_size": config.vocab_size}
        for block_size in (16, measured.block_size):  # the first step only makes the optimizer's states
            batch = random_batch(block_size=block_size, **sizes)
            memory.restart()
            engine_runs.accumulate(engine, batch, case)
            engine.update(learning_rate=1e-3)
        _name_states(memory, engine)
    loads = torch.tensor(engine.loads())
    shares = loads.unflatten(1, (case.ep, -1)).sum(-1)
    rho = float((shares[:, engine.mesh.ep_rank] / shares.mean(1)).max())
    return Peak(memory.peak_bytes, memory.bytes_at_peak(), rho)


def _name_states(memory: LiveMemory, engine: Any) -> None:
    """What DeepSpeed has made of the weights and given the optimizer."""
    states = engine.ds.basic_optimizer.state
    moments = [value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor)]
    memory.name([*states, *moments], kind="optimizer")
    for parameter in engine.model.parameters():
        memory.name([getattr(parameter, "ds_tensor", parameter)], kind="weights")


DENSE_FIRST = {"num_hidden_layers": 3, "mlp_only_layers": [0], "intermediate_size": 512}


@pytest.mark.slow
@pytest.mark.parametrize(
    "measured",
    [
        Measured({}, Case()),
        Measured({"qk_norm": "head", "regather": True}, Case(tp=2, ep=2, stage=1)),
        Measured({"qk_norm": "full"}, Case(tp=2, stage=2, bf16=True)),
        Measured(DENSE_FIRST, Case(dp=2, stage=2, accumulation=2), block_size=128),
        Measured(DENSE_FIRST | {"mlp_only_layers": [0, 2]}, Case(tp=2, stage=2, bf16=True, checkpointing=True)),
        Measured({"strategy": "gather_weights"}, Case(tp=2, stage=2)),
        Measured({"strategy": "all_to_all"}, Case(tp=2, ep=2, stage=2, bf16=True)),
        Measured({"num_key_value_heads": 1, "regather": True}, Case(dp=2, tp=2, ep=2, stage=2, checkpointing=True)),
        Measured({"overlap": True}, Case(dp=2, tp=2, stage=3, bf16=True)),
        Measured({"vocab_size": 8192}, Case(dp=2, stage=1, bf16=True, accumulation=2), block_size=256),
        # Few tokens and many weights: the last bucket's reduction is the fullest moment, or the first bucket's.
        *(
            Measured({"num_hidden_layers": 3}, Case(dp=2, stage=stage, bf16=bf16), {"reduce_bucket_size": size}, 2, 16)
            for stage, bf16, size in ((0, False, BUCKET), (1, False, 10**7), (2, True, 10**7), (3, True, 600_000))
        ),
    ],
    ids=str,
)
def test_the_peak_of_a_real_step_is_predicted(measured: Measured) -> None:
    peak = run_ranks(measure, measured.case.dp * measured.case.tp, measured)[0]
    plan = predict_memory(job_of(measured, rho=peak.rho))
    assert plan.peak_bytes == pytest.approx(peak.num_bytes, rel=BOUND), (plan, peak)
    assert plan.weights == pytest.approx(peak.by_kind["weights"], rel=0.01)
    assert plan.optimizer == pytest.approx(peak.by_kind["optimizer"], rel=0.01)


STATIC = {"experts_backend": "grouped", "num_hidden_layers": 2, "hidden_size": 256, "moe_intermediate_size": 256}
STATIC |= {"num_attention_heads": 8, "num_key_value_heads": 4}


def fake_peak(job: Job) -> int:
    """Bytes at the fullest moment of forward and backward, without an optimizer, in a process without a group."""
    with fake_world(job.layout, num_key_value_heads=job.sizes.num_key_value_heads) as mesh:
        trace = trace_micro_batch(job, mesh, all_layers=True, say=lambda _: None)
    return trace.phases[trace.fullest].total()


def predicted(job: Job) -> float:
    """The same as planned."""
    passes = [moment for moment in moments(job) if moment.name == "loss" or moment.name.startswith("backward")]
    return max(sum(row.num_bytes for row in moment.rows if row.kind != "optimizer") for moment in passes)


MANY = {"num_experts": 32, "num_experts_per_tok": 8}
WIDE = {"mlp_only_layers": [0], "intermediate_size": 16_384}
HEADS = {"num_attention_heads": 64, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
CHUNKS = {"overlap": True, "overlap_chunks": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "case", "document_length"),
    [
        ({}, Case(dp=2, tp=4, ep=4), None),
        ({"regather": True}, Case(tp=4, ep=2), None),
        ({"strategy": "gather_weights"}, Case(tp=4), None),
        ({"qk_norm": "head"}, Case(tp=8, ep=8, checkpointing=True), None),
        (CHUNKS, Case(dp=16, tp=4, ep=4), None),
        (MANY, Case(dp=128, tp=8, ep=8), None),
        (MANY, Case(dp=4), None),
        (WIDE, Case(tp=4, ep=4), None),
        (WIDE | CHUNKS, Case(tp=4, ep=4, checkpointing=True), None),
        (WIDE | {"regather": True}, Case(tp=4, checkpointing=True), None),
        ({"mlp_only_layers": [1], "intermediate_size": 4096}, Case(checkpointing=True), None),
        (HEADS | CHUNKS, Case(tp=4, ep=4, checkpointing=True), None),
        (HEADS | {"qk_norm": "head"}, Case(tp=4, checkpointing=True), None),
        ({"vocab_size": 50_000}, Case(dp=2, tp=4, ep=4), None),
        ({"vocab_size": 50_000, "tie_word_embeddings": True}, Case(checkpointing=True), None),
        (HEADS, Case(checkpointing=True), 512),
    ],
    ids=str,
)
def test_the_peak_with_static_rows_is_predicted(
    model: dict[str, Any], case: Case, document_length: int | None, alone: ProcessPoolExecutor
) -> None:
    """Documents are attended to one by one on a CPU, so that those are planned for one."""
    measured = Measured(STATIC | model, case._replace(bf16=True), {}, 4, 2048, document_length)
    device = "cpu" if document_length else "cuda"
    job = job_of(measured, device=device)
    peak = alone.submit(fake_peak, job).result(timeout=60)
    assert predicted(job) == pytest.approx(peak, rel=BOUND)


def small_buffers(job: Job) -> int:
    with patch("modeling.cost.ROW_BUFFER_BYTES", 2**22):
        return fake_peak(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "case"),
    [({}, Case(tp=4, ep=4)), (CHUNKS, Case(tp=4, ep=4)), ({"overlap": True, "overlap_chunks": 8}, Case(tp=4))],
    ids=str,
)
def test_the_peak_is_predicted_where_rows_come_group_by_group(
    model: dict[str, Any], case: Case, alone: ProcessPoolExecutor
) -> None:
    measured = Measured(STATIC | model, case._replace(bf16=True), {}, 4, 2048, None)
    job = job_of(measured, device="cuda")
    at_once, grouped = predicted(job), alone.submit(small_buffers, job).result(timeout=60)
    with patch("modeling.cost.ROW_BUFFER_BYTES", 2**22):
        job = replace(job)  # whose cached rows were those of one group
        assert job.expert_rows.at_once < job.expert_rows.buffer
        assert predicted(job) == pytest.approx(grouped, rel=BOUND)
    assert grouped < 0.9 * at_once
