"""Every claim in order, and the tables that go with them."""

from recipe.claims.alternatives import ALTERNATIVES, CROSSOVER, THRESHOLD
from recipe.claims.claim import Claim
from recipe.claims.combined_layouts import COMBINED_LAYOUTS
from recipe.claims.combined_practice import COMBINED_PRACTICE
from recipe.claims.exchange import EXCHANGE, EXCHANGE_TIME
from recipe.claims.qk_gather import QK_GATHER
from recipe.claims.rates import RATES
from recipe.claims.roofline import JUDGEMENT, ROOFLINE
from recipe.claims.shadowing import SHADOWING
from recipe.claims.table import Table
from recipe.claims.throughput import THROUGHPUT
from recipe.claims.tuning_attention import TUNING_ATTENTION
from recipe.claims.tuning_experts import TUNING_EXPERTS

CLAIMS: tuple[Claim, ...] = (*TUNING_ATTENTION, *TUNING_EXPERTS, *COMBINED_LAYOUTS, *COMBINED_PRACTICE)
TABLES: tuple[Table, ...] = (
    THROUGHPUT,
    EXCHANGE,
    EXCHANGE_TIME,
    ALTERNATIVES,
    CROSSOVER,
    THRESHOLD,
    SHADOWING,
    QK_GATHER,
    ROOFLINE,
    RATES,
    JUDGEMENT,
)
