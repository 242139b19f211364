"""Placing experts over ranks by their measured loads: in a model in training, and offline in a Hugging Face folder.

An expert's number decides its rank. Renumbering the experts and the router's rows alike changes nothing in what a model
computes, but for exact ties among experts: training goes on as it would have, to rounding, and every program that
opened the folder opens the result, too.
"""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from modeling.comm import RowSplits, all_to_all_rows
from modeling.mesh import ParallelMesh
from modeling.moe import GatherMoeSparseBlock
from modeling.spec import NATIVE, STOCK_TYPES
from recipe.checkpoint.expert_counts import NAME as COUNTS_NAME
from recipe.checkpoint.expert_counts import ExpertCounts, read_expert_counts
from recipe.checkpoint.folders import CHECKPOINTS_NAME, LATEST
from recipe.checkpoint.manifest import MANIFEST_NAME, file_faults, read_manifest
from recipe.hf.weights import INDEX_NAME
from recipe.shared.errors import CheckpointBrokenError
from recipe.train.placement import Placement, place_experts

if TYPE_CHECKING:
    from recipe.engine.engine import Engine

Numbers = Sequence[int]  # the new number of every expert of a layer

PLACEMENT_NAME = "placement.json"
HF_NAME = "hf"  # as a checkpoint calls its Hugging Face folder; the code that writes it would bring DeepSpeed along
_BLOCK = r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe)\."
_EXPERT = re.compile(rf"(?P<before>{_BLOCK}experts\.)(?P<expert>\d+)(?P<after>\..+)")
_ROUTER = re.compile(rf"{_BLOCK}gate\.\w+")


def place_by_counts(engine: "Engine", counts: ExpertCounts, *, say: Callable[[str], None]) -> list[tuple[int, ...]]:
    """Place the experts of a model in training by what they were sent; return their new numbers. Collective."""
    placements = [place_experts(layer, num_ranks=engine.mesh.layout.ep) for layer in counts.counts]
    numbers = [placement.numbers for placement in placements]
    move_experts(engine, numbers)
    before, after = (max(values) for values in zip(*((p.rho_now, p.rho) for p in placements), strict=True))
    say(
        f"experts placed by the routing of steps {counts.first_step} to {counts.last_step}: in the most uneven "
        f"layer the busiest rank's load over the mean goes from {before:.3f} to {after:.3f}"
    )
    return numbers


def move_experts(engine: "Engine", numbers_by_layer: Sequence[Numbers]) -> None:
    """Renumber every MoE layer's experts: weights and moments move between the ranks of a group.

    Collective over the whole world; after a load or a step. The loads by which the next step's copies are chosen are
    renumbered, too.
    """
    # Here, since it loads DeepSpeed, which the offline command does without.
    from recipe.checkpoint.native import link_moments, parts_in_place, read_training_state, write_training_state

    def change(parameter: nn.Parameter, how: Callable[[Tensor], Tensor]) -> None:
        state = [how(part) for part in read_training_state(engine, parameter)]
        write_training_state(engine, parameter, state)

    blocks = [module for module in engine.model.modules() if isinstance(module, GatherMoeSparseBlock)]
    link_moments(engine)
    with parts_in_place(engine):
        for block, numbers in zip(blocks, numbers_by_layer, strict=True):
            for parameter in (block.experts.gate_up_proj, block.experts.down_proj):
                change(parameter, partial(exchange_experts, numbers=numbers, mesh=engine.mesh))
            change(block.gate.weight, partial(renumber, numbers=numbers))
            bias = block.gate.e_score_correction_bias
            if bias is not None:
                bias.copy_(renumber(bias, numbers))
    loads = engine.loads()
    if loads is not None:
        moved = [renumber(torch.tensor(layer), numbers) for layer, numbers in zip(loads, numbers_by_layer, strict=True)]
        engine.restore_loads([layer.tolist() for layer in moved])


def renumber(x: Tensor, numbers: Numbers) -> Tensor:
    """Return rows [E, ...] in the order of their new numbers."""
    out = torch.empty_like(x)
    out[torch.tensor(numbers, device=x.device)] = x
    return out


def exchange_experts(x: Tensor, numbers: Numbers, *, mesh: ParallelMesh) -> Tensor:
    """Exchange this rank's experts [e, ...] for those it has after renumbering. Collective.

    Only ranks with the same slice of their experts exchange rows. Rows are sent in the order of their new rank and
    number, and received in the order of their old rank and new number.
    """
    here, num_local, peers = mesh.ep_rank, x.shape[0], mesh.expert_peers
    old_of = sorted(range(len(numbers)), key=lambda old: numbers[old])  # by new number
    leaving = [old for old in old_of if old // num_local == here]
    arriving = sorted(old_of[here * num_local :][:num_local], key=lambda old: old // num_local)
    send, receive = [0] * mesh.layout.tp, [0] * mesh.layout.tp
    for old in leaving:
        send[peers[numbers[old] // num_local]] += 1
    for old in arriving:
        receive[peers[old // num_local]] += 1
    assert mesh.group is not None
    rows = all_to_all_rows(x[[old % num_local for old in leaving]], RowSplits(send, receive), mesh.group)
    out = torch.empty_like(x)
    out[[numbers[old] % num_local for old in arriving]] = rows
    return out


@dataclass(frozen=True, kw_only=True)
class Source:
    """The weights to place, what their experts were sent, and the number of ranks that share the experts."""

    hf_folder: Path
    counts: ExpertCounts
    num_ranks: int


def find_source(path: Path, *, counts_file: Path | None, num_ranks: int | None) -> Source:
    """Find weights and counts at `path`: a run folder (its latest checkpoint), a checkpoint, or a Hugging Face folder.

    A checkpoint has counts and an ep of its own, which `counts_file` and `num_ranks` replace; a Hugging Face folder
    needs both. ValueError where something is missing, CheckpointBrokenError where the checkpoint is damaged.
    """
    folder = path / CHECKPOINTS_NAME / LATEST if (path / CHECKPOINTS_NAME).is_dir() else path
    if (folder / "config.json").is_file():
        if counts_file is None or num_ranks is None:
            raise ValueError(f"{folder} says nothing of its experts' loads and ranks; give --counts FILE and --ep N")
        return Source(hf_folder=folder, counts=read_expert_counts(counts_file), num_ranks=num_ranks)
    if not (folder / MANIFEST_NAME).is_file():
        raise ValueError(f"{path} is neither a run folder, nor a checkpoint, nor a Hugging Face folder")
    if not (folder / HF_NAME / "config.json").is_file():
        raise ValueError(f"{folder} has no {HF_NAME}/ folder with weights; save one with --hf_save last or every")
    manifest = read_manifest(folder)
    needed = [name for name in manifest.files if name.startswith(f"{HF_NAME}/") or name == COUNTS_NAME]
    for fault in file_faults(folder, manifest, names=needed, checksums=True):
        raise fault
    if num_ranks is None:
        num_ranks = manifest.details.get("ep")
        if not isinstance(num_ranks, int):
            raise CheckpointBrokenError(folder / MANIFEST_NAME, "its details have no ep")
    counts = read_expert_counts(folder / COUNTS_NAME if counts_file is None else counts_file)
    return Source(hf_folder=folder / HF_NAME, counts=counts, num_ranks=num_ranks)


def place_all(source: Source) -> list[Placement]:
    """Compute a placement for each MoE layer."""
    return [place_experts(counts, num_ranks=source.num_ranks) for counts in source.counts.counts]


def describe(source: Source, placements: Sequence[Placement]) -> Iterator[str]:
    """Yield the lines that the command prints."""
    counts = source.counts
    yield (
        f"{counts.num_experts} experts over ep={source.num_ranks} ranks, by the routing of steps "
        f"{counts.first_step} to {counts.last_step}; rho is the busiest rank's load over the mean load"
    )
    yield f"{'MoE layer':>9}  {'rho now':>8}  {'placed':>8}  {'bound':>8}"
    for layer, placement in enumerate(placements):
        yield f"{layer:>9}  {placement.rho_now:>8.3f}  {placement.rho:>8.3f}  {placement.bound:>8.3f}"


def write_placed(source: Source, placements: Sequence[Placement], *, out: Path) -> None:
    """Write the folder with its experts numbered anew; `out` appears only when complete.

    One file's tensors are in memory at a time. placement.json beside them has the new number of each expert, the counts
    it was made from, and rho before and after.
    """
    if out.exists():
        raise ValueError(f"--out {out} exists already; name a folder that does not")
    kind = json.loads((source.hf_folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in (NATIVE, *STOCK_TYPES):
        raise ValueError(f"{source.hf_folder} is of model_type={kind!r}; known are {[NATIVE, *STOCK_TYPES]}")
    files = _files_of(source.hf_folder)
    numbers = _numbers_by_layer(files, source=source, placements=placements)
    staging = out.with_name(f".staging-{out.name}")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        shutil.copytree(source.hf_folder, staging, ignore=shutil.ignore_patterns("*.safetensors", INDEX_NAME))
        for file in files:
            _write_file(source.hf_folder / file, staging / file, numbers=numbers)
        _write_index(source.hf_folder / INDEX_NAME, staging / INDEX_NAME, numbers=numbers)
        record = {"ep": source.num_ranks, **asdict(source.counts), "placements": [p._asdict() for p in placements]}
        (staging / PLACEMENT_NAME).write_text(json.dumps(record) + "\n", encoding="utf-8")
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _files_of(folder: Path) -> dict[str, list[str]]:
    """Return every safetensors file of a folder with the names of its tensors."""
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as reader:
            files[path.name] = list(reader.keys())
    if not files:
        raise ValueError(f"{folder} holds no safetensors to place")
    return files


def _numbers_by_layer(
    files: Mapping[str, list[str]], *, source: Source, placements: Sequence[Placement]
) -> dict[int, tuple[int, ...]]:
    """Return the new numbers by layer of the model, after checking that its tensors match the placements."""
    folder, num_experts = source.hf_folder, source.counts.num_experts
    found: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    routers = set()
    for name in (name for names in files.values() for name in names):
        if match := _EXPERT.fullmatch(name):
            found[int(match["layer"])][int(match["expert"])].add(match["after"])
        elif match := _ROUTER.fullmatch(name):
            routers.add(int(match["layer"]))
        elif ".experts." in name:
            raise ValueError(f"{folder} holds {name}; expected one tensor per matrix of an expert")
    if len(found) != len(placements):
        raise ValueError(f"{folder} has {len(found)} layers with experts, the counts are of {len(placements)}")
    for layer, experts in found.items():
        kinds = {frozenset(matrices) for matrices in experts.values()}
        if set(experts) != set(range(num_experts)) or len(kinds) > 1 or layer not in routers:
            raise ValueError(
                f"layer {layer} in {folder} has {len(experts)} experts, of which some lack a matrix or the router is "
                f"missing, or the counts are of another number, {num_experts}"
            )
    return {layer: placement.numbers for layer, placement in zip(sorted(found), placements, strict=True)}


def _write_file(old: Path, new: Path, *, numbers: Mapping[int, Numbers]) -> None:
    with safe_open(old, framework="pt") as reader:
        metadata = reader.metadata()
        tensors = {_rename(n, numbers): _permute(n, reader.get_tensor(n), numbers) for n in reader.keys()}  # noqa: SIM118
    save_file(tensors, new, metadata=metadata)


def _write_index(old: Path, new: Path, *, numbers: Mapping[int, Numbers]) -> None:
    """Write the index with the experts' new names; each tensor stays in its file."""
    if not old.is_file():
        return
    index = json.loads(old.read_text(encoding="utf-8"))
    weight_map = {_rename(name, numbers): file for name, file in index["weight_map"].items()}
    text = json.dumps({**index, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    new.write_text(text + "\n", encoding="utf-8")


def _rename(name: str, numbers: Mapping[int, Numbers]) -> str:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    return f"{match['before']}{numbers[int(match['layer'])][int(match['expert'])]}{match['after']}"


def _permute(name: str, tensor: Tensor, numbers: Mapping[int, Numbers]) -> Tensor:
    """Return a router's rows, and what else it has per expert, in the order of the new numbers; else the tensor."""
    match = _ROUTER.fullmatch(name)
    return tensor if match is None else renumber(tensor, numbers[int(match["layer"])])
