"""Each rank's own file in a checkpoint: random states, what its loop counted, and where its parameters' numbers lie."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recipe.shared.errors import CheckpointBrokenError

FOLDER = "ranks"


class Piece(NamedTuple):
    """Numbers of a parameter in a flat tensor on one data-parallel rank; counts of elements.

    start   the first element there
    offset  the same element in the shard of the parameter, flattened
    numel   how many, 0 where the rank has none of them
    """

    start: int
    offset: int
    numel: int


class Place(NamedTuple):
    """Where all data-parallel ranks together hold a trained parameter's numbers, by one rule for every ZeRO stage.

    In flat tensor `group` (as the optimizer's state counts them) of rank r, the `width` elements from `start` on are
    those from r * width + first on of the parameter's shard, flattened, as far as the shard reaches.
    """

    group: int
    start: int
    width: int
    first: int

    def piece(self, dp_rank: int, *, numel: int) -> Piece:
        """What a rank holds of a shard of `numel` elements."""
        first = dp_rank * self.width + self.first
        begin, end = max(first, 0), min(first + self.width, numel)
        return Piece(self.start + begin - first, begin, max(0, end - begin))

    def holders(self, begin: int, end: int, *, dp: int) -> range:
        """The ranks that hold elements `begin` to `end` of a shard, of which there is at least one."""
        return range(max(0, (begin - self.first) // self.width), min(dp, (end - 1 - self.first) // self.width + 1))


@dataclass(frozen=True, kw_only=True)
class Partition:
    """How the optimizer holds the model: what DeepSpeed's own files do not say of themselves.

    It is the same on all data-parallel ranks, so that who reads needs the file of the first one only.

    optimizer  the class of DeepSpeed's optimizer
    shapes     of this rank's shard of every stored tensor, by name
    places     of every trained parameter
    """

    optimizer: str
    shapes: Mapping[str, tuple[int, ...]]
    places: Mapping[str, Place]


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
        "places": {name: tuple(place) for name, place in partition.places.items()},
        "counters": vars(file.counters),
        "random": file.random,
        "state": file.state,
    }


def read_rank_file(folder: Path, rank: int) -> RankFile:
    """CheckpointBrokenError where the file is missing or holds something else."""
    path = rank_path(folder, rank)
    try:
        content = torch.load(path, weights_only=False, map_location="cpu")
        places = {name: Place(*place) for name, place in content["places"].items()}
        return RankFile(
            partition=Partition(optimizer=content["optimizer"], shapes=content["shapes"], places=places),
            counters=Counters(**content["counters"]),
            random=content["random"],
            state=content["state"],
        )
    except FileNotFoundError as error:
        raise CheckpointBrokenError(path, "missing") from error
    except Exception as error:  # whatever the unpickler makes of other content
        raise CheckpointBrokenError(path, f"is not the file of a rank ({error!r})") from error
