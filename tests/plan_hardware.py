"""What plans are asked for in tests: requests, and hardware whose round numbers let times be worked out by hand."""

from collections.abc import Mapping
from typing import Any

from recipe.plan.hardware import (
    PASSES,
    PRODUCT_KINDS,
    AttentionRate,
    Hardware,
    Link,
    Measured,
    ProductRate,
    find_hardware,
)
from recipe.plan.search import PlanRequest
from recipe.settings.flags import Arguments
from recipe.settings.model import read_model

# What makes a backward of attention, which takes 2.5 forwards, as long as the 2 that model FLOPs count.
BACKWARD = 1.25


def flat_hardware(
    *,
    rate: float = 1e9,
    pass_s: float = 1e-30,
    alpha_s: float = 0.0,
    bytes_per_s: float = 1e9,
    busy: float = 0.0,
    ranks_per_node: int = 8,
    inter: Link | None = None,
) -> Hardware:
    """A CPU that multiplies at `rate` FLOP/s whatever the shape; a pass takes `pass_s` per 1024 elements."""
    rates = tuple(ProductRate(rows, width, rate) for rows in (16, 64, 256) for width in (64, 512))
    measured = Measured(
        products=dict.fromkeys(PRODUCT_KINDS, rates),
        attention=tuple(AttentionRate(length, 64, rate, BACKWARD * rate) for length in (16, 4096)),
        passes=dict.fromkeys(PASSES, ((2**10, pass_s), (2**20, pass_s * 2**10))),
    )
    return Hardware(
        name="flat",
        device="cpu",
        memory_bytes=2**34,
        ranks_per_node=ranks_per_node,
        peak_flops_per_s={"fp32": rate},
        memory_bytes_per_s=1e10,
        intra=Link(alpha_s=alpha_s, bytes_per_s=bytes_per_s, busy=busy),
        inter=inter,
        efficiencies=None,
        launch_s=1e-6,
        sources={"measured": "made up"},
        measured={"fp32": measured},
        compute_capability=None,
    )


def plan_request(
    model: str | Mapping[str, Any] = "demo",
    *,
    hardware: str = "a100-80g",
    overrides: dict[str, Any] | None = None,
    **changes: Any,
) -> PlanRequest:
    """A small model on eight A100 of one node, unless told otherwise; a model is named, or given whole."""
    if isinstance(model, str):
        model = read_model(Arguments(config_name=model, config_overrides=overrides or {})).kwargs
    values = {"gpus": 8, "ranks_per_node": changes.get("gpus", 8), "block_size": 512, "sequences_per_step": 16}
    return PlanRequest(model=model, hardware=find_hardware(hardware), **{**values, "precision": "bf16", **changes})
