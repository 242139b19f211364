"""Each rank's own file in a checkpoint: random states, what its loop counted, and where its parameters' numbers lie."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recipe.checkpoint.errors import CheckpointBrokenError

FOLDER = "ranks"


class Piece(NamedTuple):
    """Numbers of a trained parameter in a flat tensor of the optimizer on one rank; counts of elements.

    group   which of the flat tensors, as the optimizer's state counts them
    start   the first element there
    offset  the same element in this rank's shard of the parameter, flattened
    numel   how many
    """

    group: int
    start: int
    offset: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class Partition:
    """How one rank's optimizer holds the model: what DeepSpeed's own files do not say of themselves.

    optimizer  the class of DeepSpeed's optimizer
    shapes     of this rank's shard of every stored tensor, by name
    pieces     of every trained parameter; none where its numbers are on other data-parallel ranks
    """

    optimizer: str
    shapes: Mapping[str, tuple[int, ...]]
    pieces: Mapping[str, tuple[Piece, ...]]


@dataclass(frozen=True, kw_only=True)
class Counters:
    """How far the engine is, over all starts of the run."""

    global_steps: int
    global_samples: int
    skipped_steps: int
    tokens_read: int


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """`random` are the states of random_states(); `state` is whatever the training loop keeps of this rank."""

    partition: Partition
    counters: Counters
    random: dict[str, Any]
    state: dict[str, Any]


def rank_path(folder: Path, rank: int) -> Path:
    """Where a rank's file lies in the checkpoint `folder`."""
    return folder / FOLDER / f"rank-{rank:05d}.pt"


def to_content(file: RankFile) -> dict[str, Any]:
    """What torch.save writes: plain containers, so that no class of ours has to stay where it is."""
    partition = file.partition
    return {
        "optimizer": partition.optimizer,
        "shapes": dict(partition.shapes),
        "pieces": {name: [tuple(piece) for piece in pieces] for name, pieces in partition.pieces.items()},
        "counters": vars(file.counters),
        "random": file.random,
        "state": file.state,
    }


def read_rank_file(folder: Path, rank: int) -> RankFile:
    """CheckpointBrokenError where the file is missing or holds something else."""
    path = rank_path(folder, rank)
    try:
        content = torch.load(path, weights_only=False, map_location="cpu")
        pieces = {name: tuple(Piece(*piece) for piece in found) for name, found in content["pieces"].items()}
        return RankFile(
            partition=Partition(optimizer=content["optimizer"], shapes=content["shapes"], pieces=pieces),
            counters=Counters(**content["counters"]),
            random=content["random"],
            state=content["state"],
        )
    except FileNotFoundError as error:
        raise CheckpointBrokenError(path, "missing") from error
    except Exception as error:  # whatever the unpickler makes of other content
        raise CheckpointBrokenError(path, f"is not the file of a rank ({error!r})") from error
