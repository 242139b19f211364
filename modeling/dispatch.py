"""How tokens meet their experts. One function per strategy, all with the same result as a single rank."""

from typing import NamedTuple

from torch import Tensor

from .collectives import gather_routing, gather_tokens, scatter_tokens
from .experts import GatherMoeExperts
from .mesh import ParallelMesh
from .router import Routing


class Dispatch(NamedTuple):
    """One layer's work: the normed tokens here, where they go, and the experts here."""

    x_tD: Tensor
    routing: Routing
    experts: GatherMoeExperts
    mesh: ParallelMesh


def dispatch_by_gathering_tokens(work: Dispatch) -> Tensor:
    """All tokens to every rank, each works on its experts or slices, sums come home: [t, D] -> [t, D].

    Wire per rank, forward: T*D in and T*D out, and 6*A bytes per token for ids and weights, whatever the routing is.
    """
    group = work.mesh.group
    x_TD = gather_tokens(work.x_tD, group)
    gathered = gather_routing(work.routing.expert_ids_tA, work.routing.weights_tA, group)
    partial_TD = work.experts(x_TD, gathered.expert_ids_TA, gathered.weights_TA)
    return scatter_tokens(partial_TD, group)
