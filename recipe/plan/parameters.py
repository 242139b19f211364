"""How many numbers of a model each rank of a group holds, by part and by parameter, counted through the shard table."""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from modeling.layout import ParallelLayout
from modeling.shard_table import ShardTable
from modeling.spec import ModelSizes, Shapes, layer_shapes, outer_shapes

BLOCK_OUTPUTS = {"experts": 3, "dense": 1}  # with a gradient: x, and two sums of the router


class RankParameters(NamedTuple):
    """Numbers held by each rank of a group, padding included: of the model, its largest tensor, layers and their parts.

    norms  those of q and k included
    head   0 where it is tied to the embedding
    """

    total: int
    largest: int
    moe_layer: int
    dense_layer: int
    attention: int
    experts: int
    dense: int
    norms: int
    embedding: int
    head: int

    def layer(self, *, is_dense: bool) -> int:
        return self.dense_layer if is_dense else self.moe_layer


class Module(NamedTuple):
    """A part of the model that ZeRO-3 fetches as one.

    parameters  numbers of each, by name, in the order in which they were made
    block       "experts" or "dense" of a decoder block, which DeepSpeed takes as a leaf: with everything inside
    """

    name: str
    parameters: Mapping[str, int]
    block: str = ""

    @property
    def kind(self) -> str:
        """What modules that are alike have in common: of blocks, what kind they are, of others, their name."""
        return self.block or self.name

    @property
    def num_outputs(self) -> int:
        """With a gradient; each asks for the module once in the backward."""
        return BLOCK_OUTPUTS.get(self.block, 1)


@lru_cache(maxsize=256)
def held_modules(sizes: ModelSizes, layout: ParallelLayout) -> tuple[Module, ...]:
    """Return what each rank of a group holds: the embedding, every block, the last norm, the head, as they run."""
    outer = _held(outer_shapes(sizes), sizes=sizes, layout=layout)
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    head = "lm_head.weight" if "lm_head.weight" in outer else embedding  # tied: the same parameter
    kinds = {
        is_dense: _held(layer_shapes(sizes, is_dense=is_dense), sizes=sizes, layout=layout)
        for is_dense in {i in sizes.dense_layers for i in range(sizes.num_hidden_layers)}
    }
    blocks = []
    for i in range(sizes.num_hidden_layers):
        is_dense = i in sizes.dense_layers
        parameters = {f"model.layers.{i}.{name}": number for name, number in kinds[is_dense].items()}
        blocks.append(Module(f"block {i}", parameters, block="dense" if is_dense else "experts"))
    ends = [Module(part, {name: outer[name]}) for part, name in (("norm", norm), ("head", head))]
    return (Module("embedding", {embedding: outer[embedding]}), *blocks, *ends)


@lru_cache(maxsize=256)
def rank_parameters(sizes: ModelSizes, layout: ParallelLayout) -> RankParameters:
    """Count once for every model and layout."""
    outer = _held(outer_shapes(sizes), sizes=sizes, layout=layout)
    num_moe, num_dense = sizes.num_moe_layers, len(sizes.dense_layers)
    moe, dense = (
        _held(layer_shapes(sizes, is_dense=is_dense), sizes=sizes, layout=layout) if number else {}
        for is_dense, number in ((False, num_moe), (True, num_dense))
    )
    layer = moe | dense

    def parts(*names: str) -> int:
        return sum(number for name, number in layer.items() if any(part in name for part in names))

    moe_layer, dense_layer = sum(moe.values()), sum(dense.values())
    return RankParameters(
        total=num_moe * moe_layer + num_dense * dense_layer + sum(outer.values()),
        largest=max((layer | outer).values()),
        moe_layer=moe_layer,
        dense_layer=dense_layer,
        attention=parts("q_proj", "k_proj", "v_proj", "o_proj"),
        experts=parts("mlp.experts."),
        dense=parts("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        norms=parts("norm"),
        embedding=outer["model.embed_tokens.weight"],
        head=outer.get("lm_head.weight", 0),
    )


def _held(shapes: Shapes, *, sizes: ModelSizes, layout: ParallelLayout) -> dict[str, int]:
    """Return what the first rank of a group, which holds no less than any other, has of parameters of these shapes."""
    table = ShardTable(layout, sizes.num_key_value_heads, sizes.qk_norm)
    # A layer's names are those inside it; the table's rules also look for what comes before.
    return {name: prod(table.shard(f".{name}", shape, group_rank=0).shape) for name, shape in shapes.items()}
