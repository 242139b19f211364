"""A ledger of the bytes that leave a rank, kept where every collective of torch.distributed passes: its dispatcher.

Whichever function started a collective, waited for or not, forward or backward, ours or another library's, it is
booked. What counts is what the algorithm has to send, not what a backend happens to: a gather, scatter or all-reduce
as a ring sends it, an exchange all rows but a rank's own.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from modeling.cost import ID_BYTES, WEIGHT_BYTES


class Sent(NamedTuple):
    """Bytes one rank sent; `routing` is what travelled in narrow rows: ids, weights, counts."""

    payload: float
    routing: float

    @property
    def total(self) -> float:
        return self.payload + self.routing

    def since(self, before: "Sent") -> "Sent":
        """What was added after `before`."""
        return Sent(self.payload - before.payload, self.routing - before.routing)


class Ledger(TorchDispatchMode):
    """Counts from `with` to its end, on the thread that runs it, which on CPU is the backward's too.

    narrow_bytes  rows of a tensor (its last dim) of at most so many bytes are routing, wider ones payload; 0: all is
                  payload
    """

    def __init__(self, *, narrow_bytes: int = 0) -> None:
        super().__init__()
        self._narrow_bytes = narrow_bytes
        self.sent = Sent(0.0, 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._book(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _book(self, name: str, args: Any) -> None:
        if name not in RULES:
            raise ValueError(f"the ledger has no rule for c10d.{name}; it knows {sorted(RULES)}")
        tensors, num_bytes = RULES[name](args)
        payload, routing = self.sent
        if _row_bytes(tensors[0]) > self._narrow_bytes:
            payload += num_bytes
        else:
            routing += num_bytes
        self.sent = Sent(payload, routing)


def widest_routing_row(num_active: int) -> int:
    """Bytes: a token's ids and weights as the MoE layer gathers them, or one int64."""
    return max((ID_BYTES + WEIGHT_BYTES) * num_active, 8)


class Entry(NamedTuple):
    """What is sent, and the bytes of it that leave the rank."""

    tensors: list[Tensor]
    num_bytes: float


def _group(args: Any) -> ProcessGroup:
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    return ProcessGroup.unbox(boxed)


def _listed(tensors: Any) -> list[Tensor]:
    """A tensor, a list of them, or a list of lists -> a list."""
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for entry in tensors for tensor in _listed(entry)]


def _row_bytes(x: Tensor) -> int:
    return x.element_size() * (x.shape[-1] if x.dim() > 1 else 1)


def _gathered(args: Any) -> Entry:
    """(output, input, group): each rank's input goes to all others."""
    sent = _listed(args[1])
    return Entry(sent, (_group(args).size() - 1) * _nbytes(sent))


def _scattered(args: Any) -> Entry:
    """(output, input, group): each rank's part of the input, summed on the way."""
    sent, size = _listed(args[1]), _group(args).size()
    return Entry(sent, (size - 1) / size * _nbytes(sent))


def _reduced(args: Any) -> Entry:
    """(tensors, group): scattered and gathered."""
    sent, size = _listed(args[0]), _group(args).size()
    return Entry(sent, 2 * (size - 1) / size * _nbytes(sent))


def _exchanged(args: Any) -> Entry:
    """(output, input, group, rows from each, rows to each): equal parts where no numbers of rows are given."""
    sent, group, to_each = args[1], _group(args), list(args[4])
    rows = to_each or [sent.shape[0] // group.size()] * group.size()
    row_bytes = sent.nbytes / max(sent.shape[0], 1)
    return Entry([sent], (sum(rows) - rows[group.rank()]) * row_bytes)


def _exchanged_as_list(args: Any) -> Entry:
    """(outputs, inputs, group): one tensor to each."""
    sent = _listed(args[1])
    return Entry(sent, _nbytes(sent) - sent[_group(args).rank()].nbytes)


def _posted(args: Any) -> Entry:
    """(tensors, group, ...): to one other rank."""
    sent = _listed(args[0])
    return Entry(sent, float(_nbytes(sent)))


def _nothing(args: Any) -> Entry:
    return Entry([torch.empty(0)], 0.0)


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


RULES: Mapping[str, Callable[[Any], Entry]] = {
    "_allgather_base_": _gathered,
    "allgather_": _gathered,
    "_reduce_scatter_base_": _scattered,
    "reduce_scatter_": _scattered,
    "allreduce_": _reduced,
    "alltoall_base_": _exchanged,
    "alltoall_": _exchanged_as_list,
    "send": _posted,
    "recv_": _nothing,
    "barrier": _nothing,
}
