"""The feed-forward half of a decoder block: a sparse mixture of experts, or one dense SwiGLU layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import gather_tokens, scatter_tokens
from .config import GatherMoeConfig
from .cost import MoeTraffic, choose_strategy
from .dispatch import Dispatch, dispatch
from .experts import GatherMoeExperts
from .linear import Linear
from .mesh import ParallelMesh
from .router import GatherMoeRouter, Routing


class GatherMoeSparseBlock(nn.Module):
    """A router over the experts of the whole group."""

    def __init__(self, config: GatherMoeConfig, *, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh, self.strategy, self.sizes = mesh, config.strategy, config.sizes
        self.gate = GatherMoeRouter(config)
        self.experts = GatherMoeExperts(config, mesh=mesh)

    def forward(
        self, x_tD: Tensor, *, router_weight: Tensor | None = None, token_mask_t: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """This rank's normed tokens [t, D] -> their outputs [t, D], and how they were routed."""
        routing = self.gate(x_tD, weight=router_weight, token_mask_t=token_mask_t)
        work = Dispatch(x_tD, routing, self.experts, self.mesh)
        return dispatch(work, strategy=self.strategy_for(x_tD)), routing

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
        )
        return choose_strategy(traffic)


class GatherMoeMlp(nn.Module):
    """SwiGLU (Shazeer, 2002.05202), its width split over the group."""

    def __init__(self, config: GatherMoeConfig, *, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh = mesh
        width = config.intermediate_size // mesh.layout.tp
        self.gate_proj = Linear(config.hidden_size, width)
        self.up_proj = Linear(config.hidden_size, width)
        self.down_proj = Linear(width, config.hidden_size)

    def forward(self, x_tD: Tensor) -> Tensor:
        """This rank's normed tokens [t, D] -> their outputs [t, D]."""
        x_TD = gather_tokens(x_tD, self.mesh.group)
        partial_TD = self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))
        return scatter_tokens(partial_TD, self.mesh.group)
