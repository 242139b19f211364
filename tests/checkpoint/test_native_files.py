"""Any part of a checkpoint's tensors out of DeepSpeed's own files, by a process that trains nothing."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling.shard_table import Ranges
from recipe.checkpoint.native_files import NativeFiles, open_training_state
from recipe.checkpoint.rank_files import rank_path, read_rank_file
from recipe.checkpoint.training_state import KINDS, Overlap, copy_run, cut, everything, overlaps
from recipe.shared.errors import CheckpointBrokenError
from tests.engine_runs import Case, join_shards
from tests.flat_files import write_by_hand
from tests.referee import mixed_config
from tests.resuming import Source, config_of, details_of, make_source
from tests.states import MemoryState, part_of, read_all, state_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_source(tmp_path_factory.mktemp("source"), Case(stage=2))


def open_files(source: Source) -> NativeFiles:
    state = open_training_state(source.checkpoint.folder, details=source.checkpoint.details)
    assert isinstance(state, NativeFiles)
    return state


def open_made(folder: Path, *, dp: int, stage: int) -> NativeFiles:
    return NativeFiles(folder, details=details_of(config_of(), Case(dp=dp, stage=stage)))


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


@pytest.mark.parametrize(
    ("name", "ranges"),
    [
        ("model.layers.1.mlp.experts.gate_up_proj", (((2, 4), (7, 8)), ((3, 9), (35, 41)), ((0, 32),))),
        ("model.layers.2.mlp.experts.down_proj", (((1, 2),), ((0, 32),), ((8, 16), (0, 4)))),
        ("model.embed_tokens.weight", (((49, 50),), ((1, 2),))),
        ("model.norm.weight", (((30, 32), (0, 1)),)),
    ],
)
def test_any_part_is_read_without_the_rest(source: Source, name: str, ranges: tuple[Ranges, ...]) -> None:
    state, held = open_files(source), source.by_rank[0].held
    for kind in KINDS:
        part = state.read(name, kind=kind, ranges=ranges)
        assert torch.equal(part, part_of(held[kind][name], ranges)), kind
    assert state.num_bytes == 3 * part.nbytes


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


@pytest.mark.parametrize("stage", [2, 3])
def test_tensors_come_together_from_parts_that_end_within_rows(tmp_path: Path, made: MemoryState, stage: int) -> None:
    write_by_hand(tmp_path, made, dp=3, stage=stage)
    state = open_made(tmp_path, dp=3, stage=stage)
    assert state.step == made.step
    got = read_all(state)
    assert got.keys() == made.tensors.keys()
    for key, tensor in made.tensors.items():
        assert torch.equal(got[key], tensor), key
    name, ranges = "model.layers.1.mlp.experts.gate_up_proj", (((1, 4), (6, 8)), ((12, 20), (44, 52)), ((5, 30),))
    for kind in KINDS:
        part = state.read(name, kind=kind, ranges=ranges)
        assert torch.equal(part, part_of(made.tensors[f"{kind}/{name}"], ranges)), kind


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
        open_training_state(tmp_path, details=details_of(mixed_config(), Case()))
