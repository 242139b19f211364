"""The small layers: products that save their parameter, norms over split rows, embedding and head over a vocabulary."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

from modeling import operators
from modeling.layers import Linear, linear, rms_norm
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh, one_rank_mesh
from modeling.vocabulary import VocabularyEmbedding, VocabularyHead
from tests.engine_runs import mesh_without_groups
from tests.ranks import run_ranks


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


def test_a_copy_of_the_code_in_a_folder_of_any_name_has_operators_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes ASCII alone; two folders must not share a name either."""
    monkeypatch.syspath_prepend(str(tmp_path))
    namespaces = {operators.NAMESPACE}
    for folder in ("模型", "数据"):
        shutil.copytree(Path(operators.__file__).parent, tmp_path / folder)
        copy = importlib.import_module(f"{folder}.layers")
        x, weight = torch.randn(2, 8), torch.ones(8)
        assert torch.equal(copy.rms_norm(x, weight, eps=1e-5), rms_norm(x, weight, eps=1e-5))
        namespaces.add(importlib.import_module(f"{folder}.operators").NAMESPACE)
    assert len(namespaces) == 3


class Decomposed(TorchDispatchMode):
    """torch's fused norm has no backward on a CPU, but torch knows what it computes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.ops.aten._fused_rms_norm_backward.default:
            func = decomposition_table[func]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gpus_fused_norm_is_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a weight in float32 beside tokens in bfloat16, too, and heads that are no memory of their own."""
    x, grad = ((randn(6, 8, 14, seed=seed)[..., :7] * 3).to(dtype) for seed in (0, 1))
    for weight_dtype in {dtype, torch.float32}:
        weight = randn(7, seed=2).to(weight_dtype)
        want = operators._rms_norm(x, weight, 1e-5)
        gradients = operators._rms_norm_back(grad, x, weight, want[1])
        with Decomposed():
            got = operators.fused_rms_norm(x, weight, 1e-5)
            fused = operators.fused_rms_norm_back(grad, x, weight, got[1])
        for ours, theirs in zip((*want, *gradients), (*got, *fused), strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            torch.testing.assert_close(ours, theirs, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize(("vocab_size", "tp"), [(51, 2), (51, 4), (5, 4)])
def test_embeddings_of_the_parts_sum_to_the_whole(vocab_size: int, tp: int) -> None:
    ids = torch.tensor([[0, vocab_size - 1, 2], [vocab_size - 2, 2, 1]])
    whole = randn(vocab_size, 6).requires_grad_()
    want = F.embedding(ids, whole)
    factor = randn(2, 3, 6, seed=1)
    want.backward(factor)
    total = torch.zeros_like(want)
    for rank in range(tp):
        embedding = VocabularyEmbedding(
            vocab_size, 6, mesh=mesh_without_groups(ParallelLayout(tp=tp, ep=tp), rank)
        ).double()
        part = embedding.part
        embedding.weight.data.fill_(torch.nan)  # padding must not be seen
        embedding.weight.data[: part.num_real] = whole.detach()[part.first : part.first + part.num_real]
        out = embedding(ids)
        out.backward(factor)
        total += out.detach()
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
