"""Hardware whose speeds are round numbers, so that times can be worked out by hand."""

from dataclasses import fields

from recipe.plan.hardware import (
    PASSES,
    PRODUCT_KINDS,
    AttentionRate,
    Efficiencies,
    Hardware,
    Link,
    Measured,
    ProductRate,
)

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
        efficiencies=Efficiencies(**{share.name: 1.0 for share in fields(Efficiencies)}),
        launch_s=1e-6,
        sources={"measured": "made up"},
        measured={"fp32": measured},
    )
