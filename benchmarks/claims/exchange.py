"""Gathering all tokens against exchanging routed rows, in bytes of a rank, forward: dispatch and combine."""

from dataclasses import replace

from claims import case
from claims.claim import MS, PERCENT
from claims.machines import A100_BUS_BYTES_PER_S
from claims.table import Column, Row, Table

SETTINGS = ((4, 1, 8), (4, 2, 8), (4, 4, 64), (4, 8, 128), (8, 2, 64), (8, 8, 128), (16, 8, 128))  # N, k, E


def dispatch_bytes(strategy: str, *, ranks: int, active: int, experts: int, rho: float = 1.0) -> float:
    """Of "gather_tokens" or "all_to_all", tokens there and sums home, by the project's formulas."""
    sizes = replace(case.LAYER, num_experts=experts, num_experts_per_tok=active)
    return case.forward_payload(case.moe_traffic(ranks=ranks, sizes=sizes, rho=rho), strategy=strategy)


def once_per_rank_bytes(*, ranks: int, active: int, experts: int) -> float:
    """An exchange that sends a token once to each rank with one of its experts, even routing."""
    others = case.sent_share(ranks) * case.ranks_hit(experts=experts, active=active, ranks=ranks)
    return 2 * others * case.tokens_bytes() / ranks


def gathered_s() -> float:
    """Of the case on A100: tokens gathered and sums scattered, without ids."""
    return dispatch_bytes("gather_tokens", ranks=case.RANKS, active=case.ACTIVE, experts=8) / A100_BUS_BYTES_PER_S


def exchanged_s(*, rho: float, sync_s: float = 0.0) -> float:
    """Of the case on A100: the busiest rank's rows there and back, and what it waits for its host."""
    sent = dispatch_bytes("all_to_all", ranks=case.RANKS, active=case.ACTIVE, experts=8, rho=rho)
    return sent / A100_BUS_BYTES_PER_S + sync_s


def exchange_rows() -> tuple[Row, ...]:
    rows = []
    for ranks, active, experts in SETTINGS:
        unit = case.tokens_bytes() / ranks
        sizes = {"ranks": ranks, "active": active, "experts": experts}
        exchanged, gathered = (dispatch_bytes(name, **sizes) / unit for name in ("all_to_all", "gather_tokens"))
        once = once_per_rank_bytes(**sizes) / unit
        counts = {"exchanged": exchanged, "once": once, "gathered": gathered}
        rows.append({**sizes, **counts, "ratio": gathered / exchanged, "ratio_once": gathered / once})
    return tuple(rows)


def time_rows() -> tuple[Row, ...]:
    gathered = gathered_s()
    level_sync = gathered - exchanged_s(rho=1)
    settings = ((1.0, 0.0), (2.0, 0.0), (1.0, level_sync), (2.5, 0.1e-3), (gathered / 0.6 / exchanged_s(rho=1), 0.0))
    rows = []
    for rho, sync_s in settings:
        exchanged = exchanged_s(rho=rho, sync_s=sync_s)
        times = {"gathered": gathered, "exchanged": exchanged, "saved": round(1 - gathered / exchanged, 9)}
        rows.append({"rho": rho, "sync": sync_s, **times})
    return tuple(rows)


EXCHANGE = Table(
    key="exchange",
    title="All-gather against all-to-all, in bytes",
    intro=(
        "What a rank sends forward in a MoE layer, in units of its own tokens' bytes (T/N·H·b), even routing. "
        "all-to-all: 2·k·(N-1)/N, a row per token and expert, there and back. Once per rank: 2·(N-1)·P, where P = 1 "
        "- C(E-E/N, k)/C(E, k) is the chance that a rank has one of a token's experts. Gathered and scattered: "
        "2·(N-1)."
    ),
    columns=(
        Column("ranks", "N"),
        Column("active", "k"),
        Column("experts", "E"),
        Column("exchanged", "all-to-all", None, 2),
        Column("once", "once per rank", None, 2),
        Column("gathered", "gathered", None, 0),
        Column("ratio", "gathered / all-to-all", None, 2),
        Column("ratio_once", "gathered / once per rank", None, 2),
    ),
    rows=exchange_rows,
    notes=(
        "All-to-all's busiest rank sends or receives rho times as much, rho being its load over the mean; gathering "
        "does not depend on the routing. So gathering sends less once rho·k >= N, with k = N·P where each rank gets "
        "a token once.",
    ),
)
EXCHANGE_TIME = Table(
    key="exchange_time",
    title="All-gather against all-to-all, in time",
    intro=(
        "The same for the case above (T=16,384, H=1024, N=4, k=2) at 200 GB/s: t = 2·q·T·H·b / rate gathered, "
        "2·rho·k·q·T/N·H·b / rate + wait exchanged, the wait being for the host that must know the counts."
    ),
    columns=(
        Column("rho", "rho", None, 2),
        Column("sync", "wait for the host", MS, 3),
        Column("gathered", "gathered", MS, 3),
        Column("exchanged", "all-to-all", MS, 3),
        Column("saved", "time saved by gathering", PERCENT),
    ),
    rows=time_rows,
)
