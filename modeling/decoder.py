"""One decoder block: attention and feed-forward with their norms, around tokens that are sharded over the group."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import AttentionInputs, GatherMoeAttention
from .comm import sum_gradients
from .config import GatherMoeConfig
from .execution import Execution
from .layers import RmsNorm, plain_weight
from .mesh import ParallelMesh
from .moe import GatherMoeMlp, GatherMoeSparseBlock
from .noise import NoiseOrigin, token_counters
from .router import GatherMoeRouter, router_statistics


class OwnTokens(NamedTuple):
    """Where the tokens of this rank lie in the batch of B sequences.

    sequence_of_token_t  [t] int64
    token_mask_t         [t] bool, False for padding; None where there is none
    noise_t              [t] int64, counters that the router's jitter is drawn from; None for none
    """

    num_sequences: int
    sequence_of_token_t: Tensor
    token_mask_t: Tensor | None
    noise_t: Tensor | None = None


class GatherMoeDecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward with their norms; under a mesh each gathers the tokens and scatters the sums."""

    # ZeRO-3 fetches all of a block's parameters at once. Otherwise it would fetch per submodule, in an order that the
    # functional use of the norms and the router does not follow.
    _z3_leaf = True

    def __init__(self, config: GatherMoeConfig, *, layer_idx: int, mesh: ParallelMesh, execution: Execution) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self.self_attn = GatherMoeAttention(config, layer_idx=layer_idx, mesh=mesh, execution=execution)
        self.mlp: GatherMoeSparseBlock | GatherMoeMlp
        if config.is_sparse(layer_idx):
            self.mlp = GatherMoeSparseBlock(config, mesh=mesh, execution=execution)
        else:
            self.mlp = GatherMoeMlp(config, mesh=mesh, execution=execution)
        self.input_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, *, inputs: AttentionInputs, tokens: OwnTokens) -> tuple[Tensor, ...]:
        """Map hidden_states [B, S, D] on one process, [t, D] under a mesh, to the same and what RouterStatistics holds.

        One flat tuple, of one element without a router: reentrant checkpointing drops the gradients of nested tensors.
        """
        shape = hidden_states.shape
        weights = self._summed_weights()
        normed = self.input_layernorm(hidden_states, weight=weights.get(self.input_layernorm))
        attended, _ = self.self_attn(normed, inputs, weights, num_sequences=tokens.num_sequences)
        x = hidden_states + attended
        normed = self.post_attention_layernorm(x, weight=weights.get(self.post_attention_layernorm)).view(-1, shape[-1])
        if isinstance(self.mlp, GatherMoeMlp):
            return (x + self.mlp(normed).view(shape),)
        out, routing = self.mlp(
            normed, weight=weights.get(self.mlp.gate), token_mask_t=tokens.token_mask_t, noise_t=tokens.noise_t
        )
        statistics = router_statistics(
            routing,
            sequence_of_token_t=tokens.sequence_of_token_t,
            num_sequences=tokens.num_sequences,
            token_mask_t=tokens.token_mask_t,
        )
        return (x + out.view(shape), *statistics)

    def _summed_weights(self) -> Mapping[nn.Module, Tensor]:
        """Return the weights that every rank holds whole, by module: of norms, q and k norms, and the router.

        Their gradients are summed over the group in one all-reduce for the whole block, which is why they are taken
        from their modules here. On one process there is nothing to sum, and each module uses its own weight, so that
        an adapter around it has its say.
        """
        if self.mesh.group is None:
            return {}
        modules: list[nn.Module] = [self.input_layernorm, self.post_attention_layernorm]
        if self.config.qk_norm == "head":
            modules += [self.self_attn.q_norm, self.self_attn.k_norm]
        own = [plain_weight(norm, kind=RmsNorm) for norm in modules]
        if isinstance(self.mlp, GatherMoeSparseBlock):
            modules.append(self.mlp.gate)
            own.append(plain_weight(self.mlp.gate, kind=GatherMoeRouter))
        return dict(zip(modules, sum_gradients(own, self.mesh.group), strict=True))


def tokens_of_layers(
    embeds: Tensor, attention_mask: Tensor | None, *, config: GatherMoeConfig, mesh: ParallelMesh
) -> list[OwnTokens]:
    """Find this rank's tokens among embeds [B, S, D], the same for every layer; mask [B, past + S] or None."""
    num_sequences, block_size = embeds.shape[:2]
    token_t = _own_numbers(embeds, mesh)
    token_mask_t = None
    if attention_mask is not None and attention_mask.dim() == 2:
        token_mask_t = attention_mask[:, -block_size:].flatten().chunk(mesh.layout.tp)[mesh.group_rank].bool()
    return [OwnTokens(num_sequences, token_t // block_size, token_mask_t)] * config.num_hidden_layers


def with_noise(
    layers: list[OwnTokens], embeds: Tensor, *, config: GatherMoeConfig, mesh: ParallelMesh, origin: NoiseOrigin | None
) -> list[OwnTokens]:
    """Add each layer's noise to its tokens; without an origin it is drawn from torch's random state, as dropout is.

    ValueError without an origin in a group: its ranks, and recomputation by others, need the same noise.
    """
    if origin is None and mesh.group is not None:
        raise ValueError(
            f"router_jitter_noise={config.router_jitter_noise} needs to know which noise a group of "
            f"tp={mesh.layout.tp} ranks shares; give noise=NoiseOrigin(seed, first_token) to every forward"
        )
    if origin is None:
        origin = NoiseOrigin(int(torch.randint(2**62, ())), 0)
    token_t = _own_numbers(embeds, mesh)
    counters = (token_counters(token_t, origin=origin, layer_idx=i) for i in range(len(layers)))
    return [tokens._replace(noise_t=noise_t) for tokens, noise_t in zip(layers, counters, strict=True)]


def _own_numbers(embeds: Tensor, mesh: ParallelMesh) -> Tensor:
    """Return the numbers of this rank's tokens in the flattened batch, int64 [t]."""
    num_tokens = embeds.shape[0] * embeds.shape[1] // mesh.layout.tp
    first = mesh.group_rank * num_tokens
    return torch.arange(first, first + num_tokens, device=embeds.device)
