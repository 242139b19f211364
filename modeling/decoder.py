"""One decoder block: attention and feed-forward with their norms, around tokens that are sharded over the group."""

from typing import NamedTuple

from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import AttentionInputs, GatherMoeAttention, QkNormWeights
from .collectives import sum_gradients
from .config import GatherMoeConfig
from .mesh import ParallelMesh
from .moe import GatherMoeMlp, GatherMoeSparseBlock
from .norm import RmsNorm
from .router import router_statistics


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
        norm_in, norm_post, *rest = self._shared_weights()
        qk_norm = QkNormWeights(*rest[:2]) if self.config.qk_norm == "head" else None
        normed = self.input_layernorm(hidden_states, weight=norm_in)
        attended, _ = self.self_attn(normed, inputs, qk_norm, num_sequences=place.num_sequences)
        x = hidden_states + attended
        normed = self.post_attention_layernorm(x, weight=norm_post).view(-1, shape[-1])
        if isinstance(self.mlp, GatherMoeMlp):
            return (x + self.mlp(normed).view(shape),)
        out, routing = self.mlp(normed, router_weight=rest[-1], token_mask_t=place.token_mask_t, noise_t=place.noise_t)
        statistics = router_statistics(
            routing,
            sequence_of_token_t=place.sequence_of_token_t,
            num_sequences=place.num_sequences,
            token_mask_t=place.token_mask_t,
        )
        return (x + out.view(shape), *statistics)

    def _shared_weights(self) -> list[Tensor]:
        """The weights every rank holds, their gradients summed in one all-reduce: norms, q and k norms, router."""
        weights: list[Tensor] = [self.input_layernorm.weight, self.post_attention_layernorm.weight]
        if self.config.qk_norm == "head":
            weights += self.self_attn.qk_norm_weights()
        if isinstance(self.mlp, GatherMoeSparseBlock):
            weights.append(self.mlp.gate.weight)
        return sum_gradients(weights, self.mesh.group)
