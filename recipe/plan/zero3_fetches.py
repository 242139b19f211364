"""Which parameters ZeRO-3 gathers in one micro-batch: DeepSpeed's rules of fetching ahead and of keeping, played out.

The engine goes through the model in an order that it has recorded before: forward, then backward. Each module's
parameters are fetched where they are missing, and others ahead of their use as far as the thresholds allow. After its
use a parameter is dropped, unless its next use has already been counted with or is near. So the bytes depend on where
in the model the large parameters are, and no closed formula gives them.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recipe.plan.zero_defaults import zero_number

ROOT, INSIDE = "root", "inside"  # the whole model and the decoder inside it, which have no parameters of their own


class Thresholds(NamedTuple):
    """In numbers of parameters, as DeepSpeed sees them; the names are those of its JSON."""

    prefetch: int
    max_live: int
    max_reuse: int
    persistence: int
    model_persistence: int

    @classmethod
    def of(cls, zero: Mapping[str, Any]) -> "Thresholds":
        keys = (
            "stage3_prefetch_bucket_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
        )
        return cls(*(zero_number(zero, key) for key in keys))


class Module(NamedTuple):
    """A part of the model that is fetched as one.

    parameters   numbers, by name, in the order in which they were made
    is_block     a decoder block, which DeepSpeed takes as a leaf: with all that is inside
    num_outputs  with a gradient; each asks for the module once in the backward
    """

    name: str
    parameters: Mapping[str, int]
    is_block: bool = False
    num_outputs: int = 1


class Way(NamedTuple):
    """How a step goes through the model.

    num_outputs  of the decoder as a whole, with a gradient; each asks for it once in the backward
    accumulates  in several micro-batches. DeepSpeed decides once for all, in the second micro-batch, what a module
                 drops at a place; then nothing has been left gathered yet by an optimizer's step, unless there was one
    """

    num_outputs: int = 1
    accumulates: bool = False


ONCE = Way()


class Fetch(NamedTuple):
    """One module asked for: the names gathered because they were missing, then those gathered ahead of their use.

    num_live  numbers that are gathered or on their way then, without those that always stay
    """

    module: str
    missing: tuple[str, ...]
    ahead: tuple[str, ...]
    num_live: int


def persistent(modules: Sequence[Module], thresholds: Thresholds) -> dict[str, int]:
    """The parameters so small that they stay gathered from step to step."""
    kept: dict[str, int] = {}
    room = thresholds.model_persistence
    for module in modules:
        for name, numel in module.parameters.items():
            if numel <= min(thresholds.persistence, room) and name not in kept:
                kept[name] = numel
                room -= numel
    return kept


def fetches_of_a_micro_batch(modules: Sequence[Module], thresholds: Thresholds, *, way: Way = ONCE) -> list[Fetch]:
    """In their order, forward and backward. `modules`: embedding, blocks, last norm, head, as they run."""
    kept = frozenset(persistent(modules, thresholds))
    play = _Play(modules, thresholds, way, kept, here=set(kept))
    if way.accumulates:
        second = _Play(modules, thresholds, way, kept, here=set())
        second.fetches()
        play.decided = second.decided
    return play.fetches()


def gathers_of(fetches: Sequence[Fetch]) -> list[tuple[str, ...]]:
    """For each gather the names of the parameters in it."""
    return [names for fetch in fetches for names in (fetch.missing, fetch.ahead) if names]


@dataclass
class _Play:
    """One micro-batch under way; numbers of steps count the fetches."""

    modules: Sequence[Module]
    thresholds: Thresholds
    way: Way
    kept: frozenset[str]  # never dropped
    here: set[str]  # gathered already
    decided: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # what a module drops at a step
    step: int = 0
    num_live: int = 0
    found: list[Fetch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numel = {name: numel for module in self.modules for name, numel in module.parameters.items()}
        self.own = {module.name: module.parameters for module in self.modules} | {ROOT: {}, INSIDE: {}}
        inside = {name: numel for module in self.modules[:-1] for name, numel in module.parameters.items()}
        self.within = {**self.own, ROOT: self.numel, INSIDE: inside}
        self.outside = {module.name: module.parameters for module in self.modules if not module.is_block}
        self.blocks = {module.name for module in self.modules if module.is_block}
        self.order = [name for name, is_fetch in self._events() if is_fetch]
        self.queue = deque((name, step) for step, module in enumerate(self.order) for name in self.own[module])
        self.counted_until = dict.fromkeys(self.numel, -1)  # the last step whose use was counted with

    def fetches(self) -> list[Fetch]:
        for module, is_fetch in self._events():
            if is_fetch:
                self._fetch(module)
            else:
                self._release(module)
        return self.found

    def _events(self) -> Iterator[tuple[str, bool]]:
        """Modules in the order in which they are fetched (True) and released."""
        *inside, head = self.modules
        yield from ((ROOT, True), (INSIDE, True))
        for module in (*inside, head):
            yield from ((module.name, True), (module.name, False))
        yield ROOT, True
        yield from ((head.name, True), (head.name, False))
        yield from [(INSIDE, True)] * self.way.num_outputs
        for module in reversed(inside):
            yield from [(module.name, True)] * module.num_outputs
            # The embedding has no input with a gradient, so its end is that of the micro-batch.
            if module is not inside[0]:
                yield module.name, False

    def _gather(self, names: Sequence[str]) -> tuple[str, ...]:
        self.here.update(names)
        self.num_live += sum(self.numel[name] for name in names)
        return tuple(names)

    def _fetch(self, module: str) -> None:
        own = self.own[module]
        missing = self._gather([name for name in own if name not in self.here])
        due = {name for name in own if self.counted_until[name] < self.step}
        taken: set[str] = set()
        while self.queue and len(taken) < len(due):
            name, step = self.queue.popleft()
            self.counted_until[name] = step
            taken.add(name)
        ahead = self._fetch_ahead()
        self.found.append(Fetch(module, missing, ahead, self.num_live))
        self.step += 1

    def _fetch_ahead(self) -> tuple[str, ...]:
        room = min(self.thresholds.max_live - self.num_live, self.thresholds.prefetch)
        ahead: dict[str, int] = {}
        numel = 0
        while self.queue and numel < room:
            name, step = self.queue.popleft()
            self.counted_until[name] = max(self.counted_until[name], step)
            if name not in self.here and name not in ahead:
                ahead[name] = self.numel[name]
                numel += ahead[name]
        return self._gather(list(ahead))

    def _release(self, module: str) -> None:
        if (module, self.step) not in self.decided:
            self.decided[module, self.step] = self._to_drop(module)
        dropped = self.decided[module, self.step] & self.here
        self.here -= dropped
        self.num_live -= sum(self.numel[name] for name in dropped)

    def _to_drop(self, module: str) -> set[str]:
        dropped = {name for name in self.own[module] if name not in self.kept and self.counted_until[name] <= self.step}
        # A block looks for its parameters inside of all that comes, others not inside of anything.
        parameters = self.within if module in self.blocks else self.outside
        distance = 0
        for later in self.order[self.step :]:
            if distance >= self.thresholds.max_reuse:
                break
            for name, numel in parameters.get(later, {}).items():
                dropped.discard(name)
                distance += numel
        return dropped
