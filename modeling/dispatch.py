"""How tokens meet their experts. One function per strategy, all with the same result as a single rank.

strategy         layout        what moves, forward                                         the host waits
gather_tokens    any ep x etp  all tokens to every rank, sums home                         never
gather_weights   ep = 1        slices of expert weights to every rank, tokens stay         never
all_to_all       ep = N        each token's row to the ranks of its experts, and back      for the counts
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .collectives import exchange_rows, start_routing, wide
from .experts import GatherMoeExperts
from .linear import autocast_inputs
from .mesh import ParallelMesh
from .router import Routing
from .scopes import scope
from .transfers import RowSplits, all_to_all_rows
from .wire import Wire


class Dispatch(NamedTuple):
    """One layer's work: the normed tokens here, what routes them, and the experts here."""

    x_tD: Tensor
    route: Callable[[], Routing]
    experts: GatherMoeExperts
    mesh: ParallelMesh
    wire: Wire


class Dispatched(NamedTuple):
    """The weighted sums of the experts' outputs for this rank's tokens, [t, D], and how these were routed."""

    out_tD: Tensor
    routing: Routing


def dispatch(work: Dispatch, *, strategy: str) -> Dispatched:
    """Route this rank's normed tokens [t, D] and send them through their experts."""
    if work.mesh.group is None:
        routing = work.route()
        return Dispatched(work.experts(work.x_tD, routing.expert_ids_tA, routing.weights_tA), routing)
    return _STRATEGIES[strategy](work)


def _gather_tokens(work: Dispatch) -> Dispatched:
    """All tokens to every rank, each works on its experts or slices, sums come home.

    Wire per rank, forward: T*D in and T*D out, and 6*A bytes per token for ids and weights, whatever the routing is.
    The router works while the first tokens travel, and its choice goes before the others.
    """
    group = work.mesh.group
    assert group is not None
    [x_tD] = autocast_inputs(work.x_tD)
    with scope("experts"):
        transfer = work.wire.expert_tokens(x_tD, group)
    routing = work.route()
    in_flight = start_routing(routing.expert_ids_tA, routing.weights_tA, group)
    with scope("experts"):
        transfer.gather.start_rest()
    ids_TA, weights_TA = in_flight.finish()
    transfer = transfer._replace(weights_TA=weights_TA)
    return Dispatched(work.experts(x_tD, ids_TA, routing.weights_tA, transfer=transfer), routing)


def _gather_weights(work: Dispatch) -> Dispatched:
    """Every rank borrows the other ranks' slices of all experts, and works on its own tokens.

    Wire per rank: the 3*E*F*D weights of the layer, forward and again backward, and their gradients home, whatever
    the number of tokens is. Pays for many tokens and few experts. The router works while the weights travel.
    """
    group = work.mesh.group
    assert group is not None
    in_flight = work.experts.lend(group) if work.wire.overlap else None
    routing = work.route()
    in_flight = in_flight or work.experts.lend(group)
    out_tD = work.experts.forward_whole(
        work.x_tD, routing.expert_ids_tA, routing.weights_tA, group=group, in_flight=in_flight
    )
    return Dispatched(out_tD, routing)


def _all_to_all(work: Dispatch) -> Dispatched:
    """Every token-expert pair as a row to the rank of its expert, and the output back; nothing is dropped.

    Wire per rank, forward: t*A*D out and back on average, times the load of the busiest rank. The counts are read by
    the host (GShard, 2006.16668, §3.2, without its capacity).
    """
    group, experts, routing = work.mesh.group, work.experts, work.route()
    assert group is not None
    num_tokens, num_active = routing.expert_ids_tA.shape
    size = work.mesh.layout.tp
    ids = routing.expert_ids_tA.flatten()
    # Padding belongs to no expert, thus to the rank after the last, and stays behind.
    owner, order = (ids // experts.num_local).clamp(max=size).sort(stable=True)
    ranks = torch.arange(size + 1, device=ids.device)
    ends = torch.searchsorted(owner, ranks, right=False)
    counts = ends.diff()
    splits = _agree_on_splits(counts, work.mesh, read=experts.host_reads.row_splits)
    order = order[: sum(splits.send)]
    with scope("routing"):
        sent_ids = all_to_all_rows(ids[order], splits, group)
    rows_RD = exchange_rows(work.x_tD[order // num_active], splits, group)
    ones_R1 = torch.ones(rows_RD.shape[0], 1, dtype=routing.weights_tA.dtype, device=rows_RD.device)
    y_RD = experts(rows_RD, sent_ids[:, None], ones_R1)
    back_RD = exchange_rows(y_RD, splits.turned(), group)
    weighted_RD = wide(back_RD) * routing.weights_tA.flatten()[order][:, None]
    out_tD = weighted_RD.new_zeros(num_tokens, work.x_tD.shape[1]).index_add(0, order // num_active, weighted_RD)
    return Dispatched(out_tD.to(work.x_tD.dtype), routing)


@scope("routing")
def _agree_on_splits(counts: Tensor, mesh: ParallelMesh, *, read: Callable[[Tensor], list[list[int]]]) -> RowSplits:
    """Tell every rank how many rows it will get; the host reads the numbers."""
    assert mesh.group is not None
    one_each = RowSplits([1] * mesh.layout.tp, [1] * mesh.layout.tp)
    received = all_to_all_rows(counts, one_each, mesh.group)
    send, receive = read(torch.stack([counts, received]))
    return RowSplits(send, receive)


_STRATEGIES: Mapping[str, Callable[[Dispatch], Dispatched]] = {
    "gather_tokens": _gather_tokens,
    "gather_weights": _gather_weights,
    "all_to_all": _all_to_all,
}
