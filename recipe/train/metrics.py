"""The numbers of a log line: summed over micro-batches, over the steps since the last line, and over ranks.

A loss is the sum of token losses divided by the number of predicted tokens, so that every token weighs the same. The
ranks of a group work on the same tokens and hold the same sums, of which one copy counts.
"""

import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from modeling.auxiliary import TokenSums
from modeling.spec import ModelSizes
from recipe.shared.flops import model_flops_per_token

# None, and left out of a log line, without MoE layers; the last three without a capacity, with ep=1, without copies.
OPTIONAL = (
    *("aux_loss", "z_loss", "rho", "dead_experts", "router_entropy"),
    *("dropped", "rank_rho", "rank_rho_bound"),
)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums since the last log; plain numbers, so that ranks can exchange them.

    The tuples have one entry per MoE layer and are empty in a model without one: sums over tokens of both auxiliary
    losses and of the entropy of the router's scores, the token-expert pairs of each expert, and those that a capacity
    dropped, empty without one. `slowest` and `slowest_bound` are rows as in RankLoads.
    """

    loss_sum: float
    num_targets: int
    num_tokens: int
    squared_lengths: int
    aux_sums: tuple[float, ...]
    z_sums: tuple[float, ...]
    entropy_sums: tuple[float, ...]
    expert_counts: tuple[tuple[float, ...], ...]
    dropped: tuple[float, ...]
    slowest: tuple[float, ...]
    slowest_bound: tuple[float, ...]
    peak_memory_bytes: int


class StepMeter:
    """Adds up micro-batches on the device they are on; nothing is read by the host before `take`."""

    def __init__(self) -> None:
        self._sums: TokenSums | None = None  # in float64
        self._num_targets = self._num_tokens = self._squared_lengths = 0

    def add(self, token_sums: TokenSums, *, num_targets: int, num_tokens: int, squared_lengths: int) -> None:
        """Add a step, or a part of one, of the group; `squared_lengths` is the sum of length^2 over its documents."""
        sums = [part.detach().double() for part in token_sums]
        if self._sums is not None:
            earlier = _with_rank_loads_of(TokenSums(*sums), sums=self._sums)
            sums = [old + new for old, new in zip(earlier, sums, strict=True)]
        self._sums = TokenSums(*sums)
        self._num_targets += num_targets
        self._num_tokens += num_tokens
        self._squared_lengths += squared_lengths

    def take(self, *, peak_memory_bytes: int) -> Totals:
        """Return the sums so far and start again at zero. Waits for the device, once."""
        if self._sums is None:
            raise ValueError("nothing was added since the last time; call add() for every micro-batch")
        flat = torch.cat([part.flatten() for part in self._sums]).cpu().split([part.numel() for part in self._sums])
        sums = TokenSums(*(part.view(like.shape) for part, like in zip(flat, self._sums, strict=True)))
        totals = Totals(
            loss_sum=sums.nll.item(),
            num_targets=self._num_targets,
            num_tokens=self._num_tokens,
            squared_lengths=self._squared_lengths,
            aux_sums=tuple(sums.balance_L.tolist()),
            z_sums=tuple(sums.z_L.tolist()),
            entropy_sums=tuple(sums.entropy_L.tolist()),
            expert_counts=tuple(tuple(counts) for counts in sums.expert_counts.tolist()),
            dropped=tuple(sums.dropped_L.tolist()),
            slowest=tuple(sums.slowest_L.tolist()),
            slowest_bound=tuple(sums.bound_L.tolist()),
            peak_memory_bytes=peak_memory_bytes,
        )
        self._sums = None
        self._num_targets = self._num_tokens = self._squared_lengths = 0
        return totals

    def renumber_experts(self, numbers_by_layer: Sequence[Sequence[int]]) -> None:
        """Count what expert i of a layer was sent so far for expert numbers[i] from now on."""
        if self._sums is None:
            return
        counts = torch.empty_like(self._sums.expert_counts)
        for row, old_row, numbers in zip(counts, self._sums.expert_counts, numbers_by_layer, strict=True):
            row[torch.tensor(numbers, device=row.device)] = old_row
        self._sums = self._sums._replace(expert_counts=counts)

    def state(self) -> dict[str, Any]:
        """Return the sums so far, for a checkpoint between two logged steps."""
        sums = None if self._sums is None else [part.tolist() for part in self._sums]
        return {"sums": sums, "counts": (self._num_targets, self._num_tokens, self._squared_lengths)}

    def restore(self, state: dict[str, Any], *, device: torch.device) -> None:
        """Take over the sums of a `state()`."""
        sums = state["sums"]
        if sums is not None:
            sums = TokenSums(*(torch.tensor(part, dtype=torch.float64, device=device) for part in sums))
        self._sums = sums
        self._num_targets, self._num_tokens, self._squared_lengths = state["counts"]


def merge_meters(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the `state()` of a meter that added what all of these meters did; without any, that of a new one."""
    if not states:
        return StepMeter().state()
    sums = [state["sums"] for state in states if state["sums"] is not None]
    merged = [torch.tensor(parts, dtype=torch.float64).sum(0).tolist() for parts in zip(*sums, strict=True)]
    counts = zip(*(state["counts"] for state in states), strict=True)
    return {"sums": merged or None, "counts": tuple(sum(values) for values in counts)}


def combine_ranks(by_rank: Sequence[Totals], *, tp: int) -> Totals:
    """Sum the totals of every rank, in rank order: each group of tp ranks counts once."""
    groups = by_rank[::tp]
    sums = {total.name: _add_up([getattr(group, total.name) for group in groups]) for total in fields(Totals)}
    return Totals(**{**sums, "peak_memory_bytes": max(rank.peak_memory_bytes for rank in by_rank)})


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One logged step, as the progress bar, the file and the tracker all show it."""

    step: int
    loss: float | None  # None where no token was predicted
    aux_loss: float | None  # mean over the MoE layers; None without any
    z_loss: float | None
    grad_norm: float | None  # None where the engine does not know it
    lr: float
    tokens: int  # consumed since the run began, counted once per group, resumed runs included
    tokens_per_s: float
    model_flops_per_s: float
    mfu: float
    rho: tuple[float, ...] | None  # per MoE layer, the busiest expert's load over the mean load
    dead_experts: tuple[int, ...] | None  # per MoE layer, experts that got no token since the last line
    router_entropy: tuple[float, ...] | None  # per MoE layer, of the scores over all experts, in nats, mean over tokens
    dropped: tuple[float, ...] | None  # per MoE layer, share of the choices that a capacity dropped; None without one
    rank_rho: tuple[float, ...] | None  # per MoE layer, rows of the busiest rank over their mean; None where ep is 1
    rank_rho_bound: tuple[float, ...] | None  # no choice of copies gives less; None without copies
    skipped_steps: int
    peak_memory_bytes: int  # of the rank with the highest

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name, without those of MoE layers, a capacity or copies where there are none."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in OPTIONAL}


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation after `step` optimizer steps."""

    step: int
    eval_loss: float | None
    perplexity: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_step_record(
    totals: Totals,
    *,
    step: int,
    lr: float,
    grad_norm: float | None,
    tokens: int,
    skipped_steps: int,
    elapsed_s: float,
    sizes: ModelSizes,
    peak_flops_per_s: float,
) -> StepRecord:
    """Turn the run's totals, which training took `elapsed_s` for, into a log line.

    `peak_flops_per_s` is the sum over all devices.
    """
    tokens_per_s = totals.num_tokens / elapsed_s
    attention_length = totals.squared_lengths / totals.num_tokens
    flops_per_s = tokens_per_s * model_flops_per_token(sizes, attention_length=attention_length)
    chosen = [sum(counts) for counts in totals.expert_counts]
    rows = [pairs - lost for pairs, lost in zip(chosen, totals.dropped or [0.0] * len(chosen), strict=True)]
    return StepRecord(
        step=step,
        loss=mean_loss(totals.loss_sum, num_targets=totals.num_targets),
        aux_loss=moe_layer_mean([total / totals.num_tokens for total in totals.aux_sums]),
        z_loss=moe_layer_mean([total / totals.num_tokens for total in totals.z_sums]),
        grad_norm=grad_norm,
        lr=lr,
        tokens=tokens,
        tokens_per_s=tokens_per_s,
        model_flops_per_s=flops_per_s,
        mfu=flops_per_s / peak_flops_per_s,
        rho=tuple(load_ratio(counts) for counts in totals.expert_counts) or None,
        dead_experts=tuple(counts.count(0) for counts in totals.expert_counts) or None,
        router_entropy=tuple(total / totals.num_tokens for total in totals.entropy_sums) or None,
        dropped=_ratios(totals.dropped, chosen),
        rank_rho=_ratios(totals.slowest, rows),
        rank_rho_bound=_ratios(totals.slowest_bound, rows),
        skipped_steps=skipped_steps,
        peak_memory_bytes=totals.peak_memory_bytes,
    )


def make_eval_record(loss_sum: float, *, num_targets: int, step: int) -> EvalRecord:
    loss = mean_loss(loss_sum, num_targets=num_targets)
    if loss is None:
        return EvalRecord(step=step, eval_loss=None, perplexity=None)
    overflows = loss > math.log(sys.float_info.max)
    return EvalRecord(step=step, eval_loss=loss, perplexity=math.inf if overflows else math.exp(loss))


def mean_loss(loss_sum: float, *, num_targets: int) -> float | None:
    """Return the loss per predicted token in nats; None where no token was predicted."""
    return loss_sum / num_targets if num_targets else None


def moe_layer_mean(values: Sequence[float]) -> float | None:
    """Return the mean over MoE layers, given a value for each; None in a model without any."""
    return sum(values) / len(values) if values else None


def _ratios(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, ...] | None:
    """Divide layer by layer: NaN where there is nothing to divide by; None without parts."""
    if not parts:
        return None
    return tuple(part / whole if whole else math.nan for part, whole in zip(parts, wholes, strict=True))


def load_ratio(counts: Sequence[float]) -> float:
    """Return the largest load over the mean load: 1 if balanced, len(counts) at worst, NaN if nothing was routed."""
    return max(counts) * len(counts) / sum(counts) if sum(counts) else math.nan


class TrainingClock:
    """Counts the seconds spent on training, without what is spent under `paused()` (evaluation, saving)."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, *, already_s: float = 0.0) -> None:
        self._now = now
        self._start_s = now() - already_s
        self._paused_at_s: float | None = None

    def elapsed_s(self) -> float:
        """Return the seconds since the last lap, without ending it; in a pause, up to its beginning."""
        return (self._now() if self._paused_at_s is None else self._paused_at_s) - self._start_s

    def lap(self) -> float:
        """Return the seconds since the last lap, or since the start, and begin a new one."""
        start_s, self._start_s = self._start_s, self._now()
        return self._start_s - start_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        paused_at_s = self._paused_at_s = self._now()
        yield
        self._start_s += self._now() - paused_at_s
        self._paused_at_s = None


def read_peak_memory_bytes(device: str) -> int:
    """Return the most bytes this process has held: allocated by torch on a "cuda" device, resident on a "cpu"."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # getrusage would start from the peak of the launcher, which a child inherits through fork and exec.
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _with_rank_loads_of(like: TokenSums, *, sums: TokenSums) -> TokenSums:
    """Return sums of steps before a resume with the same measures of the ranks' loads as the steps since.

    Where every rank had a slice of every expert, the busiest had the mean load; without slots for copies, the bound is
    what was reached.
    """
    slowest_L, bound_L = sums.slowest_L, sums.bound_L
    if not slowest_L.numel():
        slowest_L = sums.expert_counts.sum(-1) - (sums.dropped_L if sums.dropped_L.numel() else 0.0)
    if not bound_L.numel():
        bound_L = slowest_L
    return sums._replace(
        slowest_L=slowest_L if like.slowest_L.numel() else like.slowest_L,
        bound_L=bound_L if like.bound_L.numel() else like.bound_L,
    )


def _add_up(parts: Sequence[Any]) -> Any:
    """Sum numbers, or tuples of them or of tuples position by position; whole numbers stay whole."""
    if isinstance(parts[0], tuple):
        return tuple(_add_up(column) for column in zip(*parts, strict=True))
    return sum(parts) if isinstance(parts[0], int) else math.fsum(parts)
