"""A check before the first step: the ranks of a group hold the same batches, and different groups different ones."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from recipe.data.batches import MicroBatch
from recipe.shared.ranks import Ranks


class _Held(NamedTuple):
    """What one rank holds."""

    checksum: str
    positions: frozenset[int]


def checksum(micro_batches: Sequence[MicroBatch]) -> str:
    """A digest of everything the model sees of these micro-batches."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in micro_batches:
        for tensor in (batch.input_ids, batch.labels, batch.token_mask):
            if tensor is not None:
                digest.update(tensor.contiguous().numpy().tobytes())
        digest.update(repr((tuple(batch.input_ids.shape), batch.document_starts, batch.positions)).encode())
    return digest.hexdigest()


def check_batches(micro_batches: Sequence[MicroBatch], *, ranks: Ranks, tp: int) -> None:
    """Compare the first training micro-batches over all ranks; every rank raises the same ValueError; collective.

    `ranks` is the whole world in groups of `tp`, not one group: ranks that found nothing wrong would otherwise go on
    and wait for the others for ever. Groups are told apart by positions in the stream, since a small or repetitive
    corpus may give them equal text rightly.
    """
    held: list[_Held] = ranks.gather(
        _Held(checksum(micro_batches), frozenset(p for batch in micro_batches for p in batch.positions))
    )
    faults = [*_faults_inside_groups(held, tp=tp), *_faults_between_groups(held[::tp], tp=tp)]
    if faults:
        raise ValueError(
            "the ranks did not load the batches of their layout; data must depend on dp_rank alone:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
        )


def _faults_inside_groups(held: list[_Held], *, tp: int) -> list[str]:
    faults = []
    for first in range(0, len(held), tp):
        differing = [rank for rank in range(first, first + tp) if held[rank].checksum != held[first].checksum]
        if differing:
            faults.append(f"ranks {differing} hold other batches than rank {first} of their group (tp={tp})")
    return faults


def _faults_between_groups(held: list[_Held], *, tp: int) -> list[str]:
    """`held` is what the first rank of each group holds."""
    faults = []
    for group, mine in enumerate(held):
        same = [other * tp for other in range(group + 1, len(held)) if mine.positions & held[other].positions]
        if same:
            faults.append(f"ranks {[group * tp, *same]} of different groups hold the same sequences of the stream")
    return faults
