"""Initial weights drawn from (seed, parameter name, global index): the same model for every layout.

Each element has a counter of its own, so a rank draws just its shard and any two layouts agree on every number. The
generator is a 64-bit mix of the counter (the finaliser of SplitMix64, Steele et al., OOPSLA 2014) and the Box-Muller
transform in float64.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from .config import GatherMoeConfig
from .mesh import ParallelMesh
from .shard_table import Shard, ShardTable

CHUNK = 2**22  # elements drawn at a time, to bound the memory for counters


def initialise(model: nn.Module, *, config: GatherMoeConfig, mesh: ParallelMesh, seed: int) -> None:
    """Fill every parameter of `model` in place: norms with 1, all else normal with `initializer_range`."""
    table = shard_table(config, mesh)
    for name, full_shape in full_shapes(model, config=config, table=table).items():
        shard = table.shard(name, full_shape, group_rank=mesh.group_rank)
        parameter = model.get_parameter(name)
        with torch.no_grad():
            if len(full_shape) == 1:
                parameter.fill_(1.0)
            else:
                fill_normal(parameter, name=name, shard=shard, seed=seed, std=config.initializer_range)


def shard_table(config: GatherMoeConfig, mesh: ParallelMesh) -> ShardTable:
    """The shard table of a model of this configuration on this mesh."""
    return ShardTable(mesh.layout, config.sizes.num_key_value_heads, config.qk_norm)


def full_shapes(model: nn.Module, *, config: GatherMoeConfig, table: ShardTable) -> dict[str, tuple[int, ...]]:
    """The whole shape of every parameter, by name, from the local ones and the table; tied ones once."""
    shapes = {}
    for name, parameter in model.named_parameters():
        # ZeRO-3 leaves an empty tensor behind and keeps the shape beside it.
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        for split in table.rule(name).splits:
            _, parts = table.part(split.over, 0)
            shape[split.dim] = config.vocab_size if split.padded else shape[split.dim] * parts
        shapes[name] = tuple(shape)
    return shapes


def fill_normal(local: Tensor, *, name: str, shard: Shard, seed: int, std: float) -> None:
    """Write this shard's normal numbers into `local`; padding becomes 0."""
    local.zero_()
    indices = [
        torch.cat([torch.arange(start, end, device=local.device) for start, end in ranges]) for ranges in shard.ranges
    ]
    real = local[tuple(slice(0, index.numel()) for index in indices)]
    strides = [math.prod(shard.full_shape[dim + 1 :]) for dim in range(len(indices))]
    row_size = math.prod(index.numel() for index in indices[1:])
    step = max(1, CHUNK // max(row_size, 1))
    for start in range(0, indices[0].numel(), step):
        counters = indices[0][start : start + step] * strides[0]
        for index, stride in zip(indices[1:], strides[1:], strict=True):
            counters = counters[..., None] + index * stride
        real[start : start + step] = normal_at(counters, name=name, seed=seed).mul_(std).to(local.dtype)


def normal_at(counters: Tensor, *, name: str, seed: int) -> Tensor:
    """Standard normal numbers, float64, one per int64 counter, of the stream named by (seed, name)."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    bits = _mix(_mix(counters + key) + key)
    second = _mix(bits)
    # 53 bits each; the first lies in (0, 1], so that its logarithm is finite.
    radius = ((_shift(bits, 11) + 1).double() * 2.0**-53).log_().mul_(-2.0).sqrt_()
    return radius.mul_((_shift(second, 11).double() * (2.0**-53 * 2 * math.pi)).cos_())


def _mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers whose every output bit depends on every input bit; int64 wraps as needed."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
