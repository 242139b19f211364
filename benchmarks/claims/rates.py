"""The rates that claims are held against beside those that the planner takes for the same machines."""

from claims.claim import GB_PER_S, PERCENT
from claims.machines import A100, A100_ASSUMED, H100, H100_ASSUMED
from claims.table import Column, Row, Table
from recipe.plan.hardware import USUAL, find_hardware


def rate_rows() -> tuple[Row, ...]:
    rows: list[Row] = []
    for name, label, here in ((A100, "A100", A100_ASSUMED), (H100, "H100", H100_ASSUMED)):
        planned = find_hardware(name)
        assert planned.intra is not None
        assert planned.efficiencies is not None
        rows.append(
            {
                "machine": label,
                "products": here.products,
                "planned_products": planned.efficiencies.product,
                "attention": here.attention,
                "planned_attention": planned.efficiencies.attention[USUAL].forward,
                "link": here.link_bytes_per_s,
                "planned_link": planned.intra.bytes_per_s,
            }
        )
    return tuple(rows)


RATES = Table(
    key="rates",
    title="What is assumed here, and by the planner",
    intro=(
        "The layer above is held against round numbers, since it belongs to no program. `gather-moe plan` predicts "
        'this project\'s own step and differs from it on purpose: its rates are in the columns "planner", products '
        "fall short of them where they are small; experts have three matrices, not two; with whole experts on a rank "
        "a GPU computes as many rows as could come, not those that do; what it recomputes, norms, permutations, loss "
        "and optimizer are counted."
    ),
    columns=(
        Column("machine", "machine"),
        Column("products", "products, here", PERCENT, 0),
        Column("planned_products", "planner, on a cold device", PERCENT, 0),
        Column("attention", "attention, here", PERCENT, 0),
        Column("planned_attention", "planner, forward", PERCENT, 0),
        Column("link", "link, here", GB_PER_S, 0),
        Column("planned_link", "planner, gathers", GB_PER_S, 0),
    ),
    rows=rate_rows,
)
