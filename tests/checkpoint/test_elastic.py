"""A run goes on in another layout, ZeRO stage and accumulation: the same numbers, and then the same curves."""

import random
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modeling.auxiliary import TokenSums
from modeling.config import GatherMoeConfig
from recipe.checkpoint.find import Checkpoint
from recipe.checkpoint.native_files import open_training_state
from recipe.checkpoint.reshard import reshard
from recipe.checkpoint.training_state import write_whole
from recipe.train.metrics import StepMeter, combine_ranks
from recipe.train.resume import merge_rank_states
from tests.engine_runs import Case, start_engine, train_steps
from tests.ranks import run_ranks
from tests.referee import full_state
from tests.resuming import (
    SAVED_AT,
    check_targets,
    config_of,
    counters_of,
    details_of,
    hashes,
    held_by,
    make_source,
    resume,
)
from tests.saves import entries
from tests.states import state_of
from tests.training import Flags, read_metrics, train_on_ranks, write_ds_config, write_inputs

BF16 = Case(bf16=True)
ONE, DP, TP, BOTH, WIDE = Case(), Case(dp=2), Case(tp=2, ep=2), Case(dp=2, tp=2, ep=2), Case(tp=4, ep=4)
TP1, BOTH1, WIDE1, WIDE2 = (case._replace(ep=ep) for case, ep in ((TP, 1), (BOTH, 1), (WIDE, 1), (WIDE, 2)))
# Rows of a vocabulary of 51 do not divide evenly over the ranks.
ODD: dict[str, Any] = {"vocab_size": 51}
TIED = ODD | {"tie_word_embeddings": True, "qk_norm": "full", "score_function": "softmax"}
FROZEN = (r"layers\.1\..*(experts|norm)", "embed_tokens")
# Between them all pairs of layouts, of stages, and of whole experts and slices of them.
PAIRS: list[tuple[Case, list[tuple[Case, int]], dict[str, Any], tuple[str, ...]]] = [
    (ONE._replace(stage=2), [(ONE, 1), (DP, 2), (TP1, 3), (BOTH, 0), (WIDE, 1)], {}, ()),
    (DP._replace(stage=3), [(ONE, 0), (DP, 1), (TP, 2), (BOTH1, 1), (WIDE1, 2)], ODD, FROZEN),
    (TP._replace(stage=1), [(ONE, 3), (DP, 3), (TP1, 1), (BOTH, 2), (WIDE2, 3)], TIED, ()),
    (BOTH1._replace(stage=2, accumulation=2), [(ONE, 2), (DP, 1), (TP, 3), (BOTH, 1), (WIDE1, 2)], ODD, FROZEN),
    (WIDE._replace(stage=3, accumulation=3), [(ONE, 1), (DP, 3), (TP1, 0), (BOTH, 3), (WIDE, 2)], TIED, ()),
    (BOTH._replace(stage=0), [(ONE, 3), (WIDE2, 0)], {}, ()),
]


def test_the_pairs_are_all_pairs_of_layouts_stages_and_shares_of_experts() -> None:
    pairs = [(source, layout._replace(stage=stage)) for source, targets, *_ in PAIRS for layout, stage in targets]
    layouts = {(case.dp, case.tp) for case in (ONE, DP, TP, BOTH, WIDE)}
    assert {((a.dp, a.tp), (b.dp, b.tp)) for a, b in pairs} == set(product(layouts, repeat=2))
    stages = {(a.stage, b.stage) for a, b in pairs}
    assert stages >= set(product((1, 2, 3), repeat=2)) | {(0, 3), (0, 0), (2, 0), (3, 0)}
    split = [(a, b) for a, b in pairs if a.tp > 1 and b.tp > 1]
    assert {(a.ep == a.tp, b.ep == b.tp) for a, b in split} == set(product((False, True), repeat=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "targets", "changes", "frozen"), PAIRS, ids=lambda value: str(value) if isinstance(value, Case) else ""
)
@pytest.mark.requirement("R-CKPT-13", "R-CKPT-08")
def test_any_layout_goes_on_in_any_other(
    tmp_path: Path, source: Case, targets: list[tuple[Case, int]], changes: dict[str, Any], frozen: tuple[str, ...]
) -> None:
    made = make_source(tmp_path, source, config=config_of(**changes), frozen=frozen)
    held = made.by_rank[0].held
    assert ("lm_head.weight" in held["weight"]) == (changes is not TIED)
    assert ("model.embed_tokens.weight" in held["exp_avg"]) == (frozen is not FROZEN)
    check_targets(made, [layout._replace(stage=stage) for layout, stage in targets], frozen=frozen)


BF16_1, BF16_2, BF16_3 = BF16._replace(dp=2, stage=1), BF16._replace(tp=4, ep=4, stage=2), BF16._replace(dp=2, stage=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "targets"),
    [
        # From and to every stage in bf16, of which the first is DeepSpeed's BF16_Optimizer; from and to float32.
        (BF16._replace(dp=2, tp=2, ep=2, stage=1), [BF16_1, BF16_2, Case(stage=2)]),
        (BF16._replace(dp=2, stage=2), [BF16_3, Case(stage=2)]),
        (BF16._replace(tp=2, stage=3), [BF16_1, Case(stage=2)]),
        (Case(dp=2, stage=1), [BF16._replace(tp=2, ep=2, stage=stage) for stage in (1, 2, 3)]),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else "",
)
@pytest.mark.requirement("R-CKPT-08")
def test_one_precision_goes_on_in_another_from_the_optimizers_own_numbers(
    tmp_path: Path, source: Case, targets: list[Case]
) -> None:
    check_targets(make_source(tmp_path, source), targets, tolerance=0.02)


def resume_beside(
    rank: int, world_size: int, folder: Path, config: GatherMoeConfig, case: Case, then: Any, now: Any
) -> list[str]:
    """Save under DeepSpeed's settings `then`, go on under `now` in the same layout; what is said."""
    from recipe.checkpoint.native import save_native

    engine = start_engine(config, full_state(config), case, **then)
    train_steps(engine, config, case, range(SAVED_AT))
    save_native(engine, folder, rank_state={"rank": rank})
    want = held_by(engine)
    other = start_engine(config, full_state(config, seed=2), case, **now)
    said = resume_saying(other, Checkpoint(SAVED_AT, folder, details_of(config, case)), case)
    got = held_by(other)
    assert [hashes(tensors) for tensors in got.values()] == [hashes(tensors) for tensors in want.values()]
    assert counters_of(other) == counters_of(engine)
    return said


def resume_saying(engine: Any, checkpoint: Checkpoint, case: Case) -> list[str]:
    from recipe.checkpoint.elastic import resume_training
    from recipe.shared.ranks import TorchRanks

    said: list[str] = []
    state = resume_training(
        engine,
        checkpoint,
        details=details_of(engine.model.config, case),
        seed=1,
        ranks=TorchRanks(),
        say=said.append,
    )
    assert state == (None if said else {"rank": engine.mesh.rank})
    return said


LOW, CUT = {"data_types": {"grad_accum_dtype": "bf16"}}, {"zero_optimization": {"stage": 3, "sub_group_size": 1000}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "then", "now", "said"),
    [
        (BF16._replace(dp=2, stage=1), {}, LOW, "(BF16_Optimizer then, DeepSpeedZeroOptimizer now)"),
        (BF16._replace(dp=2, stage=1), LOW, {}, "(DeepSpeedZeroOptimizer then, BF16_Optimizer now)"),
        (Case(dp=2, stage=3), CUT, {}, "now)"),
    ],
    ids=["an optimizer of float32 before", "an optimizer of float32 now", "other sub-groups"],
)
def test_the_same_layout_with_other_parts_on_the_ranks_is_cut_anew(
    tmp_path: Path, case: Case, then: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    (line,), _ = run_ranks(resume_beside, 2, tmp_path, config_of(), case, then, now)
    precision = "bf16" if case.bf16 else "fp32"
    assert line.startswith(f"resuming dp=2 tp=1 ep=1 ZeRO-{case.stage} {precision} with other parts on the ranks")
    assert said in line


def test_the_same_layout_is_left_to_deepspeed(tmp_path: Path) -> None:
    assert run_ranks(resume_beside, 1, tmp_path, config_of(), Case(stage=2), {}, {}) == [[]]


def bytes_read(rank: int, world_size: int, config: GatherMoeConfig, stages: list[int]) -> list[int]:
    """Put a state in place under each stage, look at what the engine holds then, and count what was read for it."""
    from recipe.checkpoint.elastic import put_state
    from recipe.checkpoint.native import parts_in_place

    counts = []
    for stage in stages:
        state = state_of(config)
        engine = start_engine(config, full_state(config, seed=2), Case(dp=world_size, stage=stage))
        with parts_in_place(engine):
            put_state(engine, state, checkpoint=Checkpoint(3, Path(), {}))
        counts.append(state.num_bytes)
        for kind, tensors in held_by(engine).items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, state.tensors[f"{kind}/{name}"]), (stage, kind, name)
    return counts


@pytest.mark.slow
def test_every_rank_reads_only_what_it_keeps() -> None:
    config, dp = config_of(), 2
    state = state_of(config)
    names = [name for name in state.shapes() if len(state.kinds(name)) == 3]
    trained = sum(state.tensors[f"weight/{name}"].nbytes for name in names)
    buffers = sum(state.tensors[f"weight/{name}"].nbytes for name in state.shapes() if name not in names)
    by_rank = run_ranks(bytes_read, dp, config, [2, 3])
    of_stage_2, of_stage_3 = (sum(counts) for counts in zip(*by_rank, strict=True))
    assert of_stage_2 == dp * (trained + buffers) + 2 * trained, "whole weights, and a part of the moments"
    assert of_stage_3 == dp * buffers + 3 * trained


def refusals(rank: int, world_size: int, tries: list[tuple[Checkpoint, GatherMoeConfig, Any]]) -> list[str]:
    from recipe.shared.errors import CheckpointBrokenError

    errors = []
    for checkpoint, config, options in tries:
        with pytest.raises((ValueError, CheckpointBrokenError)) as caught:
            resume(rank, world_size, checkpoint, config, [Case(stage=1)], options)
        errors.append(f"{caught.type.__name__}: {caught.value}")
    return errors


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    frozen, folder = {"frozen": FROZEN}, re.escape(str(tmp_path))
    checkpoint, config, _, _ = make_source(tmp_path, Case(stage=2), **frozen)
    tries = [
        (checkpoint._replace(details=checkpoint.details | {"dp": 2}), config, frozen),
        (checkpoint, config_of(num_hidden_layers=4, vocab_size=51), frozen),
        (checkpoint, config_of(num_hidden_layers=2, vocab_size=51), frozen),
        (checkpoint, config, {}),
    ]
    (errors,) = run_ranks(refusals, 1, tries)
    for error, match in zip(
        errors,
        [
            rf"CheckpointBrokenError: {folder}/ranks/rank-00001\.pt: missing",
            rf"CheckpointBrokenError: {folder}: its tensors are not those of the model: 12 are missing \['model\.",
            r"of the model: 0 are missing \[\], 12 are unexpected \['model.*, 2 are of another shape \['lm_head",
            "ValueError: 7 parameters are to be trained that were frozen when .*; freeze them again, or begin",
        ],
        strict=True,
    ):
        assert re.search(match, error), error


def resume_whole(rank: int, world_size: int, checkpoint: Checkpoint, config: GatherMoeConfig, case: Case) -> list[str]:
    return resume_saying(start_engine(config, full_state(config, seed=2), case), checkpoint, case)


@pytest.mark.requirement("R-CKPT-08")
def test_one_rank_goes_on_without_zero_and_from_whole_tensors_in_any_stage(tmp_path: Path) -> None:
    source, out = make_source(tmp_path / "source", Case(stage=2)), tmp_path / "out"
    check_targets(source, [Case(stage=0)])
    (out / "ranks").mkdir(parents=True)
    (out / "ranks" / "rank-00000.pt").write_bytes((tmp_path / "source" / "ranks" / "rank-00000.pt").read_bytes())
    state = open_training_state(source.checkpoint.folder, details=source.checkpoint.details)
    write_whole(out / "whole", state, advance=lambda num_bytes: None)
    source = source._replace(checkpoint=source.checkpoint._replace(folder=out))
    check_targets(source, [Case(stage=2), Case(stage=3)])
    ((line,),) = run_ranks(resume_whole, 1, source.checkpoint, source.config, Case(stage=2))
    assert line.startswith("resuming whole tensors as dp=1 tp=1 ep=1 ZeRO-2 fp32: weights")


def resume_from_the_start(rank: int, world_size: int, folder: Path, config: GatherMoeConfig, case: Case) -> None:
    from recipe.checkpoint.elastic import load_elastic
    from recipe.checkpoint.native import save_native
    from recipe.shared.ranks import TorchRanks

    engine = start_engine(config, full_state(config), case)
    save_native(engine, folder, rank_state={})
    other = start_engine(config, full_state(config, seed=2), case._replace(stage=1))
    checkpoint = Checkpoint(0, folder, details_of(config, case))
    load_elastic(other, checkpoint, seed=1, ranks=TorchRanks())
    assert counters_of(other)["steps"] == {0.0}
    outcomes = [train_steps(each, config, case, range(2)) for each in (engine, other)]
    assert outcomes[0] == outcomes[1]


def test_a_checkpoint_before_the_first_step_goes_on(tmp_path: Path) -> None:
    run_ranks(resume_from_the_start, 1, tmp_path, config_of(), Case(stage=2))


@pytest.mark.requirement("R-CKPT-09")
def test_another_layout_draws_from_the_seed_the_step_and_the_group() -> None:
    from recipe.checkpoint.rank_files import random_states, reseed, restore_random_states

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), torch.rand(()).item()

    before = random_states(torch.device("cpu"))
    draws = []
    for seed, step, dp_rank in [(1, 2, 0), (1, 2, 0), (2, 2, 0), (1, 3, 0), (1, 2, 1)]:
        reseed(seed, step=step, dp_rank=dp_rank)
        draws.append(draw())
    assert draws[0] == draws[1]
    assert len(set(draws)) == 4
    restore_random_states(before, device=torch.device("cpu"))
    want = draw()
    restore_random_states(before, device=torch.device("cpu"))
    assert draw() == want


EXACT = ("step", "lr", "tokens", "skipped_steps", "rho", "dead_experts")
CLOSE = ("loss", "grad_norm", "aux_loss", "z_loss", "router_entropy")


def layout_flags(folder: Path, *, tp: int, stage: int, accumulation: int = 1, batch: int = 2, **parallel: Any) -> Flags:
    ds_config = {"zero_optimization": {"stage": stage}, "parallel": {"tp": tp, **parallel}}
    sizes = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": batch}
    return write_ds_config(folder, **ds_config) | sizes


def check_curves(run: Path, straight: Path, *, steps: set[int]) -> None:
    """Hold the lines of these steps, and the evaluation of the last one, against those of the straight run."""
    want, got = read_metrics(straight), read_metrics(run)
    assert got.keys() == steps
    for step, line in got.items():
        for key in EXACT:
            assert line[key] == want[step][key], (step, key)
        for key in CLOSE:
            assert line[key] == pytest.approx(want[step][key], abs=1e-5), (step, key)
    evaluated = [read_metrics(folder, key="eval_loss")[max(steps)]["eval_loss"] for folder in (run, straight)]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.requirement("R-CKPT-08")
def test_a_run_goes_on_twice_in_other_layouts(tmp_path: Path) -> None:
    """Saved in the middle of a log line both times; the routers' jitter goes on with the stream of tokens.

    The second time it goes on from whole tensors, in an output folder of its own.
    """
    flags = write_inputs(tmp_path) | {"max_steps": 6, "save_steps": 2, "logging_steps": 3, "hf_save": "never"}
    flags |= {"router_jitter_noise": 0.1, "balance_bias_update_rate": 0.01, "learning_rate": 1e-3}
    straight, run, out = tmp_path / "straight", tmp_path / "run", tmp_path / "whole"
    run_ranks(train_on_ranks, 4, flags | layout_flags(tmp_path, tp=2, stage=2) | {"output_dir": straight})
    shutil.copytree(straight, run, symlinks=True)
    for lost in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{lost}")
    flags |= {"resume_from_checkpoint": "auto"}
    _, said = run_ranks(train_on_ranks, 4, flags | layout_flags(tmp_path, tp=4, stage=3, accumulation=2))[0]
    assert any("resuming dp=2 tp=2 ep=2 ZeRO-2 fp32 as dp=1 tp=4 ep=4 ZeRO-3 fp32: weights" in line for line in said)
    check_curves(run, straight, steps={3, 6})
    reshard(run / "checkpoints" / "step-4", out=out, say=said.append)
    assert entries(out) == ["expert_counts.json", "manifest.json", "ranks", "whole"]
    flags |= {"resume_from_checkpoint": out, "output_dir": tmp_path / "on"}
    _, said = run_ranks(train_on_ranks, 1, flags | layout_flags(tmp_path, tp=1, stage=0, accumulation=4, batch=1))[0]
    assert f"resuming from {out}" in said
    assert any("resuming whole tensors as dp=1 tp=1 ep=1 ZeRO-0 fp32" in line for line in said)
    check_curves(tmp_path / "on", straight, steps={6})


def test_another_number_of_sequences_per_step_is_said_and_the_position_goes_on(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"max_steps": 2, "hf_save": "never", "router_jitter_noise": 0.1}
    run_ranks(train_on_ranks, 1, flags)
    flags |= {"resume_from_checkpoint": "auto", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}
    _, by_deepspeed = run_ranks(train_on_ranks, 1, flags | {"max_steps": 3})[0]
    assert any("the run had max_steps=2 and now has 3" in line for line in by_deepspeed)
    without_zero = write_ds_config(tmp_path, zero_optimization={"stage": 0})
    _, cut_anew = run_ranks(train_on_ranks, 1, flags | {"max_steps": 4} | without_zero)[0]
    warning = "the run had 2 sequences per step and now has 6; it goes on behind the 4 sequences it has read"
    assert [any(warning in line for line in said) for said in (by_deepspeed, cut_anew)] == [True, False]
    line = "resuming dp=1 tp=1 ep=1 ZeRO-2 fp32 as dp=1 tp=1 ep=1 ZeRO-0 fp32: weights and optimizer state are cut anew"
    assert [any(line in each for each in said) for said in (by_deepspeed, cut_anew)] == [False, True]
    tokens = [line["tokens"] for line in read_metrics(tmp_path / "run").values()]
    assert tokens == [2 * 16, 4 * 16, 10 * 16, 16 * 16]


@pytest.mark.slow
def test_a_run_goes_on_in_another_precision_with_its_experts_placed_anew(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"max_steps": 3, "save_steps": 2, "hf_save": "never"}
    run_ranks(train_on_ranks, 1, flags | {"gradient_accumulation_steps": 2})
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-3")
    changes = {"resume_from_checkpoint": "auto", "bf16": True, "place_experts": True}
    _, said = run_ranks(train_on_ranks, 4, flags | changes | layout_flags(tmp_path, tp=2, stage=3, ep=2))[0]
    assert any("the run had precision=fp32 and now has bf16" in line for line in said)
    assert any("experts placed by the routing of steps 1 to 2" in line for line in said)
    assert read_metrics(tmp_path / "run").keys() == {1, 2, 3}


def sums_of(counts: list[float], *, slowest: list[float] = [], bound: list[float] = []) -> TokenSums:  # noqa: B006
    """Of a model with one MoE layer."""
    one, none = torch.ones(1), torch.zeros(0)
    return TokenSums(
        torch.tensor(2.0), one, one, one, torch.tensor([counts]), none, torch.tensor(slowest), torch.tensor(bound)
    )


def meter_of(*added: TokenSums) -> StepMeter:
    meter = StepMeter()
    for sums in added:
        meter.add(sums, num_targets=2, num_tokens=3, squared_lengths=5)
    return meter


def test_the_first_group_takes_over_the_sums_of_all_and_every_group_the_loads() -> None:
    kept = [meter_of(sums_of([1, 2], slowest=[4])), meter_of(sums_of([5, 0], slowest=[8]))]
    states = [
        {"meter": meter.state(), "elapsed_s": 7.0 + number, "loads": [[1.0 + number, 2.0]]}
        for number, meter in enumerate(kept)
    ]
    want = combine_ranks([meter.take(peak_memory_bytes=1) for meter in kept], tp=1)
    first, second = (merge_rank_states(states, dp_rank=dp_rank) for dp_rank in (0, 1))
    meters = [StepMeter(), StepMeter()]
    for meter, state in zip(meters, (first, second), strict=True):
        meter.restore(state["meter"], device=torch.device("cpu"))
    assert meters[0].take(peak_memory_bytes=1) == want
    with pytest.raises(ValueError, match="nothing was added"):
        meters[1].take(peak_memory_bytes=1)
    assert [(state["elapsed_s"], state["loads"]) for state in (first, second)] == [(7.0, [[3.0, 4.0]])] * 2
    fresh = {"meter": StepMeter().state(), "elapsed_s": 1.0, "loads": None}
    assert merge_rank_states([fresh] * 2, dp_rank=0) == fresh, "of groups that have not begun a line"


@pytest.mark.parametrize(
    ("before", "after", "slowest", "bound"),
    [
        (([], []), ([6], []), [3 + 6], []),  # slices of every expert before: each rank had the mean load
        (([4], []), ([6], [5]), [4 + 6], [4 + 5]),  # without copies nothing else was to be had
        (([], []), ([6], [5]), [3 + 6], [3 + 5]),
        (([4], [3]), ([6], []), [4 + 6], []),
        (([4], [3]), ([], []), [], []),
    ],
)
def test_loads_of_the_ranks_go_on_where_whole_experts_or_copies_begin_or_end(
    before: Any, after: Any, slowest: list[float], bound: list[float]
) -> None:
    sums = [sums_of([1, 2], slowest=loads[0], bound=loads[1]) for loads in (before, after)]
    totals = meter_of(*sums).take(peak_memory_bytes=1)
    assert (totals.slowest, totals.slowest_bound) == (tuple(slowest), tuple(bound))
