"""Training with copies of hot experts equals one plain process: losses, gradients, norms, weights after three steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.copies import HeldCopies
from modeling.execution import Execution
from tests.engine_runs import (
    Case,
    join_ranks,
    join_shards,
    make_micro_batches,
    start_engine,
    three_steps,
    train_on_rank,
)
from tests.ranks import run_ranks
from tests.referee import assert_runs_match, full_state, mixed_config, referee_run, split_options, tiny_config

pytestmark = pytest.mark.slow

Loads = list[list[float]]
COPIES = Execution(resident_experts=1)


class CountedRows:
    """Counts the rows that copies are given here."""

    def __init__(self) -> None:
        self.num_rows = 0

    def __enter__(self) -> "CountedRows":
        self._slots = HeldCopies.slots

        def slots(held: HeldCopies, ids_TA: Tensor, *, num_experts: int) -> Tensor:
            found = self._slots(held, ids_TA, num_experts=num_experts)
            num_ranks, num_copies = held.copies_PC.shape
            first = num_experts // num_ranks
            self.num_rows += int(((found >= first) & (found < first + num_copies)).sum())
            return found

        HeldCopies.slots = slots  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        HeldCopies.slots = self._slots  # type: ignore[method-assign]


def watched_run(
    rank: int, world_size: int, config: GatherMoeConfig, state: dict[str, Tensor], case: Case, loads: Loads
) -> Any:
    """Train as if a step with `loads` had gone before."""
    with CountedRows() as rows:
        run = three_steps(config, case)
        result = train_on_rank(
            rank, world_size, config, state, case, **run, change=lambda engine: engine.restore_loads(loads)
        )
    return result, rows.num_rows


def check_copies(config: GatherMoeConfig, case: Case, *, state: dict[str, Tensor] | None = None) -> None:
    """The first step's copies are those of expert 0 in every slot of the other ranks."""
    state = full_state(config) if state is None else state
    loads = [[100.0] + [1.0] * (config.num_experts - 1)] * config.sizes.num_moe_layers
    by_rank = run_ranks(watched_run, case.dp * case.tp, config, state, case, loads)
    got = join_ranks([result for result, _ in by_rank], config, case)
    assert sum(num_rows for _, num_rows in by_rank) > 100
    assert_runs_match(got, referee_run(config, state, **three_steps(config, case), own=True))


def all_to_the_first(config: GatherMoeConfig) -> dict[str, Tensor]:
    """Every token goes to the first experts, which live on one rank: a channel that all share decides."""
    state = full_state(config)
    state["model.embed_tokens.weight"][:, 0] = 1.0
    for name, tensor in state.items():
        if name.endswith("mlp.gate.weight"):
            tensor[:, 0] = -0.5 * torch.arange(config.num_experts)
    return state


def test_training_with_copies_matches_one_plain_process() -> None:
    execution = replace(COPIES, overlap=True, overlap_chunks=2)
    check_copies(tiny_config(), Case(tp=2, ep=2, stage=2, accumulation=3, checkpointing=True, execution=execution))


def test_training_with_all_tokens_on_one_rank_matches_one_plain_process() -> None:
    config = tiny_config()
    check_copies(config, Case(tp=2, ep=2, execution=COPIES), state=all_to_the_first(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(dp=2, tp=2, ep=2, stage=2, accumulation=3), {"regather": True, "overlap": True, "overlap_chunks": 3}),
        (Case(dp=2, tp=2, ep=2, stage=1, checkpointing=True), {"experts_backend": "grouped"}),
        (Case(tp=4, ep=2, stage=2, accumulation=3, checkpointing=True), {"resident_experts": 2}),
        (Case(tp=4, ep=4, stage=0), {"num_key_value_heads": 2, "experts_backend": "grouped"}),
    ],
    ids=str,
)
def test_training_with_copies_matches_in_other_layouts(case: Case, options: dict[str, Any]) -> None:
    changes, execution = split_options({"resident_experts": 1} | options)
    config, case = mixed_config(**changes), case._replace(execution=execution)
    check_copies(config, case)
    check_copies(config, case, state=all_to_the_first(config))


def bf16_gradients(
    rank: int, world_size: int, config: GatherMoeConfig, state: dict[str, Tensor], case: Case, loads: Loads
) -> Any:
    from deepspeed.utils import safe_get_full_grad

    with CountedRows() as rows:
        engine = start_engine(config, state, case)
        engine.restore_loads(loads)
        batches = make_micro_batches(config, case, step=0, dp_rank=engine.mesh.dp_rank)
        engine.accumulate(batches, counts=engine.count(batches))
    held = [experts.held for experts in engine.model.experts_with_copies]
    assert all(weight.dtype == torch.bfloat16 for copies in held for weight in copies.weights)
    return {name: safe_get_full_grad(p).float().clone() for name, p in engine.model.named_parameters()}, rows.num_rows


@pytest.mark.slow
def test_copies_are_as_exact_in_bf16() -> None:
    """The gradients' distance from float32's is hardly larger with copies than without."""
    config = tiny_config()
    state = {name: tensor.bfloat16().float() for name, tensor in all_to_the_first(config).items()}
    case, loads = Case(tp=2, ep=2, stage=2, bf16=True, packed=False), [[100.0, 1.0, 1.0, 1.0]] * 2
    exact = referee_run(config, state, **three_steps(config, case._replace(bf16=False)), own=True).gradients
    distances = []
    for execution, fewest in ((Execution(), 0), (COPIES, 50)):
        results = run_ranks(bf16_gradients, 2, config, state, case._replace(execution=execution), loads)
        by_rank, rows = zip(*results, strict=True)
        assert sum(rows) >= fewest
        got = join_shards(list(by_rank), config, case)
        distances.append(sum((got[name] - exact[name]).square().sum().item() for name in exact) ** 0.5)
    assert distances[0] > 0
    assert distances[1] < 1.2 * distances[0]


def steps_of_copies(rank: int, world_size: int, config: GatherMoeConfig, state: dict[str, Tensor]) -> list[Any]:
    """Whether copies are held in the forwards of three steps and of the evaluations after them, and what is known."""
    case = Case(tp=2, ep=2, execution=COPIES)
    engine = start_engine(config, state, case)
    [first, *_] = engine.model.experts_with_copies
    found: list[Any] = []
    first.register_forward_pre_hook(lambda *_: found.append(first.held is not None))
    for step in range(3):
        found.append(engine.loads() is not None)
        batches = make_micro_batches(config, case, step=step, dp_rank=0)
        counts = engine.count(batches)
        engine.accumulate(batches, counts=counts)
        engine.update(learning_rate=1e-3)
        engine.evaluate(batches)
    return found


def test_copies_begin_with_the_second_step_and_serve_training_alone() -> None:
    config = tiny_config()
    [found, other] = run_ranks(steps_of_copies, 2, config, full_state(config))
    assert found == other
    # Loads known before the step, then copies held in its forward and in the evaluation's.
    assert found == [False, False, False, True, True, False, True, True, False]


def with_zero_3(rank: int, world_size: int) -> str:
    config = tiny_config()
    with pytest.raises(ValueError, match="resident_experts=1 cannot be used with ZeRO-3") as caught:
        start_engine(config, full_state(config), Case(tp=2, ep=2, stage=3, execution=COPIES))
    return str(caught.value)


def test_zero_3_has_no_whole_experts_to_copy() -> None:
    assert "use stage 0, 1 or 2, or resident_experts=0" in run_ranks(with_zero_3, 2)[0]
