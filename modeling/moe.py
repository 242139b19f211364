"""The feed-forward half of a decoder block: a sparse mixture of experts, or one dense SwiGLU layer."""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .capacity import expert_capacity, kept_choices
from .config import GatherMoeConfig
from .cost import MoeTraffic, choose_strategy
from .dispatch import Dispatch, Dispatched, dispatch
from .experts import GatherMoeExperts
from .gathered_linear import gather_linear, linear_scatter
from .linear import Linear, check_plain, plain_weight
from .mesh import ParallelMesh
from .router import GatherMoeRouter, Routing
from .wire import wire_of


class GatherMoeSparseBlock(nn.Module):
    """A router over the experts of the whole group."""

    def __init__(self, config: GatherMoeConfig, *, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh, self.strategy, self.sizes, self.wire = mesh, config.strategy, config.sizes, wire_of(config)
        self.capacity_factor = config.capacity_factor
        self.gate = GatherMoeRouter(config)
        self.experts = GatherMoeExperts(config, mesh=mesh)

    def forward(
        self,
        x_tD: Tensor,
        *,
        router_weight: Tensor | None = None,
        token_mask_t: Tensor | None = None,
        noise_t: Tensor | None = None,
    ) -> Dispatched:
        """This rank's normed tokens [t, D] -> their outputs [t, D], and how they were routed."""
        if self.mesh.group is not None:
            check_plain(self.experts, kind=GatherMoeExperts)
        route = partial(self._route, x_tD, weight=router_weight, token_mask_t=token_mask_t, noise_t=noise_t)
        return dispatch(Dispatch(x_tD, route, self.experts, self.mesh, self.wire), strategy=self.strategy_for(x_tD))

    def _route(self, x_tD: Tensor, **options: Any) -> Routing:
        """The gate's choice; in training without what an expert has no room for, where there is a capacity."""
        routing = self.gate(x_tD, **options)
        if self.capacity_factor is None or not self.training:
            return routing
        num_active, num_experts = self.sizes.num_experts_per_tok, self.sizes.num_experts
        capacity = expert_capacity(
            x_tD.shape[0] * self.mesh.layout.tp,
            num_active=num_active,
            num_experts=num_experts,
            factor=self.capacity_factor,
        )
        kept_tA = kept_choices(routing.expert_ids_tA, num_experts=num_experts, capacity=capacity, group=self.mesh.group)
        return routing.dropping(kept_tA)

    def strategy_for(self, x_tD: Tensor) -> str:
        """The configured strategy; for "auto" what sends least for as many tokens as there are."""
        if self.strategy != "auto":
            return self.strategy
        layout = self.mesh.layout
        traffic = MoeTraffic(
            sizes=self.sizes,
            layout=layout,
            num_tokens=x_tD.shape[0] * layout.tp,
            element_bytes=x_tD.element_size(),
            regather=self.wire.regather,
        )
        return choose_strategy(traffic)


class GatherMoeMlp(nn.Module):
    """SwiGLU (Shazeer, 2002.05202), its width split over the group."""

    def __init__(self, config: GatherMoeConfig, *, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh, self.wire = mesh, wire_of(config)
        width = config.intermediate_size // mesh.layout.tp
        self.gate_proj = Linear(config.hidden_size, width)
        self.up_proj = Linear(config.hidden_size, width)
        self.down_proj = Linear(width, config.hidden_size)

    def forward(self, x_tD: Tensor) -> Tensor:
        """This rank's normed tokens [t, D] -> their outputs [t, D]."""
        if self.mesh.group is None:
            return self.down_proj(F.silu(self.gate_proj(x_tD)) * self.up_proj(x_tD))
        gathering = self.wire.gathering(x_tD, self.mesh.group)
        gate, up = gather_linear(x_tD, [plain_weight(self.gate_proj), plain_weight(self.up_proj)], gathering=gathering)
        return linear_scatter(F.silu(gate) * up, plain_weight(self.down_proj), chunks=gathering.chunks)
