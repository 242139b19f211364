"""A ledger of the bytes that leave a rank, kept where every collective of torch.distributed passes: its dispatcher.

Whichever function started a collective, waited for or not, forward or backward, ours or another library's, it is
booked, under the scope (modeling/comm.py) that it ran in. What counts is what the algorithm has to send, not what a
backend happens to: a gather, scatter or all-reduce as a ring sends it, an exchange all rows but a rank's own.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modeling.comm import current_scope
from modeling.cost import ID_BYTES, WEIGHT_BYTES
from modeling.mesh import ParallelMesh
from recipe.shared.sent import Sent, add_up


class Volume(NamedTuple):
    """Bytes one rank sent; `routing` is what travelled in narrow rows: ids, weights, counts."""

    payload: float
    routing: float

    @property
    def total(self) -> float:
        return self.payload + self.routing


class Booked(NamedTuple):
    """One collective as this rank took part in it.

    purpose    the scope it ran in
    row_bytes  of the last dim of what goes in
    """

    op: str
    purpose: str
    group: ProcessGroup
    row_bytes: int
    sent_bytes: float


class Ledger(TorchDispatchMode):
    """Books from `with` to its end, on the thread that runs it, which on CPU is the backward's too."""

    def __init__(self) -> None:
        super().__init__()
        self.booked: list[Booked] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.book(func._opname, args)
        return func(*args, **(kwargs or {}))

    def volume(self, *, narrow_bytes: int = 0) -> Volume:
        """All that was sent; rows of at most `narrow_bytes` are routing, wider ones payload. 0: all is payload."""
        routing = sum(entry.sent_bytes for entry in self.booked if entry.row_bytes <= narrow_bytes)
        return Volume(sum(entry.sent_bytes for entry in self.booked) - routing, routing)

    def rows(self, mesh: ParallelMesh) -> tuple[Sent, ...]:
        """Return what was booked by the mesh's axes; a group of one sends nothing and is left out."""
        return add_up(
            Sent(axis_of(entry.group, mesh), entry.op, entry.purpose, 1, entry.sent_bytes)
            for entry in self.booked
            if entry.group.size() > 1 and entry.op != "barrier"
        )

    def book(self, name: str, args: Any) -> None:
        """Enter a collective by the name of its operator; ValueError for one without a rule."""
        if name not in KINDS:
            raise ValueError(f"the ledger has no rule for c10d.{name}; it knows {sorted(KINDS)}")
        op, place, share = KINDS[name]
        group = ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        given = [] if place is None else tree_leaves(args[place])
        if name == "alltoall_":  # a tensor to each
            sent_bytes: float = _nbytes(given) - given[group.rank()].nbytes
        elif name == "alltoall_base_" and args[ROWS_TO_EACH]:
            rows = list(args[ROWS_TO_EACH])
            sent_bytes = (sum(rows) - rows[group.rank()]) * _nbytes(given) / max(given[0].shape[0], 1)
        else:
            sent_bytes = share(group.size()) * _nbytes(given)
        if name == "alltoall_base_" and not args[ROWS_TO_EACH]:
            # Equal parts: gloo has no reduce-scatter that sends as little, so parts are exchanged and summed.
            op = "reduce_scatter"
        self.booked.append(Booked(op, current_scope(), group, _row_bytes(given), sent_bytes))


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


def _row_bytes(tensors: list[Tensor]) -> int:
    first = tensors[0] if tensors else torch.empty(0)
    return first.element_size() * (first.shape[-1] if first.dim() > 1 else 1)


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class _Kind(NamedTuple):
    """An operator of c10d: the place of what goes in among its arguments, and how much of that leaves the rank."""

    op: str
    place: int | None
    share: Callable[[int], float]


ROWS_TO_EACH = 4  # the place of an exchange's numbers of rows to every rank
# Shares by the number of ranks. In a gather what a rank gives goes to all others. Of a scatter or an even exchange all
# parts but one leave, and from or to one rank as much is the mean over a ring's. A sum is scattered and gathered.
KINDS: Mapping[str, _Kind] = {
    "_allgather_base_": _Kind("all_gather", 1, lambda size: size - 1),
    "allgather_": _Kind("all_gather", 1, lambda size: size - 1),
    "_reduce_scatter_base_": _Kind("reduce_scatter", 1, lambda size: (size - 1) / size),
    "reduce_scatter_": _Kind("reduce_scatter", 1, lambda size: (size - 1) / size),
    "allreduce_": _Kind("all_reduce", 0, lambda size: 2 * (size - 1) / size),
    "alltoall_base_": _Kind("all_to_all", 1, lambda size: (size - 1) / size),
    "alltoall_": _Kind("all_to_all", 1, lambda size: (size - 1) / size),
    "broadcast_": _Kind("broadcast", 0, lambda size: (size - 1) / size),
    "reduce_": _Kind("reduce", 0, lambda size: (size - 1) / size),
    "send": _Kind("send", 0, lambda _: 1),
    "recv_": _Kind("receive", None, lambda _: 1),
    "barrier": _Kind("barrier", None, lambda _: 1),
}
