"""The end of a run, or a stop, is saved whatever lies in the folder of its step; only what this run saved is not."""

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from recipe.checkpoint.expert_counts import NAME as COUNTS_NAME
from recipe.checkpoint.expert_counts import ExpertCounter, ExpertCounts
from recipe.checkpoint.find import verify_checkpoint
from recipe.checkpoint.manifest import read_manifest
from recipe.shared.ranks import OneRank
from recipe.train.loop import TrainResults
from run_pretrain import report
from tests.ranks import run_ranks
from tests.training import Flags, train_on_ranks, write_inputs

ENTROPY = "unigram_entropy_nats"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Flags:
    """The flags of a run that saved the steps 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    flags = write_inputs(folder, num_hidden_layers=1) | {"max_steps": 4, "save_steps": 2, "hf_save": "never"}
    run_ranks(train_on_ranks, 1, flags)
    return flags


@pytest.fixture
def flags(finished: Flags, tmp_path: Path) -> Flags:
    """The same with a copy of the run that is a test's own, from step 2 on without saves in between."""
    shutil.copytree(finished["output_dir"], tmp_path / "run", symlinks=True)
    return finished | {"output_dir": tmp_path / "run", "save_steps": 0, "resume_from_checkpoint": "auto"}


def folder_of(flags: Flags, step: int) -> Path:
    return Path(flags["output_dir"]) / "checkpoints" / f"step-{step}"


@pytest.mark.requirement("R-CKPT-01")
def test_a_broken_checkpoint_of_the_last_step_is_replaced_and_one_that_is_complete_named(
    flags: Flags,
) -> None:
    (path,) = folder_of(flags, 4).glob("deepspeed/*optim_states.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    results, _ = run_ranks(train_on_ranks, 1, flags | {"max_steps": 2})[0]
    assert results["checkpoint"] == str(folder_of(flags, 2)), "where it is, not the latest"
    results, said = run_ranks(train_on_ranks, 1, flags)[0]
    assert f"resuming from {folder_of(flags, 2)}" in said
    assert results["steps"] == 4
    verify_checkpoint(folder_of(flags, 4), ranks=OneRank())


def train_and_be_told(rank: int, world_size: int, flags: Flags, *, told: bool) -> tuple[Any, list[str]]:
    """SIGTERM in the first step."""
    from recipe.engine.engine import Engine

    accumulate = Engine.accumulate

    def accumulating(self: Engine, micro_batches: Any, **kwargs: Any) -> Any:
        if told:
            os.kill(os.getpid(), signal.SIGTERM)
        return accumulate(self, micro_batches, **kwargs)

    with patch.object(Engine, "accumulate", accumulating):
        return train_on_ranks(rank, world_size, flags)


@pytest.mark.parametrize("told", [False, True], ids=["at the end", "told to stop"])
def test_another_way_from_an_older_step_replaces_what_an_earlier_one_came_to(told: bool, flags: Flags) -> None:
    before = read_manifest(folder_of(flags, 4))
    other = {"resume_from_checkpoint": folder_of(flags, 2), "learning_rate": 1e-3, "max_steps": 9 if told else 4}
    results, said = run_ranks(train_and_be_told, 1, flags | other, told=told)[0]
    assert (results["steps"], results["stopped"]) == (4, told)
    assert ("told to stop: saving step 4, then leaving" in said) == told
    after = verify_checkpoint(folder_of(flags, 4), ranks=OneRank())
    assert after.details["optimizer"]["learning_rate"] == 1e-3 != before.details["optimizer"]["learning_rate"]


@pytest.mark.parametrize("told", [False, True], ids=["at the end", "told to stop"])
def test_a_run_that_is_not_to_be_saved_says_that_it_has_no_checkpoint(told: bool, flags: Flags) -> None:
    other = {"max_steps": 9, "save_strategy": "no", "resume_from_checkpoint": "auto", "save_steps": 5}
    results, said = run_ranks(train_and_be_told, 1, flags | other, told=told)[0]
    assert (results["steps"], results["checkpoint"], results["hf_folder"]) == (6 if told else 9, None, None)
    assert ("told to stop: not saving step 6, then leaving" in said) == told
    assert not any(folder_of(flags, step).exists() for step in (5, 6, 9))


def test_the_last_line_of_a_stopped_run_that_is_not_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results = TrainResults(5, 80, None, None, checkpoint=None, hf_folder=None, stopped=True)
    run = SimpleNamespace(folder=SimpleNamespace(path=tmp_path), data=SimpleNamespace(report={ENTROPY: 1.0}))
    report(results, SimpleNamespace(run=run))  # type: ignore[arg-type]
    assert capfd.readouterr().out == "nothing was saved, as --save_strategy no asks\n"
    assert json.loads((tmp_path / "train_results.json").read_text())["checkpoint"] is None


def test_what_is_complete_is_saved_again_for_hf_alone_and_keeps_its_counts_of_experts(flags: Flags) -> None:
    step = folder_of(flags, 4)
    counts, inode = (step / COUNTS_NAME).read_text(), step.stat().st_ino
    assert (json.loads(counts)["first_step"], json.loads(counts)["last_step"]) == (3, 4)
    run_ranks(train_on_ranks, 1, flags)
    assert step.stat().st_ino == inode, "nothing was lacking"
    results, _ = run_ranks(train_on_ranks, 1, flags | {"hf_save": "last"})[0]
    assert step.stat().st_ino != inode
    assert results["hf_folder"] == str(step.parent / "latest" / "hf")
    assert (step / COUNTS_NAME).read_text() == counts


def test_counts_are_those_since_the_last_save_or_where_nothing_was_counted_those_it_had() -> None:
    saved = ExpertCounts(first_step=3, last_step=4, counts=((5.0, 6.0, 7.0),))
    counter = ExpertCounter(step=4, saved=saved)
    counter.renumber([[2, 0, 1]])
    moved = ExpertCounts(first_step=3, last_step=4, counts=((6.0, 7.0, 5.0),))
    assert counter.save(4, ranks=OneRank(), tp=1) == moved
    for _ in range(2):
        counter.add(torch.tensor([[1, 0, 2]]))
    trained = ExpertCounts(first_step=5, last_step=6, counts=((2.0, 0.0, 4.0),))
    assert [counter.save(6, ranks=OneRank(), tp=1) for _ in range(2)] == [trained] * 2
    without_experts = ExpertCounter(step=0, saved=None)
    assert without_experts.save(0, ranks=OneRank(), tp=1) is None
    without_experts.add(torch.zeros(0, 4))
    assert without_experts.save(1, ranks=OneRank(), tp=1) is None


def train_where_rank_1_sees_no_weights(rank: int, world_size: int, flags: Flags) -> tuple[Any, list[str]]:
    """As on a network file system that is late on some nodes."""
    is_dir = Path.is_dir

    def looking(path: Path) -> bool:
        return is_dir(path) and not (rank == 1 and path.name == "hf" and path.parent.name == "latest")

    with patch.object(Path, "is_dir", looking):
        return train_on_ranks(rank, world_size, flags)


@pytest.mark.slow
def test_all_ranks_have_the_same_results(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path, num_hidden_layers=1) | {"max_steps": 1}
    folders = [results["hf_folder"] for results, _ in run_ranks(train_where_rank_1_sees_no_weights, 2, flags)]
    assert folders == [str(tmp_path / "run" / "checkpoints" / "latest" / "hf")] * 2
