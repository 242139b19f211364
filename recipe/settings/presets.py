"""Named model configurations, as keyword arguments of our model's config; the sizes are those of the published models.

`read_model` in model.py turns a name into a model.
"""

from collections.abc import Mapping
from typing import Any

# In the order in which the numbers of each preset stand below.
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok"),
)


def _preset(*sizes: int, qk_norm: str, positions: int, theta: float, eps: float, sums_to_one: bool = True) -> Any:
    return {
        **dict(zip(SIZES, sizes, strict=True)),
        "norm_topk_prob": sums_to_one,
        "qk_norm": qk_norm,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
    }


OLMOE: Mapping[str, Any] = _preset(
    *(50304, 2048, 1024, 1024, 16, 16, 16, 128, 64, 8),
    qk_norm="full",
    positions=4096,
    theta=1e4,
    eps=1e-5,
    sums_to_one=False,
)
# The articles' own model as far as they state it: width 1024, 64 heads (of 16 numbers, then), 8 experts of 4 x 1024
# with two per token, up to 32K positions. They name no layers and no vocabulary: 24 layers and 32,000 tokens are
# assumed. By the rates that `benchmarks/claims` assumes, their 290 ms are a step of about 21 layers. Their experts have
# two matrices, those here three.
ARTICLE: Mapping[str, Any] = _preset(
    *(32000, 1024, 4096, 4096, 24, 64, 64, 16, 8, 2), qk_norm="none", positions=32768, theta=1e4, eps=1e-6
)
# One and a half times as wide experts and 256K positions are what the second one asks for.
WIDER = {"intermediate_size": 6144, "moe_intermediate_size": 6144, "max_position_embeddings": 262144}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "demo": _preset(*(8192, 256, 768, 384, 4, 8, 4, 32, 8, 2), qk_norm="head", positions=2048, theta=1e4, eps=1e-6),
    "qwen3-30b-a3b": _preset(
        *(151936, 2048, 6144, 768, 48, 32, 4, 128, 128, 8), qk_norm="head", positions=40960, theta=1e6, eps=1e-6
    ),
    "qwen3-235b-a22b": _preset(
        *(151936, 4096, 12288, 1536, 94, 64, 4, 128, 128, 8), qk_norm="head", positions=40960, theta=1e6, eps=1e-6
    ),
    "mixtral-8x7b": _preset(
        *(32000, 4096, 14336, 14336, 32, 32, 8, 128, 8, 2), qk_norm="none", positions=32768, theta=1e6, eps=1e-5
    ),
    "mixtral-8x22b": _preset(
        *(32000, 6144, 16384, 16384, 56, 48, 8, 128, 8, 2), qk_norm="none", positions=65536, theta=1e6, eps=1e-5
    ),
    "olmoe-1b-7b": OLMOE,
    "olmoe": OLMOE,
    "article-1": ARTICLE,
    "article-2": {**ARTICLE, **WIDER},
}
