"""Each rank's own file in a checkpoint: random states, what its loop counted, and which numbers its optimizer holds."""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from recipe.shared.errors import CheckpointBrokenError

FOLDER = "ranks"
DS_COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # as DeepSpeed's engine calls them


class Piece(NamedTuple):
    """Numbers of a parameter in a flat tensor on one data-parallel rank; counts of elements."""

    start: int  # the first element there
    offset: int  # the same element in the shard of the parameter, flattened
    numel: int  # 0 where the rank has none of them


class Position(NamedTuple):
    """Where the data-parallel ranks together hold a trained parameter's numbers, by one rule for every ZeRO stage.

    In flat tensor `group` (as the optimizer's state counts them) of rank r, the `width` elements from `start` on are
    those from r * width + first on of the parameter's shard, flattened, as far as the shard reaches.
    """

    group: int
    start: int
    width: int
    first: int

    def piece(self, dp_rank: int, *, numel: int) -> Piece:
        """Return which of a shard's `numel` elements a rank holds."""
        first = dp_rank * self.width + self.first
        begin, end = max(first, 0), min(first + self.width, numel)
        return Piece(self.start + begin - first, begin, max(0, end - begin))

    def holders(self, begin: int, end: int, *, dp: int) -> range:
        """Return the ranks that hold some of the elements `begin` to `end` of a shard; `end` is greater."""
        return range(max(0, (begin - self.first) // self.width), min(dp, (end - 1 - self.first) // self.width + 1))


@dataclass(frozen=True, kw_only=True)
class Partition:
    """How the optimizer holds the model, which DeepSpeed's own files do not say.

    It is the same on all data-parallel ranks of a group rank, so a reader needs the file of the first one only.
    """

    optimizer: str  # the class of DeepSpeed's optimizer
    shapes: Mapping[str, tuple[int, ...]]  # of this rank's shard of every stored tensor, by name
    positions: Mapping[str, Position]  # of every trained parameter, by name


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """The content of a rank's file."""

    partition: Partition
    counters: Mapping[str, int]  # DS_COUNTERS and tokens_read since the run first started, over all resumes
    random: dict[str, Any]  # from random_states()
    state: dict[str, Any]  # from the training loop


def rank_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file in the checkpoint `folder`."""
    return folder / FOLDER / f"rank-{rank:05d}.pt"


def to_content(file: RankFile) -> dict[str, Any]:
    """Return what torch.save writes: plain containers, so that files survive a change of our classes."""
    partition = file.partition
    return {
        "optimizer": partition.optimizer,
        "shapes": dict(partition.shapes),
        "places": {name: tuple(position) for name, position in partition.positions.items()},
        "counters": dict(file.counters),
        "random": file.random,
        "state": file.state,
    }


def read_rank_file(folder: Path, rank: int) -> RankFile:
    """Read the file of a rank. CheckpointBrokenError where it is missing or holds something else."""
    path = rank_path(folder, rank)
    try:
        content = torch.load(path, weights_only=False, map_location="cpu")
        positions = {name: Position(*position) for name, position in content["places"].items()}
        return RankFile(
            partition=Partition(optimizer=content["optimizer"], shapes=content["shapes"], positions=positions),
            counters=content["counters"],
            random=content["random"],
            state=content["state"],
        )
    except FileNotFoundError as error:
        raise CheckpointBrokenError(path, "missing") from error
    except Exception as error:  # whatever the unpickler makes of other content
        raise CheckpointBrokenError(path, f"is not the file of a rank ({error!r})") from error


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy, torch and, on a GPU, of this rank's device."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else {})


def restore_random_states(states: dict[str, Any], *, device: torch.device) -> None:
    """Put back what `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def reseed(seed: int, *, step: int, dp_rank: int) -> None:
    """Seed all generators from (seed, step, dp_rank): for a run that goes on after `step` in another layout.

    The ranks of a group draw the same numbers; other groups and other steps draw different ones.
    """
    digest = hashlib.blake2b(f"{seed}\0{step}\0{dp_rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number % 2**63)  # of every GPU, too
