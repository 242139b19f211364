"""The most memory in each part of a micro-batch, so that what few layers keep tells what many would.

In each of these parts the peak grows with every further layer by the same bytes; which of them is the fullest does not
stay the same, so each is followed by itself. From block to block of a kind what is kept shrinks and what gradients take
grows, each by the same bytes, so that either the first or the last one is the fullest.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from modeling.moe import GatherMoeMlp
from recipe.dry_run.live_memory import LiveMemory

FORWARD, HEAD, BETWEEN = "forward", "head", "backward of other blocks"
BLOCK_KINDS = {"MoE": False, "dense": True}  # whether one of that kind is dense
# The backward's own sums are made by no code that could be named.
RENAMED = {"buffers": "activations", "other": "activations"}

Phases = Mapping[str, Counter[str]]  # bytes by kind at the fullest moment of each part


class PhasePeaks:
    """Follows a model's forward and backward while `memory` is entered; `finish` after the backward."""

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
        peak: Counter[str] = Counter()
        for kind, num_bytes in self._memory.bytes_at_peak().items():
            peak[RENAMED.get(kind, kind)] += num_bytes
        before = self._found.get(self._phase)
        if before is None or before.total() < peak.total():
            self._found[self._phase] = peak
        self._phase = phase
        self._memory.restart()


def block_phase(which: str, kind: str) -> str:
    """The backward of the "first" or the "last" block of a kind."""
    return f"backward of the {which} {kind} block"
