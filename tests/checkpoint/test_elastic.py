"""A run goes on in another layout, ZeRO stage and accumulation: the same numbers, and then the same curves."""

import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modeling.config import GatherMoeConfig
from recipe.checkpoint.find import Checkpoint
from recipe.checkpoint.native_files import open_training_state
from recipe.checkpoint.whole import write_whole
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
from tests.states import state_of

BF16 = Case(bf16=True)
ONE, DP, TP, BOTH, WIDE = Case(), Case(dp=2), Case(tp=2, ep=2), Case(dp=2, tp=2, ep=2), Case(tp=4, ep=4)
# Between them all pairs of layouts, of stages, and of whole experts and slices of them.
PAIRS = [
    (ONE._replace(stage=2), [(ONE, 1), (DP, 2), (TP._replace(ep=1), 3), (BOTH, 0), (WIDE, 1)]),
    (DP._replace(stage=3), [(ONE, 0), (DP, 1), (TP, 2), (BOTH._replace(ep=1), 1), (WIDE._replace(ep=1), 2)]),
    (TP._replace(stage=1), [(ONE, 3), (DP, 3), (TP._replace(ep=1), 1), (BOTH, 2), (WIDE._replace(ep=2), 3)]),
    (BOTH._replace(ep=1, stage=2, accumulation=2), [(ONE, 2), (DP, 1), (TP, 3), (BOTH, 1), (WIDE._replace(ep=1), 2)]),
    (WIDE._replace(stage=3, accumulation=3), [(ONE, 1), (DP, 3), (TP._replace(ep=1), 0), (BOTH, 3), (WIDE, 2)]),
    (BOTH._replace(stage=0), [(ONE, 3), (WIDE._replace(ep=2), 0)]),
]


def test_the_pairs_are_all_pairs_of_layouts_stages_and_shares_of_experts() -> None:
    pairs = [(source, layout._replace(stage=stage)) for source, targets in PAIRS for layout, stage in targets]
    layouts = {(case.dp, case.tp) for case in (ONE, DP, TP, BOTH, WIDE)}
    assert {((a.dp, a.tp), (b.dp, b.tp)) for a, b in pairs} == set(product(layouts, repeat=2))
    stages = {(a.stage, b.stage) for a, b in pairs}
    assert stages >= set(product((1, 2, 3), repeat=2)) | {(0, 3), (0, 0), (2, 0), (3, 0)}
    split = [(a, b) for a, b in pairs if a.tp > 1 and b.tp > 1]
    assert {(a.ep == a.tp, b.ep == b.tp) for a, b in split} == set(product((False, True), repeat=2))


@pytest.mark.slow
@pytest.mark.parametrize(("source", "targets"), PAIRS, ids=lambda value: str(value) if isinstance(value, Case) else "")
@pytest.mark.requirement("R-CKPT-08")
def test_any_layout_goes_on_in_any_other(tmp_path: Path, source: Case, targets: list[tuple[Case, int]]) -> None:
    check_targets(make_source(tmp_path, source), [layout._replace(stage=stage) for layout, stage in targets])


@pytest.mark.requirement("R-CKPT-08")
def test_one_rank_goes_on_without_zero(tmp_path: Path) -> None:
    check_targets(make_source(tmp_path, Case(stage=2)), [Case(stage=0)])


TO_ANY = [BF16._replace(dp=2, stage=1), BF16._replace(tp=4, ep=4, stage=2), BF16._replace(dp=2, tp=2, ep=2, stage=3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (BF16._replace(dp=2, tp=2, ep=2, stage=1), [*TO_ANY, Case(stage=2)]),  # which is DeepSpeed's BF16_Optimizer
        (BF16._replace(dp=2, stage=2), [*TO_ANY, Case(stage=2)]),
        (BF16._replace(tp=2, stage=3), [*TO_ANY, Case(stage=2)]),
        (Case(dp=2, stage=1), [BF16._replace(tp=2, ep=2, stage=stage) for stage in (1, 2, 3)]),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else "",
)
@pytest.mark.requirement("R-CKPT-08")
def test_one_precision_goes_on_in_another_from_the_optimizers_own_numbers(
    tmp_path: Path, source: Case, targets: list[Case]
) -> None:
    check_targets(make_source(tmp_path, source), targets, tolerance=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.requirement("R-CKPT-13")
def test_tied_embeddings_and_full_width_norms_go_on(tmp_path: Path, stage: int) -> None:
    config = config_of(tie_word_embeddings=True, qk_norm="full", score_function="softmax", vocab_size=51)
    source = make_source(tmp_path, Case(tp=2, ep=2, stage=stage), config=config)
    assert "lm_head.weight" not in source.by_rank[0].held["weight"]
    check_targets(source, [Case(stage=3 - stage), Case(tp=4, ep=2, stage=4 - stage)])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_go_on_frozen(tmp_path: Path, stage: int) -> None:
    # Rows of a vocabulary of 51 do not divide evenly over the ranks.
    config, frozen = config_of(vocab_size=51), (r"\.experts\.", "embed_tokens", r"layers\.1\..*norm")
    source = make_source(tmp_path, Case(dp=2, tp=2, ep=2, stage=stage), config=config, frozen=frozen)
    assert source.by_rank[0].held["weight"].keys() > source.by_rank[0].held["exp_avg"].keys()
    check_targets(source, [Case(stage=0), Case(dp=2, stage=4 - stage), Case(tp=4, ep=1, stage=2)], frozen=frozen)
    ((error,),) = run_ranks(refusals, 1, [(source.checkpoint, config)])
    assert re.match("ValueError: 9 parameters are to be trained that were frozen when .*; freeze them again, or", error)


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
    config, dp = config_of(), 4
    state = state_of(config)
    names = [name for name in state.shapes() if len(state.kinds(name)) == 3]
    trained = sum(state.tensors[f"weight/{name}"].nbytes for name in names)
    buffers = sum(state.tensors[f"weight/{name}"].nbytes for name in state.shapes() if name not in names)
    by_rank = run_ranks(bytes_read, dp, config, [2, 3])
    of_stage_2, of_stage_3 = (sum(counts) for counts in zip(*by_rank, strict=True))
    assert of_stage_2 == dp * (trained + buffers) + 2 * trained, "whole weights, and a part of the moments"
    assert of_stage_3 == dp * buffers + 3 * trained


def refusals(rank: int, world_size: int, tries: list[tuple[Checkpoint, GatherMoeConfig]]) -> list[str]:
    from recipe.shared.errors import CheckpointBrokenError

    errors = []
    for checkpoint, config in tries:
        with pytest.raises((ValueError, CheckpointBrokenError)) as caught:
            resume(rank, world_size, checkpoint, config, [Case(stage=1)], {})
        errors.append(f"{caught.type.__name__}: {caught.value}")
    return errors


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    (checkpoint, config, _, _), folder = make_source(tmp_path, Case(stage=2)), re.escape(str(tmp_path))
    tries = [
        (checkpoint._replace(details=checkpoint.details | {"dp": 2}), config),
        (checkpoint, config_of(num_hidden_layers=4, vocab_size=51)),
        (checkpoint, config_of(num_hidden_layers=2, vocab_size=51)),
    ]
    (errors,) = run_ranks(refusals, 1, tries)
    for error, match in zip(
        errors,
        [
            rf"CheckpointBrokenError: {folder}/ranks/rank-00001\.pt: missing",
            rf"CheckpointBrokenError: {folder}: its tensors are not those of the model: 12 are missing \['model\.",
            r"of the model: 0 are missing \[\], 12 are unexpected \['model.*, 2 are of another shape \['lm_head",
        ],
        strict=True,
    ):
        assert re.search(match, error), error


def resume_whole(rank: int, world_size: int, checkpoint: Checkpoint, config: GatherMoeConfig, case: Case) -> list[str]:
    return resume_saying(start_engine(config, full_state(config, seed=2), case), checkpoint, case)


@pytest.mark.requirement("R-CKPT-08")
def test_whole_tensors_go_on_in_any_layout(tmp_path: Path) -> None:
    source, out = make_source(tmp_path / "source", Case(stage=2)), tmp_path / "out"
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
