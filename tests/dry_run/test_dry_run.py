"""What is planned is what the dry run counts, to the byte; and that is what real ranks send."""

import json
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from recipe.plan.job import Job
from recipe.plan.zero3 import DEFAULTS
from recipe.shared.sent import Sent
from tests.ranks import run_ranks
from tests.traffic_jobs import engine_config, small_job

pytestmark = pytest.mark.slow

OVERLAP: dict[str, Any] = {"overlap": True, "overlap_chunks": 3, "regather": True}
LAYOUTS = {
    "gather_tokens, N=1": small_job(4, 1, zero={"stage": 2}, accumulation=2),
    "gather_tokens, N=1, dp=128": small_job(128, 1, zero={"stage": 3}, precision="bf16"),
    "gather_tokens, N=2": small_job(
        4,
        2,
        2,
        **OVERLAP,
        precision="bf16",
        accumulation=3,
        model={"tie_word_embeddings": True, "balance_scope": "global_batch"},
    ),
    "gather_tokens, N=4": small_job(
        1, 4, 2, zero={"stage": 2}, precision="bf16", accumulation=3, model={"qk_norm": "full", "capacity_factor": 1.0}
    ),
    "gather_tokens, N=8": small_job(
        128, 8, 8, zero={"stage": 3}, precision="bf16", recompute=True, model={"qk_norm": "head"}
    ),
    "gather_tokens in 8 bits, sums in 32": small_job(
        4,
        4,
        4,
        token_dtype="float8_e4m3",
        combine_dtype="float32",
        precision="bf16",
        experts_backend="grouped",
        model={"mlp_only_layers": [0]},
    ),
    "gather_weights, N=2": small_job(1, 2, 1, strategy="gather_weights", zero={"stage": 0}),
    "gather_weights, N=4": small_job(
        128, 4, 1, strategy="gather_weights", precision="bf16", model={"balance_bias_update_rate": 0.01}
    ),
    "gather_weights, N=8": small_job(
        4,
        8,
        1,
        strategy="gather_weights",
        # Every fetch gathers the next parameter ahead, so that calls tell how many fetches there are.
        zero={
            "stage": 3,
            "stage3_param_persistence_threshold": 300,
            "stage3_prefetch_bucket_size": 1,
            "stage3_max_reuse_distance": 0,
        },
        accumulation=2,
        recompute=True,
        clips_gradients=False,
        model={"router_z_loss_coef": 0.01},
    ),
    "all_to_all, N=2": small_job(
        4,
        2,
        2,
        strategy="all_to_all",
        zero={"stage": 3, "stage3_param_persistence_threshold": 300, "stage3_prefetch_bucket_size": 3000},
        accumulation=4,
    ),
    # Ten rows per rank, which four ranks do not share equally.
    "all_to_all, N=4": small_job(
        128,
        4,
        4,
        strategy="all_to_all",
        zero={"stage": 2},
        block_size=10,
        clips_gradients=False,
        model={"qk_norm": "full"},
    ),
    "stage 0 without clipping": small_job(2, 2, 2, zero={"stage": 0}, clips_gradients=False, experts_backend="triton"),
    "all_to_all, N=8": small_job(1, 8, 8, strategy="all_to_all", precision="bf16", recompute=True),
}


def counted(job: Job, *, rank: int = 0, **options: Any) -> Any:
    """The dry run and its rows beside the plan's; in a process without a group of its own."""
    from recipe.dry_run.command import quiet_libraries
    from recipe.dry_run.dry_run import dry_run
    from recipe.dry_run.report import compare

    with quiet_libraries():
        found = dry_run(job, engine_config=engine_config(job), rank=rank, **options)
    return found, compare(found, job, rank=rank).rows


@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_bytes_are_those_of_the_dry_run(name: str, alone: ProcessPoolExecutor) -> None:
    job = LAYOUTS[name]
    found, rows = alone.submit(counted, job).result(timeout=90)
    assert [row for row in rows if not row.is_equal or not row.has_equal_calls] == []
    purposes = {sent.purpose for sent in found.rows}
    assert ("zero" in purposes) is (job.layout.world_size > 1)
    if job.layout.tp > 1:
        assert {"attention", "experts", "replicated", "head"} <= purposes
        assert {sent.op for sent in found.rows if sent.purpose == "experts"} == {
            "gather_tokens": {"all_gather", "reduce_scatter"},
            "gather_weights": {"all_gather", "reduce_scatter"},
            "all_to_all": {"all_to_all"},
        }[job.execution.strategy]


def sent_by_ranks(rank: int, world_size: int, job: Job, num_steps: int) -> tuple[Sent, ...]:
    """The last of so many steps of the real engine."""
    import torch

    from modeling.init import build_model
    from modeling.mesh import build_mesh
    from recipe.dry_run.fake_world import config_of
    from recipe.dry_run.ledger import Ledger
    from recipe.engine.engine import Engine
    from tests.engine_runs import Case, micro_batches, optimizer_for
    from tests.referee import Training, random_batch

    layout = job.layout
    mesh = build_mesh(layout, num_key_value_heads=job.sizes.num_key_value_heads)
    model = build_model(config_of(job), mesh=mesh, execution=job.execution, seed=0)
    if job.recompute:
        model.gradient_checkpointing_enable()
    optimizer: torch.optim.Optimizer = optimizer_for(model, Training())
    engine = Engine(model, ds_config=engine_config(job), optimizer=optimizer)
    case = Case(dp=layout.dp, tp=layout.tp, ep=layout.ep, accumulation=job.accumulation)
    batch = random_batch(num_sequences=job.num_sequences * job.accumulation * layout.dp, block_size=job.block_size)
    parts = micro_batches(batch, case, dp_rank=mesh.dp_rank)
    for _ in range(num_steps):
        with Ledger() as ledger:
            engine.accumulate(parts, counts=engine.count(parts))
            engine.update(learning_rate=1e-3)
    return ledger.rows(mesh)


@pytest.mark.parametrize(
    ("job", "num_steps"),
    [
        (small_job(2, 2, 2, zero={"stage": 2}, precision="bf16", accumulation=2, recompute=True, **OVERLAP), 1),
        # ZeRO-3 learns in two micro-batches, after which all further ones are alike.
        (small_job(2, 2, 1, zero={"stage": 3, "stage3_param_persistence_threshold": 300}, accumulation=2), 2),
    ],
    ids=["stage 2", "stage 3"],
)
def test_the_dry_run_counts_what_real_ranks_send(job: Job, num_steps: int, alone: ProcessPoolExecutor) -> None:
    found, _ = alone.submit(counted, job).result(timeout=90)
    for rows in run_ranks(sent_by_ranks, 4, job, num_steps):
        assert [row[:4] for row in rows] == [row[:4] for row in found.rows]
        for ours, theirs in zip(found.rows, rows, strict=True):
            assert ours.sent_bytes == pytest.approx(theirs.sent_bytes, abs=0.5)


def both_ways(job: Job) -> Any:
    """All layers run, and put together from fewer."""
    from recipe.dry_run.dry_run import trace_micro_batch
    from recipe.dry_run.fake_world import fake_world

    with fake_world(job.layout, num_key_value_heads=job.sizes.num_key_value_heads) as mesh:
        return [trace_micro_batch(job, mesh, all_layers=every, say=lambda line: None) for every in (True, False)]


@pytest.mark.parametrize("recompute", [False, True])
def test_further_layers_add_what_the_second_did(recompute: bool, alone: ProcessPoolExecutor) -> None:
    model = {"num_hidden_layers": 6, "mlp_only_layers": [0, 1, 2]}
    job = small_job(4, 4, 4, model=model, recompute=recompute, block_size=64)
    every, fewer = alone.submit(both_ways, job).result(timeout=60)
    assert fewer.rows == every.rows
    for trace in (every, fewer):
        assert len(trace.phases) == 6 + (trace is every)
    peaks = [trace.phases[trace.fullest].total() for trace in (every, fewer)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


def engine_rows(job: Job) -> list[list[Sent]]:
    """The engine's own rows over tensors whose memory is not touched, and over ordinary ones."""
    from recipe.dry_run.command import quiet_libraries
    from recipe.dry_run.engine_trace import trace_engine
    from recipe.dry_run.fake_world import fake_world

    with quiet_libraries(), fake_world(job.layout, num_key_value_heads=job.sizes.num_key_value_heads) as mesh:
        return [trace_engine(job, mesh, engine_config=engine_config(job), large=large) for large in (1, 2**40)]


@pytest.mark.parametrize(
    "job",
    [
        small_job(6, 2, 2, zero={"stage": 1}, precision="bf16"),
        small_job(6, 2, 2, zero={"stage": 2}, accumulation=2, model={"balance_bias_update_rate": 0.01}),
        # Some parameters stay, some come ahead of their use, some are kept from the forward to the backward.
        small_job(
            6,
            2,
            2,
            zero={
                "stage": 3,
                "stage3_param_persistence_threshold": 600,
                "stage3_prefetch_bucket_size": 4000,
                "stage3_max_reuse_distance": 30000,
            },
            model={"num_hidden_layers": 4, "mlp_only_layers": [1]},
        ),
    ],
    ids=["stage 1", "stage 2", "stage 3"],
)
def test_untouched_tensors_are_sent_like_ordinary_ones(job: Job, alone: ProcessPoolExecutor) -> None:
    untouched, ordinary = alone.submit(engine_rows, job).result(timeout=90)
    assert untouched == ordinary
    assert {"zero", "counts"} <= {row.purpose for row in ordinary}


def unequal_rows(job: Job, name: str, value: Any) -> list[tuple[str, str, str]]:
    """What differs where the planner takes another value for something that it knows of DeepSpeed."""
    from unittest.mock import patch

    with patch(name, value):
        _, rows = counted(job)
    return [row.counted[:3] for row in rows if not row.is_equal]


def one_group(*_: Any) -> list[dict[str, int]]:
    """Another optimizer than the run's, in the planner's words."""
    return [{"all": 10_000}]


@pytest.mark.parametrize(
    ("stage", "name", "value", "row"),
    [
        (2, "recipe.plan.traffic.ALIGNMENT", 512, "all_gather"),
        (2, "recipe.plan.traffic.SUM_BYTES", 2, "all_reduce"),
        (2, "recipe.plan.traffic.flat_groups", one_group, "all_gather"),
        (3, "recipe.plan.zero3.DEFAULTS", dict.fromkeys(DEFAULTS, 1), "all_gather"),
    ],
    ids=["padding", "type of sums", "optimizer groups", "thresholds"],
)
def test_a_planner_that_errs_about_deepspeed_is_found_out(
    stage: int, name: str, value: Any, row: str, alone: ProcessPoolExecutor
) -> None:
    job = small_job(8, zero={"stage": stage}, precision="bf16")
    assert ("dp", row, "zero") in alone.submit(unequal_rows, job, name, value).result(timeout=90)


def run_command(words: list[str]) -> tuple[int, str, str]:
    """What `gather-moe dry-run` returns and prints to stdout and stderr."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from recipe.cli import main

    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(["dry-run", *words])
    return code, out.getvalue(), err.getvalue()


def test_the_command_prints_one_object_and_says_that_the_plan_is_equal(
    tmp_path: Path, alone: ProcessPoolExecutor
) -> None:
    """In float32 for GPUs; what the JSON sets for the run is part of the job, and its monitors write nothing."""
    config, monitor = tmp_path / "ds.json", tmp_path / "monitor"
    options = {
        "capacity_factor": 1.25,
        "balance_scope": "global_batch",
        "balance_bias_update_rate": 0.001,
        "router_jitter_noise": 0.01,
    }
    csv = {"enabled": True, "output_path": str(monitor), "job_name": "run"}
    config.write_text(json.dumps({"arguments": options, "csv_monitor": csv}))
    words = "--model demo --gpus 16 --gpus_per_node 8 --tp 2 --ep 2 --seq_len 128 --zero_stage 1 --compare --json"
    words += f" --precision fp32 --gpu a100-80g --rank 3 --ds_config {config}"
    code, out, err = alone.submit(run_command, words.split()).result(timeout=120)
    assert list(tmp_path.iterdir()) == [config]
    assert code == 0, err
    found = json.loads(out)
    assert found["compare"]["collective_bytes_equal"] is True
    assert found["layout"] == {"dp": 8, "tp": 2, "ep": 2, "etp": 1}
    assert sum(row["sent_bytes"] for row in found["collectives"]) == pytest.approx(found["sent_bytes"])
    places = [(row["axis"], row["op"], row["purpose"]) for row in found["collectives"]]
    assert {("group", "all_gather", "capacity"), ("dp", "all_reduce", "statistics")} <= set(places)
    assert ("dp", "all_reduce", "router_bias") in places
    memory = {row["kind"]: row for row in found["compare"]["memory"]}
    assert memory["weights"]["counted_bytes"] == memory["weights"]["planned_bytes"] > 0
    assert memory["activations"]["counted_bytes"] == pytest.approx(memory["activations"]["planned_bytes"], rel=0.1)
    assert re.search(r"the model with 4 MoE and 0 dense layers of 4 and 0\n", err)
