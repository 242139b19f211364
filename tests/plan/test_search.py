"""The planner proposes only what the trainer accepts, finds what trying everything finds, and rejects with numbers."""

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from modeling.layout import LayoutRequest, ParallelLayout, layout_faults
from recipe.plan import report, search
from recipe.plan.flags import add_job_flags, add_model_flags, add_world_flags, read_job
from recipe.plan.job import Job, job_of
from recipe.plan.memory import predict_memory
from recipe.plan.report import against, describe, idle_notes, loses_by, nearest_to_fit, plan_as_json, why_first
from recipe.plan.search import Arrangement, Found, Plan, PlanRequest, Rejected, make_job, search_plans
from recipe.plan.step_time import mfu, predict_time
from recipe.settings.arguments import parse_arguments
from recipe.settings.model import read_model, sizes_of
from recipe.settings.resolve import BUCKET_KEY, USUAL_BUCKET, resolve_config
from recipe.settings.sources import load_deepspeed_json
from recipe.shared.units import GIB, size
from tests.plan_hardware import plan_request

TINY = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4}
SIX_HEADS = {**TINY, "num_attention_heads": 6, "num_key_value_heads": 6, "num_experts": 8}


def resolved_job(plan: Plan, wanted: PlanRequest, *, name: str, folder: Path) -> Job:
    """The job of a run with the plan's file, as the trainer settles it on the plan's ranks."""
    file = folder / "plan.json"
    overrides = {key: wanted.model[key] for key in TINY} if name == "demo" else {}
    report.write_config(
        file, config=report.run_config(plan.job, model={"config_name": name, "config_overrides": overrides})
    )
    arguments = parse_arguments([f"--ds_config={file}"])
    world_size = plan.job.layout.world_size
    assert arguments.expect_world_size == world_size
    ranks = replace(wanted.ranks, world_size=world_size, local_world_size=min(world_size, wanted.ranks_per_node))
    model = read_model(arguments).kwargs
    settings = resolve_config(
        arguments, deepspeed_json=load_deepspeed_json(str(file)), ranks=ranks, sizes=sizes_of(model)
    )
    return job_of(settings, model=model, recompute=arguments.gradient_checkpointing, device=wanted.hardware.device)


@pytest.mark.parametrize("gpus", [1, 3, 6, 8])
@pytest.mark.parametrize(("overrides", "hardware"), [(TINY, "a100-80g"), (SIX_HEADS, "h100")])
@pytest.mark.requirement("R-PLAN-03")
def test_every_plan_passes_the_trainers_own_validation(
    overrides: dict[str, Any], hardware: str, gpus: int, tmp_path: Path
) -> None:
    wanted = plan_request(hardware=hardware, overrides=overrides, gpus=gpus, sequences_per_step=gpus, block_size=96)
    found = search_plans(wanted)
    assert found.plans
    for plan in found.plans:
        layout = plan.job.layout
        assert not layout_faults(LayoutRequest(sizes=wanted.sizes, layout=layout, world_size=layout.world_size))
        assert resolved_job(plan, wanted, name="demo", folder=tmp_path) == plan.job
        assert found.idle(plan) == gpus - layout.world_size
        assert plan.job.tokens_per_step == gpus * 96
    planned = {plan.job.layout.tp for plan in found.plans}
    assert planned == {tp for tp in (1, 2, 3, 4, 6) if tp <= gpus and overrides["num_attention_heads"] % tp == 0}


@pytest.mark.requirement("R-PLAN-03")
def test_three_devices_leave_one_idle_where_the_group_is_two() -> None:
    """Numbers per GPU and MFU are of all devices, idle ones too."""
    found = search_plans(plan_request(overrides=TINY, gpus=3, sequences_per_step=3))
    assert {plan.job.layout.tp: found.idle(plan) for plan in found.plans} == {1: 0, 2: 1}
    (rejected,) = [row for row in found.rejected if row.tp == 3]
    assert "num_attention_heads=4 cannot be split over tp=3; tp must be one of [1, 2, 4]" in rejected.reason
    assert "tp=3 cannot be: tp=3: num_attention_heads=4 cannot be split" in against(found, {"tp": 3})
    plan = next(plan for plan in found.plans if plan.job.layout.tp == 2)
    row = plan_as_json(plan, found)
    assert row["idle_gpus"] == 1
    assert row["tokens_per_s_per_gpu"] == plan.tokens_per_s / 3
    assert row["mfu"] == pytest.approx(mfu(plan.job, plan.time.step_s, found.request.hardware) * 2 / 3)
    assert "per GPU and MFU: of all 3 devices, those with nothing to do included" in describe(found, notes=(), top=9)


def fastest(wanted: PlanRequest, arrangement: Arrangement) -> float:
    """Seconds of the best step among everything that fits."""
    return min(
        predict_time(job, hardware=wanted.hardware, ranks_per_node=wanted.ranks_per_node).step_s
        for job in everything(wanted, arrangement)
        if predict_memory(job).total_bytes <= search.room_of(wanted)
    )


SMALL = {"overrides": {"num_hidden_layers": 2}, "gpus": 4, "sequences_per_step": 8}
LARGE = {"model": "qwen3-30b-a3b", "hardware": "h100", "gpus": 16, "ranks_per_node": 8, "block_size": 4096}


@pytest.mark.parametrize(
    ("changes", "room_gib"),
    [
        (SMALL, None),
        (SMALL | {"hardware": "cpu", "precision": "fp32", "skew": 1.5}, None),
        # Here memory binds.
        pytest.param(LARGE | {"sequences_per_step": 32}, 52, marks=pytest.mark.slow),
        pytest.param(LARGE | {"sequences_per_step": 64}, 60, marks=pytest.mark.slow),
    ],
    ids=["gpu", "cpu", "32 sequences", "64 sequences"],
)
def test_nothing_that_is_left_out_of_the_search_would_be_faster(changes: dict[str, Any], room_gib: int | None) -> None:
    wanted = plan_request(**changes)
    if room_gib is not None:
        wanted = with_room(wanted, room_gib * GIB)
    plans = search_plans(wanted).plans
    assert plans
    assert room_gib is None or any(plan.job.accumulation > 1 for plan in plans)
    for plan in plans:
        assert plan.time.step_s <= fastest(wanted, plan.arrangement) * 1.001, plan.arrangement


def everything(wanted: PlanRequest, arrangement: Arrangement) -> list[Job]:
    switch = (False, True) if arrangement.layout.tp > 1 else (False,)
    choices = product(
        search.micro_batches(wanted, arrangement.layout), search.zero_stages(wanted), (False, True), switch, switch
    )
    names = ("num_sequences", "zero_stage", "recompute", "regather", "overlap")
    jobs = [make_job(wanted, arrangement, **dict(zip(names, choice, strict=True))) for choice in choices]
    lowered = [job for job in jobs if job.zero.get(BUCKET_KEY) == search.MOST_AT_ONCE]
    return [*jobs, *(replace(job, zero={**job.zero, BUCKET_KEY: USUAL_BUCKET}) for job in lowered)]


def with_room(wanted: PlanRequest, num_bytes: int) -> PlanRequest:
    """On devices that leave a rank so much for tensors."""
    memory_bytes = num_bytes + search.RESERVE_BYTES[wanted.hardware.device]
    return replace(wanted, hardware=replace(wanted.hardware, memory_bytes=memory_bytes))


def test_what_does_not_fit_is_rejected_by_the_least_that_it_needs() -> None:
    wanted = plan_request("mixtral-8x7b", hardware="a100-40g", gpus=4, block_size=4096, sequences_per_step=4)
    found = search_plans(wanted)
    lacking = {row.layout: row for row in found.rejected if row.lacking_bytes}
    assert lacking
    for arrangement in search.arrangements(wanted):
        row = lacking.get(str(arrangement))
        if isinstance(arrangement, Arrangement) and row is not None:
            least = min(predict_memory(job).total_bytes for job in everything(wanted, arrangement))
            assert row.lacking_bytes == least - found.room_bytes > 0
            assert f"needs {size(least)} per rank at the least (ZeRO-" in row.reason
    assert all(plan.memory.total_bytes <= found.room_bytes for plan in found.plans)
    nothing = search_plans(with_room(wanted, 2 * GIB))
    assert nothing.plans == ()
    assert len(nothing.rejected) == len(list(search.arrangements(wanted)))


def test_all_sequences_at_once_may_fit_where_fewer_do_not() -> None:
    """A single micro-batch keeps no gradients of those before it."""
    wanted = plan_request("mixtral-8x7b", block_size=2048, sequences_per_step=4)
    found = 0
    for arrangement in search.arrangements(wanted):
        if isinstance(arrangement, Rejected):
            continue
        needed: dict[int, int] = {}
        for job in everything(wanted, arrangement):
            memory = predict_memory(job).total_bytes
            needed[job.num_sequences] = min(memory, needed.get(job.num_sequences, memory))
        most = max(needed)
        if all(needed[most] < needed[b] for b in needed if b != most) and len(needed) > 1:
            plans = {plan.arrangement: plan for plan in search_plans(with_room(wanted, needed[most])).plans}
            assert plans[arrangement].job.num_sequences == most
            found += 1
    assert found


def test_skew_slows_whole_experts_and_leaves_slices_alone() -> None:
    sizes = plan_request("qwen3-30b-a3b").sizes
    layouts = {ep: ParallelLayout(tp=8, ep=ep) for ep in (1, 2, 4, 8)}
    found = {ep: search.skew_of(layout, sizes=sizes, skew=2.0) for ep, layout in layouts.items()}
    # The busiest of eight has a quarter of all rows, each other 3/28: four of them together have 4/7.
    assert found == pytest.approx({1: 1.0, 2: 8 / 7, 4: 10 / 7, 8: 2.0})
    # With 8 experts of which 2 are chosen, one of 8 ranks gets half of the rows at most, each other 1/14.
    few = plan_request("mixtral-8x7b").sizes
    capped = {ep: search.skew_of(layout, sizes=few, skew=7.0) for ep, layout in layouts.items()}
    assert capped == pytest.approx({1: 1.0, 2: 10 / 7, 4: 16 / 7, 8: 4.0})
    for skew in (1.0, 1.5, 3.0, 8.0):
        rising = [search.skew_of(layout, sizes=few, skew=skew) for layout in layouts.values()]
        assert rising == sorted(rising)
    even, skewed = (
        {plan.arrangement: plan.time.step_s for plan in search_plans(plan_request("olmoe", skew=skew)).plans}
        for skew in (1.0, 2.0)
    )
    for arrangement, step_s in skewed.items():
        assert (step_s > even[arrangement]) if arrangement.layout.ep > 1 else (step_s == even[arrangement])


def test_a_micro_batch_is_no_larger_than_asked_and_shared_by_all_ranks() -> None:
    wanted = plan_request(max_micro_batch=2, block_size=6, sequences_per_step=8)
    assert search.micro_batches(wanted, ParallelLayout(dp=1, tp=4, ep=1)) == [2]
    found = search_plans(wanted)
    assert {plan.job.num_sequences for plan in found.plans} <= {1, 2}
    (row,) = [row for row in found.rejected if row.tp == 8]
    assert "cannot be shared by tp=8 ranks" in row.reason


def test_dropout_keeps_to_single_ranks() -> None:
    found = search_plans(plan_request(overrides={"attention_dropout": 0.1}))
    assert {plan.job.layout.tp for plan in found.plans} == {1}
    assert any("attention_dropout=0.1 cannot be used with tp=2" in row.reason for row in found.rejected)


def test_words_name_the_best_and_what_every_other_layout_loses_by() -> None:
    found = search_plans(plan_request("olmoe", gpus=16, ranks_per_node=8, block_size=4096))
    best, second, *_, worst = found.plans
    assert sum(report.seconds_by_kind(best).values()) == pytest.approx(best.time.step_s)
    sentences = why_first(found)
    assert sentences.startswith(f"{best.arrangement} trains most, {best.tokens_per_s:,.0f} tokens/s")
    assert f"The next, {second.arrangement}, is {1 - second.tokens_per_s / best.tokens_per_s:.1%} behind" in sentences
    assert set(report.why_not(found)) == {1, 2, 4, 8, 16} - {best.job.layout.tp}
    ours, theirs = map(report.seconds_by_kind, (best, worst))
    kind = max(theirs, key=lambda name: theirs[name] - ours[name])
    assert f"{kind} alone" in loses_by(worst, best=best)
    place, last = best.job.layout, worst.job.layout
    assert f"comes 1st of {len(found.plans)}, " in against(found, {"tp": place.tp, "ep": place.ep})
    said = against(found, {"tp": last.tp, "ep": last.ep, "strategy": worst.arrangement.strategy})
    assert f"comes {report.ordinal(len(found.plans))} of {len(found.plans)} and is" in said
    assert "comes " in against(found, {"tp": 1, "strategy": "all_to_all"})  # a rank alone has no strategy
    with pytest.raises(ValueError, match="--against tp=17 is a group of more than the 16 devices of --gpus"):
        against(found, {"tp": 17})
    alone = found._replace(plans=found.plans[:1], rejected=())
    assert against(alone, {"tp": place.tp}).endswith("comes 1st of 1.")
    assert why_first(alone).endswith("No other layout fits.")
    assert " ".join(map(report.ordinal, (2, 3, 11, 12, 13, 21, 111))) == "2nd 3rd 11th 12th 13th 21st 111th"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"tp": 4, "ep": 3}, "ep=3 does not divide tp=4; ep must be one of [1, 2, 4] for tp=4"),
        ({"tp": 4, "ep": 1, "strategy": "all_to_all"}, "strategy=all_to_all needs whole experts on each rank: ep=4"),
        ({"tp": 3}, "num_attention_heads=16 cannot be split over tp=3"),
        ({"tp": 4, "strategy": "all_to_all"}, "dp=1 tp=4 ep=4 etp=1 all_to_all: needs "),
        ({"tp": 4, "ep": 2, "strategy": "gather_tokens"}, "dp=1 tp=4 ep=2 etp=2 gather_tokens: needs "),
    ],
)
def test_a_layout_that_cannot_be_is_told_its_own_reason(wanted: dict[str, Any], why: str) -> None:
    """With and without a layout that fits."""
    olmoe = plan_request("olmoe", gpus=4, sequences_per_step=4)
    found = search_plans(with_room(olmoe, 20 * GIB))
    assert not [plan for plan in found.plans if plan.job.layout.tp == 4]
    assert f" cannot be: {why}" in against(found, wanted)


def test_memory_that_is_short_is_nearer_to_fitting_than_a_broken_rule() -> None:
    rule = Rejected("a", "a rule", tp=2)
    much, little = (Rejected(name, name, tp=2, ep=1, lacking_bytes=n) for name, n in (("much", 9), ("little", 5)))
    assert nearest_to_fit([rule, much, little]) == little
    assert nearest_to_fit([rule]) == rule
    alone = plan_request(overrides=TINY, gpus=1, sequences_per_step=1)
    found = Found(alone, search_plans(alone).plans, (rule, much, little), GIB)
    assert "why not tp=2: little: little" in describe(found, notes=(), top=1)
    only_ruled_out = found._replace(rejected=(rule,))
    assert not [line for line in describe(only_ruled_out, notes=(), top=1) if line.startswith("why not")]


def test_a_batch_that_leaves_groups_idle_is_named_with_one_that_does_not() -> None:
    odd = plan_request(gpus=7, sequences_per_step=7)
    (note,) = idle_notes(search_plans(odd))
    assert note.startswith("7 sequences of a step in equal parts keep only 1 of 3 groups of 2 at work; ")
    assert f"--tokens_per_batch {21 * 512} leaves no group idle" in note
    enough = search_plans(replace(odd, sequences_per_step=21))
    assert not list(idle_notes(enough))
    assert {plan.job.layout.tp: enough.idle(plan) for plan in enough.plans} == {1: 0, 2: 1, 4: 3}


def job_flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model_flags(parser, required=False)
    add_world_flags(parser)
    add_job_flags(parser)
    return parser.parse_args(words)


def test_flags_of_a_job_are_settled_as_a_run_settles_them(tmp_path: Path) -> None:
    job, settings = read_job(job_flags("--model=olmoe", "--gpus=16", "--tp=4", "--seq_len=64", "--micro_batch=2"))
    assert (job.layout, settings.layout) == (ParallelLayout(dp=4, tp=4, ep=4),) * 2
    assert (job.precision, job.num_sequences, job.execution.experts_backend) == ("bf16", 2, "grouped")
    assert job.execution.regather
    file = tmp_path / "ds.json"
    file.write_text('{"arguments": {"config_name": "demo", "block_size": 32}, "parallel": {"ep": 1}}')
    flags = job_flags(f"--ds_config={file}", "--gpus=4", "--tp=2", "--zero_stage=3", "--accumulation=3", "--recompute")
    job, _ = read_job(flags, device="cpu", compute_capability=None)
    assert (job.layout, job.block_size, job.zero_stage) == (ParallelLayout(dp=2, tp=2, ep=1), 32, 3)
    assert (job.accumulation, job.recompute, job.precision) == (3, True, "fp32")
    with pytest.raises(ValueError, match=r"the settings .* cannot be used:\n.*num_attention_heads=16"):
        read_job(job_flags("--model=olmoe", "--gpus=3", "--tp=3"))


@pytest.mark.parametrize("block", ["parallel", "zero_optimization"])
def test_a_block_that_is_no_object_is_named_under_flags(block: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(f'{{"{block}": 3}}')
    with pytest.raises(ValueError, match=f'"{block}" must be an object of keys and values, got 3'):
        read_job(job_flags("--model=demo", f"--ds_config={file}", "--gpus=4", "--tp=2", "--zero_stage=1"))


@pytest.mark.parametrize(("name", "says_so"), [("olmoe", True), ("demo", False)])
def test_a_file_says_how_much_is_summed_at_once_where_the_trainer_would_sum_more(name: str, says_so: bool) -> None:
    whole = Arrangement(ParallelLayout(dp=2, tp=4, ep=4), "gather_tokens")
    switches = {"recompute": False, "regather": False, "overlap": True}
    job = make_job(plan_request(name), whole, num_sequences=1, zero_stage=2, **switches)
    written = report.run_config(job, model={})["zero_optimization"]
    assert (job.zero["reduce_bucket_size"] == 50_000_000) is says_so
    assert written == ({"stage": 2, "reduce_bucket_size": 50_000_000} if says_so else {"stage": 2})
