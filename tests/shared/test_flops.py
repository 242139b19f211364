"""FLOPs and parameters of a model against numbers computed by hand and published ones; the peaks MFU divides by."""

from dataclasses import replace

import pytest
import torch

from modeling.spec import ModelSizes
from recipe.shared.flops import (
    count_parameters,
    find_peak,
    measure_peak,
    model_flops_per_token,
    sum_squared_lengths,
    table_peak,
)
from tests.resolving import TINY

QWEN3_30B = ModelSizes(
    vocab_size=151936,
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    intermediate_size=0,
    max_position_embeddings=40960,
    num_hidden_layers=48,
    qk_norm="head",
)
MIXTRAL_8X7B = ModelSizes(
    vocab_size=32000,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=14336,
    intermediate_size=0,
    max_position_embeddings=32768,
    num_hidden_layers=32,
    qk_norm="none",
)


def test_r_log_03_flops_count_active_experts_and_causal_attention() -> None:
    assert model_flops_per_token(TINY, attention_length=16) == 6 * 20_288 + 6_144 == 127_872


def test_r_log_03_fewer_active_experts_cost_less() -> None:
    one = model_flops_per_token(replace(TINY, num_experts_per_tok=1), attention_length=16)
    assert 127_872 - one == 6 * 2 * 3 * 32 * 32


def test_r_log_03_more_experts_only_add_router_flops() -> None:
    eight = model_flops_per_token(replace(TINY, num_experts=8), attention_length=16)
    assert eight - 127_872 == 6 * 2 * 4 * 32


def test_published_model_flops() -> None:
    """13,010 tokens/s on each GPU are published as 299.4 model TFLOP/s for this model at 4,096 tokens."""
    tflops = 13_010 * model_flops_per_token(QWEN3_30B, attention_length=4096) / 1e12
    assert tflops == pytest.approx(299.4, rel=0.005)


def test_dense_layers_count_their_own_width() -> None:
    dense = replace(TINY, dense_layers=(0,), intermediate_size=100)
    moe_layer, dense_layer = 32 * 4 + 2 * 3 * 32 * 32, 3 * 32 * 100
    assert model_flops_per_token(dense, attention_length=16) == 127_872 + 6 * (dense_layer - moe_layer)


def test_parameter_counts_of_tiny() -> None:
    assert count_parameters(TINY) == (34_336, 22_048)


@pytest.mark.parametrize(("sizes", "total", "active"), [(QWEN3_30B, 30.53e9, 3.35e9), (MIXTRAL_8X7B, 46.70e9, 12.88e9)])
def test_parameter_counts_of_published_models(sizes: ModelSizes, total: float, active: float) -> None:
    counts = count_parameters(sizes)
    assert counts.total == pytest.approx(total, rel=1e-3)
    assert counts.active == pytest.approx(active, rel=1e-3)


@pytest.mark.parametrize(("qk_norm", "weights"), [("none", 0), ("head", 2 * 2 * 8), ("full", 2 * (32 + 16))])
def test_qk_norm_parameters(qk_norm: str, weights: int) -> None:
    assert count_parameters(replace(TINY, qk_norm=qk_norm)).total == 34_336 + weights


def test_tied_embeddings_count_once() -> None:
    assert count_parameters(replace(TINY, tie_word_embeddings=True)).total == 34_336 - 50 * 32


def test_documents_shorten_attention() -> None:
    squared = sum_squared_lengths([(0, 4), (0,)], block_size=16)
    assert squared == 4**2 + 12**2 + 16**2
    shorter = model_flops_per_token(TINY, attention_length=squared / 32)
    assert 127_872 - shorter == pytest.approx(6_144 * (1 - squared / 32 / 16))


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_peaks_of_known_gpus(name: str, tflops: float) -> None:
    peak = table_peak(name)
    assert peak is not None
    assert peak.flops_per_s == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA A10", "NVIDIA H2000", "Tesla T4"),
        *("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"),
    ],
)
def test_an_unknown_gpu_has_no_peak_in_the_table(name: str) -> None:
    assert table_peak(name) is None


def test_gpu_peak_comes_from_the_table_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert find_peak("cuda", precision="bf16") == (989.4e12, "data sheet of NVIDIA H200, dense bf16")


def test_cpu_peak_is_measured() -> None:
    peak = find_peak("cpu", precision="fp32")
    assert peak.source == "measured: 1024x1024 product in fp32 on cpu"
    assert 1e8 < peak.flops_per_s < 1e14
    assert measure_peak("cpu", precision="bf16", num_repeats=1).source.endswith("in bf16 on cpu")
