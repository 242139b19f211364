"""Placing experts by their loads: against all placements, and that new numbers leave a model's function as it was."""

import itertools
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from recipe.checkpoint.expert_counts import NAME as COUNTS_NAME
from recipe.checkpoint.expert_counts import ExpertCounts, read_expert_counts, write_expert_counts
from recipe.cli import main
from recipe.hf.export import FOLDER
from recipe.shared.errors import CheckpointBrokenError
from recipe.train.placement import HF_NAME, PlacedModel, place_experts, place_model, write_placed
from tests.exports import CONFIGS
from tests.referee import full_state, referee_model
from tests.states import seal


def zipf(num_experts: int, *, seed: int, skew: float = 1.0) -> list[float]:
    loads = [float(round(1e5 / (i + 1) ** skew)) for i in range(num_experts)]
    random.Random(seed).shuffle(loads)
    return loads


def worst_load(loads: Sequence[float], numbers: Sequence[int], *, num_ranks: int) -> float:
    num_local, sums = len(loads) // num_ranks, [0.0] * num_ranks
    for load, number in zip(loads, numbers, strict=True):
        sums[number // num_local] += load
    return max(sums)


def best_of_all_placements(loads: Sequence[float], *, num_ranks: int) -> float:
    """The least largest load over every way to give each rank as many experts."""
    if num_ranks == 1:
        return sum(loads)
    first, *rest = loads
    best = float("inf")
    for others in itertools.combinations(range(len(rest)), len(loads) // num_ranks - 1):
        mine = first + sum(rest[i] for i in others)
        if mine < best:
            left = [load for i, load in enumerate(rest) if i not in others]
            best = min(best, max(mine, best_of_all_placements(left, num_ranks=num_ranks - 1)))
    return best


@pytest.mark.parametrize(("num_experts", "num_ranks", "skew"), [(8, 4, 1.0), (8, 2, 0.5), (9, 3, 1.0), (12, 3, 0.3)])
def test_small_layers_get_a_placement_close_to_the_best_of_all(num_experts: int, num_ranks: int, skew: float) -> None:
    for seed in range(10):
        loads = zipf(num_experts, seed=seed, skew=skew)
        found = place_experts(loads, num_ranks=num_ranks)
        mean = sum(loads) / num_ranks
        best = best_of_all_placements(loads, num_ranks=num_ranks) / mean
        assert sorted(found.numbers) == list(range(num_experts))
        assert found.rho == pytest.approx(worst_load(loads, found.numbers, num_ranks=num_ranks) / mean)
        assert found.rho_now == pytest.approx(worst_load(loads, range(num_experts), num_ranks=num_ranks) / mean)
        assert found.bound <= best * (1 + 1e-12)
        assert best * (1 - 1e-12) <= found.rho <= min(found.rho_now, best * 1.03)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(64, 4), (64, 8), (128, 8), (60, 5)])
def test_large_layers_come_close_to_the_bound(num_experts: int, num_ranks: int) -> None:
    for seed in range(3):
        found = place_experts(zipf(num_experts, seed=seed, skew=0.7), num_ranks=num_ranks)
        assert found.rho_now > 1.1
        assert 1.0 <= found.bound <= found.rho < found.bound * 1.01


def test_a_good_placement_is_left_alone_and_a_greedy_one_bettered() -> None:
    assert place_experts([5.0, 1.0, 4.0, 2.0], num_ranks=2).numbers == (0, 1, 2, 3)
    loads = zipf(64, seed=1)
    assert place_experts(loads, num_ranks=8) == place_experts(list(loads), num_ranks=8)
    assert place_experts(loads, num_ranks=1) == (tuple(range(64)), 1.0, 1.0, 1.0)
    equal = place_experts([3.0] * 8, num_ranks=4)
    assert (equal.numbers, equal.rho) == (tuple(range(8)), 1.0)
    one_each = place_experts([8.0, 1.0, 1.0, 2.0], num_ranks=4)
    assert one_each.rho == one_each.rho_now == one_each.bound == pytest.approx(8 / 3)
    # Heaviest first gives 9 + 5 + 3 and 8 + 6 + 1; swapping 9 and 8 evens them out.
    loads = [9.0, 8.0, 6.0, 5.0, 3.0, 1.0]
    assert place_experts(loads, num_ranks=2).rho == pytest.approx(best_of_all_placements(loads, num_ranks=2) / 16)


@pytest.mark.parametrize(
    ("loads", "num_ranks", "message"),
    [
        ([1.0] * 6, 4, r"6 experts cannot be spread over ep=4; ep must be one of \[1, 2, 3, 6\]"),
        ([1.0] * 6, 0, r"6 experts cannot be spread over ep=0"),
        ([0.0] * 4, 2, r"the loads \[0.0, 0.0, 0.0, 0.0\] are no counts of routed rows"),
        ([1.0, -1.0], 2, r"the loads \[1.0, -1.0\] are no counts of routed rows; none may be negative"),
        ([1.0, float("nan")], 2, r"the loads \[1.0, nan\] are no counts"),
    ],
)
def test_loads_that_make_no_sense_are_refused(loads: list[float], num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place_experts(loads, num_ranks=num_ranks)


def counts_for(config: Any) -> ExpertCounts:
    """The hottest experts together on the first rank, in the next layer on the last one."""
    falling = sorted(zipf(config.num_experts, seed=0), reverse=True)
    return counts_of(*(falling[:: (-1) ** layer] for layer in range(config.sizes.num_moe_layers)))


def counts_of(*layers: list[float]) -> ExpertCounts:
    return ExpertCounts(first_step=11, last_step=20, counts=tuple(map(tuple, layers)))


def saved_model(folder: Path, kind: str) -> Any:
    """The stock class where there is one, with random weights, in `folder`."""
    model = referee_model(CONFIGS[kind](), full_state(CONFIGS[kind]())).eval()
    model.save_pretrained(folder)
    return model


def counted_model(folder: Path, kind: str = "mixtral", *, counts: ExpertCounts | None = None) -> Any:
    """Save a model in `folder`/hf, and counts of its experts' rows beside it."""
    model = saved_model(folder / "hf", kind)
    write_expert_counts(folder, counts or counts_for(CONFIGS[kind]()))
    return model


def placed_in(folder: Path, *, num_ranks: int = 2) -> PlacedModel:
    return place_model(folder / "hf", counts_file=folder / COUNTS_NAME, num_ranks=num_ranks)


def split_files(folder: Path) -> None:
    """Every other tensor in another file, so that the same matrix of two experts lies in two files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(2):
        file, names = f"model-0000{part + 1}-of-00002.safetensors", sorted(tensors)[part::2]
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def saved_checkpoint(folder: Path) -> Path:
    """What a run leaves: a checkpoint with a Hugging Face folder, counts, and a manifest over both."""
    checkpoint = folder / "run" / "checkpoints" / "step-20"
    saved_model(checkpoint / HF_NAME, "mixtral")
    write_expert_counts(checkpoint, counts_for(CONFIGS["mixtral"]()))
    seal(checkpoint, step=20, details={"ep": 2})
    (checkpoint.parent / "latest").symlink_to(checkpoint.name)
    return checkpoint


@pytest.mark.parametrize("kind", CONFIGS)
def test_new_numbers_leave_the_function_as_it_was(kind: str, tmp_path: Path) -> None:
    """Every type, its own class before and after; in several files for one of them."""
    config = CONFIGS[kind]()
    before = counted_model(tmp_path, kind)
    if kind == "qwen3_moe":
        split_files(tmp_path / "hf")
    placed = placed_in(tmp_path)
    assert all(placement.numbers != tuple(range(config.num_experts)) for placement in placed.placements)
    write_placed(placed, out=tmp_path / "placed")
    after, info = AutoModelForCausalLM.from_pretrained(tmp_path / "placed", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(after) is type(before)
    ids = torch.arange(48).view(3, 16) % config.vocab_size
    torch.testing.assert_close(after.eval()(ids).logits, before(ids).logits, atol=1e-5, rtol=1e-5)
    old, new = (dict(model.named_parameters()) for model in (before, after))
    sparse = [layer for layer in range(config.num_hidden_layers) if config.is_sparse(layer)]
    for layer, placement in zip(sparse, placed.placements, strict=True):
        router = f"model.layers.{layer}.mlp.gate.weight"
        assert torch.equal(new[router][list(placement.numbers)], old[router])
        assert not torch.equal(new[router], old[router])
    files = {file.name: set(load_file(file)) for file in (tmp_path / "placed").glob("*.safetensors")}
    assert files.keys() == {file.name for file in (tmp_path / "hf").glob("*.safetensors")}
    if kind == "qwen3_moe":
        weight_map = json.loads((tmp_path / "placed" / "model.safetensors.index.json").read_text())["weight_map"]
        assert weight_map == {name: file for file, names in files.items() for name in names}
    record = json.loads((tmp_path / "placed" / "placement.json").read_text())
    assert record["placements"][0]["numbers"] == list(placed.placements[0].numbers)
    assert (record["ep"], record["last_step"], record["counts"][0]) == (2, 20, list(placed.counts.counts[0]))


def test_the_bias_of_a_router_moves_with_its_rows(tmp_path: Path) -> None:
    counted_model(tmp_path, "gather_moe")
    file = tmp_path / "hf" / "model.safetensors"
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    save_file(load_file(file) | {name: torch.arange(8.0)}, file, metadata={"format": "pt"})
    placed = placed_in(tmp_path, num_ranks=4)
    write_placed(placed, out=tmp_path / "placed")
    with safe_open(tmp_path / "placed" / "model.safetensors", framework="pt") as reader:
        bias = reader.get_tensor(name)
        assert reader.metadata() == {"format": "pt"}
    assert bias[list(placed.placements[0].numbers)].tolist() == list(range(8))
    assert bias.tolist() != list(range(8))


def test_the_command_places_what_a_run_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = saved_checkpoint(tmp_path)
    [first, second] = (place_experts(layer, num_ranks=2) for layer in counts_for(CONFIGS["mixtral"]()).counts)
    for path in (tmp_path / "run", checkpoint, checkpoint.parent / "latest"):
        assert main(["place", str(path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("4 experts over ep=2 ranks, by the routing of steps 11 to 20; ")
        assert lines[2].split() == ["0", *(f"{x:.3f}" for x in first[1:])]
        assert lines[3].split() == ["1", *(f"{x:.3f}" for x in second[1:])]
        assert "nothing was written; --out FOLDER writes" in lines[4]
    out = tmp_path / "placed"
    assert main(["place", str(tmp_path / "run"), "--out", str(out), "--ep", "4"]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {out}; train on from it with --model_name_or_path {out}\n")
    assert json.loads((out / "placement.json").read_text())["ep"] == 4
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["placed", "run"]


def spoil_weights(checkpoint: Path) -> None:
    file = checkpoint / HF_NAME / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((checkpoint / "manifest.json").read_text())
    change(content)
    (checkpoint / "manifest.json").write_text(json.dumps(content))


def remove_counts(checkpoint: Path) -> None:
    change_manifest(checkpoint, lambda content: content["files"].pop(COUNTS_NAME))
    (checkpoint / COUNTS_NAME).unlink()


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (spoil_weights, CheckpointBrokenError.exit_code, r"model.safetensors: its content has changed"),
        (
            lambda checkpoint: change_manifest(checkpoint, lambda content: content["details"].clear()),
            CheckpointBrokenError.exit_code,
            r"manifest.json: its details have no ep",
        ),
        (
            lambda checkpoint: shutil.rmtree(checkpoint / HF_NAME),
            2,
            r"step-20 has no hf/ folder with weights; save one with --hf_save last or every",
        ),
        (remove_counts, 2, r"expert_counts.json does not exist, so nothing is known of the experts' loads"),
    ],
)
def test_a_checkpoint_that_cannot_be_placed_is_refused(
    spoil: Any, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = saved_checkpoint(tmp_path)
    spoil(checkpoint)
    capsys.readouterr()
    assert main(["place", str(checkpoint), "--out", str(tmp_path / "placed")]) == code
    shown = capsys.readouterr().err
    assert shown.startswith("gather-moe place: ")
    assert message in shown
    assert not (tmp_path / "placed").exists()


def test_a_folder_that_says_too_little_is_refused(tmp_path: Path) -> None:
    saved_model(tmp_path / "hf", "mixtral")
    with pytest.raises(ValueError, match=r"hf says nothing of its experts' loads and ranks; give --counts FILE"):
        place_model(tmp_path / "hf", counts_file=None, num_ranks=2)
    with pytest.raises(ValueError, match=r"is neither a run folder, nor a checkpoint, nor a Hugging Face folder"):
        place_model(tmp_path, counts_file=None, num_ranks=2)


def rename_type(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"model_type": "llama"}))


def rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


def without(part: str) -> Any:
    return lambda folder: rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if part not in n})


def stack_experts(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 2, 2)})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (rename_type, r"hf is of model_type='llama'; known are \['gather_moe', 'mixtral', 'qwen3_moe', 'olmoe'\]"),
        (without(".experts.3.w2"), r"layer 0 in .*hf has 4 experts, of which some lack a matrix"),
        (without("layers.1.block_sparse_moe.gate"), r"layer 1 in .*hf has 4 experts, .* or the router is missing"),
        (without("layers.0.block_sparse_moe"), r"hf has 1 layers with experts, the counts are of 2"),
        (stack_experts, r"hf holds .*gate_up_proj; expected one tensor per matrix of an expert"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"hf holds no safetensors to place"),
    ],
)
def test_weights_that_are_not_what_was_counted_are_refused(spoil: Any, message: str, tmp_path: Path) -> None:
    counted_model(tmp_path)
    spoil(tmp_path / "hf")
    with pytest.raises(ValueError, match=message):
        write_placed(placed_in(tmp_path), out=tmp_path / "placed")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [COUNTS_NAME, "hf"]


def test_counts_of_another_number_of_experts_are_refused(tmp_path: Path) -> None:
    counted_model(tmp_path, counts=counts_of(zipf(8, seed=0), zipf(8, seed=1)))
    with pytest.raises(ValueError, match=r"layer 0 in .* has 4 experts, .* or the counts are of another number, 8"):
        write_placed(placed_in(tmp_path), out=tmp_path / "placed")


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted_model(tmp_path)
    with pytest.raises(ValueError, match=r"--out .*hf exists already; name a folder that does not"):
        write_placed(placed_in(tmp_path), out=tmp_path / "hf")

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("recipe.train.placement.save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_placed(placed_in(tmp_path), out=tmp_path / "placed")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [COUNTS_NAME, "hf"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"counts.json holds no counts of experts \(JSONDecodeError"),
        ('{"first_step": 1, "last_step": 2}', r"holds no counts of experts \(KeyError\('counts'\)\); it should read"),
        ('{"first_step": 1, "last_step": 2, "counts": [["a"]]}', r"holds no counts of experts \(ValueError"),
        ('{"first_step": 1, "last_step": 2, "counts": [[1, 2], [1]]}', r"has rows of \[2, 1\] counts; it should read"),
        ('{"first_step": 1, "last_step": 2, "counts": []}', r"has rows of \[\] counts"),
        ('{"first_step": 1, "last_step": 2, "counts": [[]]}', r"has rows of \[0\] counts"),
    ],
)
def test_a_file_without_counts_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_expert_counts(tmp_path / "counts.json")


def test_weights_are_where_a_checkpoint_has_them() -> None:
    assert HF_NAME == FOLDER
