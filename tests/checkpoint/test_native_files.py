"""DeepSpeed's own files without the ranks that wrote them: any part of their tensors, and all of them made whole."""

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from modeling.config import GatherMoeConfig
from modeling.shard_table import Ranges
from recipe.checkpoint.native_files import NativeFiles, open_training_state
from recipe.checkpoint.rank_files import Counters, Partition, Position, RankFile, rank_path, read_rank_file, to_content
from recipe.checkpoint.training_state import KINDS, MOMENTS, WEIGHT, Overlap, copy_run, cut, everything, overlaps
from recipe.checkpoint.whole import WholeTensors
from recipe.cli import main
from recipe.shared.errors import CheckpointBrokenError
from tests import resuming
from tests.engine_runs import Case, join_shards, slow
from tests.ranks import run_ranks
from tests.referee import mixed_config, tiny_config
from tests.resuming import Source, config_of, make_source
from tests.states import MemoryState, assert_same, details_of, part_of, read_all, seal, state_of
from tests.training import read_metrics, train_on_ranks, write_ds_config, write_inputs


def write_by_hand(folder: Path, state: MemoryState, *, dp: int, stage: int) -> None:
    """ZeRO 2 or 3 in float32 without tensor parallelism; everything in one group of the optimizer."""
    names = [name for name in state.shapes() if state.kinds(name) == KINDS]
    buffers = {name: state.tensors[f"weight/{name}"] for name in state.shapes() if name not in names}
    positions: dict[str, Position] = {}
    parts = {kind: _parts(state, kind, names=names, dp=dp, stage=stage, positions=positions) for kind in KINDS}
    partition = Partition(optimizer="by hand", shapes=state.shapes(), positions=positions)
    counters = Counters(global_steps=int(state.step), global_samples=0, skipped_steps=0, tokens_read=0)
    for name in ("deepspeed", "ranks"):
        (folder / name).mkdir(parents=True)
    for rank in range(dp):
        file = RankFile(partition=partition, counters=counters, random={}, state={"rank": rank})
        torch.save(to_content(file), rank_path(folder, rank))
        model: dict[str, Any] = {"module": buffers, "buffer_names": list(buffers)}
        part = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(model, folder / "deepspeed" / f"{part}mp_rank_00_model_states.pt")
        step = torch.tensor(state.step)
        torch.save(
            {"optimizer_state_dict": _optimizer({kind: parts[kind][rank] for kind in KINDS}, step=step, stage=stage)},
            folder / "deepspeed" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )


def _optimizer(parts: dict[str, Tensor], *, step: Tensor, stage: int) -> dict[str, Any]:
    moments = {kind: parts[kind] for kind in MOMENTS}
    inner = {"state": {0: {"step": step, **moments}}}
    if stage == 3:
        return {"fp32_flat_groups": [parts[WEIGHT]], "optimizer_state_dict": inner}
    return {"single_partition_of_fp32_groups": [parts[WEIGHT]], "base_optimizer_state": inner}


def _parts(
    state: MemoryState, kind: str, *, names: list[str], dp: int, stage: int, positions: dict[str, Position]
) -> list[Tensor]:
    """The flat tensor of every rank; `positions` are filled in."""
    tensors = [state.tensors[f"{kind}/{name}"].flatten() for name in names]
    start = 0
    if stage == 3:  # of every parameter an equal part
        by_tensor = [_shares(tensor, dp=dp) for tensor in tensors]
        for name, shares in zip(names, by_tensor, strict=True):
            positions[name] = Position(0, start, shares[0].numel(), 0)
            start += shares[0].numel()
        return [torch.cat(parts) for parts in zip(*by_tensor, strict=True)]
    shares = _shares(torch.cat(tensors), dp=dp)  # an equal part of all parameters together
    for name, tensor in zip(names, tensors, strict=True):
        positions[name] = Position(0, 0, shares[0].numel(), -start)
        start += tensor.numel()
    return shares


def _shares(flat: Tensor, *, dp: int) -> list[Tensor]:
    width = -(-flat.numel() // dp)
    return [share.clone() for share in pad(flat, (0, width * dp - flat.numel())).split(width)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_source(tmp_path_factory.mktemp("source"), Case(stage=2))


def open_files(source: Source) -> NativeFiles:
    state = open_training_state(source.checkpoint.folder, details=source.checkpoint.details)
    assert isinstance(state, NativeFiles)
    return state


def open_made(folder: Path, *, dp: int, stage: int) -> NativeFiles:
    return NativeFiles(folder, details=resuming.details_of(config_of(), Case(dp=dp, stage=stage)))


def test_every_tensor_is_there_whole(source: Source) -> None:
    state, outcome = open_files(source), source.by_rank[0]
    assert state.step == 2.0
    assert state.shapes().keys() == outcome.held["weight"].keys()
    for name, shape in state.shapes().items():
        is_trained = not name.endswith("bias")
        assert state.kinds(name) == (KINDS if is_trained else ("weight",))
        for kind in state.kinds(name):
            part = state.read(name, kind=kind, ranges=everything(shape))
            assert part.dtype == torch.float32
            assert torch.equal(part, outcome.held[kind][name]), (name, kind)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_parts_come_together_from_the_shards_of_many_ranks(tmp_path: Path, stage: int) -> None:
    case, config = Case(dp=2, tp=2, ep=1, stage=stage), config_of(vocab_size=51)
    source = make_source(tmp_path, case, config=config)
    state = open_files(source)
    name, ranges = "model.layers.1.mlp.experts.gate_up_proj", (((1, 3),), ((12, 20), (44, 52)), ((5, 30),))
    for kind in KINDS:
        tensors = join_shards([outcome.held[kind] for outcome in source.by_rank], config, case)
        assert torch.equal(state.read(name, kind=kind, ranges=ranges), part_of(tensors[name], ranges)), kind
        for other, tensor in tensors.items():
            assert torch.equal(state.read(other, kind=kind, ranges=everything(tuple(tensor.shape))), tensor), other
    for file in (tmp_path / "deepspeed").glob("*mp_rank_01*"):
        file.unlink()
    state, heads = open_files(source), "model.layers.0.self_attn.q_proj.weight"
    state.read(heads, kind="exp_avg", ranges=(((0, 16),), ((0, 32),)))  # all on the first rank of the group
    with pytest.raises(CheckpointBrokenError, match=r"mp_rank_01_.*\.pt: missing"):
        state.read(heads, kind="exp_avg", ranges=(((0, 17),), ((0, 32),)))


@pytest.fixture(scope="module")
def made() -> MemoryState:
    return state_of(config_of())


PARTS: list[tuple[str, tuple[Ranges, ...]]] = [
    ("model.layers.1.mlp.experts.gate_up_proj", (((2, 4), (7, 8)), ((3, 9), (35, 41)), ((0, 32),))),
    ("model.layers.2.mlp.experts.down_proj", (((1, 2),), ((0, 32),), ((8, 16), (0, 4)))),
    ("model.embed_tokens.weight", (((49, 50),), ((1, 2),))),
    ("model.norm.weight", (((30, 32), (0, 1)),)),
]


@pytest.mark.parametrize("stage", [2, 3])
def test_tensors_come_together_from_parts_that_end_within_rows(tmp_path: Path, made: MemoryState, stage: int) -> None:
    write_by_hand(tmp_path, made, dp=3, stage=stage)
    state = open_made(tmp_path, dp=3, stage=stage)
    assert state.step == made.step
    got = read_all(state)
    assert_same(got, made.tensors)
    for name, ranges in PARTS:
        for kind in KINDS:
            before = state.num_bytes
            part = state.read(name, kind=kind, ranges=ranges)
            assert torch.equal(part, part_of(made.tensors[f"{kind}/{name}"], ranges)), (name, kind)
            assert state.num_bytes - before == part.nbytes, "nothing else was read"


@pytest.mark.parametrize("stage", [2, 3])
def test_files_without_any_of_the_part_are_not_opened(tmp_path: Path, made: MemoryState, stage: int) -> None:
    write_by_hand(tmp_path, made, dp=3, stage=stage)
    for rank in (1, 2):  # under ZeRO 2 the first rank has the first parameters, under ZeRO 3 the first rows of each
        for path in [tmp_path / "ranks" / f"rank-0000{rank}.pt", *tmp_path.glob(f"deepspeed/*rank_{rank}_*")]:
            path.unlink()
    state = open_made(tmp_path, dp=3, stage=stage)
    name, ranges = "model.embed_tokens.weight", (((0, 3),), ((2, 9),))
    for kind in KINDS:
        part = state.read(name, kind=kind, ranges=ranges)
        assert torch.equal(part, part_of(made.tensors[f"{kind}/{name}"], ranges)), kind
    with pytest.raises(CheckpointBrokenError, match=r"zero_pp_rank_2_mp_rank_00_optim_states\.pt: missing"):
        state.read("lm_head.weight", kind="exp_avg", ranges=(((49, 50),), ((0, 32),)))


@pytest.mark.parametrize("stage", [2, 3])
def test_optimizer_state_may_be_missing_only_before_the_first_step(
    tmp_path: Path, made: MemoryState, stage: int
) -> None:
    write_by_hand(tmp_path, made, dp=1, stage=stage)
    path, rank = tmp_path / "deepspeed" / "zero_pp_rank_0_mp_rank_00_optim_states.pt", rank_path(tmp_path, 0)
    name = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    content = torch.load(path, weights_only=False)
    moments = content["optimizer_state_dict"][name]["state"]

    def save_and_open() -> NativeFiles:
        torch.save(content, path)
        return open_made(tmp_path, dp=1, stage=stage)

    norm = {"name": "model.norm.weight", "ranges": (((0, 32),),)}
    del moments[0]["exp_avg_sq"]
    save_and_open().read(kind="exp_avg", **norm)
    match = r"optim_states\.pt: has no exp_avg_sq of the optimizer's tensor 0, though it took 3 steps"
    with pytest.raises(CheckpointBrokenError, match=match):
        save_and_open().read(kind="exp_avg_sq", **norm)
    moments.clear()
    with pytest.raises(CheckpointBrokenError, match=r"has no optimizer state, though the run took 3 steps"):
        save_and_open().read(kind="exp_avg", **norm)
    counters = torch.load(rank, weights_only=False)["counters"]
    change(rank, counters=counters | {"skipped_steps": 3})
    state = save_and_open()
    assert state.step == 0.0
    assert not state.read(kind="exp_avg_sq", **norm).any()


def test_a_run_gives_what_it_has_of_a_part() -> None:
    shape, box = (3, 4, 5), (Overlap(0, 1, 2), Overlap(0, 1, 2), Overlap(0, 2, 3))
    whole = torch.arange(1, 61).float().view(shape)
    want = whole[1:3, 1:3, 2:5]
    for begin, end in combinations(range(61), 2):
        part = torch.zeros(2, 2, 3)
        num_copied = copy_run(part, whole.flatten()[begin:end], begin=begin, shape=shape, box=box)
        has = (want > begin) & (want <= end)
        assert torch.equal(part, want * has)
        assert num_copied == has.sum()


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


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    source = make_source(tmp_path, Case(stage=2))
    model = tmp_path / "deepspeed" / "mp_rank_00_model_states.pt"
    optimizer = tmp_path / "deepspeed" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    rank = tmp_path / "ranks" / "rank-00000.pt"
    norm = {"name": "model.norm.weight", "kind": "weight", "ranges": (((0, 32),),)}
    bias = norm | {"name": "model.layers.1.mlp.gate.e_score_correction_bias", "ranges": (((0, 8),),)}

    positions = read_rank_file(tmp_path, 0).partition.positions
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
        (lambda: change(model, module={}), bias, "no entry 'model.layers.1.mlp.gate.e_score_correction_bias' where"),
        (lambda: model.unlink(), bias, "missing"),
    ]:
        broken()
        with pytest.raises(CheckpointBrokenError, match=match) as caught:
            open_files(source).read(**request)  # type: ignore[arg-type]
        (damaged,) = [path for path, content in contents.items() if not path.exists() or path.read_bytes() != content]
        assert caught.value.file == damaged
        damaged.write_bytes(contents[damaged])


def test_steps_that_differ_are_refused(tmp_path: Path) -> None:
    source = make_source(tmp_path, Case(stage=0))
    path = tmp_path / "deepspeed" / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    content["optimizer"]["state"][0]["step"] += 1
    torch.save(content, path)
    with pytest.raises(CheckpointBrokenError, match=r"took different numbers of steps: \[2\.0, 3\.0\]"):
        _ = open_files(source).step


def test_a_folder_of_neither_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointBrokenError, match="holds neither deepspeed/ nor whole/"):
        open_training_state(tmp_path, details=resuming.details_of(mixed_config(), Case()))


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
    assert_same(got, want.tensors)


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
@pytest.mark.requirement("R-CKPT-05")
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
