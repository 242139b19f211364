"""FLOPs and parameters by formula equal published numbers and those counted over real modules; peaks for MFU."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.initialization import no_init_weights

from modeling.config import GatherMoeConfig
from modeling.experts import GatherMoeExperts
from modeling.model import GatherMoeForCausalLM
from recipe.settings.model import sizes_of
from recipe.settings.presets import PRESETS
from recipe.shared.flops import (
    count_parameters,
    find_peak,
    measure_peak,
    model_flops_per_token,
    sum_squared_lengths,
    table_peak,
)
from tests.resolving import TINY


@pytest.mark.requirement("R-LOG-03")
def test_flops_count_active_experts_and_causal_attention() -> None:
    assert count_parameters(TINY) == (34_336, 22_048)
    assert count_parameters(replace(TINY, tie_word_embeddings=True)).total == 34_336 - 50 * 32
    assert model_flops_per_token(TINY, attention_length=16) == 6 * 20_288 + 6_144 == 127_872
    eight = model_flops_per_token(replace(TINY, num_experts=8), attention_length=16)
    assert eight - 127_872 == 6 * 2 * 4 * 32, "more experts only add rows of the router"


def test_published_model_flops() -> None:
    """13,010 tokens/s on each GPU are published as 299.4 model TFLOP/s for this model at 4,096 tokens."""
    sizes = sizes_of(PRESETS["qwen3-30b-a3b"])
    assert 13_010 * model_flops_per_token(sizes, attention_length=4096) / 1e12 == pytest.approx(299.4, rel=0.005)


def on_meta(name: str) -> GatherMoeForCausalLM:
    """The whole model, every module of it, without memory for a single number."""
    with torch.device("meta"), no_init_weights():
        return GatherMoeForCausalLM(GatherMoeConfig(**PRESETS[name]))


@pytest.mark.parametrize("name", ["demo", "qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b"])
def test_counts_equal_those_over_the_real_modules(name: str) -> None:
    model, length = on_meta(name), 4096
    sizes = sizes_of(PRESETS[name])
    experts = [p for m in model.modules() if isinstance(m, GatherMoeExperts) for p in m.parameters()]
    total = sum(p.numel() for p in model.parameters())
    # A token is sent to A of the E experts along their first dim.
    idle = sum(p.numel() // p.shape[0] * (p.shape[0] - sizes.num_experts_per_tok) for p in experts)
    assert count_parameters(sizes) == (total, total - idle)
    # Norms multiply no matrices, and an embedding is looked up.
    idle += sum(p.numel() for p in model.parameters() if p.dim() == 1) + model.model.embed_tokens.weight.numel()
    attention = sum(layer.self_attn.num_heads * layer.self_attn.head_dim * length for layer in model.model.layers)
    assert model_flops_per_token(sizes, attention_length=length) == 6 * (total - idle) + 6 * attention


def added_product_flops(total: torch.Size, a: torch.Size, b: torch.Size, **_: object) -> int:
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": "full"}, {"mlp_only_layers": [0]}, {"num_experts_per_tok": 3, "num_key_value_heads": 2}]
)
def test_a_step_multiplies_as_often_as_the_formula_says(changes: dict[str, object]) -> None:
    """Eager attention computes the full square, of which a causal one needs half."""
    sizes_given = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 48, "vocab_size": 128}
    kwargs = {**PRESETS["demo"], **sizes_given, **changes}
    model = GatherMoeForCausalLM(GatherMoeConfig(**kwargs, attn_implementation="eager"))
    assert count_parameters(sizes_of(kwargs)).total == sum(p.numel() for p in model.parameters())
    ids = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(0))
    # torch counts no product that is added in place.
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_product_flops}) as counter:
        model(ids, labels=ids, output_logits=False, use_cache=False).loss.backward()
    want = ids.numel() * model_flops_per_token(sizes_of(kwargs), attention_length=2 * 32)
    assert counter.get_total_flops() == want


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
        *((name, None) for name in ("NVIDIA A10", "NVIDIA H2000", "Tesla T4", "NVIDIA GeForce RTX 4090 D")),
        *((name, None) for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb")),
    ],
)
def test_peaks_of_known_gpus_and_none_of_others(name: str, tflops: float | None) -> None:
    peak = table_peak(name)
    assert (None if peak is None else peak.flops_per_s) == (None if tflops is None else tflops * 1e12)


def test_a_peak_comes_from_the_table_in_bf16_or_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert find_peak("cuda", precision="bf16") == (989.4e12, "data sheet of NVIDIA H200, dense bf16")
    peak = find_peak("cpu", precision="fp32")
    assert peak.source == "measured: 1024x1024 product in fp32 on cpu"
    assert 1e8 < peak.flops_per_s < 1e14
    assert measure_peak("cpu", precision="bf16", num_repeats=1).source.endswith("in bf16 on cpu")
