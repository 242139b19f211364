"""What the benchmark of predictions measures is the step that it predicts."""

import pytest
from predicted import CASES, Case, rho_of, settle, start

from modeling.moe import GatherMoeSparseBlock
from tests.ranks import run_ranks


def one_step(rank: int, world_size: int, case: Case) -> tuple[float, str, int, bool]:
    """The load that a step had, and what of the case is found again in the engine."""
    engine, steps = start(case, num_steps=1, tiny=True)
    for micro_batches in steps:
        engine.accumulate(micro_batches, counts=engine.count(micro_batches))
        engine.update(learning_rate=1e-6)
    block = next(module for module in engine.model.modules() if isinstance(module, GatherMoeSparseBlock))
    return rho_of(engine), block.strategy, engine.zero_stage, engine.model.model.gradient_checkpointing


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.ranks == 2 and case.precision == "fp32"], ids=str)
def test_the_engine_does_what_the_prediction_is_of(case: Case) -> None:
    job, _ = settle(case, tiny=True)
    for rho, strategy, stage, recomputes in run_ranks(one_step, case.ranks, case):
        assert 1 <= rho <= job.layout.ep
        assert (rho == 1) is (job.layout.ep == 1)
        assert (strategy, stage) == (job.execution.strategy, job.zero_stage)
        assert recomputes is case.recompute
