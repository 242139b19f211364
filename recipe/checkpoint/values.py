"""The numbers of a training state at a glance: norm, range, and how many are not finite."""

import math
from typing import NamedTuple

import torch

from recipe.checkpoint.training_state import TrainingState
from recipe.checkpoint.whole import entries_of, read_pieces
from recipe.shared.units import byte_bar

PIECE_BYTES = 16 * 2**20


class Values(NamedTuple):
    """Over all tensors of a kind; norm, minimum and maximum over the finite numbers, of none 0, inf and -inf."""

    num_tensors: int
    num_elements: int
    num_not_finite: int
    norm: float
    min: float
    max: float


def scan_values(state: TrainingState, *, piece_bytes: int = PIECE_BYTES) -> dict[str, Values]:
    """Read every number, a piece at a time; the result by kind of tensor."""
    found: dict[str, list[Values]] = {}
    entries = entries_of(state)
    with byte_bar("reading", num_bytes=sum(entry.num_bytes for entry in entries)) as bar:
        for entry in entries:
            for number, piece in enumerate(read_pieces(state, entry, piece_bytes=piece_bytes)):
                found.setdefault(entry.kind, []).append(_values_of(piece, starts_a_tensor=number == 0))
                bar.update(piece.nbytes)
    return {kind: _together(parts) for kind, parts in found.items()}


def _values_of(piece: torch.Tensor, *, starts_a_tensor: bool) -> Values:
    finite = piece[piece.isfinite()]
    nothing = finite.numel() == 0
    return Values(
        num_tensors=int(starts_a_tensor),
        num_elements=piece.numel(),
        num_not_finite=piece.numel() - finite.numel(),
        norm=torch.linalg.vector_norm(finite, dtype=torch.float64).item(),
        min=math.inf if nothing else finite.min().item(),
        max=-math.inf if nothing else finite.max().item(),
    )


def _together(parts: list[Values]) -> Values:
    return Values(
        num_tensors=sum(part.num_tensors for part in parts),
        num_elements=sum(part.num_elements for part in parts),
        num_not_finite=sum(part.num_not_finite for part in parts),
        norm=math.hypot(*(part.norm for part in parts)),
        min=min(part.min for part in parts),
        max=max(part.max for part in parts),
    )
