"""The small layers: products that save their parameter, norms over split rows, embedding and head over a vocabulary."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from modeling.hf_keys import file_tensors
from modeling.layout import ParallelLayout
from modeling.linear import Linear, linear, plain_weight
from modeling.mesh import ParallelMesh, build_mesh, one_rank_mesh
from modeling.norm import RmsNorm, rms_norm, split_rms_norms
from modeling.spec import stock_type
from modeling.vocabulary import VocabularyEmbedding, VocabularyHead, vocabulary_part
from tests.ranks import run_ranks
from tests.referee import full_state, mixed_config, referee_model, tiny_config

WORLD = 2


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)], ids=str)
def test_linear_is_torchs(shape: tuple[int, ...]) -> None:
    if len(shape) > 1:
        torch.autograd.gradcheck(linear, (randn(*shape).requires_grad_(), randn(4, 5, seed=1).requires_grad_()))
    torch.testing.assert_close(linear(randn(*shape), randn(4, 5, seed=1)), F.linear(randn(*shape), randn(4, 5, seed=1)))


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_linear_makes_only_the_gradients_that_are_needed(frozen: str) -> None:
    x = randn(3, 5).requires_grad_(frozen != "x")
    weight = randn(4, 5, seed=1).requires_grad_(frozen != "weight")
    linear(x, weight).sum().backward()
    assert (x.grad is None, weight.grad is None) == (frozen == "x", frozen == "weight")


def test_products_save_the_parameter_and_no_view_of_it() -> None:
    """A view would keep the storage that ZeRO-3 gathered."""
    layer = Linear(5, 4)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        layer(torch.randn(3, 5))
    of_the_weight = [x for x in saved if x.untyped_storage().data_ptr() == layer.weight.untyped_storage().data_ptr()]
    assert len(of_the_weight) == 1
    assert of_the_weight[0] is layer.weight
    assert isinstance(layer, nn.Linear)
    assert layer.bias is None


def test_a_projection_that_something_else_stands_in_for_is_refused_where_ranks_share_it() -> None:
    layer = Linear(5, 4)
    assert plain_weight(layer) is layer.weight
    with pytest.raises(ValueError, match=r"replaced by Sequential, which a model shared by several ranks"):
        plain_weight(torch.nn.Sequential(layer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_is_computed_in_float32_at_least(dtype: torch.dtype) -> None:
    x, weight = (randn(4, 7) * 30).to(dtype), randn(7, seed=1).to(dtype)
    got = rms_norm(x, weight, eps=1e-5)
    want = F.rms_norm(x.double(), (7,), weight.double(), eps=1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype), rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=0)


def test_rms_norm_has_the_gradient_of_the_formula() -> None:
    inputs = (randn(4, 7).requires_grad_(), randn(7, seed=1).requires_grad_())
    torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, eps=1e-3), inputs)


def _norm_of_own_tokens(rank: int, _: int) -> None:
    norm = RmsNorm(5, eps=1e-5, group=dist.group.WORLD)
    norm(torch.full((2, 5), 1.0)).backward(torch.full((2, 5), rank + 1.0))
    torch.testing.assert_close(norm.weight.grad, torch.full((5,), 6.0), rtol=1e-4, atol=0)


def test_a_shared_norm_sums_its_gradient_over_the_group() -> None:
    run_ranks(_norm_of_own_tokens, WORLD)


def _split_norms(rank: int, world_size: int, num_kv: int) -> None:
    """q of 4 heads is split; k of `num_kv` heads is split too or held by both ranks."""
    heads, size, eps = 4, 3, 1e-2
    whole = [randn(6, n * size, seed=n).requires_grad_() for n in (heads, num_kv)]
    weights = [randn(n * size, seed=n + 20).requires_grad_() for n in (heads, num_kv)]
    factors = [randn(6, n * size, seed=n + 40) for n in (heads, num_kv)]
    wants = [F.rms_norm(x, (x.shape[1],), w, eps=eps) for x, w in zip(whole, weights, strict=True)]
    sum((want * factor).sum() for want, factor in zip(wants, factors, strict=True)).backward()  # type: ignore[union-attr]

    replicas = max(world_size // num_kv, 1)
    spans = [
        slice(rank * heads * size // world_size, (rank + 1) * heads * size // world_size),
        slice(0, size) if replicas > 1 else slice(rank * num_kv * size // 2, (rank + 1) * num_kv * size // 2),
    ]
    rows = [x.detach()[:, span].clone().requires_grad_() for x, span in zip(whole, spans, strict=True)]
    mine = [w.detach()[span].clone().requires_grad_() for w, span in zip(weights, spans, strict=True)]
    got = split_rms_norms(
        (rows[0], rows[1]),
        (mine[0], mine[1]),
        full_widths=(heads * size, num_kv * size),
        shares=(1.0, 1 / replicas),
        eps=eps,
        group=dist.group.WORLD,
    )
    for part, want, span in zip(got, wants, spans, strict=True):
        torch.testing.assert_close(part, want[:, span])
    # Each of the replicas brings its share of the gradient that reaches the head they hold.
    shares = (1.0, 1 / replicas)
    losses = [(p * f[:, s]).sum() * share for p, f, s, share in zip(got, factors, spans, shares, strict=True)]
    (losses[0] + losses[1]).backward()
    for x, w, row, weight, span, count in zip(whole, weights, rows, mine, spans, (1, replicas), strict=True):
        for local, full in ((row.grad, x.grad[:, span]), (weight.grad, w.grad[span])):  # type: ignore[index]
            assert local is not None
            if count > 1:
                dist.all_reduce(local)
            torch.testing.assert_close(local, full)


@pytest.mark.parametrize("num_kv", [2, 1])
def test_norms_over_split_rows_match_the_whole_rows(num_kv: int) -> None:
    run_ranks(_split_norms, WORLD, num_kv)


def mesh_of(tp: int, rank: int) -> ParallelMesh:
    return ParallelMesh(layout=ParallelLayout(tp=tp, ep=tp), rank=rank, tp_group=None, dp_group=None, kv_group=None)


def test_the_vocabulary_is_cut_into_equal_parts() -> None:
    parts = [vocabulary_part(51, mesh_of(4, rank)) for rank in range(4)]
    assert [tuple(part) for part in parts] == [(0, 13, 13), (13, 13, 13), (26, 13, 13), (39, 13, 12)]
    assert tuple(vocabulary_part(5, mesh_of(4, 3))) == (6, 2, 0)
    assert tuple(vocabulary_part(50, one_rank_mesh())) == (0, 50, 50)


@pytest.mark.parametrize(("vocab_size", "tp"), [(51, 2), (51, 4), (5, 4)])
def test_embeddings_of_the_parts_sum_to_the_whole(vocab_size: int, tp: int) -> None:
    ids = torch.tensor([[0, vocab_size - 1, 2], [vocab_size - 2, 2, 1]])
    whole = randn(vocab_size, 6).requires_grad_()
    want = F.embedding(ids, whole)
    factor = randn(2, 3, 6, seed=1)
    want.backward(factor)
    total = torch.zeros_like(want)
    for rank in range(tp):
        embedding = VocabularyEmbedding(vocab_size, 6, mesh=mesh_of(tp, rank)).double()
        part = embedding.part
        embedding.weight.data.fill_(torch.nan)  # padding must not be seen
        embedding.weight.data[: part.num_real] = whole.detach()[part.first : part.first + part.num_real]
        out = embedding(ids)
        out.backward(factor)
        total += out.detach()
        assert whole.grad is not None
        assert embedding.weight.grad is not None
        torch.testing.assert_close(
            embedding.weight.grad[: part.num_real], whole.grad[part.first : part.first + part.num_real]
        )
    torch.testing.assert_close(total, want.detach())


def test_the_head_gives_logits_or_losses() -> None:
    head = VocabularyHead(6, 11, mesh=one_rank_mesh()).double()
    x, targets = randn(2, 3, 6), torch.tensor([[1, -100, 10], [0, 3, -100]])
    logits = head(x)
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(head(x, targets=targets).nll, want)
    assert isinstance(head, nn.Linear)


def _meshes(rank: int, world_size: int) -> Any:
    found = {}
    for layout in (ParallelLayout(dp=2, tp=2, ep=1), ParallelLayout(dp=1, tp=4, ep=2), ParallelLayout(dp=4)):
        mesh = build_mesh(layout, num_key_value_heads=2)
        groups = [mesh.tp_group, mesh.dp_group, mesh.kv_group]
        ranks = [None if group is None else dist.get_process_group_ranks(group) for group in groups]
        found[str(layout)] = (ranks, mesh.dp_rank, mesh.group_rank, mesh.ep_rank, mesh.group is None, mesh.dp_ranks)
    return found


@pytest.mark.slow
def test_the_mesh_numbers_ranks_group_by_group() -> None:
    for rank, found in enumerate(run_ranks(_meshes, 4)):
        pair, twins = rank // 2, [rank // 2 * 2, rank // 2 * 2 + 1]
        dp_pair = [rank % 2, rank % 2 + 2]
        everyone = [0, 1, 2, 3]
        assert found["dp=2 tp=2 ep=1 etp=2"] == ([twins, dp_pair, None], pair, rank % 2, 0, False, dp_pair)
        assert found["dp=1 tp=4 ep=2 etp=2"] == ([everyone, [rank], twins], 0, rank, pair, False, [rank])
        assert found["dp=4 tp=1 ep=1 etp=1"] == ([[rank], everyone, None], rank, 0, 0, True, everyone)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("mixtral", tiny_config(qk_norm="none")),
        ("qwen3_moe", mixed_config()),
        ("olmoe", tiny_config(qk_norm="full", norm_topk_prob=False)),
    ],
    ids=["mixtral", "qwen3_moe", "olmoe"],
)
def test_names_on_disk_are_those_the_stock_model_saves(kind: str, config: Any, tmp_path: Path) -> None:
    assert stock_type(config) == kind
    state = full_state(config)
    referee_model(config, state).save_pretrained(tmp_path)
    stock = load_file(tmp_path / "model.safetensors")
    ours = {
        t.name: (name, t) for name in state for t in file_tensors(name, num_experts=config.num_experts, model_type=kind)
    }
    assert set(ours) == set(stock)
    assert (
        Counter(name for name, _ in ours.values())["model.layers.1.mlp.experts.gate_up_proj"] == 2 * config.num_experts
    )
    for key, (name, place) in ours.items():
        part = state[name] if place.expert is None else state[name][place.expert]
        part = part if place.half is None else part.chunk(2)[place.half]
        assert torch.equal(stock[key], part), key


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": "none", "norm_topk_prob": False},
        {"qk_norm": "none", "clip_qkv": 1.0},
        {"qk_norm": "none", "mlp_only_layers": [0]},
        {"qk_norm": "head", "clip_qkv": 1.0},
        {"qk_norm": "full", "mlp_only_layers": [0]},
        {"qk_norm": "full", "head_dim": 16},
        {"num_experts": 0, "num_experts_per_tok": 0},
    ],
    ids=str,
)
def test_what_no_stock_model_says_is_our_own_type(changes: dict[str, Any]) -> None:
    assert stock_type(tiny_config(**changes)) == "gather_moe"
