"""How many tokens each expert was sent since the save before: counted while training, kept in a file of the checkpoint.

Experts are placed over the ranks by these counts.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.shared.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

NAME = "expert_counts.json"
_FORMAT = (
    'it should read {"first_step": 1, "last_step": 10, "counts": [[...], ...]}, a row per MoE layer, a count per expert'
)


@dataclass(frozen=True, kw_only=True)
class ExpertCounts:
    """Token-expert pairs of all ranks per MoE layer and expert, over the steps from `first_step` to `last_step`."""

    first_step: int
    last_step: int
    counts: tuple[tuple[float, ...], ...]

    @property
    def num_experts(self) -> int:
        return len(self.counts[0])


class ExpertCounter:
    """Counts what this rank's group sends each expert after the checkpoint of `step`, whose own counts are `saved`."""

    def __init__(self, *, step: int, saved: ExpertCounts | None) -> None:
        self._step, self._saved = step, saved
        self._counts_LE: Tensor | None = None

    def add(self, counts_LE: "Tensor") -> None:
        """Count a step's token-expert pairs of this group, [MoE layers, experts] on any device."""
        counts_LE = counts_LE.double()
        self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE

    def renumber(self, numbers_by_layer: Sequence[Sequence[int]]) -> None:
        """Note that expert i of a layer has become expert numbers[i]. Comes before the first `add`."""
        assert self._counts_LE is None
        if self._saved is not None:
            layers = zip(self._saved.counts, numbers_by_layer, strict=True)
            counts = tuple(tuple(c for _, c in sorted(zip(numbers, row, strict=True))) for row, numbers in layers)
            self._saved = replace(self._saved, counts=counts)

    def save(self, step: int, *, ranks: Ranks, tp: int) -> ExpertCounts | None:
        """Return the counts of all groups for a checkpoint of this step, and start counting anew. Collective.

        None without MoE layers. Where no step was taken since the checkpoint before, its counts are returned again.
        """
        if self._counts_LE is not None:
            groups = ranks.gather(self._counts_LE.tolist())[::tp]
            counts = tuple(tuple(map(math.fsum, zip(*layer, strict=True))) for layer in zip(*groups, strict=True))
            self._saved = ExpertCounts(first_step=self._step + 1, last_step=step, counts=counts) if counts else None
        self._step, self._counts_LE = step, None
        return self._saved


def write_expert_counts(folder: Path, counts: ExpertCounts) -> None:
    """Add the file to the checkpoint in `folder`. For one rank, with the counts of all ranks."""
    (folder / NAME).write_text(json.dumps(asdict(counts)) + "\n", encoding="utf-8")


def read_expert_counts(path: Path) -> ExpertCounts:
    """Read the counts of a checkpoint. ValueError where the file is absent or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        counts = tuple(tuple(float(count) for count in layer) for layer in content["counts"])
        found = ExpertCounts(first_step=content["first_step"], last_step=content["last_step"], counts=counts)
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist, so nothing is known of the experts' loads") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no counts of experts ({error!r}); {_FORMAT}") from error
    if not counts or not counts[0] or len({len(layer) for layer in counts}) > 1:
        raise ValueError(f"{path} has rows of {[len(layer) for layer in counts]} counts; {_FORMAT}")
    return found
