"""Saves a run on some ranks and goes on with it on others, and holds what comes out against the run that went on."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.init import join, shard_table
from modeling.layout import ParallelLayout
from recipe.checkpoint.find import Checkpoint
from tests.parity import (
    BLOCK_SIZE,
    LEARNING_RATE,
    NUM_SEQUENCES,
    WEIGHT_DECAY,
    Case,
    full_state,
    make_micro_batches,
    mixed_config,
    start_engine,
)
from tests.ranks import run_ranks

SAVED_AT, LAST = 2, 5
Tensors = dict[str, Tensor]


# One layout each, so that the pairs with TARGETS are all pairs of layouts, of stages, and of whole experts and slices.
def config_of(**changes: Any) -> GatherMoeConfig:
    """Key-value heads and rows of the vocabulary that tp=4 cannot split evenly, biased sigmoid routers, jitter."""
    options = {"router_bias": True, "balance_bias_update_rate": 0.01, "score_function": "sigmoid"}
    return mixed_config(**options | {"router_jitter_noise": 0.1} | changes)


def details_of(config: GatherMoeConfig, case: Case) -> dict[str, Any]:
    """What recipe/train/run.py puts in the manifest, as far as files are read by it."""
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
    held["weight"] |= {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    return held


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


def train(engine: Any, config: GatherMoeConfig, case: Case, steps: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in steps:
        batches = make_micro_batches(config, case, step=step, dp_rank=engine.mesh.dp_rank)
        counts = engine.count(batches)
        nll = engine.accumulate(batches, counts=counts).nll
        torch.distributed.all_reduce(nll, group=engine.mesh.dp_group)
        losses.append(nll.item() / counts.num_targets)
        norms.append(engine.update(learning_rate=LEARNING_RATE))
    return losses, norms


def go_on(engine: Any, config: GatherMoeConfig, case: Case) -> Outcome:
    held, counters = held_by(engine), counters_of(engine)
    losses, norms = train(engine, config, case, range(SAVED_AT, LAST))
    return Outcome(held, counters, losses, norms, held_by(engine)["weight"])


def save(
    rank: int, world_size: int, folder: Path, config: GatherMoeConfig, case: Case, num_steps: int, options: Any
) -> Outcome:
    from recipe.checkpoint.native import save_native

    engine = start_engine(config, full_state(config), case, **options)
    train(engine, config, case, range(num_steps))
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


def whole(by_rank: list[Tensors], config: GatherMoeConfig, case: Case) -> Tensors:
    """Whole tensors from the ranks' shards; those of all groups must be the same bits."""
    mesh: Any = type("Mesh", (), {"layout": ParallelLayout(dp=case.dp, tp=case.tp, ep=case.ep)})
    table = shard_table(config, mesh)
    joined = {}
    for name, local in by_rank[0].items():
        shape = table.full_shape(name, tuple(local.shape), vocab_size=config.vocab_size)
        shards = [table.shard(name, shape, group_rank=rank) for rank in range(case.tp)]
        for rank, tensors in enumerate(by_rank):
            assert torch.equal(tensors[name], by_rank[rank % case.tp][name]), (name, rank)
        joined[name] = join([(by_rank[rank][name], shard) for rank, shard in enumerate(shards)])
    return joined


def hashes(tensors: Tensors) -> dict[str, str]:
    return {name: hashlib.blake2b(tensor.contiguous().numpy().data).hexdigest() for name, tensor in tensors.items()}


class Source(NamedTuple):
    checkpoint: Checkpoint
    config: GatherMoeConfig
    case: Case
    by_rank: list[Outcome]


def make_source(folder: Path, case: Case, *, config: GatherMoeConfig | None = None, **options: Any) -> Source:
    config = config or config_of()
    by_rank = run_ranks(save, case.dp * case.tp, folder, config, case, SAVED_AT, options)
    return Source(Checkpoint(SAVED_AT, folder, details_of(config, case)), config, case, by_rank)


def check_targets(source: Source, targets: list[Case], *, tolerance: float = 1e-5, **options: Any) -> None:
    """Resume in every target and hold it against the run that went on."""
    want = source.by_rank[0]
    assert want.counters["tokens_read"] == SAVED_AT * NUM_SEQUENCES * BLOCK_SIZE
    assert want.counters["decay"] == [WEIGHT_DECAY, 0.0]
    want_held = {
        kind: hashes(whole([outcome.held[kind] for outcome in source.by_rank], source.config, source.case))
        for kind in want.held
    }
    want_weights = whole([outcome.weights for outcome in source.by_rank], source.config, source.case)
    for world_size in sorted({case.dp * case.tp for case in targets}):
        cases = [case for case in targets if case.dp * case.tp == world_size]
        by_rank = run_ranks(resume, world_size, source.checkpoint, source.config, cases, options)
        for number, case in enumerate(cases):
            outcomes = [outcomes[number] for outcomes in by_rank]
            for kind, expected in want_held.items():
                found = hashes(whole([outcome.held[kind] for outcome in outcomes], source.config, case))
                assert found == expected, (source.case, case, kind)
            for got in outcomes:
                assert got.counters == want.counters, (source.case, case)
                assert got.losses == pytest.approx(want.losses, abs=tolerance), (source.case, case)
                assert got.norms == pytest.approx(want.norms, abs=tolerance), (source.case, case)
            weights = whole([outcome.weights for outcome in outcomes], source.config, case)
            for name, tensor in weights.items():
                difference = (tensor - want_weights[name]).abs().max().item()
                assert difference <= tolerance, (source.case, case, name, difference)
