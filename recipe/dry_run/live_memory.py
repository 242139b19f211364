"""Which tensor storages live while code runs, real or fake: the most bytes at once, by kind, in each part of a step.

Every storage that an operator takes or gives counts once, from its first sight to the death of its last tensor. What an
operator's kernel allocates and frees inside is not seen, nor is the memory of a collective's own implementation.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modeling.comm import current_scope
from modeling.moe import GatherMoeMlp

GATHERS = ("all_gather", "allgather")  # in the names of operators whose result holds other ranks' numbers
KIND_OF_SCOPE = {"head": "logits", "gathered": "gathered"}  # of what is made there; all else is activations
FORWARD, HEAD, BETWEEN = "forward", "head", "backward of other blocks"
BLOCK_KINDS = {"MoE": False, "dense": True}  # whether one of that kind is dense

Phases = Mapping[str, Counter[str]]  # bytes by kind at the fullest moment of each part of a micro-batch


@dataclass(slots=True)
class _Life:
    """From birth to death, in numbers of events."""

    num_bytes: int
    born: int
    kind: str
    died: int | None = None


class LiveMemory(TorchDispatchMode):
    """While it is entered, storages are followed; afterwards it tells about the peak since the last `restart`.

    A storage's kind is "gathered" for results of an all-gather, "logits" in the head's scope, else "activations",
    unless `name` says better, which it can at any time of its life.

    alive_bytes  now
    peak_bytes   the most alive at once since the last restart
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive_bytes = self.peak_bytes = 0
        self._lives: list[_Life] = []
        self._alive: dict[int, _Life] = {}  # by the storage's address as a Python object
        self._num_events = self._peak_event = 0

    def restart(self) -> None:
        """Look for the peak from now on; what is alive stays known."""
        self._num_events += 1
        self.peak_bytes, self._peak_event = self.alive_bytes, self._num_events

    def name(self, tensors: Iterable[Tensor | None], *, kind: str) -> None:
        """Say what these tensors' storages are; those not seen yet are seen from now on."""
        for tensor in tensors:
            if tensor is not None:
                self._see(tensor, kind=kind).kind = kind

    def name_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let what a backward brings to these parameters be called so."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: self.name([gradient], kind="gradients"))

    def bytes_at_peak(self) -> Counter[str]:
        """Sum the storages alive at the peak by kind."""
        now, sums = self._peak_event, Counter[str]()
        for life in self._lives:
            if life.born <= now and (life.died is None or life.died > now):
                sums[life.kind] += life.num_bytes
        return sums

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._see(leaf, kind=KIND_OF_SCOPE.get(current_scope(), "activations"))
        if any(part in func.__name__ for part in GATHERS):
            # The output comes first, by c10d's and by the functional collectives' convention alike.
            self.name((t for t in tree_leaves(args[0]) if isinstance(t, Tensor)), kind="gathered")
        return result

    def _see(self, tensor: Tensor, *, kind: str) -> _Life:
        """Return the life of the tensor's storage, which begins here if it was not seen before."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._alive:
            self._count(storage.nbytes())
            self._alive[key] = _Life(storage.nbytes(), self._num_events, kind)
            self._lives.append(self._alive[key])
            weakref.finalize(storage, self._end, key).atexit = False
        return self._alive[key]

    def _end(self, key: int) -> None:
        life = self._alive.pop(key)
        self._count(-life.num_bytes)
        life.died = self._num_events

    def _count(self, num_bytes: int) -> None:
        self._num_events += 1
        self.alive_bytes += num_bytes
        if self.alive_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_event = self.alive_bytes, self._num_events


class PhasePeaks:
    """The fullest moment of each part of a micro-batch: the forward, the head, the backward of first and last blocks.

    In each part the peak grows with every further layer by the same bytes, so that a few layers tell about many; which
    part is the fullest does not stay the same. From block to block of a kind what is kept shrinks and what gradients
    take grows, each by the same bytes, so that either the first or the last one is the fullest. Follows a model while
    `memory` is entered; `finish` after the backward.
    """

    def __init__(self, memory: LiveMemory, model: Any) -> None:
        self._memory, self._phase = memory, FORWARD
        self._found: dict[str, Counter[str]] = {}
        self._hooks = [model.lm_head.register_forward_pre_hook(lambda *_: self._enter(HEAD))]
        self._alone: list[str] = []
        for kind, is_dense in BLOCK_KINDS.items():
            blocks = [layer for layer in model.model.layers if isinstance(layer.mlp, GatherMoeMlp) is is_dense]
            for block in blocks:
                phase = block_phase("last", kind) if block is blocks[-1] else block_phase("first", kind)
                self._watch(block, phase if block in (blocks[0], blocks[-1]) else BETWEEN)
            if len(blocks) == 1:
                self._alone.append(kind)

    def finish(self) -> Phases:
        self._enter("")
        for hook in self._hooks:
            hook.remove()
        for kind in self._alone:  # the last one and the first
            self._found[block_phase("first", kind)] = self._found[block_phase("last", kind)]
        return self._found

    def _watch(self, block: nn.Module, phase: str) -> None:
        """The backward of a block begins with the gradient of its output."""

        def enter(_: Tensor) -> None:
            self._enter(phase)

        def follow(_: nn.Module, __: Any, out: tuple[Tensor, ...]) -> None:
            out[0].register_hook(enter)

        self._hooks.append(block.register_forward_hook(follow))

    def _enter(self, phase: str) -> None:
        peak, before = self._memory.bytes_at_peak(), self._found.get(self._phase)
        if before is None or before.total() < peak.total():
            self._found[self._phase] = peak
        self._phase = phase
        self._memory.restart()


def block_phase(which: str, kind: str) -> str:
    """Name the backward of the "first" or the "last" block of a kind."""
    return f"backward of the {which} {kind} block"
