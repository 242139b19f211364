"""Initial weights: one model for every layout, and numbers that behave like independent normal ones."""

import math
from typing import Any

import pytest
import torch

from modeling import init
from modeling.config import GatherMoeConfig
from modeling.init import build_model, fill_normal, join, normal_at
from modeling.layout import ParallelLayout
from modeling.mesh import one_rank_mesh
from modeling.shard_table import ShardTable
from recipe.dry_run.live_memory import LiveMemory
from tests.engine_runs import mesh_without_groups
from tests.referee import Tensors, mixed_config, tiny_config

SAMPLE = 2**20


def shards_of(config: GatherMoeConfig, layout: ParallelLayout) -> list[Tensors]:
    """The parameters that every rank draws, without any process group."""
    meshes = [mesh_without_groups(layout, rank, group=object()) for rank in range(layout.world_size)]
    models = [build_model(config, mesh=mesh, seed=1234) for mesh in meshes]
    return [{name: p.detach() for name, p in model.named_parameters()} for model in models]


@pytest.mark.parametrize(
    ("changes", "tp_ep"),
    [
        *(({}, tp_ep) for tp_ep in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))),
        *(({"vocab_size": 51, "tie_word_embeddings": True}, tp_ep) for tp_ep in ((2, 2), (4, 1), (4, 4))),
        *(({"qk_norm": "full"}, tp_ep) for tp_ep in ((2, 1), (4, 2))),
    ],
    ids=str,
)
@pytest.mark.requirement("R-MOE-06")
def test_every_layout_draws_the_same_weights_and_no_two_shards_of_a_matrix(
    changes: dict[str, Any], tp_ep: tuple[int, int]
) -> None:
    config = mixed_config(**changes) if "qk_norm" not in changes else tiny_config(**changes)
    layout = ParallelLayout(dp=2, tp=tp_ep[0], ep=tp_ep[1])
    [whole] = shards_of(config, ParallelLayout())
    by_rank = shards_of(config, layout)
    table = ShardTable(layout, config.sizes.num_key_value_heads, config.qk_norm)
    assert set(whole) == set(by_rank[0])
    for name, tensor in whole.items():
        shards = [table.shard(name, tuple(tensor.shape), group_rank=rank) for rank in range(layout.tp)]
        parts, twins = ([local[name] for local in group] for group in (by_rank[: layout.tp], by_rank[layout.tp :]))
        assert all(map(torch.equal, parts, twins)), name
        assert torch.equal(join(list(zip(parts, shards, strict=True))), tensor), name
        # Padding holds no numbers, and replicas are bitwise alike.
        assert sum(int((p != 0).sum()) for p in parts) == int((tensor != 0).sum()) * shards[0].num_replicas, name
        if tensor.dim() > 1:
            assert len({part.numpy().tobytes() for part in parts}) == layout.tp // shards[0].num_replicas, name


@pytest.mark.requirement("R-MOE-06")
def test_norms_are_one_and_no_row_of_a_matrix_is_another() -> None:
    [weights] = shards_of(mixed_config(), ParallelLayout())
    rows: list[tuple[float, ...]] = []
    for name, tensor in weights.items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            rows += [tuple(row[:16]) for row in tensor.flatten(0, -2).tolist()]
    assert len(set(rows)) == len(rows) > 500


def test_the_numbers_stay_what_they_are() -> None:
    """Old runs must be reproducible: a change of the generator is a change of every model."""
    got = normal_at(torch.tensor([0, 1, 2**40]), name="lm_head.weight", seed=1234)
    known = torch.tensor([-1.1455136252134086, 1.255968880734736, -0.11674011259764595], dtype=torch.float64)
    torch.testing.assert_close(got, known, atol=1e-12, rtol=0)


def test_the_numbers_are_normal() -> None:
    x = normal_at(torch.arange(SAMPLE), name="w", seed=3)
    assert x.dtype == torch.float64
    assert torch.isfinite(x).all()
    limit = 4 / math.sqrt(SAMPLE)  # four standard errors
    assert abs(x.mean().item()) < limit
    assert abs(x.std().item() - 1) < limit / math.sqrt(2)
    assert abs(x.pow(3).mean().item()) < limit * math.sqrt(15)
    assert abs(x.pow(4).mean().item() - 3) < limit * math.sqrt(96)
    for bound in (0.5, 1.0, 2.0, 3.0, 4.0):
        expected = math.erfc(bound / math.sqrt(2))
        error = math.sqrt(expected * (1 - expected) / SAMPLE)
        assert abs((x.abs() > bound).double().mean().item() - expected) < 4.5 * error, bound
    assert 4.4 < x.abs().max().item() < 6.5


@pytest.mark.parametrize("distance", [1, 2, 3, 32, 1024, 4096])
def test_neighbours_are_not_correlated(distance: int) -> None:
    x = normal_at(torch.arange(SAMPLE), name="w", seed=5)
    a, b = x[:-distance], x[distance:]
    limit = 4.5 / math.sqrt(a.numel())
    assert abs((a * b).mean().item()) < limit
    assert abs((a.square() * b.square()).mean().item() - 1) < limit * math.sqrt(8)


def test_streams_of_neighbouring_seeds_and_names_are_not_correlated() -> None:
    counters = torch.arange(SAMPLE // 4)
    streams = [normal_at(counters, name=name, seed=seed) for seed in (0, 1) for name in ("experts.0", "experts.1")]
    covariance = torch.stack(streams).cov()
    assert (covariance - torch.eye(4)).abs().max() < 4.5 * math.sqrt(2 / counters.numel())


def test_every_bit_of_the_counter_matters() -> None:
    base = torch.full((63,), 12345)
    flipped = base ^ (1 << torch.arange(63))
    a, b = normal_at(base, name="w", seed=0), normal_at(flipped, name="w", seed=0)
    assert not torch.isclose(a, b, atol=1e-6).any()


def test_initializer_range_is_the_standard_deviation() -> None:
    config = tiny_config(vocab_size=500, initializer_range=0.05)
    [weights] = shards_of(config, ParallelLayout())
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.experts.down_proj"):
        num = weights[name].numel()
        assert abs(weights[name].std().item() / 0.05 - 1) < 4 / math.sqrt(2 * num), name


def test_a_shard_is_drawn_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ShardTable(ParallelLayout(tp=2, ep=1), 2, "none")
    shard = table.shard("model.layers.0.mlp.experts.gate_up_proj", (4, 6, 5), group_rank=1)
    got = []
    for chunk in (1, 20, 10**6):
        monkeypatch.setattr(init, "CHUNK", chunk)
        local = torch.full(shard.shape, torch.nan)
        fill_normal(local, name="w", shard=shard, seed=1, std=1.0)
        got.append(local)
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])


def test_low_precision_weights_are_the_rounded_ones() -> None:
    config = tiny_config()
    wide = build_model(config, mesh=one_rank_mesh(), seed=1)
    narrow = build_model(config, mesh=one_rank_mesh(), seed=1, dtype=torch.bfloat16)
    for (name, a), b in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert b.dtype == torch.bfloat16
        assert ((a - b.float()).abs() <= a.abs() * 2**-8).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_start_takes_little_more_memory_than_the_weights(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Each tensor is made once, in its type; beside it stand the numbers that are drawn at a time."""
    monkeypatch.setattr(init, "CHUNK", 2**13)
    config = tiny_config(hidden_size=256, moe_intermediate_size=512, num_hidden_layers=3, vocab_size=1024)
    with LiveMemory() as memory:
        model = build_model(config, mesh=one_rank_mesh(), seed=1, dtype=dtype)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights <= memory.peak_bytes <= 1.1 * weights
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not any(parameter.is_meta for parameter in [*model.parameters(), *model.buffers()])


def test_tied_and_frozen_tensors_stay_what_they_are() -> None:
    tied = build_model(tiny_config(tie_word_embeddings=True), mesh=one_rank_mesh(), seed=1)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    biased = build_model(tiny_config(router_bias=True), mesh=one_rank_mesh(), seed=1, dtype=torch.bfloat16)
    biases = [buffer for name, buffer in biased.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(bias.dtype == torch.float32 and not bias.any() for bias in biases)
