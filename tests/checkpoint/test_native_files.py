"""DeepSpeed's own files without the ranks that wrote them: any part of their tensors, and all of them made whole."""

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from modeling.config import GatherMoeConfig
from modeling.shard_table import Ranges
from recipe.checkpoint.manifest import read_manifest
from recipe.checkpoint.native_files import open_training_state
from recipe.checkpoint.rank_files import rank_path, read_rank_file
from recipe.checkpoint.training_state import Overlap, TrainingState, WholeTensors, cut, overlaps
from recipe.cli import main
from recipe.shared.errors import CheckpointBrokenError
from tests import resuming
from tests.engine_runs import Case, slow
from tests.ranks import run_ranks
from tests.referee import tiny_config
from tests.resuming import config_of
from tests.states import assert_same, details_of, part_of, read_all, seal, state_of

SLICED, BF16 = Case(tp=4, ep=2, stage=2), Case(dp=2, tp=2, ep=1, stage=1, bf16=True)
CHANGES: dict[Case, dict[str, Any]] = {
    SLICED: {"tie_word_embeddings": True, "vocab_size": 51, "score_function": "softmax"},
    BF16: {"qk_norm": "full", "num_key_value_heads": 1},
}
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight"


def config_for(case: Case) -> GatherMoeConfig:
    return config_of(**CHANGES.get(case, {}))


def save_state(rank: int, world_size: int, folder: Path, config: GatherMoeConfig, case: Case) -> None:
    """Have an engine hold random numbers, and save them as training does."""
    from recipe.checkpoint.elastic import put_state
    from recipe.checkpoint.find import Checkpoint
    from recipe.checkpoint.native import parts_in_place, save_native
    from tests.engine_runs import start_engine

    state = state_of(config)
    weights = {key.removeprefix("weight/"): t for key, t in state.tensors.items() if key.startswith("weight/")}
    engine = start_engine(config, weights, case)
    with parts_in_place(engine):
        put_state(engine, state, checkpoint=Checkpoint(3, folder, {}))
    save_native(engine, folder, rank_state={})


def save(folder: Path, config: GatherMoeConfig, case: Case) -> Path:
    """A complete checkpoint of step 3, saved by as many ranks as the case has."""
    folder.mkdir()
    run_ranks(save_state, case.num_ranks, folder, config, case)
    return seal(folder, step=3, details=details_of(config, **resuming.details_of(config, case)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """The checkpoint of a case; saved once, not to be changed."""
    return functools.cache(lambda case: save(tmp_path_factory.mktemp("saved") / "step-3", config_for(case), case))


def open_state(folder: Path) -> TrainingState:
    return open_training_state(folder, details=read_manifest(folder).details)


def random_ranges(shape: tuple[int, ...], random: Random) -> tuple[Ranges, ...]:
    """Per dimension one or two stretches, in any order."""
    ranges = []
    for size in shape:
        a, b, c, d = sorted(random.sample(range(size + 1), 4))
        ranges.append(tuple(random.sample([(a, b), (c, d)], random.randint(1, 2))))
    return tuple(ranges)


@pytest.mark.parametrize(
    "case",
    [
        Case(stage=0),
        Case(dp=3, stage=2),  # three ranks share nothing evenly: their parts end within rows
        Case(dp=3, stage=3),
        slow(Case(dp=2, tp=2, ep=1, stage=0)),
        slow(Case(dp=2, tp=2, ep=2, stage=3)),
        slow(SLICED),
        slow(BF16),
    ],
    ids=str,
)
@pytest.mark.requirement("R-CKPT-05")
def test_every_number_is_where_it_was(
    case: Case, saved: Callable[[Case], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random numbers, so that nothing can be lost or change places unseen."""
    want, folder, random = state_of(config_for(case)), saved(case), Random(case.stage)
    state, num = open_state(folder), len(want.tensors)
    assert (state.step, state.shapes()) == (want.step, want.shapes())
    assert all(state.kinds(name) == want.kinds(name) for name in want.shapes())
    for key, tensor in want.tensors.items():
        kind, name = key.split("/")
        for _ in range(5):
            ranges = random_ranges(tuple(tensor.shape), random)
            part = state.read(name, kind=kind, ranges=ranges)
            assert part.dtype == torch.float32
            assert torch.equal(part, part_of(tensor, ranges)), (key, ranges)
    assert main(["reshard", str(folder), str(tmp_path / "out")]) == 0
    assert f"\n{num} tensors read, {num} read back and found equal\n" in capsys.readouterr().out
    whole = WholeTensors(tmp_path / "out" / "whole")
    assert whole.step == want.step
    assert_same(read_all(whole), want.tensors)
    assert main(["inspect", str(folder), "--values", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["checkpoint"]["values"]
    assert sum(found["num_tensors"] for found in values.values()) == num


@pytest.mark.parametrize(
    ("case", "others", "last", "missing"),
    [
        # Under ZeRO 2 the first rank has the first parameters, under ZeRO 3 the first rows of each.
        (Case(dp=3, stage=2), "*zero_pp_rank_[12]_*", HEAD, r"zero_pp_rank_2_mp_rank_00_optim_states\.pt"),
        (Case(dp=3, stage=3), "*zero_pp_rank_[12]_*", HEAD, r"zero_pp_rank_2_mp_rank_00_optim_states\.pt"),
        slow(SLICED, "*mp_rank_0[123]_*", EMBEDDING, r"rank-00003\.pt"),
    ],
    ids=str,
)
def test_files_without_any_of_the_part_are_not_opened(
    case: Case, others: str, last: str, missing: str, saved: Callable[[Case], Path], tmp_path: Path
) -> None:
    folder, want = shutil.copytree(saved(case), tmp_path / "step-3"), state_of(config_for(case))
    for path in [*folder.glob("ranks/rank-0000[123].pt"), *folder.glob(f"deepspeed/{others}")]:
        path.unlink()
    state, ranges = open_state(folder), (((0, 3),), ((2, 9),))
    for kind in want.kinds(EMBEDDING):
        part = state.read(EMBEDDING, kind=kind, ranges=ranges)
        assert torch.equal(part, part_of(want.tensors[f"{kind}/{EMBEDDING}"], ranges)), kind
    with pytest.raises(CheckpointBrokenError, match=f"{missing}: missing"):
        state.read(last, kind="exp_avg", ranges=(((49, 50),), ((0, 32),)))


@pytest.mark.parametrize("stage", [2, 3])
def test_optimizer_state_may_be_missing_only_before_the_first_step(
    stage: int, saved: Callable[[Case], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved(Case(dp=3, stage=stage)), tmp_path / "step-3")
    path, rank = folder / "deepspeed" / "zero_pp_rank_0_mp_rank_00_optim_states.pt", rank_path(folder, 0)
    content, counters = (torch.load(file, weights_only=False) for file in (path, rank))
    states = content["optimizer_state_dict"]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["state"]

    def read_after_saving(kind: str) -> torch.Tensor:
        torch.save(content, path)
        return open_state(folder).read(NORM, kind=kind, ranges=(((0, 32),),))

    for state in states.values():
        del state["exp_avg_sq"]
    read_after_saving("exp_avg")
    match = r"optim_states\.pt: has no exp_avg_sq of the optimizer's tensor \d, though it took 3 steps"
    with pytest.raises(CheckpointBrokenError, match=match):
        read_after_saving("exp_avg_sq")
    states.clear()
    change(rank, counters=counters["counters"] | {"global_steps": 3})
    with pytest.raises(CheckpointBrokenError, match=r"has no optimizer state, though the run took 3 steps"):
        read_after_saving("exp_avg")
    change(rank, counters=counters["counters"] | {"global_steps": 3, "skipped_steps": 3})
    assert not read_after_saving("exp_avg_sq").any()
    assert open_state(folder).step == 0.0


def test_ranges_are_cut_and_overlap_counted_in_the_parts_not_in_the_whole() -> None:
    assert cut(((4, 8), (12, 16)), 2, 6) == ((6, 8), (12, 14))
    assert cut(((4, 8), (12, 16)), 0, 4) == ((4, 8),)
    assert cut(((4, 8),), 3, 9) == ((7, 8),), "the rest is padding"
    assert cut(((4, 8),), 5, 9) == ()
    assert overlaps(((4, 8),), ((0, 5), (6, 10))) == [Overlap(0, 4, 1), Overlap(2, 5, 2)]
    assert overlaps(((6, 8), (0, 2)), ((1, 7),)) == [Overlap(0, 5, 1), Overlap(3, 0, 1)]
    assert overlaps(((0, 2),), ((2, 4),)) == []


def change(path: Path, **changes: Any) -> None:
    content = torch.load(path, weights_only=False)
    torch.save(content | changes, path)


def count_another_step(path: Path) -> None:
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1
    torch.save(content, path)


def test_a_broken_file_is_named(saved: Callable[[Case], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved(Case(stage=2)), tmp_path / "step-3")
    model = folder / "deepspeed" / "mp_rank_00_model_states.pt"
    optimizer = folder / "deepspeed" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    rank = rank_path(folder, 0)
    norm = {"name": "model.norm.weight", "kind": "weight", "ranges": (((0, 32),),)}
    bias = norm | {"name": "model.layers.1.mlp.gate.e_score_correction_bias", "ranges": (((0, 8),),)}
    moment = norm | {"kind": "exp_avg"}
    positions = read_rank_file(folder, 0).partition.positions
    of_norm = positions["model.norm.weight"]
    short = {**positions, "model.norm.weight": of_norm._replace(width=31 - of_norm.first)}
    contents = {path: path.read_bytes() for path in (model, optimizer, rank)}
    for broken, request, match in [
        (lambda: change(rank, places=short), norm, "of model.norm.weight, 31 of 32 elements are in the files"),
        (lambda: change(rank, places=None), norm, "is not the file of a rank"),
        (lambda: rank.unlink(), norm, "missing"),
        (lambda: change(optimizer, optimizer_state_dict={}), norm, "no entry 'single_partition_of_fp32_groups' where"),
        (lambda: optimizer.write_bytes(b"?" * 99), norm, "is not a file of DeepSpeed's"),
        (lambda: optimizer.unlink(), norm, "missing"),
        (lambda: count_another_step(optimizer), moment, r"took different numbers of steps: \[3\.0, 4\.0\]"),
        (lambda: change(model, module={}), bias, "no entry 'model.layers.1.mlp.gate.e_score_correction_bias' where"),
        (lambda: model.unlink(), bias, "missing"),
    ]:
        broken()
        with pytest.raises(CheckpointBrokenError, match=match) as caught:
            open_state(folder).read(**request)  # type: ignore[arg-type]
        (damaged,) = [path for path, content in contents.items() if not path.exists() or path.read_bytes() != content]
        assert caught.value.file == damaged
        damaged.write_bytes(contents[damaged])


def test_a_folder_of_neither_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointBrokenError, match="holds neither deepspeed/ nor whole/"):
        open_training_state(tmp_path, details={})


# A state of 76 MB: 3 x 4 bytes for each of 6 million parameters.
LARGE = {"hidden_size": 256, "moe_intermediate_size": 4096, "num_experts": 2, "num_hidden_layers": 1}
ROW_BYTES = 4 * 2 * 4096 * 256  # of an expert's first matrix, which three data-parallel ranks do not divide evenly
PIECE_BYTES = 2**18

MEASURE = """
import sys, threading
from pathlib import Path
import torch.distributed
from recipe.checkpoint import tensor_file, training_state
from recipe.checkpoint.reshard import reshard

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
training_state.PIECE_BYTES, tensor_file.MAX_FILE_BYTES = int(piece_bytes), 2**25
reshard(Path(large), out=Path(folder) / "second", say=lambda line: None)
done.set()
thread.join()
assert not torch.distributed.is_initialized()
print(most - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_state(saved: Callable[[Case], Path], tmp_path: Path) -> None:
    """A process of its own, without ranks; what loading libraries takes is spent on a small checkpoint before.

    Pages of mapped files do not count: the system takes them back whenever it needs room.
    """
    case = Case(dp=3, stage=3)
    large = save(tmp_path / "large", tiny_config(**LARGE), case)
    arguments = [saved(case), large, tmp_path, PIECE_BYTES]
    done = subprocess.run([sys.executable, "-c", MEASURE, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    state_bytes = sum(path.stat().st_size for path in (tmp_path / "second" / "whole").glob("*.safetensors"))
    assert state_bytes > 75e6
    assert int(done.stdout) < ROW_BYTES / 2
