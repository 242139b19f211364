"""How many of a model's numbers a rank of the group holds, by part, counted through the shard table."""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from modeling.layout import ParallelLayout
from modeling.shard_table import ShardTable
from modeling.spec import ModelSizes, Shapes, layer_shapes, outer_shapes


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

    def matrices(self, sizes: ModelSizes) -> int:
        """All that weight decay applies to: DeepSpeed keeps it in a flat buffer of its own."""
        moe, dense = sizes.num_moe_layers, len(sizes.dense_layers)
        layers = (moe + dense) * self.attention + moe * (self.router + self.experts) + dense * self.dense
        return layers + self.embedding + self.head

    def vectors(self, sizes: ModelSizes) -> int:
        return sizes.num_hidden_layers * self.norms + self.final_norm

    def total(self, sizes: ModelSizes) -> int:
        return self.matrices(sizes) + self.vectors(sizes)


def held_numbers(shapes: Shapes, *, sizes: ModelSizes, layout: ParallelLayout) -> dict[str, int]:
    """What a rank holds of parameters of these whole shapes; the first of a group holds no less than any other."""
    table = ShardTable(layout, sizes.num_key_value_heads, sizes.qk_norm)
    # A layer's names are those inside of it; the table's rules look for what comes before, too.
    return {name: prod(table.shard(f".{name}", shape, group_rank=0).shape) for name, shape in shapes.items()}


@lru_cache(maxsize=256)
def rank_parameters(sizes: ModelSizes, layout: ParallelLayout) -> RankParameters:
    """Counted once for every model and layout."""
    moe, dense = (
        held_numbers(layer_shapes(sizes, is_dense=is_dense), sizes=sizes, layout=layout) if number else {}
        for is_dense, number in ((False, sizes.num_moe_layers), (True, len(sizes.dense_layers)))
    )
    layer = moe | dense
    outer = held_numbers(outer_shapes(sizes), sizes=sizes, layout=layout)

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
