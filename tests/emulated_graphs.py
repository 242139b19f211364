"""Graphs without a GPU: a replay runs the recorded work again, and ruins every buffer that nobody may rely on.

As on a device, a replay changes memory behind autograd's back: no version counter moves.
"""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from recipe.engine.graphs import Work


class EmulatedCapture:
    """Records like CudaCapture. Before a replay it ruins the outputs of all recordings, after it the replay's inputs.

    num_recordings, num_replays  forwards and backwards
    """

    def __init__(self) -> None:
        self.num_recordings = self.num_replays = 0
        self._outputs: list[weakref.ref[Tensor]] = []

    def __call__(self, work: Work) -> Callable[[], None]:
        self.num_recordings += 1
        self._outputs += [weakref.ref(output) for output in work.outputs]
        work.run()
        ruin(work.outputs)

        def replay() -> None:
            self.num_replays += 1
            everyones = [output for output in (ref() for ref in self._outputs) if output is not None]
            with torch.autograd._unsafe_preserve_version_counter(tuple(everyones) + work.inputs):
                ruin(everyones)
                work.run()
                ruin(work.inputs)

        return replay


def ruin(tensors: Iterable[Tensor]) -> None:
    """NaN in floating tensors, an index out of any range in others, the opposite in masks."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
