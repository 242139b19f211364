"""Layouts, ZeRO stages and options against one plain process: losses, gradients, norms, weights after three steps."""

import itertools
from typing import Any

import pytest

from tests.engine_runs import Case, three_steps, train
from tests.referee import assert_runs_match, full_state, mixed_config, referee_run, tiny_config

CONFIGS = {
    "mixtral": lambda: tiny_config(qk_norm="none"),
    "qwen3_moe": lambda: mixed_config(qk_norm="head"),
    "olmoe": lambda: tiny_config(qk_norm="full", norm_topk_prob=False, clip_qkv=0.5),
    "dense first, no norm": lambda: mixed_config(qk_norm="none", norm_topk_prob=True),
    "odd vocabulary, tied": lambda: tiny_config(qk_norm="head", vocab_size=51, tie_word_embeddings=True),
}
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1), (2, 4)]
FACTORS: dict[str, list[Any]] = {
    "layout": LAYOUTS,
    "stage": [0, 1, 2, 3],
    "whole_experts": [True, False],
    "accumulation": [1, 3],
    "config": list(CONFIGS),
    "checkpointing": [False, True],
}


def covering_set(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Few combinations in which every pair of values of any two factors occurs: greedy, the same on every run."""
    names = list(factors)

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(zip(names, row, strict=True), 2))

    combinations = list(itertools.product(*factors.values()))
    still_open = set().union(*map(pairs, combinations))
    rows = []
    while still_open:
        best = max(combinations, key=lambda row: len(pairs(row) & still_open))
        still_open -= pairs(best)
        rows.append(dict(zip(names, best, strict=True)))
    return rows


def check_case(config_name: str, case: Case) -> None:
    config = CONFIGS[config_name]()
    state = full_state(config)
    want = referee_run(config, state, **three_steps(config, case))
    got = train(config, state, case, **three_steps(config, case))
    assert_runs_match(got, want)
    assert all(gradient.abs().max() > 0 for gradient in got.gradients.values()), "every parameter is trained"


def to_case(row: dict[str, Any]) -> Case:
    dp, tp = row["layout"]
    return Case(
        dp=dp,
        tp=tp,
        ep=tp if row["whole_experts"] else 1,
        stage=row["stage"],
        accumulation=row["accumulation"],
        checkpointing=row["checkpointing"],
    )


FAST = [
    ("mixtral", Case(tp=2, ep=2, stage=2)),
    pytest.param("olmoe", Case(dp=1, tp=4, ep=1, stage=1, checkpointing=True), marks=pytest.mark.slow),
    ("qwen3_moe", Case(dp=2, tp=2, ep=2, stage=3, accumulation=3)),
]


@pytest.mark.parametrize(("config_name", "case"), FAST, ids=str)
def test_training_matches_one_plain_process(config_name: str, case: Case) -> None:
    check_case(config_name, case)


@pytest.mark.slow
@pytest.mark.parametrize("row", covering_set(FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_options_matches_one_plain_process(row: dict[str, Any]) -> None:
    check_case(row["config"], to_case(row))


def test_the_covering_set_meets_every_pair() -> None:
    rows = covering_set(FACTORS)
    for a, b in itertools.combinations(FACTORS, 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(FACTORS[a], FACTORS[b]))
