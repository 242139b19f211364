"""Placing experts over ranks by their measured loads: in a model in training, and offline in a Hugging Face folder.

An expert's number decides its rank: every rank holds the same number of experts, and expert i lives on rank
i // (E / ep). Without copies an expert's rows are computed where it lives, so the busiest rank decides how long a layer
takes; rho is that rank's load over the mean load.

Renumbering the experts and the router's rows alike changes nothing in what a model computes, but for exact ties among
experts: training goes on as it would have, to rounding, and every program that opened the folder opens the result, too.
"""

import itertools
import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from modeling.comm import RowSplits, all_to_all_rows
from modeling.execution import check_experts_divide
from modeling.mesh import ParallelMesh
from modeling.moe import GatherMoeSparseBlock
from modeling.spec import NATIVE, STOCK_TYPES
from recipe.checkpoint.expert_counts import NAME as COUNTS_NAME
from recipe.checkpoint.expert_counts import ExpertCounts, read_expert_counts
from recipe.checkpoint.folders import CHECKPOINTS_NAME, LATEST
from recipe.checkpoint.manifest import MANIFEST_NAME, file_faults, read_manifest
from recipe.hf.weights import INDEX_NAME
from recipe.shared.errors import CheckpointBrokenError
from recipe.shared.json_files import write_json

if TYPE_CHECKING:
    from recipe.engine.engine import Engine

Numbers = Sequence[int]  # the new number of every expert of a layer

HF_NAME = "hf"  # as a checkpoint calls its Hugging Face folder; the code that writes it would bring DeepSpeed along
_BLOCK = r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe)\."
_EXPERT = re.compile(rf"(?P<before>{_BLOCK}experts\.)(?P<expert>\d+)(?P<after>\..+)")
_ROUTER = re.compile(rf"{_BLOCK}gate\.\w+")


class Placement(NamedTuple):
    """Where the experts of one layer should live.

    numbers  the new number of every expert: a permutation of range(E)
    rho_now  with the experts where they are
    rho      with the new numbers, never more
    bound    no placement has a rho below it
    """

    numbers: tuple[int, ...]
    rho_now: float
    rho: float
    bound: float


def place_experts(loads: Sequence[float], *, num_ranks: int) -> Placement:
    """Spread one layer's experts over `num_ranks`, the same number on each, from their measured loads (rows routed).

    The heaviest expert first, each to the lightest rank with room (Graham, 1969), then swaps between the busiest rank
    and another as long as one helps. The same loads give the same placement; the experts stay where they are unless
    that is worse.
    """
    check_experts_divide(len(loads), num_ranks=num_ranks)
    if not all(math.isfinite(load) and load >= 0 for load in loads) or not any(loads):
        raise ValueError(f"the loads {list(loads)[:8]} are no counts of routed rows; none may be negative, nor all 0")
    num_local, mean = len(loads) // num_ranks, math.fsum(loads) / num_ranks
    now = [list(range(rank * num_local, (rank + 1) * num_local)) for rank in range(num_ranks)]
    ranks = _heaviest_first(loads, num_ranks=num_ranks)
    _swap(ranks, loads)
    worst_now, worst = (max(math.fsum(loads[i] for i in rank) for rank in held) for held in (now, ranks))
    if worst >= worst_now:
        ranks, worst = now, worst_now
    ranks = sorted(sorted(rank) for rank in ranks)
    numbers = [0] * len(loads)
    for number, expert in enumerate(expert for rank in ranks for expert in rank):
        numbers[expert] = number
    return Placement(tuple(numbers), worst_now / mean, worst / mean, _placement_bound(loads, num_ranks=num_ranks))


def _heaviest_first(loads: Sequence[float], *, num_ranks: int) -> list[list[int]]:
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    for expert in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        with_room = [rank for rank in range(num_ranks) if len(held[rank]) < len(loads) // num_ranks]
        lightest = min(with_room, key=lambda rank: (sums[rank], rank))
        held[lightest].append(expert)
        sums[lightest] += loads[expert]
    return held


def _swap(held: list[list[int]], loads: Sequence[float]) -> None:
    """Swap experts in place until no swap makes the busiest rank lighter. Ends: the sorted loads fall every time."""
    sums = [math.fsum(loads[i] for i in rank) for rank in held]
    while True:
        busiest = max(range(len(held)), key=lambda rank: (sums[rank], -rank))
        swaps = []  # the larger load of both ranks afterwards, the other rank, what it gets, and what it gives for it
        for rank, experts in enumerate(held):
            for given, taken in itertools.product(held[busiest], experts):
                shift = loads[given] - loads[taken]
                worst = max(sums[busiest] - shift, sums[rank] + shift)
                if worst < sums[busiest]:  # not where the rank is the busiest itself
                    swaps.append((worst, rank, given, taken))
        if not swaps:
            return
        _, rank, given, taken = min(swaps)
        held[busiest][held[busiest].index(given)] = taken
        held[rank][held[rank].index(taken)] = given
        sums[busiest] -= loads[given] - loads[taken]
        sums[rank] += loads[given] - loads[taken]


def _placement_bound(loads: Sequence[float], *, num_ranks: int) -> float:
    """The mean; and of the k * num_ranks + 1 heaviest experts some rank holds k + 1, beside the lightest of all."""
    num_local, mean = len(loads) // num_ranks, math.fsum(loads) / num_ranks
    falling = sorted(loads, reverse=True)
    return max(
        1.0,
        *(
            math.fsum(falling[k * num_ranks - k : k * num_ranks + 1]) / mean
            + math.fsum(falling[len(loads) - (num_local - k - 1) :]) / mean
            for k in range(num_local)
        ),
    )


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
class PlacedModel:
    """Weights, what their experts were sent, how many ranks are to share the experts, and where each would live.

    `placements` has one entry per MoE layer.
    """

    hf_folder: Path
    counts: ExpertCounts
    num_ranks: int
    placements: list[Placement]


def place_model(path: Path, *, counts_file: Path | None, num_ranks: int | None) -> PlacedModel:
    """Place the experts of what lies at `path`: a run folder (its last checkpoint), a checkpoint, Hugging Face weights.

    A checkpoint has counts and an ep of its own, which `counts_file` and `num_ranks` replace; a Hugging Face folder
    needs both. ValueError where something is missing, CheckpointBrokenError where the checkpoint is damaged.
    """
    folder = path / CHECKPOINTS_NAME / LATEST if (path / CHECKPOINTS_NAME).is_dir() else path
    if (folder / "config.json").is_file():
        hf_folder = folder
        if counts_file is None or num_ranks is None:
            raise ValueError(f"{folder} says nothing of its experts' loads and ranks; give --counts FILE and --ep N")
    else:
        hf_folder = folder / HF_NAME
        if not (folder / MANIFEST_NAME).is_file():
            raise ValueError(f"{path} is neither a run folder, nor a checkpoint, nor a Hugging Face folder")
        if not (hf_folder / "config.json").is_file():
            raise ValueError(f"{folder} has no {HF_NAME}/ folder with weights; save one with --hf_save last or every")
        manifest = read_manifest(folder)
        needed = [name for name in manifest.files if name.startswith(f"{HF_NAME}/") or name == COUNTS_NAME]
        for fault in file_faults(folder, manifest, names=needed, checksums=True):
            raise fault
        counts_file = folder / COUNTS_NAME if counts_file is None else counts_file
        num_ranks = manifest.details.get("ep") if num_ranks is None else num_ranks
        if not isinstance(num_ranks, int):
            raise CheckpointBrokenError(folder / MANIFEST_NAME, "its details have no ep")
    counts = read_expert_counts(counts_file)
    placements = [place_experts(layer, num_ranks=num_ranks) for layer in counts.counts]
    return PlacedModel(hf_folder=hf_folder, counts=counts, num_ranks=num_ranks, placements=placements)


def describe(model: PlacedModel) -> Iterator[str]:
    """Yield the lines that the command prints."""
    counts = model.counts
    yield (
        f"{counts.num_experts} experts over ep={model.num_ranks} ranks, by the routing of steps "
        f"{counts.first_step} to {counts.last_step}; rho is the busiest rank's load over the mean load"
    )
    yield f"{'MoE layer':>9}  {'rho now':>8}  {'placed':>8}  {'bound':>8}"
    for layer, placement in enumerate(model.placements):
        yield f"{layer:>9}  {placement.rho_now:>8.3f}  {placement.rho:>8.3f}  {placement.bound:>8.3f}"


def write_placed(model: PlacedModel, *, out: Path) -> None:
    """Write the folder with its experts numbered anew; `out` appears only when complete.

    One file's tensors are in memory at a time. placement.json beside them has the new number of each expert, the counts
    it was made from, and rho before and after.
    """
    folder = model.hf_folder
    if out.exists():
        raise ValueError(f"--out {out} exists already; name a folder that does not")
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in (NATIVE, *STOCK_TYPES):
        raise ValueError(f"{folder} is of model_type={kind!r}; known are {[NATIVE, *STOCK_TYPES]}")
    files = _files_of(folder)
    numbers = _numbers_by_layer(files, model)
    staging = out.with_name(f".staging-{out.name}")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        shutil.copytree(folder, staging, ignore=shutil.ignore_patterns("*.safetensors", INDEX_NAME))
        for file in files:
            _write_file(folder / file, staging / file, numbers=numbers)
        _write_index(folder / INDEX_NAME, staging / INDEX_NAME, numbers=numbers)
        record = {"ep": model.num_ranks, **asdict(model.counts), "placements": [p._asdict() for p in model.placements]}
        (staging / "placement.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
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


def _numbers_by_layer(files: Mapping[str, list[str]], model: PlacedModel) -> dict[int, Numbers]:
    """Return the new numbers by layer of the model, after checking that its tensors match the placements."""
    folder, num_experts, placements = model.hf_folder, model.counts.num_experts, model.placements
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
    write_json(new, {**index, "weight_map": dict(sorted(weight_map.items()))})


def _rename(name: str, numbers: Mapping[int, Numbers]) -> str:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    return f"{match['before']}{numbers[int(match['layer'])][int(match['expert'])]}{match['after']}"


def _permute(name: str, tensor: Tensor, numbers: Mapping[int, Numbers]) -> Tensor:
    """Return a router's rows, and what else it has per expert, in the order of the new numbers; else the tensor."""
    match = _ROUTER.fullmatch(name)
    return tensor if match is None else renumber(tensor, numbers[int(match["layer"])])
