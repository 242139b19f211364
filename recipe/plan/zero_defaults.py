"""DeepSpeed 0.19.8's sizes, in numbers: where the "zero_optimization" block has none, and one that is no setting."""

import sys
from collections.abc import Mapping
from typing import Any

from recipe.settings.resolve import BUCKET_KEY, USUAL_BUCKET

DEFAULTS = {
    BUCKET_KEY: USUAL_BUCKET,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_model_persistence_threshold": sys.maxsize,
}
PLAIN_BUCKET = 500_000_000  # where the engine itself sums gradients: without ZeRO, and in bf16 with stage 1


def zero_number(zero: Mapping[str, Any], key: str) -> int:
    """A size of the block, or its default."""
    return int(zero.get(key, DEFAULTS[key]))
