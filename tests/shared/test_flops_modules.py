"""Parameters and FLOPs counted over the real modules, and while they run, are exactly those of the formulas."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.initialization import no_init_weights

from modeling.config import GatherMoeConfig
from modeling.experts import GatherMoeExperts
from modeling.model import GatherMoeForCausalLM
from recipe.settings.model import sizes_of
from recipe.settings.presets import PRESETS
from recipe.shared.flops import count_parameters, model_flops_per_token

PUBLISHED = {"qwen3-30b-a3b": (30.53e9, 3.35e9), "mixtral-8x7b": (46.70e9, 12.88e9)}


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
    if name in PUBLISHED:
        assert count_parameters(sizes) == tuple(pytest.approx(number, rel=2e-3) for number in PUBLISHED[name])
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
    ids = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(0))
    # torch counts no product that is added in place.
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_product_flops}) as counter:
        model(ids, labels=ids, output_logits=False, use_cache=False).loss.backward()
    want = ids.numel() * model_flops_per_token(sizes_of(kwargs), attention_length=2 * 32)
    assert counter.get_total_flops() == want
