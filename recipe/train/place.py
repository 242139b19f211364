"""Number a model's experts anew so that every rank gets as much work: the same function, other names in its files.

An expert's number decides its rank. Numbering experts and the router's rows alike changes nothing in what a model
computes, but for exact ties among experts, so every program that opened the folder opens the result, too.
"""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from modeling.hf_keys import STOCK_TYPES
from recipe.checkpoint.expert_counts import NAME as COUNTS_NAME
from recipe.checkpoint.expert_counts import ExpertCounts, read_expert_counts
from recipe.checkpoint.folders import CHECKPOINTS_NAME, LATEST
from recipe.checkpoint.manifest import MANIFEST_NAME, file_faults, read_manifest
from recipe.hf.config import NATIVE
from recipe.hf.weights import INDEX_NAME
from recipe.shared.errors import CheckpointBrokenError
from recipe.train.placement import Placement, place_experts

PLACEMENT_NAME = "placement.json"
HF_NAME = "hf"  # as a checkpoint calls its Hugging Face folder; the code that writes it would bring DeepSpeed along
_BLOCK = r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe)\."
_EXPERT = re.compile(rf"(?P<before>{_BLOCK}experts\.)(?P<expert>\d+)(?P<after>\..+)")
_ROUTER = re.compile(rf"{_BLOCK}gate\.\w+")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The weights to place, what their experts were sent, and the number of ranks that share the experts."""

    hf_folder: Path
    counts: ExpertCounts
    num_ranks: int


def find_source(path: Path, *, counts_file: Path | None, num_ranks: int | None) -> Source:
    """What `path` offers: a run folder (its latest checkpoint), a checkpoint, or a Hugging Face folder.

    A checkpoint brings its counts and its ep along, which `counts_file` and `num_ranks` replace; a Hugging Face folder
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
    """A placement for each MoE layer."""
    return [place_experts(counts, num_ranks=source.num_ranks) for counts in source.counts.counts]


def describe(source: Source, placements: Sequence[Placement]) -> Iterator[str]:
    """The lines that the command prints."""
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

    One file's tensors are in memory at a time. Beside them lies placement.json: the new number of each expert, what it
    was made from, and rho before and after.
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
    """Every safetensors file of a folder with the names of its tensors."""
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
    """The new numbers by layer of the model, after checking that its tensors are those the placements speak of."""
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


def _write_file(old: Path, new: Path, *, numbers: Mapping[int, Sequence[int]]) -> None:
    with safe_open(old, framework="pt") as reader:
        metadata = reader.metadata()
        tensors = {_rename(n, numbers): _permute(n, reader.get_tensor(n), numbers) for n in reader.keys()}  # noqa: SIM118
    save_file(tensors, new, metadata=metadata)


def _write_index(old: Path, new: Path, *, numbers: Mapping[int, Sequence[int]]) -> None:
    """Experts keep their file, so that the index changes with their names."""
    if not old.is_file():
        return
    index = json.loads(old.read_text(encoding="utf-8"))
    weight_map = {_rename(name, numbers): file for name, file in index["weight_map"].items()}
    text = json.dumps({**index, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    new.write_text(text + "\n", encoding="utf-8")


def _rename(name: str, numbers: Mapping[int, Sequence[int]]) -> str:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    return f"{match['before']}{numbers[int(match['layer'])][int(match['expert'])]}{match['after']}"


def _permute(name: str, tensor: Tensor, numbers: Mapping[int, Sequence[int]]) -> Tensor:
    """The rows of a router, and of what else it has per expert, in the order of the new numbers."""
    match = _ROUTER.fullmatch(name)
    if match is None:
        return tensor
    out = torch.empty_like(tensor)
    out[torch.tensor(numbers[int(match["layer"])])] = tensor
    return out
