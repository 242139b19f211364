"""The shard table against the modules it describes: names, shapes, replicas, and that shards join to the whole."""

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from transformers.initialization import no_init_weights

from modeling.config import GatherMoeConfig
from modeling.init import cut, full_shapes, join, paste, shard_table, stored_tensors
from modeling.layout import ParallelLayout
from modeling.mesh import ParallelMesh, one_rank_mesh
from modeling.model import GatherMoeForCausalLM
from modeling.shard_table import FULL_QK_NORM, TABLE, ShardTable
from recipe.engine.engine import tag_parameters
from tests.engine_runs import mesh_without_groups
from tests.referee import mixed_config, tiny_config

CONFIGS = {
    "mixtral": lambda: tiny_config(qk_norm="none"),
    "dense first": lambda: mixed_config(qk_norm="head"),
    "full norms": lambda: tiny_config(qk_norm="full"),
    "odd vocabulary, tied": lambda: tiny_config(vocab_size=51, tie_word_embeddings=True),
    "small vocabulary": lambda: tiny_config(vocab_size=5),
    "biased routers": lambda: tiny_config(router_bias=True),
}
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
EVERYWHERE = pytest.mark.parametrize("tp_ep", LAYOUTS, ids=str)
EVERY_CONFIG = pytest.mark.parametrize("config_name", list(CONFIGS))


def mesh_of(tp_ep: tuple[int, int], group_rank: int) -> ParallelMesh:
    return mesh_without_groups(ParallelLayout(tp=tp_ep[0], ep=tp_ep[1]), group_rank, group=object())


def model_on_meta(config: GatherMoeConfig, mesh: Any) -> GatherMoeForCausalLM:
    with torch.device("meta"), no_init_weights():
        return GatherMoeForCausalLM(config, mesh=mesh)


@cache
def whole_shapes(config_name: str) -> dict[str, tuple[int, ...]]:
    model = model_on_meta(CONFIGS[config_name](), one_rank_mesh())
    return {name: tuple(tensor.shape) for name, tensor in stored_tensors(model).items()}


@EVERY_CONFIG
def test_every_parameter_has_exactly_one_rule(config_name: str) -> None:
    config = CONFIGS[config_name]()
    rules = (*TABLE, *FULL_QK_NORM) if config.qk_norm == "full" else TABLE
    table = shard_table(config, one_rank_mesh())
    for name in whole_shapes(config_name):
        matching = [rule for rule in rules if re.search(rule.pattern, name)]
        # Norms over the full width of q and k also look like ordinary norms; the split ones come first.
        if config.qk_norm == "full" and name.endswith(("q_norm.weight", "k_norm.weight")):
            assert table.rule(name) in FULL_QK_NORM
        else:
            assert matching == [table.rule(name)], name


def test_every_rule_is_needed() -> None:
    used = set()
    for config_name, make in CONFIGS.items():
        table = shard_table(make(), one_rank_mesh())
        used |= {table.rule(name) for name in whole_shapes(config_name)}
    assert used == {*TABLE, *FULL_QK_NORM}


def test_a_name_without_a_rule_is_an_error() -> None:
    table = ShardTable(ParallelLayout(), 2, "none")
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.experts.gate_up_proj_scale", "score"):
        with pytest.raises(KeyError, match=f"no rule of the shard table covers the parameter '{name}'"):
            table.rule(name)


@EVERYWHERE
@EVERY_CONFIG
def test_local_shapes_are_those_of_the_modules(config_name: str, tp_ep: tuple[int, int]) -> None:
    config = CONFIGS[config_name]()
    whole = whole_shapes(config_name)
    for group_rank in range(tp_ep[0]):
        mesh = mesh_of(tp_ep, group_rank)
        table = shard_table(config, mesh)
        model = model_on_meta(config, mesh)
        stored = stored_tensors(model)
        assert set(stored) == set(whole)
        for name, tensor in stored.items():
            assert table.shard(name, whole[name], group_rank=group_rank).shape == tuple(tensor.shape), name
        assert full_shapes(model, config=config, table=table) == whole


@EVERYWHERE
@EVERY_CONFIG
def test_shards_join_to_the_whole_tensor(config_name: str, tp_ep: tuple[int, int]) -> None:
    config = CONFIGS[config_name]()
    table = shard_table(config, mesh_of(tp_ep, 0))
    for name, shape in whole_shapes(config_name).items():
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        shards = [table.shard(name, shape, group_rank=rank) for rank in range(tp_ep[0])]
        locals_ = [cut(whole, shard) for shard in shards]
        for local, shard in zip(locals_, shards, strict=True):
            assert local.shape == shard.shape
            assert local.is_contiguous()
        assert torch.equal(join(list(zip(locals_, shards, strict=True))), whole), name
        # Every number is on as many ranks as the table says, and what is no number of the whole is zero.
        counts = Counter(value for local in locals_ for value in local.flatten().tolist())
        counts.pop(0.0, None)
        assert set(counts) == set(whole.flatten().tolist())
        assert set(counts.values()) == {shards[0].num_replicas}, name


def test_a_shard_is_its_own_memory() -> None:
    whole = torch.zeros(4, 2)
    shard = ShardTable(ParallelLayout(), 2, "none").shard("lm_head.weight", (4, 2), group_rank=0)
    cut(whole, shard).fill_(1.0)
    assert not whole.any()


def test_pasting_leaves_the_other_ranks_alone() -> None:
    table = ShardTable(ParallelLayout(tp=2, ep=1), 2, "none")
    shard = table.shard("model.layers.0.mlp.experts.gate_up_proj", (1, 4, 2), group_rank=1)
    full = torch.full((1, 4, 2), -1.0)
    paste(full, torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), shard)
    assert full.tolist() == [[[-1.0, -1.0], [1.0, 2.0], [-1.0, -1.0], [3.0, 4.0]]]


def test_gate_and_up_are_cut_alike() -> None:
    table = ShardTable(ParallelLayout(tp=4, ep=2), 2, "none")
    shard = table.shard("model.layers.1.mlp.experts.gate_up_proj", (4, 12, 5), group_rank=3)
    assert shard.ranges == (((2, 4),), ((3, 6), (9, 12)), ((0, 5),))
    down = table.shard("model.layers.1.mlp.experts.down_proj", (4, 5, 6), group_rank=3)
    assert down.ranges == (((2, 4),), ((0, 5),), ((3, 6),))


@pytest.mark.parametrize(
    ("vocab_size", "tp", "rows"),
    [
        (51, 2, [(0, 26), (26, 51)]),
        (51, 4, [(0, 13), (13, 26), (26, 39), (39, 51)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),  # the last rank holds nothing but padding
    ],
)
def test_the_vocabulary_is_padded_inside_only(vocab_size: int, tp: int, rows: list[tuple[int, int]]) -> None:
    table = ShardTable(ParallelLayout(tp=tp, ep=tp), 2, "none")
    shards = [table.shard("lm_head.weight", (vocab_size, 3), group_rank=rank) for rank in range(tp)]
    assert [shard.ranges[0][0] for shard in shards] == rows
    assert {shard.shape for shard in shards} == {(-(-vocab_size // tp), 3)}
    assert {shard.full_shape for shard in shards} == {(vocab_size, 3)}


def test_key_value_heads_are_replicated_in_neighbouring_ranks() -> None:
    table = ShardTable(ParallelLayout(tp=4, ep=4), 2, "full")
    for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight"):
        shape = (16,) if "norm" in name else (16, 32)
        shards = [table.shard(f"model.layers.0.{name}", shape, group_rank=rank) for rank in range(4)]
        assert [shard.ranges[0] for shard in shards] == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]
        assert [(shard.replica, shard.num_replicas) for shard in shards] == [(0, 2), (1, 2), (0, 2), (1, 2)]
        assert not any(shard.is_replicated for shard in shards)


@EVERYWHERE
@EVERY_CONFIG
def test_tags_let_every_number_be_counted_once(config_name: str, tp_ep: tuple[int, int]) -> None:
    """DeepSpeed counts tagged parameters on every rank and the others on the group's first rank alone."""
    config = CONFIGS[config_name]()
    counted: Counter[str] = Counter()
    for group_rank in range(tp_ep[0]):
        mesh = mesh_of(tp_ep, group_rank)
        model = model_on_meta(config, mesh)
        tag_parameters(model, config=config, mesh=mesh)
        table = shard_table(config, mesh)
        for name, parameter in model.named_parameters():
            if getattr(parameter, "tensor_model_parallel", False) or group_rank == 0:
                shard = table.shard(name, whole_shapes(config_name)[name], group_rank=group_rank)
                counted[name] += _num_real(shard.ranges)
    parameters = dict(model_on_meta(config, one_rank_mesh()).named_parameters())
    assert dict(counted) == {name: parameter.numel() for name, parameter in parameters.items()}


def _num_real(ranges: Any) -> int:
    return torch.Size([sum(end - start for start, end in spans) for spans in ranges]).numel()
