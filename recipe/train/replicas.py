"""Do the ranks that should hold the same numbers still hold them: replicated parameters in a group, all across dp."""

import hashlib

import torch
from torch import Tensor, nn

from modeling.init import full_shapes, shard_table, stored_tensors
from recipe.checkpoint.native import full_precision_shard
from recipe.engine.engine import Engine
from recipe.shared.ranks import Ranks


def check_replicas(engine: Engine, ranks: Ranks) -> None:
    """Compare a hash of every parameter and router's bias among all ranks that hold the same part of it, bit for bit.

    `ranks` is the whole world. Up to ZeRO-2 the hash is of the numbers that the forward uses; under ZeRO-3 of the
    optimizer's copy, which the data-parallel ranks first put together, one parameter at a time, so there it compares
    the ranks of each group. Moves every parameter to the host once.

    Raises RuntimeError on every rank alike, naming the first parameter that differs and which ranks agree.
    """
    model, mesh = engine.model, engine.mesh
    digests = {}
    for name, tensor in stored_tensors(model).items():
        if engine.zero_stage == 3 and isinstance(tensor, nn.Parameter):
            tensor = full_precision_shard(tensor)
        digests[name] = _digest(tensor)
    by_rank = ranks.gather(digests)
    table = shard_table(model.config, mesh)
    for name, shape in full_shapes(model, config=model.config, table=table).items():
        holders: dict[object, dict[str, list[int]]] = {}
        for rank, its_digests in enumerate(by_rank):
            part = table.shard(name, shape, group_rank=rank % mesh.layout.tp).ranges
            holders.setdefault(part, {}).setdefault(its_digests[name], []).append(rank)
        for same_part in holders.values():
            if len(same_part) > 1:
                raise RuntimeError(
                    f"ranks that must hold the same numbers do not: the tensor {name!r} differs between "
                    f"{' and '.join(f'ranks {some}' for some in same_part.values())}; go back to the last checkpoint"
                )


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=16).hexdigest()
