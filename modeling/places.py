"""Where the tokens of this rank lie in the batch, and which noise each layer's router adds to them in training."""

import torch
from torch import Tensor

from .config import GatherMoeConfig
from .decoder import TokenPlace
from .mesh import ParallelMesh
from .noise import NoiseOrigin, token_counters


def layer_places(
    embeds: Tensor, attention_mask: Tensor | None, *, config: GatherMoeConfig, mesh: ParallelMesh
) -> list[TokenPlace]:
    """For every layer the same place of this rank's tokens among embeds [B, S, D]; mask [B, past + S] or None."""
    num_sequences, block_size = embeds.shape[:2]
    token_t = _own_tokens(embeds, mesh)
    token_mask_t = None
    if attention_mask is not None and attention_mask.dim() == 2:
        token_mask_t = attention_mask[:, -block_size:].flatten().chunk(mesh.layout.tp)[mesh.group_rank].bool()
    place = TokenPlace(num_sequences, block_size, token_t // block_size, token_mask_t)
    return [place] * config.num_hidden_layers


def noisy_places(
    places: list[TokenPlace], embeds: Tensor, *, config: GatherMoeConfig, mesh: ParallelMesh, origin: NoiseOrigin | None
) -> list[TokenPlace]:
    """The same places with each layer's noise. Without an origin it is drawn from torch's random state, as dropout is.

    ValueError without an origin in a group: its ranks, and recomputation by others, need the same noise.
    """
    if origin is None and mesh.group is not None:
        raise ValueError(
            f"router_jitter_noise={config.router_jitter_noise} needs to know which noise a group of "
            f"tp={mesh.layout.tp} ranks shares; give noise=NoiseOrigin(seed, first_token) to every forward"
        )
    if origin is None:
        origin = NoiseOrigin(int(torch.randint(2**62, ())), 0)
    token_t = _own_tokens(embeds, mesh)
    return [
        place._replace(noise_t=token_counters(token_t, origin=origin, layer_idx=i)) for i, place in enumerate(places)
    ]


def _own_tokens(embeds: Tensor, mesh: ParallelMesh) -> Tensor:
    num_tokens = embeds.shape[0] * embeds.shape[1] // mesh.layout.tp
    first = mesh.group_rank * num_tokens
    return torch.arange(first, first + num_tokens, device=embeds.device)
