"""Saves a run on some ranks and goes on with it on others, and holds what comes out against the run that went on."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from modeling.config import GatherMoeConfig
from recipe.checkpoint.find import Checkpoint
from tests.engine_runs import Case, join_shards, start_engine, train_steps, weight_shards
from tests.ranks import run_ranks
from tests.referee import (
    BLOCK_SIZE,
    CLIPPED,
    FP32_ATOL,
    NUM_SEQUENCES,
    Tensors,
    assert_all_match,
    full_state,
    mixed_config,
)

SAVED_AT, LAST = 2, 4


def config_of(**changes: Any) -> GatherMoeConfig:
    """Key-value heads and rows of the vocabulary that tp=4 cannot split evenly, biased sigmoid routers, jitter."""
    options = {"router_bias": True, "balance_bias_update_rate": 0.01, "score_function": "sigmoid"}
    return mixed_config(**options | {"router_jitter_noise": 0.1} | changes)


def details_of(config: GatherMoeConfig, case: Case) -> dict[str, Any]:
    """What recipe/train/prepare.py puts in the manifest, as far as files are read by it."""
    return {
        "dp": case.dp,
        "tp": case.tp,
        "ep": case.ep,
        "zero_stage": case.stage,
        "precision": "bf16" if case.bf16 else "fp32",
        **{f"model.{name}": getattr(config, name) for name in ("vocab_size", "num_key_value_heads", "qk_norm")},
    }


class Outcome(NamedTuple):
    """Of one rank: what is held at the checkpoint, by kind and name; curves and weights of the steps after it."""

    held: dict[str, Tensors]
    counters: dict[str, Any]
    losses: list[float]
    norms: list[float]
    weights: Tensors


def held_by(engine: Any) -> dict[str, Tensors]:
    """Copies of the float32 numbers, both moments, and the routers' biases; what the forward uses must agree."""
    import deepspeed

    from recipe.checkpoint.native import link_moments, read_training_state
    from recipe.checkpoint.training_state import KINDS

    link_moments(engine)
    parameters = dict(engine.model.named_parameters())
    states = {name: read_training_state(engine, parameter) for name, parameter in parameters.items()}
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=engine.zero_stage == 3):
        for name, parameter in parameters.items():
            assert torch.equal(parameter, states[name][0].to(parameter.dtype)), name
    held: dict[str, Tensors] = {kind: {} for kind in KINDS}
    for name, parts in states.items():
        for kind, part in zip(KINDS, parts, strict=False):
            held[kind][name] = part.float().clone()
    held["weight"] |= buffers_of(engine)
    return held


def buffers_of(engine: Any) -> Tensors:
    return {name: buffer.clone() for name, buffer in engine.model.named_buffers()}


def counters_of(engine: Any) -> dict[str, Any]:
    inner = getattr(engine.ds.optimizer, "optimizer", engine.ds.optimizer)
    return {
        "steps": {float(state["step"]) for state in inner.state.values() if state},
        "decay": [group["weight_decay"] for group in engine.ds.optimizer.param_groups],
        "global_steps": engine.ds.global_steps,
        "global_samples": engine.ds.global_samples,
        "skipped_steps": engine.skipped_steps,
        "tokens_read": engine.tokens_read,
    }


def go_on(engine: Any, config: GatherMoeConfig, case: Case) -> Outcome:
    held, counters = held_by(engine), counters_of(engine)
    losses, norms = train_steps(engine, config, case, range(SAVED_AT, LAST))
    return Outcome(held, counters, losses, norms, weight_shards(engine) | buffers_of(engine))


def save(
    rank: int, world_size: int, folder: Path, config: GatherMoeConfig, case: Case, num_steps: int, options: Any
) -> Outcome:
    from recipe.checkpoint.native import save_native

    engine = start_engine(config, full_state(config), case, **options)
    train_steps(engine, config, case, range(num_steps))
    engine.ds.skipped_steps = 7  # as if
    save_native(engine, folder, rank_state={"rank": rank})
    return go_on(engine, config, case)


def resume(
    rank: int, world_size: int, checkpoint: Checkpoint, config: GatherMoeConfig, targets: list[Case], options: Any
) -> list[Outcome]:
    from recipe.checkpoint.elastic import load_elastic, old_group_states
    from recipe.shared.ranks import TorchRanks

    outcomes = []
    for case in targets:
        engine = start_engine(config, full_state(config, seed=2), case, **options)
        load_elastic(engine, checkpoint, seed=1, ranks=TorchRanks())
        groups = range(0, checkpoint.details["dp"] * checkpoint.details["tp"], checkpoint.details["tp"])
        assert old_group_states(checkpoint) == [{"rank": first} for first in groups]
        outcomes.append(go_on(engine, config, case))
    return outcomes


def hashes(tensors: Tensors) -> dict[str, str]:
    return {name: hashlib.blake2b(tensor.contiguous().numpy().data).hexdigest() for name, tensor in tensors.items()}


class Source(NamedTuple):
    checkpoint: Checkpoint
    config: GatherMoeConfig
    case: Case
    by_rank: list[Outcome]


def make_source(folder: Path, case: Case, *, config: GatherMoeConfig | None = None, **options: Any) -> Source:
    config = config or config_of()
    by_rank = run_ranks(save, case.num_ranks, folder, config, case, SAVED_AT, options)
    return Source(Checkpoint(SAVED_AT, folder, details_of(config, case)), config, case, by_rank)


def check_targets(source: Source, targets: list[Case], *, tolerance: float = FP32_ATOL, **options: Any) -> None:
    """Resume in every target and hold it against the run that went on."""
    want = source.by_rank[0]
    assert want.counters["tokens_read"] == SAVED_AT * NUM_SEQUENCES * BLOCK_SIZE
    assert want.counters["decay"] == [CLIPPED.weight_decay, 0.0]
    want_held = {
        kind: hashes(join_shards([outcome.held[kind] for outcome in source.by_rank], source.config, source.case))
        for kind in want.held
    }
    want_weights = join_shards([outcome.weights for outcome in source.by_rank], source.config, source.case)
    for world_size in sorted({case.num_ranks for case in targets}):
        cases = [case for case in targets if case.num_ranks == world_size]
        by_rank = run_ranks(resume, world_size, source.checkpoint, source.config, cases, options)
        for number, case in enumerate(cases):
            outcomes = [outcomes[number] for outcomes in by_rank]
            for kind, expected in want_held.items():
                found = hashes(join_shards([outcome.held[kind] for outcome in outcomes], source.config, case))
                assert found == expected, (source.case, case, kind)
            for got in outcomes:
                assert got.counters == want.counters, (source.case, case)
                assert got.losses == pytest.approx(want.losses, abs=tolerance), (source.case, case)
                assert got.norms == pytest.approx(want.norms, abs=tolerance), (source.case, case)
            weights = join_shards([outcome.weights for outcome in outcomes], source.config, case)
            assert_all_match(weights, want_weights, atol=tolerance)
