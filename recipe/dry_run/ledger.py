"""A ledger of the bytes that leave a rank, kept where every collective of torch.distributed passes: its dispatcher.

Whichever function started a collective, waited for or not, forward or backward, ours or another library's, it is
booked. What counts is what the algorithm has to send, not what a backend happens to: a gather, scatter or all-reduce
as a ring sends it, an exchange all rows but a rank's own. So the sums that gloo makes of an exchange are booked as the
reduce-scatter that every other backend does there: the bytes are the same.
"""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from modeling.cost import ID_BYTES, WEIGHT_BYTES
from modeling.mesh import ParallelMesh
from recipe.plan.traffic import Sent, add_up

# Which code sends for which purpose: module, the start of a function's qualified name, purpose. The innermost frame
# that is here decides. A dense layer's transfers are those of the same products as attention's.
PURPOSES = (
    ("modeling.gathered_linear", "", "attention"),
    ("modeling.collectives", "start_routing", "routing"),
    ("modeling.collectives", "_GatherRouting", "routing"),
    ("modeling.collectives", "_ExchangeRows", "experts"),
    ("modeling.collectives", "_ScatterTokens", "embedding"),
    ("modeling.collectives", "_SumGradients", "replicated"),
    ("modeling.collectives", "_SumOverGroup", "qk_norm"),
    ("modeling.collectives", "_TotalOverGroup", "statistics"),
    ("modeling.balance", "", "statistics"),
    ("modeling.capacity", "", "capacity"),
    ("modeling.loss", "", "head"),
    ("modeling.expert_copies", "", "copies"),
    ("modeling.experts", "_scatter_routing_gradient", "routing"),
    ("modeling.experts", "", "experts"),
    ("modeling.expert_weights", "", "experts"),
    ("modeling.dispatch", "_gather", "experts"),
    ("modeling.dispatch", "", "routing"),
    ("recipe.engine.engine", "Engine.count", "counts"),
    ("recipe.engine.engine", "Engine._move_router_biases", "router_bias"),
    ("recipe.engine.engine", "", "norm"),
)
SUMS_BY_EXCHANGE = ("modeling.transfers", "start_scatter")


class Volume(NamedTuple):
    """Bytes one rank sent; `routing` is what travelled in narrow rows: ids, weights, counts."""

    payload: float
    routing: float

    @property
    def total(self) -> float:
        return self.payload + self.routing


class Booked(NamedTuple):
    """One collective as this rank took part in it.

    purpose    by PURPOSES, "zero" for DeepSpeed's own, else "other"
    num_bytes  of this rank's tensors that go in
    row_bytes  of their last dim
    """

    op: str
    purpose: str
    group: ProcessGroup
    num_bytes: int
    row_bytes: int
    sent_bytes: float


class Ledger(TorchDispatchMode):
    """Books from `with` to its end, on the thread that runs it, which on CPU is the backward's too."""

    def __init__(self) -> None:
        super().__init__()
        self.booked: list[Booked] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._book(func._opname, args)
        return func(*args, **(kwargs or {}))

    def volume(self, *, narrow_bytes: int = 0) -> Volume:
        """All that was sent; rows of at most `narrow_bytes` are routing, wider ones payload. 0: all is payload."""
        routing = sum(entry.sent_bytes for entry in self.booked if entry.row_bytes <= narrow_bytes)
        return Volume(sum(entry.sent_bytes for entry in self.booked) - routing, routing)

    def rows(self, mesh: ParallelMesh) -> tuple[Sent, ...]:
        """The same by the mesh's axes; a group of one sends nothing and is left out."""
        return add_up(
            Sent(axis_of(entry.group, mesh), entry.op, entry.purpose, 1, entry.sent_bytes)
            for entry in self.booked
            if entry.group.size() > 1 and entry.op != "barrier"
        )

    def _book(self, name: str, args: Any) -> None:
        if name not in RULES:
            raise ValueError(f"the ledger has no rule for c10d.{name}; it knows {sorted(RULES)}")
        op, rule = RULES[name]
        tensors, sent_bytes = rule(args)
        frame = sys._getframe(2)
        if op == "all_to_all" and _is_called_by(frame, SUMS_BY_EXCHANGE):
            op = "reduce_scatter"
        row_bytes = _row_bytes(tensors[0])
        self.booked.append(Booked(op, purpose_of(frame), _group(args), _nbytes(tensors), row_bytes, sent_bytes))


def purpose_of(frame: FrameType | None) -> str:
    """What the code that is running in `frame` communicates for."""
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        if module.startswith("deepspeed."):
            return "zero"
        for of_module, start, purpose in PURPOSES:
            if module == of_module and name.startswith(start):
                return purpose
        frame = frame.f_back
    return "other"


def axis_of(group: ProcessGroup, mesh: ParallelMesh) -> str:
    """ "group", "dp" or "kv" for the mesh's groups or others of the same ranks, else "other"."""
    axes = {"group": mesh.tp_group, "dp": mesh.dp_group, "kv": mesh.kv_group}
    for axis, known in axes.items():
        if known is not None and known.group_name == group.group_name:
            return axis
    ranks = dist.get_process_group_ranks(group)
    for axis, known in axes.items():
        if known is not None and dist.get_process_group_ranks(known) == ranks:
            return axis
    return "other"


def widest_routing_row(num_active: int) -> int:
    """Bytes: a token's ids and weights as the MoE layer gathers them, or one int64."""
    return max((ID_BYTES + WEIGHT_BYTES) * num_active, 8)


class _Entry(NamedTuple):
    """What goes in, and the bytes of it that leave the rank."""

    tensors: list[Tensor]
    sent_bytes: float


def _is_called_by(frame: FrameType | None, function: tuple[str, str]) -> bool:
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_qualname) == function:
            return True
        frame = frame.f_back
    return False


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


def _gathered(args: Any) -> _Entry:
    """(output, input, group): each rank's input goes to all others."""
    sent = _listed(args[1])
    return _Entry(sent, (_group(args).size() - 1) * _nbytes(sent))


def _scattered(args: Any) -> _Entry:
    """(output, input, group): each rank's part of the input, summed on the way."""
    sent, size = _listed(args[1]), _group(args).size()
    return _Entry(sent, (size - 1) * _nbytes(sent) / size)


def _reduced(args: Any) -> _Entry:
    """(tensors, group): scattered and gathered."""
    sent, size = _listed(args[0]), _group(args).size()
    return _Entry(sent, 2 * (size - 1) * _nbytes(sent) / size)


def _relayed(args: Any) -> _Entry:
    """(tensors, group): to or from one rank along a ring, each link once, so the mean over its ranks."""
    sent, size = _listed(args[0]), _group(args).size()
    return _Entry(sent, (size - 1) * _nbytes(sent) / size)


def _exchanged(args: Any) -> _Entry:
    """(output, input, group, rows from each, rows to each): equal parts where no numbers of rows are given."""
    sent, group, to_each = args[1], _group(args), list(args[4])
    rows = to_each or [sent.shape[0] / group.size()] * group.size()
    row_bytes = sent.nbytes / max(sent.shape[0], 1)
    return _Entry([sent], (sum(rows) - rows[group.rank()]) * row_bytes)


def _exchanged_as_list(args: Any) -> _Entry:
    """(outputs, inputs, group): one tensor to each."""
    sent = _listed(args[1])
    return _Entry(sent, _nbytes(sent) - sent[_group(args).rank()].nbytes)


def _posted(args: Any) -> _Entry:
    """(tensors, group, ...): to one other rank."""
    sent = _listed(args[0])
    return _Entry(sent, float(_nbytes(sent)))


def _nothing(args: Any) -> _Entry:
    return _Entry([torch.empty(0)], 0.0)


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class _Rule(NamedTuple):
    op: str
    entry: Callable[[Any], _Entry]


RULES: Mapping[str, _Rule] = {
    "_allgather_base_": _Rule("all_gather", _gathered),
    "allgather_": _Rule("all_gather", _gathered),
    "_reduce_scatter_base_": _Rule("reduce_scatter", _scattered),
    "reduce_scatter_": _Rule("reduce_scatter", _scattered),
    "allreduce_": _Rule("all_reduce", _reduced),
    "alltoall_base_": _Rule("all_to_all", _exchanged),
    "alltoall_": _Rule("all_to_all", _exchanged_as_list),
    "broadcast_": _Rule("broadcast", _relayed),
    "reduce_": _Rule("reduce", _relayed),
    "send": _Rule("send", _posted),
    "recv_": _Rule("receive", _nothing),
    "barrier": _Rule("barrier", _nothing),
}
