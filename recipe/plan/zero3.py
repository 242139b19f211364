"""Which parameters ZeRO-3 gathers in one micro-batch, as DeepSpeed 0.19.8 decides what to fetch ahead and what to keep.

The engine goes through the model in an order that it has recorded before: forward, then backward. Each module's
parameters are fetched where they are missing, and others ahead of their use as far as the thresholds allow. After its
use a parameter is dropped, unless its next use has already been counted or is near. So the bytes depend on where in
the model the large parameters are; no closed formula gives them, and the rules are followed step by step.
"""

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from modeling.layout import ParallelLayout
from modeling.spec import ModelSizes
from recipe.plan.parameters import Module, held_modules
from recipe.settings.resolve import BUCKET_KEY, USUAL_BUCKET

# DeepSpeed 0.19.8's sizes, in numbers, where the "zero_optimization" block has none.
DEFAULTS = {
    BUCKET_KEY: USUAL_BUCKET,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_model_persistence_threshold": sys.maxsize,
}
PLAIN_BUCKET = 500_000_000  # where the engine itself sums gradients: without ZeRO, and in bf16 with stage 1
ROOT, INSIDE = "root", "inside"  # the whole model and the decoder inside it, which have no parameters of their own


def zero_number(zero: Mapping[str, Any], key: str) -> int:
    """Return a size of the block, or its default."""
    return int(zero.get(key, DEFAULTS[key]))


class Thresholds(NamedTuple):
    """Numbers of parameters, as DeepSpeed sees them; the names are those of its JSON."""

    prefetch: int
    max_live: int
    max_reuse: int
    persistence: int
    model_persistence: int

    @classmethod
    def of(cls, zero: Mapping[str, Any]) -> "Thresholds":
        return cls(*(zero_number(zero, key) for key in DEFAULTS if key.startswith("stage3_")))


class Fetch(NamedTuple):
    """One module asked for: the names gathered because they were missing, then those gathered ahead of their use.

    num_live  numbers that are gathered or on their way then, without those that always stay
    """

    module: str
    missing: tuple[str, ...]
    ahead: tuple[str, ...]
    num_live: int


class Step(NamedTuple):
    """A fetch in numbers, padded to a multiple of the data-parallel ranks.

    missing, ahead  gathered now, and ahead for later modules
    waits_for       how many of the gathers ahead must have arrived before
    module          what computes then; None where another fetch follows first
    """

    missing: int
    ahead: int
    waits_for: int
    module: Module | None
    is_backward: bool


class Weights(NamedTuple):
    """ZeRO-3's weights in a micro-batch.

    steps     of the micro-batch
    kept      padded numbers of the parameters that stay whole from step to step, gathered after the update
    unparted  the same, all together and without padding
    at_work   by (module, is_backward) the most numbers of whole weights, `unparted` left out
    """

    steps: tuple[Step, ...]
    kept: tuple[int, ...]
    unparted: int
    at_work: Mapping[tuple[str, bool], int]


@lru_cache(maxsize=64)
def zero3_weights(
    sizes: ModelSizes, layout: ParallelLayout, thresholds: Thresholds, *, num_outputs: int, accumulates: bool
) -> Weights:
    """Summarise a micro-batch's fetches; `num_outputs` and `accumulates` as in `fetches_of_a_micro_batch`."""
    modules = {module.name: module for module in held_modules(sizes, layout)}
    parts = tuple(modules.values())
    held = {name: number for module in parts for name, number in module.parameters.items()}
    padded = {name: -(-number // layout.dp) * layout.dp for name, number in held.items()}
    fetches = fetches_of_a_micro_batch(parts, thresholds, num_outputs=num_outputs, accumulates=accumulates)
    turn = next(i for i, fetch in enumerate(fetches) if i and fetch.module == ROOT)
    at_work: dict[tuple[str, bool], int] = {}
    came_with: dict[str, int] = {}  # which of the gathers ahead a parameter came with, until it is used
    steps, num_ahead = [], 0
    for i, fetch in enumerate(fetches):
        key, module = (fetch.module, i >= turn), modules.get(fetch.module)
        at_work[key] = max(at_work.get(key, 0), fetch.num_live)
        waits_for = max(came_with.pop(name, 0) for name in module.parameters) if module else 0
        if fetch.ahead:
            num_ahead += 1
            came_with.update(dict.fromkeys(fetch.ahead, num_ahead))
        # Outputs of a block ask for it one by one in the backward, which follows the last.
        asked_again = i + 1 < len(fetches) and fetches[i + 1].module == fetch.module and i + 1 != turn
        missing, ahead = (sum([padded[name] for name in names]) for names in (fetch.missing, fetch.ahead))
        steps.append(Step(missing, ahead, waits_for, None if asked_again else module, i >= turn))
    kept = persistent(parts, thresholds)
    return Weights(tuple(steps), tuple(padded[name] for name in kept), sum(kept.values()), at_work)


def persistent(modules: Sequence[Module], thresholds: Thresholds) -> dict[str, int]:
    """Return the parameters so small that they stay gathered from step to step."""
    kept: dict[str, int] = {}
    room = thresholds.model_persistence
    for module in modules:
        for name, number in module.parameters.items():
            if number <= min(thresholds.persistence, room) and name not in kept:
                kept[name] = number
                room -= number
    return kept


def fetches_of_a_micro_batch(
    modules: Sequence[Module], thresholds: Thresholds, *, num_outputs: int = 1, accumulates: bool = False
) -> list[Fetch]:
    """Return the fetches in their order, forward and backward.

    modules      embedding, blocks, last norm, head, as they run
    num_outputs  of the decoder as a whole, with a gradient; each asks for it once in the backward
    accumulates  over several micro-batches. DeepSpeed decides once, in the second micro-batch, what a module drops at
                 a place; if that is before the first optimizer step, nothing has been left gathered yet
    """
    kept = frozenset(persistent(modules, thresholds))
    decided: dict[tuple[str, int], set[str]] = {}
    if accumulates:
        _MicroBatch(modules, thresholds, kept, num_outputs=num_outputs, here=set(), decided=decided).fetches()
    return _MicroBatch(modules, thresholds, kept, num_outputs=num_outputs, here=set(kept), decided=decided).fetches()


class _MicroBatch:
    """One micro-batch under way; a step is the number of a fetch.

    kept     never dropped
    here     gathered already
    decided  what a module drops at a step, filled in where it is not known yet
    """

    def __init__(
        self,
        modules: Sequence[Module],
        thresholds: Thresholds,
        kept: frozenset[str],
        *,
        num_outputs: int,
        here: set[str],
        decided: dict[tuple[str, int], set[str]],
    ) -> None:
        self.thresholds, self.kept, self.here, self.decided = thresholds, kept, here, decided
        self.numbers = {name: number for module in modules for name, number in module.parameters.items()}
        self.own: dict[str, Mapping[str, int]] = {module.name: module.parameters for module in modules}
        self.own |= {ROOT: {}, INSIDE: {}}
        inside = {name: number for module in modules[:-1] for name, number in module.parameters.items()}
        self.within = {**self.own, ROOT: self.numbers, INSIDE: inside}
        self.totals = {name: sum(parameters.values()) for name, parameters in self.within.items()}
        self.outside = {module.name: module.parameters for module in modules if not module.block}
        self.events = list(_events(modules, num_outputs=num_outputs))
        self.order = [name for name, is_fetch in self.events if is_fetch]
        self.queue = deque((name, step) for step, module in enumerate(self.order) for name in self.own[module])
        self.counted_until = dict.fromkeys(self.numbers, -1)  # the last step whose use was counted
        self.step = self.num_live = 0

    def fetches(self) -> list[Fetch]:
        found = []
        for module, is_fetch in self.events:
            if is_fetch:
                found.append(self._fetch(module))
            else:
                self._release(module)
        return found

    def _fetch(self, module: str) -> Fetch:
        own, step = self.own[module], self.step
        missing = self._gather([name for name in own if name not in self.here])
        num_due = len([name for name in own if self.counted_until[name] < step])
        taken: set[str] = set()
        while self.queue and len(taken) < num_due:
            name, self.counted_until[name] = self.queue.popleft()
            taken.add(name)
        ahead = self._gather(self._wanted_ahead())
        self.step += 1
        return Fetch(module, missing, ahead, self.num_live)

    def _gather(self, names: list[str]) -> tuple[str, ...]:
        self.here.update(names)
        self.num_live += sum([self.numbers[name] for name in names])
        return tuple(names)

    def _wanted_ahead(self) -> list[str]:
        """Return what is to be gathered ahead, and count its use and that of what is there already."""
        queue, here, counted_until = self.queue, self.here, self.counted_until
        room = min(self.thresholds.max_live - self.num_live, self.thresholds.prefetch)
        ahead: dict[str, int] = {}
        while queue and room > 0:
            name, step = queue.popleft()
            counted_until[name] = max(counted_until[name], step)
            if name not in here and name not in ahead:
                ahead[name] = self.numbers[name]
                room -= ahead[name]
        return list(ahead)

    def _release(self, module: str) -> None:
        if (module, self.step) not in self.decided:
            self.decided[module, self.step] = self._to_drop(module)
        dropped = self.decided[module, self.step] & self.here
        self.here -= dropped
        self.num_live -= sum(self.numbers[name] for name in dropped)

    def _to_drop(self, module: str) -> set[str]:
        own = self.own[module]
        dropped = {name for name in own if name not in self.kept and self.counted_until[name] <= self.step}
        # A block looks for its parameters inside everything that comes, others not inside anything.
        parameters = self.outside if module in self.outside else self.within
        distance = 0
        for later in self.order[self.step :]:
            if distance >= self.thresholds.max_reuse or not dropped:
                break
            inside = parameters.get(later, {})
            dropped.difference_update(inside)
            distance += self.totals[later] if inside else 0
        return dropped


def _events(modules: Sequence[Module], *, num_outputs: int) -> Iterator[tuple[str, bool]]:
    """Yield the modules in the order in which they are fetched (True) and released (False)."""
    *inside, head = modules
    yield from ((ROOT, True), (INSIDE, True))
    for module in modules:
        yield from ((module.name, True), (module.name, False))
    yield ROOT, True
    yield from ((head.name, True), (head.name, False))
    yield from [(INSIDE, True)] * num_outputs
    for module in reversed(inside):
        yield from [(module.name, True)] * module.num_outputs
        # The embedding has no input with a gradient, so its end is that of the micro-batch.
        if module is not inside[0]:
            yield module.name, False
