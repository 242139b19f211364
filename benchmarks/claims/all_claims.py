"""Every claim in order, and the tables that go with them."""

from claims.alternatives import ALTERNATIVES, CROSSOVER, THRESHOLD
from claims.claim import Claim
from claims.combined_layouts import COMBINED_LAYOUTS
from claims.combined_practice import COMBINED_PRACTICE
from claims.exchange import EXCHANGE, EXCHANGE_TIME
from claims.qk_gather import QK_GATHER
from claims.rates import RATES
from claims.roofline import JUDGEMENT, ROOFLINE
from claims.shadowing import SHADOWING
from claims.table import Table
from claims.throughput import THROUGHPUT
from claims.tuning_attention import TUNING_ATTENTION
from claims.tuning_experts import TUNING_EXPERTS

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
