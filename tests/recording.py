"""Records what code does below autograd: the operators it calls, and the collectives among them.

Modes see a tensor's operators whoever calls them and under whatever name, in the backward too.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
}


class Operator(NamedTuple):
    """One call: its name and the shapes of its tensors, those in lists included."""

    name: str
    shapes: tuple[tuple[int, ...], ...]


class Collective(NamedTuple):
    """One transfer: its kind, and the bytes of the larger of the two sides."""

    kind: str
    num_bytes: int


class Operators(TorchDispatchMode):
    """Lists every operator, and every collective on its own. Other kinds of transfer than `KINDS` are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Operator] = []
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = _tensors(args)
        self.called.append(Operator(str(func), tuple(tuple(x.shape) for x in tensors)))
        if func.namespace == "c10d":
            kind = KINDS[func.overloadpacket.__name__]
            self.collectives.append(Collective(kind, max(x.numel() * x.element_size() for x in tensors)))
        return func(*args, **(kwargs or {}))

    def num_bytes(self, *kinds: str) -> int:
        """Of the larger sides of all transfers of these kinds."""
        return sum(c.num_bytes for c in self.collectives if c.kind in kinds)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [x for value in values for x in _tensors(value)]
    return []
