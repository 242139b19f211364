"""One decoder block: attention and feed-forward with their norms, around tokens that are sharded over the group."""

from typing import NamedTuple

from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import AttentionInputs, GatherMoeAttention, QkNormWeights
from .collectives import sum_gradients
from .config import GatherMoeConfig
from .linear import plain_weight
from .mesh import ParallelMesh
from .moe import GatherMoeMlp, GatherMoeSparseBlock
from .norm import RmsNorm
from .router import GatherMoeRouter, router_statistics


class TokenPlace(NamedTuple):
    """Where the tokens of this rank lie in the batch of B sequences.

    sequence_of_token_t  [t] int64
    token_mask_t         [t] bool, False for padding; None where there is none
    noise_t              [t] int64, counters that the router's jitter is drawn from; None for none
    """

    num_sequences: int
    block_size: int
    sequence_of_token_t: Tensor
    token_mask_t: Tensor | None
    noise_t: Tensor | None = None


class _SharedWeights(NamedTuple):
    """What every rank holds, with the sums of the gradients arranged; None: the module's own."""

    norm_in: Tensor | None = None
    norm_post: Tensor | None = None
    qk_norm: QkNormWeights | None = None
    router: Tensor | None = None


class GatherMoeDecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward with their norms; under a mesh each gathers the tokens and scatters the sums."""

    # ZeRO-3 fetches all of a block's parameters at once. Otherwise it would fetch per submodule, in an order that the
    # functional use of the norms and the router does not follow.
    _z3_leaf = True

    def __init__(self, config: GatherMoeConfig, *, layer_idx: int, mesh: ParallelMesh) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self.self_attn = GatherMoeAttention(config, layer_idx=layer_idx, mesh=mesh)
        self.mlp: GatherMoeSparseBlock | GatherMoeMlp
        if config.is_sparse(layer_idx):
            self.mlp = GatherMoeSparseBlock(config, mesh=mesh)
        else:
            self.mlp = GatherMoeMlp(config, mesh=mesh)
        self.input_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, *, inputs: AttentionInputs, place: TokenPlace) -> tuple[Tensor, ...]:
        """hidden_states [B, S, D] on one process, [t, D] under a mesh -> the same, and what RouterStatistics holds.

        One flat tuple, of one element without a router: reentrant checkpointing drops the gradients of nested tensors.
        """
        shape = hidden_states.shape
        shared = self._shared_weights()
        normed = self.input_layernorm(hidden_states, weight=shared.norm_in)
        attended, _ = self.self_attn(normed, inputs, shared.qk_norm, num_sequences=place.num_sequences)
        x = hidden_states + attended
        normed = self.post_attention_layernorm(x, weight=shared.norm_post).view(-1, shape[-1])
        if isinstance(self.mlp, GatherMoeMlp):
            return (x + self.mlp(normed).view(shape),)
        out, routing = self.mlp(
            normed, router_weight=shared.router, token_mask_t=place.token_mask_t, noise_t=place.noise_t
        )
        statistics = router_statistics(
            routing,
            sequence_of_token_t=place.sequence_of_token_t,
            num_sequences=place.num_sequences,
            token_mask_t=place.token_mask_t,
        )
        return (x + out.view(shape), *statistics)

    def _shared_weights(self) -> _SharedWeights:
        """Norms, q and k norms and the router's weight, their gradients summed in one all-reduce.

        On one process there is nothing to sum, and each module is asked, so that an adapter around it has its say.
        """
        if self.mesh.group is None:
            return _SharedWeights()
        qk_norms = self.self_attn.qk_norm_weights() if self.config.qk_norm == "head" else []
        routers = []
        if isinstance(self.mlp, GatherMoeSparseBlock):
            routers = [plain_weight(self.mlp.gate, kind=GatherMoeRouter)]
        norms = [plain_weight(norm, kind=RmsNorm) for norm in (self.input_layernorm, self.post_attention_layernorm)]
        norm_in, norm_post, *rest = sum_gradients([*norms, *qk_norms, *routers], self.mesh.group)
        qk_norm = QkNormWeights(*rest[:2]) if qk_norms else None
        return _SharedWeights(norm_in, norm_post, qk_norm, rest[-1] if routers else None)
