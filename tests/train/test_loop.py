"""What the loop says and logs of steps that are out of the ordinary."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.ranks import run_ranks
from tests.training import Flags, read_metrics, train_on_ranks, write_ds_config, write_inputs


def train_without_targets(rank: int, world_size: int, flags: Flags) -> tuple[Any, list[str]]:
    """As if the data had masked every label."""
    from recipe.data.packing import Block, PackedBlocks

    read = PackedBlocks.__getitem__

    def read_masked(blocks: PackedBlocks, index: int) -> Block:
        block = read(blocks, index)
        block.labels[:] = -100
        return block

    with patch.object(PackedBlocks, "__getitem__", read_masked):
        return train_on_ranks(rank, world_size, flags)


@pytest.mark.requirement("R-LOSS-03")
def test_an_empty_step_is_counted_as_one_and_changes_nothing_but_weight_decay(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"max_steps": 2, "router_aux_loss_coef": 0.1}
    results, said = run_ranks(train_without_targets, 2, flags)[0]
    lines = read_metrics(tmp_path / "run")
    assert [lines[step]["loss"] for step in (1, 2)] == [None, None]
    assert [lines[step]["grad_norm"] for step in (1, 2)] == [0.0, 0.0]
    assert results["evaluation"]["eval_loss"] is None
    assert [line for line in said if "an empty step" in line] == [
        f"step {step}: an empty step, no token of its batch has a target" for step in (1, 2)
    ]


@pytest.mark.parametrize(("step", "said"), [(7, "final eval loss 2.5000"), (5, "at step 5 eval loss 2.5000")])
def test_only_an_evaluation_of_the_last_step_is_called_final(
    step: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipe.train.loop import TrainResults
    from recipe.train.metrics import EvalRecord
    from run_pretrain import report

    evaluation = EvalRecord(step=step, eval_loss=2.5, perplexity=12.2)
    results = TrainResults(7, 700, None, evaluation, checkpoint=None, hf_folder=None, stopped=True)
    run: Any = SimpleNamespace(
        folder=SimpleNamespace(path=tmp_path), data=SimpleNamespace(report={"unigram_entropy_nats": 3.0})
    )
    report(results, SimpleNamespace(run=run))  # type: ignore[arg-type]
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.slow
@pytest.mark.requirement("R-LOG-02")
def test_tokens_are_counted_once_per_group_in_every_layout(tmp_path: Path) -> None:
    """The same global batch of 4 sequences at (1, 1), (1, 2) and (2, 2): the same count, loss and balance."""
    found = []
    for world_size, tp, num_sequences in ((1, 1, 4), (2, 2, 4), (4, 2, 2)):
        folder = tmp_path / f"{world_size}-{tp}"
        flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": tp}) | {"output_dir": folder}
        run_ranks(train_on_ranks, world_size, flags | {"per_device_train_batch_size": num_sequences, "max_steps": 3})
        found.append(read_metrics(folder))
    assert [line["tokens"] for line in found[0].values()] == [64, 128, 192]
    for metrics in found[1:]:
        for step, line in found[0].items():
            assert metrics[step]["tokens"] == line["tokens"]
            for key in ("loss", "aux_loss", "z_loss", "grad_norm"):
                assert math.isclose(metrics[step][key], line[key], rel_tol=1e-5), (step, key)
            assert metrics[step]["rho"] == line["rho"]
