"""Which documents are kept back for validation where the corpus brings no validation set."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipe.data.packing import Stretches


class Holdout(NamedTuple):
    train: Stretches
    validation: Stretches
    rule: str  # in words, for the log


def all_documents(ends: NDArray[np.int64]) -> Stretches:
    """Every document of a token store, in order; `ends` [num_documents] is where each ends."""
    starts = np.zeros(len(ends), dtype=np.int64)
    starts[1:] = ends[:-1]
    return Stretches(starts, ends)


def hold_out(ends: NDArray[np.int64], *, percentage: int) -> Holdout:
    """Keep back `percentage` (0 to 99) of a corpus, always the same part of it whatever the seed.

    Documents are taken at even distances, so that both parts hold every region of a sorted corpus. A corpus of fewer
    documents than that needs is cut instead: the last `percentage` of its tokens are kept back.
    """
    documents = all_documents(ends)
    num_documents = len(ends)
    if percentage == 0:
        none = Stretches(documents.starts[:0], documents.ends[:0])
        return Holdout(documents, none, "nothing is held out")
    if num_documents * percentage >= 100:
        # Document i is held out where the running share i * percentage / 100 passes a whole number.
        number = np.arange(num_documents, dtype=np.int64)
        held_out = (number + 1) * percentage // 100 > number * percentage // 100
        rule = f"{int(held_out.sum())} of {num_documents} documents are held out, at even distances"
        return Holdout(_select(documents, ~held_out), _select(documents, held_out), rule)
    num_tokens = int(ends[-1])
    cut = num_tokens - num_tokens * percentage // 100
    rule = (
        f"the last {num_tokens - cut} of {num_tokens} tokens are held out, "
        f"because {num_documents} documents are too few to hold out {percentage} % of them"
    )
    return Holdout(_between(documents, 0, cut), _between(documents, cut, num_tokens), rule)


def _select(documents: Stretches, chosen: NDArray[np.bool_]) -> Stretches:
    return Stretches(documents.starts[chosen], documents.ends[chosen])


def _between(documents: Stretches, begin: int, end: int) -> Stretches:
    starts, ends = documents.starts.clip(begin, end), documents.ends.clip(begin, end)
    return _select(Stretches(starts, ends), starts < ends)
