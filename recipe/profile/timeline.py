"""The recorded steps of all ranks as one file for Perfetto: a process a rank, its parts, operators, transfers, memory.

The Trace Event Format, which ui.perfetto.dev and chrome://tracing read. Slices on one thread of it must nest, so spans
that overlap, as those of several streams do, get a thread each.
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from recipe.profile.account import Account, MemoryLine
from recipe.profile.spans import Copy, Part, RankSpans, Transfer, Window, Work
from recipe.profile.transfers import Sent

# Work that follows on work of the same part within this share of a step is drawn inside one slice.
GAP_SHARE = 1 / 4000

Slice = dict[str, Any]
Item = TypeVar("Item")


class SlicedTransfer(NamedTuple):
    """A collective, and what its seconds count as where nothing else hides them."""

    transfer: Transfer
    hidden_s: float
    exposed_s: float
    waiting_s: float


class RankTimeline(NamedTuple):
    """All recorded steps of a rank, on the trace's clock."""

    rank: int
    steps: list[Window]
    works: list[Work]
    transfers: list[SlicedTransfer]
    copies: list[Copy]


def rank_timeline(spans: RankSpans, accounts: Sequence[Account], sent: Sequence[Sequence[Sent]]) -> RankTimeline:
    """`accounts` and `sent` are the rank's, step by step."""
    first_s, last_s = spans.windows[0].start_s, spans.windows[-1].end_s
    transfers = [
        SlicedTransfer(
            one.transfer, account.hidden.get(i, 0.0), account.exposed.get(i, 0.0), account.waiting.get(i, 0.0)
        )
        for account, step in zip(accounts, sent, strict=True)
        for i, one in enumerate(step)
    ]
    works = [work for work in spans.works if work.end_s > first_s and work.start_s < last_s]
    copies = [copy for copy in spans.copies if copy.end_s > first_s and copy.start_s < last_s]
    return RankTimeline(spans.trace.rank, spans.windows, works, transfers, copies)


def write_timeline(
    path: Path, timelines: Sequence[RankTimeline], *, memory: Sequence[MemoryLine], facts: Mapping[str, Any]
) -> None:
    """Write one compressed file. Every rank's first step begins at 0: clocks of machines are not compared."""
    events = [event for timeline in timelines for event in _events(timeline)]
    for line in memory:
        events += [
            {"ph": "C", "name": "memory", "pid": line.rank, "ts": _us(time_s), "args": {"bytes": num_bytes}}
            for time_s, num_bytes in line.points
        ]
    content = {"displayTimeUnit": "ms", "otherData": dict(facts), "traceEvents": events}
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(content, file, separators=(",", ":"), allow_nan=False)


def _events(timeline: RankTimeline) -> Iterator[Slice]:
    """Metadata and slices of a rank, thread by thread."""
    pid, origin_s = timeline.rank, timeline.steps[0].start_s
    gap_s = GAP_SHARE * (timeline.steps[0].end_s - origin_s)
    yield _named("process_name", f"rank {pid}", pid=pid)
    yield {**_named("process_sort_index", "", pid=pid), "args": {"sort_index": pid}}
    threads = [
        ("steps", [_slice(step, f"step {step.step}" if step.step else "all", "step") for step in timeline.steps])
    ]
    transfers = _lanes(timeline.transfers, [one.transfer for one in timeline.transfers])
    lanes = {
        "transfers": [[part for one in lane for part in _of_transfer(one)] for lane in transfers],
        "work": [list(_of_works(lane, gap_s=gap_s)) for lane in _lanes(timeline.works, timeline.works)],
        "copies": [[_slice(c, c.name, "copies") for c in lane] for lane in _lanes(timeline.copies, timeline.copies)],
    }
    for name, found in lanes.items():
        threads += [(f"{name} {i + 1}" if i else name, slices) for i, slices in enumerate(found)]
    for tid, (name, slices) in enumerate(threads):
        yield _named("thread_name", name, pid=pid, tid=tid)
        yield {**_named("thread_sort_index", "", pid=pid, tid=tid), "args": {"sort_index": tid}}
        for one in slices:
            start_us, end_us = (_us(one.pop(end) - origin_s) for end in ("start_s", "end_s"))
            yield {"ph": "X", "pid": pid, "tid": tid, "ts": start_us, "dur": end_us - start_us, **one}


def _of_transfer(one: SlicedTransfer) -> Iterator[Slice]:
    """A slice, and inside it the time in which this rank only waits for slower ones."""
    transfer, *seconds = one
    numbers = dict(zip(("hidden_ms", "exposed_ms", "waiting_ms"), (1e3 * s for s in seconds), strict=True))
    args = {**_of_part(transfer.part), "sent_bytes": transfer.sent_bytes, "num_ranks": transfer.num_ranks, **numbers}
    yield _slice(transfer, f"{transfer.op} for {transfer.part.kind}", "transfer", args)
    if one.waiting_s > 0:
        waits = Window(0, transfer.start_s, min(transfer.start_s + one.waiting_s, transfer.end_s))
        yield _slice(waits, "waiting for slower ranks", "waiting")


def _of_works(works: Sequence[Work], *, gap_s: float) -> Iterator[Slice]:
    """A slice for each part, and inside it those of its operators or kernels."""
    parts: list[list[Work]] = []
    for work in works:
        if parts and parts[-1][-1].part == work.part and work.start_s - parts[-1][-1].end_s <= gap_s:
            parts[-1].append(work)
        else:
            parts.append([work])
    for inside in parts:
        part, whole = inside[0].part, Window(0, inside[0].start_s, inside[-1].end_s)
        layer = "" if part.layer is None else f", layer {part.layer}"
        yield _slice(whole, f"{part.kind}{layer}, {part.phase}", part.kind, _of_part(part))
        yield from (_slice(work, work.name, part.kind) for work in inside)


def _lanes(items: Sequence[Item], spans: Sequence[Any]) -> list[list[Item]]:
    """Spread items over as few lanes as keep their spans apart, in the order of their start."""
    lanes: list[list[Item]] = []
    ends_s: list[float] = []
    for item, span in sorted(zip(items, spans, strict=True), key=lambda pair: pair[1].start_s):
        free = next((i for i, end_s in enumerate(ends_s) if end_s <= span.start_s), len(lanes))
        if free == len(lanes):
            lanes.append([])
            ends_s.append(0.0)
        lanes[free].append(item)
        ends_s[free] = span.end_s
    return lanes


def _slice(span: Any, name: str, category: str, args: Mapping[str, Any] | None = None) -> Slice:
    return {"name": name, "cat": category, "start_s": span.start_s, "end_s": span.end_s, "args": dict(args or {})}


def _of_part(part: Part) -> dict[str, Any]:
    return {"part": part.kind, "layer": part.layer, "phase": part.phase}


def _named(kind: str, name: str, *, pid: int, tid: int = 0) -> Slice:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(time_s: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(time_s * 1e6, 3)
