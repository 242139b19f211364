"""How many numbers of a model each rank of a group holds, by part and by parameter, counted through the shard table."""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from modeling.layout import ParallelLayout
from modeling.shard_table import ShardTable
from modeling.spec import ModelSizes, Shapes, layer_shapes, outer_shapes

BLOCK_OUTPUTS = {False: 3, True: 1}  # of a block, dense or not, with a gradient: x, and two sums of the router


class RankParameters(NamedTuple):
    """Numbers held by each rank of a group, padding included: those of one layer, and those around the layers.

    matrices   attention, router, experts (of a layer with them), dense (the three matrices of one without), embedding,
               head (0 where it is tied to the embedding)
    vectors    norms (of a layer, those of q and k included), final_norm
    largest    of all single parameters
    """

    attention: int
    router: int
    experts: int
    dense: int
    embedding: int
    head: int
    norms: int
    final_norm: int
    largest: int

    def layer(self, *, is_dense: bool) -> int:
        """All of one layer."""
        return self.attention + self.norms + (self.dense if is_dense else self.router + self.experts)

    def total(self, sizes: ModelSizes) -> int:
        layers = sizes.num_moe_layers * self.layer(is_dense=False) + len(sizes.dense_layers) * self.layer(is_dense=True)
        return layers + self.embedding + self.head + self.final_norm


class Module(NamedTuple):
    """A part of the model that ZeRO-3 fetches as one.

    parameters   numbers of each, by name, in the order in which they were made
    is_block     a decoder block, which DeepSpeed takes as a leaf: with everything inside
    num_outputs  with a gradient; each asks for the module once in the backward
    """

    name: str
    parameters: Mapping[str, int]
    is_block: bool = False
    num_outputs: int = 1


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
        blocks.append(Module(f"block {i}", parameters, is_block=True, num_outputs=BLOCK_OUTPUTS[is_dense]))
    ends = [Module(part, {name: outer[name]}) for part, name in (("norm", norm), ("head", head))]
    return (Module("embedding", {embedding: outer[embedding]}), *blocks, *ends)


@lru_cache(maxsize=256)
def rank_parameters(sizes: ModelSizes, layout: ParallelLayout) -> RankParameters:
    """Count once for every model and layout."""
    kinds = ((False, sizes.num_moe_layers), (True, len(sizes.dense_layers)))
    shapes = [layer_shapes(sizes, is_dense=is_dense) for is_dense, number in kinds if number]
    layer = {name: n for part in shapes for name, n in _held(part, sizes=sizes, layout=layout).items()}
    outer = _held(outer_shapes(sizes), sizes=sizes, layout=layout)

    def parts(*names: str) -> int:
        return sum(number for name, number in layer.items() if any(part in name for part in names))

    return RankParameters(
        attention=parts("q_proj", "k_proj", "v_proj", "o_proj"),
        router=parts("mlp.gate.weight"),
        experts=parts("mlp.experts."),
        dense=parts("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        embedding=outer["model.embed_tokens.weight"],
        head=outer.get("lm_head.weight", 0),
        norms=parts("norm"),
        final_norm=outer["model.norm.weight"],
        largest=max((layer | outer).values()),
    )


def _held(shapes: Shapes, *, sizes: ModelSizes, layout: ParallelLayout) -> dict[str, int]:
    """Return what the first rank of a group, which holds no less than any other, has of parameters of these shapes."""
    table = ShardTable(layout, sizes.num_key_value_heads, sizes.qk_norm)
    # A layer's names are those inside it; the table's rules also look for what comes before.
    return {name: prod(table.shard(f".{name}", shape, group_rank=0).shape) for name, shape in shapes.items()}
