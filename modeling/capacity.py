"""A limit to how many tokens an expert takes in a micro-batch; what comes later is dropped and passes by (Switch).

First choices go before second ones, and among equals earlier tokens of the group's micro-batch before later ones, so
what is dropped does not depend on how many ranks share the tokens (2101.03961, §2.2; 2006.16668, §3.2).
"""

import math
from fractions import Fraction

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .scopes import scope
from .transfers import all_gather_rows


def expert_capacity(num_tokens: int, *, num_active: int, num_experts: int, factor: float) -> int:
    """Tokens an expert takes at most, of `num_tokens` in the whole group: `factor` times its even share, rounded up."""
    # As written: 1.1 times 100 tokens is 110, which the nearest binary number is a little more than.
    return math.ceil(Fraction(str(factor)) * num_tokens * num_active / num_experts)


def kept_choices(ids_tA: Tensor, *, num_experts: int, capacity: int, group: ProcessGroup | None) -> Tensor:
    """Which choices [t, A] of expert ids [t, A] fit, bool; `num_experts`, padding's id, takes no room and is kept.

    Every rank tells the others how often its tokens choose each expert: one small gather, and no host waits.
    """
    num_tokens, num_active = ids_tA.shape
    width = num_experts + 1
    choice = torch.arange(num_active, device=ids_tA.device)
    # By choice, then by expert, then by token.
    key_At, order = (ids_tA + choice * width).t().flatten().sort(stable=True)
    ends = torch.searchsorted(key_At, torch.arange(num_active * width, device=ids_tA.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    before = _taken_before(counts.view(num_active, width), group)
    place = torch.arange(len(key_At), device=ids_tA.device) - (ends - counts)[key_At] + before.flatten()[key_At]
    kept = (place < capacity) | (key_At % width == num_experts)
    return torch.empty_like(kept).scatter_(0, order, kept).view(num_active, num_tokens).t()


@scope("capacity")
def _taken_before(counts_AE: Tensor, group: ProcessGroup | None) -> Tensor:
    """How many of each expert's places are taken before this rank's tokens of each choice: [A, E] int64."""
    if group is None:
        return counts_AE.cumsum(0) - counts_AE
    counts_NAE = all_gather_rows(counts_AE[None], group)
    rank = torch.distributed.get_rank(group)
    of_choice = counts_NAE.sum(0)
    return of_choice.cumsum(0) - of_choice + counts_NAE[:rank].sum(0)
