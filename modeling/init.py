"""Make a model for a mesh: weights drawn from (seed, parameter name, global index), the same for every layout.

Each element has a counter of its own, so a rank draws just its shard and any two layouts agree on every number: the
Box-Muller transform, in float64, of the bits that noise.py makes of it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from .config import GatherMoeConfig
from .execution import Execution
from .mesh import ParallelMesh
from .model import GatherMoeForCausalLM
from .noise import mix, shift, stream_key
from .shard_table import Shard, ShardTable

Index = tuple[slice, ...]
CHUNK = 2**22  # elements drawn at a time, to bound the memory for counters


def build_model(
    config: GatherMoeConfig,
    *,
    mesh: ParallelMesh,
    seed: int,
    execution: Execution | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> GatherMoeForCausalLM:
    """This rank's shard of a freshly initialised model, in training mode.

    Parameters are made on their device in their type, one by one: nothing is ever there twice or in float32 before.
    """
    with no_init_weights(), torch.device("meta"):
        model = GatherMoeForCausalLM(config, mesh=mesh, execution=execution)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            made = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(made, requires_grad=parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device=device))
    model.tie_weights()  # part of what was switched off, and undone above
    initialise(model, config=config, mesh=mesh, seed=seed)
    return model.train()


def initialise(model: nn.Module, *, config: GatherMoeConfig, mesh: ParallelMesh, seed: int) -> None:
    """Fill every tensor of `model` in place: norms with 1, routers' biases with 0, all else with normal numbers."""
    table, tensors = shard_table(config, mesh), stored_tensors(model)
    for name, full_shape in full_shapes(model, config=config, table=table).items():
        shard = table.shard(name, full_shape, group_rank=mesh.group_rank)
        parameter = tensors[name]
        with torch.no_grad():
            if not isinstance(parameter, nn.Parameter):
                parameter.zero_()
            elif len(full_shape) == 1:
                parameter.fill_(1.0)
            else:
                fill_normal(parameter, name=name, shard=shard, seed=seed, std=config.initializer_range)


def shard_table(config: GatherMoeConfig, mesh: ParallelMesh) -> ShardTable:
    """The shard table of a model of this configuration on this mesh."""
    return ShardTable(mesh.layout, config.sizes.num_key_value_heads, config.qk_norm)


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of this rank, by name: parameters, tied ones once, and the biases of the routers."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def full_shapes(model: nn.Module, *, config: GatherMoeConfig, table: ShardTable) -> dict[str, tuple[int, ...]]:
    """The whole shape of every stored tensor, by name, from the local ones and the table."""
    # ZeRO-3 leaves an empty tensor behind and keeps the shape beside it.
    local = {name: tuple(getattr(x, "ds_shape", x.shape)) for name, x in stored_tensors(model).items()}
    return {name: table.full_shape(name, shape, vocab_size=config.vocab_size) for name, shape in local.items()}


def fill_normal(local: Tensor, *, name: str, shard: Shard, seed: int, std: float) -> None:
    """Write this shard's normal numbers into `local`; padding becomes 0."""
    local.zero_()
    indices = [
        torch.cat([torch.arange(start, end, device=local.device) for start, end in ranges]) for ranges in shard.ranges
    ]
    real = local[tuple(slice(0, index.numel()) for index in indices)]
    strides = [math.prod(shard.full_shape[dim + 1 :]) for dim in range(len(indices))]
    _fill(real, indices, strides, 0, lambda counters: normal_at(counters, name=name, seed=seed).mul_(std))


def _fill(out: Tensor, indices: list[Tensor], strides: list[int], first: int, draw: Callable[[Tensor], Tensor]) -> None:
    """Fill `out` with what is drawn for the counters first + the sum of index x stride, at most CHUNK at a time."""
    row_size = math.prod(index.numel() for index in indices[1:])
    if row_size > CHUNK:  # a whole expert, say
        for row, index in zip(out, indices[0].tolist(), strict=True):
            _fill(row, indices[1:], strides[1:], first + index * strides[0], draw)
        return
    step = max(1, CHUNK // max(row_size, 1))
    for start in range(0, indices[0].numel(), step):
        counters = first + indices[0][start : start + step] * strides[0]
        for index, stride in zip(indices[1:], strides[1:], strict=True):
            counters = counters[..., None] + index * stride
        out[start : start + step] = draw(counters).to(out.dtype)


def normal_at(counters: Tensor, *, name: str, seed: int) -> Tensor:
    """Standard normal numbers, float64, one per int64 counter, of the stream named by (seed, name)."""
    key = stream_key(name, seed=seed)
    bits = mix(mix(counters + key) + key)
    second = mix(bits)
    # 53 bits each; the first lies in (0, 1], so that its logarithm is finite.
    radius = ((shift(bits, 11) + 1).double() * 2.0**-53).log_().mul_(-2.0).sqrt_()
    return radius.mul_((shift(second, 11).double() * (2.0**-53 * 2 * math.pi)).cos_())


def cut(full: Tensor, shard: Shard) -> Tensor:
    """The shard of a whole tensor, padded with zeros where the table pads; contiguous and its own memory."""
    local = full.new_zeros(shard.shape)
    for there, here in _blocks(shard):
        local[here] = full[there]
    return local


def paste(full: Tensor, local: Tensor, shard: Shard) -> None:
    """Write a shard to its place in the whole tensor, in place and without its padding."""
    for there, here in _blocks(shard):
        full[there] = local[here]


def join(shards: Sequence[tuple[Tensor, Shard]]) -> Tensor:
    """The whole tensor from the shards of every rank of a group."""
    first, shard = shards[0]
    full = first.new_zeros(shard.full_shape)
    for local, place in shards:
        paste(full, local, place)
    return full


def _blocks(shard: Shard) -> Iterator[tuple[Index, Index]]:
    """Where each contiguous block of a shard is: in the whole tensor, and in the shard."""
    by_dim = []
    for ranges in shard.ranges:
        ends = list(accumulate((end - start for start, end in ranges), initial=0))
        by_dim.append([(slice(*place), slice(*own)) for place, own in zip(ranges, pairwise(ends), strict=True)])
    for block in product(*by_dim):
        there, here = zip(*block, strict=True)
        yield there, here
