"""Checkpoints that ranks of several layouts saved become whole tensors, offline, and runs go on from those."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from modeling.config import GatherMoeConfig
from recipe.checkpoint.whole import WholeTensors
from recipe.cli import main
from tests.engine_runs import Case, slow
from tests.flat_files import write_by_hand
from tests.ranks import run_ranks
from tests.referee import mixed_config, tiny_config
from tests.states import MemoryState, details_of, read_all, seal, state_of
from tests.training import read_metrics, train_on_ranks, write_ds_config, write_inputs

# A state of 151 MB: 3 x 4 bytes for each of 13 million parameters.
LARGE = {"hidden_size": 512, "moe_intermediate_size": 4096, "num_experts": 2, "num_hidden_layers": 1}
ROW_BYTES = 4 * 2 * 4096 * 512  # of an expert's first matrix, which three data-parallel ranks do not divide evenly
PIECE_BYTES = 2**18


def save_state(
    rank: int, world_size: int, folder: Path, config: GatherMoeConfig, case: Case, state: MemoryState | None
) -> None:
    """Have an engine hold a state, a random one by default, and save it as training does."""
    from recipe.checkpoint.elastic import put_state
    from recipe.checkpoint.find import Checkpoint
    from recipe.checkpoint.native import parts_in_place, save_native
    from tests.engine_runs import start_engine

    state = state or state_of(config)
    weights = {key.removeprefix("weight/"): t for key, t in state.tensors.items() if key.startswith("weight/")}
    with patch("modeling.init.initialise"):  # numbers that are all replaced, but take a second each ten million
        engine = start_engine(config, weights, case)
    with parts_in_place(engine):
        put_state(engine, state, checkpoint=Checkpoint(3, folder, {}))
    save_native(engine, folder, rank_state={})


def save_checkpoint(folder: Path, config: GatherMoeConfig, case: Case, state: MemoryState | None) -> Path:
    """A complete checkpoint of step 3, saved by as many ranks as the case has."""
    folder.mkdir(parents=True)
    run_ranks(save_state, case.dp * case.tp, folder, config, case, state)
    precision = "bf16" if case.bf16 else "fp32"
    details = details_of(config, dp=case.dp, tp=case.tp, ep=case.ep, zero_stage=case.stage, precision=precision)
    return seal(folder, step=3, details=details)


def make_checkpoint(folder: Path, config: GatherMoeConfig, *, dp: int, stage: int) -> Path:
    """One that nobody trained and no ranks saved."""
    write_by_hand(folder, state_of(config), dp=dp, stage=stage)
    return seal(folder, step=3, details=details_of(config, dp=dp, zero_stage=stage))


def assert_same_tensors(out: Path, want: MemoryState) -> None:
    state = WholeTensors(out / "whole")
    assert state.step == want.step
    got = read_all(state)
    assert got.keys() == want.tensors.keys()
    for key, tensor in want.tensors.items():
        assert torch.equal(got[key], tensor), key


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.requirement("R-CKPT-05")
def test_no_tensor_is_lost(tmp_path: Path, stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every tensor is filled with a number of its own."""
    config = mixed_config()
    state = state_of(config, fill=lambda number, shape: torch.full(shape, 1.0 + number))
    saved = save_checkpoint(tmp_path / "step-3", config, Case(dp=2, tp=2, ep=2, stage=stage), state)
    assert main(["reshard", str(saved), str(tmp_path / "out")]) == 0
    num = len(state.tensors)
    assert f"\n{num} tensors read, {num} read back and found equal\n" in capsys.readouterr().out
    assert_same_tensors(tmp_path / "out", state)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (Case(dp=1, tp=1, stage=0), {}),
        slow(Case(dp=1, tp=4, ep=1, stage=3), {"router_bias": True, "score_function": "sigmoid"}),
        slow(Case(dp=1, tp=4, ep=2, stage=2), {"tie_word_embeddings": True, "vocab_size": 51}),
        slow(Case(dp=2, tp=2, ep=2, stage=1, bf16=True), {"qk_norm": "full", "num_key_value_heads": 1}),
    ],
)
def test_every_number_is_where_it_was(
    tmp_path: Path, case: Case, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Random numbers, so that nothing can change places unseen."""
    config = mixed_config(**changes)
    state = state_of(config)
    saved = save_checkpoint(tmp_path / "step-3", config, case, state)
    assert main(["reshard", str(saved), str(tmp_path / "out")]) == 0
    assert_same_tensors(tmp_path / "out", state)
    capsys.readouterr()
    assert main(["inspect", str(saved), "--values", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["checkpoint"]["values"]
    assert sum(found["num_tensors"] for found in values.values()) == len(state.tensors)


@pytest.mark.slow
def test_a_run_goes_on_from_it_in_another_layout(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"save_steps": 3, "hf_save": "never"}
    first = write_ds_config(tmp_path, zero_optimization={"stage": 2}, parallel={"tp": 2, "ep": 2})
    run_ranks(train_on_ranks, 4, flags | first)
    want = read_metrics(tmp_path / "run")
    out = tmp_path / "whole"
    assert main(["reshard", str(tmp_path / "run" / "checkpoints" / "step-3"), str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["expert_counts.json", "manifest.json", "ranks", "whole"]
    other = write_ds_config(tmp_path, zero_optimization={"stage": 3}, parallel={"tp": 2, "ep": 1})
    flags |= {"per_device_train_batch_size": 4, "output_dir": tmp_path / "on", "resume_from_checkpoint": out}
    _, said = run_ranks(train_on_ranks, 2, flags | other)[0]
    assert f"resuming from {out}" in said
    got = read_metrics(tmp_path / "on")
    assert list(got) == [4, 5, 6]
    for step, line in got.items():
        assert line["tokens"] == want[step]["tokens"]
        assert line["loss"] == pytest.approx(want[step]["loss"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(want[step]["grad_norm"], abs=1e-5)


MEASURE = """
import sys, threading
from pathlib import Path
import torch.distributed
from recipe.checkpoint.reshard import Pieces, reshard

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def watch():
    global most
    while not done.wait(0.001):
        most = max(most, anonymous_bytes())

small, large, folder, piece_bytes = sys.argv[1:]
reshard(Path(small), out=Path(folder) / "first", say=lambda line: None)
before = most = anonymous_bytes()
done = threading.Event()
thread = threading.Thread(target=watch)
thread.start()
pieces = Pieces(piece_bytes=int(piece_bytes), max_file_bytes=2**26)
reshard(Path(large), out=Path(folder) / "second", say=lambda line: None, pieces=pieces)
done.set()
thread.join()
assert not torch.distributed.is_initialized()
print(most - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_state(tmp_path: Path) -> None:
    """A process of its own, without ranks; what loading libraries takes is spent on a small checkpoint before.

    Pages of mapped files do not count: the system takes them back whenever it needs room.
    """
    small = make_checkpoint(tmp_path / "small", tiny_config(), dp=3, stage=3)
    large = make_checkpoint(tmp_path / "large", tiny_config(**LARGE), dp=3, stage=3)
    arguments = [small, large, tmp_path, PIECE_BYTES]
    done = subprocess.run([sys.executable, "-c", MEASURE, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    state_bytes = sum(path.stat().st_size for path in (tmp_path / "second" / "whole").glob("*.safetensors"))
    assert state_bytes > 150e6
    assert int(done.stdout) < ROW_BYTES / 2
