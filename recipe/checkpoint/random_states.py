"""The states of a process's random number generators: taken, put back, or started anew by a rule that can be told."""

import hashlib
import random
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """Those of Python, NumPy, torch and, on a GPU, of this rank's device."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else {})


def restore_random_states(states: dict[str, Any], *, device: torch.device) -> None:
    """Go on from `random_states()`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def reseed(seed: int, *, step: int, dp_rank: int) -> None:
    """Seed all generators from (seed, step, dp_rank): for a run that goes on after `step` with other ranks.

    The ranks of a group draw the same numbers, other groups others, and no step's are those of another one.
    """
    digest = hashlib.blake2b(f"{seed}\0{step}\0{dp_rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number % 2**63)  # of every GPU, too
