"""What each expert was sent since the save before, in a file of the checkpoint: what a placement is made from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


def write_expert_counts(folder: Path, counts: Sequence[Sequence[float]], *, first_step: int, last_step: int) -> None:
    """Add the file to the checkpoint in `folder`. For one rank, with the counts of all of them."""
    content = {"first_step": first_step, "last_step": last_step, "counts": [list(layer) for layer in counts]}
    (folder / NAME).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_expert_counts(path: Path) -> ExpertCounts:
    """Read such a file. ValueError where it is absent or holds something else."""
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
