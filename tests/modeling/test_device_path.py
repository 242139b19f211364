"""The path of a GPU in Triton's interpreter: every kernel of the experts, trained against one plain process."""

from collections.abc import Callable
from typing import Any

import pytest

from modeling.execution import Execution
from tests.engine_runs import Case, three_steps, train
from tests.modeling.test_parity import CONFIGS
from tests.referee import CLIPPED, assert_runs_match, full_state, referee_run

pytestmark = pytest.mark.slow


def execution(strategy: str, **options: Any) -> Execution:
    return Execution(strategy=strategy, experts_backend="triton", **options)


CHUNKS = {"overlap": True, "overlap_chunks": 2}
CASES = {
    "whole experts": ("mixtral", Case(tp=2, ep=2, stage=2, execution=execution("gather_tokens"))),
    "whole experts, all again": (
        "qwen3_moe",
        Case(tp=4, ep=4, stage=1, execution=execution("gather_tokens", regather=True, **CHUNKS)),
    ),
    "slices": ("qwen3_moe", Case(tp=2, stage=3, checkpointing=True, execution=execution("gather_tokens", **CHUNKS))),
    "both": ("olmoe", Case(tp=4, ep=2, execution=execution("gather_tokens", **CHUNKS))),
    "borrowed weights": ("olmoe", Case(tp=2, stage=1, execution=execution("gather_weights", overlap=True))),
    "exchanged rows": ("mixtral", Case(tp=2, ep=2, execution=execution("all_to_all"))),
    "one rank each": ("qwen3_moe", Case(dp=2, stage=2, execution=execution("gather_tokens"))),
}


def see_that_kernels_run(engine: Any) -> None:
    from modeling import kernels

    assert kernels.interpreted()


def check(case: str) -> None:
    name, case_ = CASES[case]
    config = CONFIGS[name]()
    state, run = full_state(config), three_steps(config, case_) | {"training": CLIPPED._replace(num_steps=1)}
    got = train(config, state, case_, **run, change=see_that_kernels_run)
    assert_runs_match(got, referee_run(config, state, **run))


@pytest.mark.parametrize("case", CASES)
def test_training_by_kernels_is_that_of_one_plain_process(interpreter: Callable[..., Any], case: str) -> None:
    interpreter(check, case)
