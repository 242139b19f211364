"""One step as bars on a time axis, a lane for work and one for transfers of every rank, few enough for a page."""

from collections.abc import Sequence
from typing import NamedTuple

from recipe.profile.account import Account
from recipe.profile.spans import Part, RankSpans, Work
from recipe.profile.transfers import Sent

MAX_RANKS = 16
# Work that follows on work of the same part within this share of the step is drawn as one bar.
GAP_SHARE = 1 / 4000


class WorkBar(NamedTuple):
    """`num_operators` of one part with hardly anything between; `name` is that of the longest."""

    start_s: float
    end_s: float
    part: Part
    num_operators: int
    name: str


class TransferBar(NamedTuple):
    start_s: float
    end_s: float
    op: str
    part: Part
    sent_bytes: float | None
    hidden_s: float
    exposed_s: float
    waiting_s: float


class RankTimeline(NamedTuple):
    """Seconds since the step's start on this rank. Clocks of several machines are not compared."""

    rank: int
    works: list[WorkBar]
    transfers: list[TransferBar]


def shown_ranks(num_ranks: int) -> list[int]:
    """At most MAX_RANKS places among the ranks, evenly apart."""
    count = min(num_ranks, MAX_RANKS)
    return sorted({i * (num_ranks - 1) // max(count - 1, 1) for i in range(count)})


def rank_timeline(spans: RankSpans, index: int, *, account: Account, sent: Sequence[Sent]) -> RankTimeline:
    """Of the rank's step number `index`; `sent` are that step's collectives, as they were accounted for."""
    window = spans.windows[index]
    works = [w for w in spans.works if w.end_s > window.start_s and w.start_s < window.end_s]
    gap_s = (window.end_s - window.start_s) * GAP_SHARE
    bars = [
        TransferBar(
            start_s=one.transfer.start_s - window.start_s,
            end_s=one.transfer.end_s - window.start_s,
            op=one.transfer.op,
            part=one.transfer.part,
            sent_bytes=one.transfer.sent_bytes,
            hidden_s=account.hidden.get(i, 0.0),
            exposed_s=account.exposed.get(i, 0.0),
            waiting_s=account.waiting.get(i, 0.0),
        )
        for i, one in enumerate(sent)
    ]
    return RankTimeline(spans.trace.rank, _joined(works, gap_s=gap_s, origin_s=window.start_s), bars)


def _joined(works: Sequence[Work], *, gap_s: float, origin_s: float) -> list[WorkBar]:
    """Bars of neighbours that belong together, named after the longest of them."""
    bars: list[WorkBar] = []
    longest_s = 0.0
    for work in works:
        duration_s = work.end_s - work.start_s
        start_s, end_s = work.start_s - origin_s, work.end_s - origin_s
        last = bars[-1] if bars else None
        if last is not None and last.part == work.part and start_s - last.end_s <= gap_s:
            name, longest_s = (work.name, duration_s) if duration_s > longest_s else (last.name, longest_s)
            end_s = max(last.end_s, end_s)
            bars[-1] = last._replace(end_s=end_s, num_operators=last.num_operators + 1, name=name)
        else:
            bars.append(WorkBar(start_s, end_s, work.part, 1, work.name))
            longest_s = duration_s
    return bars
