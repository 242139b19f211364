"""Make a model for a mesh, its weights the same numbers whatever the layout is."""

import torch
from transformers.initialization import no_init_weights

from .config import GatherMoeConfig
from .init import initialise
from .mesh import ParallelMesh
from .model import GatherMoeForCausalLM


def build_model(
    config: GatherMoeConfig, *, mesh: ParallelMesh, seed: int, dtype: torch.dtype = torch.float32
) -> GatherMoeForCausalLM:
    """This rank's shard of a freshly initialised model, in training mode."""
    with no_init_weights():
        model = GatherMoeForCausalLM(config, mesh=mesh)
    model.tie_weights()  # part of what was switched off
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    initialise(model, config=config, mesh=mesh, seed=seed)
    return model.train()
