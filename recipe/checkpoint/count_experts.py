"""Counts what each expert is sent from one checkpoint to the next, steps before a resume included."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from recipe.checkpoint.expert_counts import ExpertCounts
from recipe.shared.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor


class ExpertCounter:
    """The counts of this rank's group since the checkpoint of `step`, which has `saved` for those before it."""

    def __init__(self, *, step: int, saved: ExpertCounts | None) -> None:
        self._step, self._saved = step, saved
        self._counts_LE: Tensor | None = None

    def add(self, counts_LE: "Tensor") -> None:
        """Count a step: [MoE layers, experts] token-expert pairs of this group, on any device."""
        counts_LE = counts_LE.double()
        self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE

    def renumber(self, numbers_by_layer: Sequence[Sequence[int]]) -> None:
        """Expert i of a layer has become expert numbers[i]; to be called before the first `add`."""
        assert self._counts_LE is None
        if self._saved is not None:
            layers = zip(self._saved.counts, numbers_by_layer, strict=True)
            counts = tuple(tuple(c for _, c in sorted(zip(numbers, row, strict=True))) for row, numbers in layers)
            self._saved = replace(self._saved, counts=counts)

    def save(self, step: int, *, ranks: Ranks, tp: int) -> ExpertCounts | None:
        """What a checkpoint of this step says of all groups; counting starts anew. None without MoE layers. Collective.

        Where no step was taken since the checkpoint before, it says the same as that.
        """
        if self._counts_LE is not None:
            groups = ranks.gather(self._counts_LE.tolist())[::tp]
            counts = tuple(tuple(map(math.fsum, zip(*layer, strict=True))) for layer in zip(*groups, strict=True))
            self._saved = ExpertCounts(first_step=self._step + 1, last_step=step, counts=counts) if counts else None
        self._step, self._counts_LE = step, None
        return self._saved
