"""The recorded steps of all ranks as one file for Perfetto: a process a rank, its parts, operators, transfers, memory.

The Trace Event Format, which ui.perfetto.dev and chrome://tracing read. Slices on one thread of it must nest, so spans
that overlap, as those of several streams do, get a thread each.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from recipe.profile.spans import Copy, Part, RankSpans, Transfer, Work
from recipe.profile.summary import MemoryLine

# Work that follows on work of the same part within this share of a step is drawn inside one slice.
GAP_SHARE = 1 / 4000

Span = TypeVar("Span", Work, Transfer, Copy)


class Slice(NamedTuple):
    name: str
    category: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = {}


def write_timeline(
    path: Path, ranks: Sequence[RankSpans], *, memory: Sequence[MemoryLine], facts: Mapping[str, Any]
) -> None:
    """Write one compressed file. Every rank's first step begins at 0: clocks of machines are not compared."""
    events = [event for spans in ranks for event in _events(spans)]
    for line in memory:
        events += [
            {"ph": "C", "name": "memory", "pid": line.rank, "ts": _us(time_s), "args": {"bytes": num_bytes}}
            for time_s, num_bytes in line.points
        ]
    content = {"displayTimeUnit": "ms", "otherData": dict(facts), "traceEvents": events}
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(content, file, separators=(",", ":"), allow_nan=False)


def _events(spans: RankSpans) -> Iterator[dict[str, Any]]:
    """Yield metadata and slices of a rank, thread by thread."""
    pid, first_s, last_s = spans.trace.rank, spans.steps[0].start_s, spans.steps[-1].end_s
    gap_s = GAP_SHARE * (spans.steps[0].end_s - first_s)
    yield _metadata("process", f"rank {pid}", pid=pid)
    yield _metadata("process", pid, pid=pid)
    steps = [Slice(f"step {s.number}" if s.number else "all", "step", s.start_s, s.end_s) for s in spans.steps]
    transfers = _lanes(transfer for step in spans.steps for transfer in step.transfers)
    works = _lanes(work for work in spans.works if work.end_s > first_s and work.start_s < last_s)
    copies = _lanes(copy for copy in spans.copies if copy.end_s > first_s and copy.start_s < last_s)
    lanes: dict[str, list[Iterable[Slice]]] = {
        "steps": [steps],
        "transfers": [_of_transfers(lane) for lane in transfers],
        "work": [_of_works(lane, gap_s=gap_s) for lane in works],
        "copies": [[Slice(c.name, "copies", c.start_s, c.end_s) for c in lane] for lane in copies],
    }
    threads = [
        (f"{name} {i + 1}" if i else name, slices) for name, found in lanes.items() for i, slices in enumerate(found)
    ]
    for tid, (name, slices) in enumerate(threads):
        yield _metadata("thread", name, pid=pid, tid=tid)
        yield _metadata("thread", tid, pid=pid, tid=tid)
        for one in slices:
            times = {"ts": _us(one.start_s - first_s), "dur": _us(one.end_s - first_s) - _us(one.start_s - first_s)}
            where = {"ph": "X", "pid": pid, "tid": tid}
            yield {**where, **times, "name": one.name, "cat": one.category, "args": one.args}


def _of_transfers(transfers: Iterable[Transfer]) -> Iterator[Slice]:
    """Yield a slice for each, and inside it the time in which this rank only waits for slower ones."""
    for one in transfers:
        numbers = {f"{name}_ms": 1e3 * getattr(one, f"{name}_s") for name in ("hidden", "exposed", "waiting")}
        args = {**_of_part(one.part), "sent_bytes": one.sent_bytes, "num_ranks": one.num_ranks, **numbers}
        yield Slice(f"{one.op} for {one.part.kind}", "transfer", one.start_s, one.end_s, args)
        if one.waiting_s > 0:
            ends_s = min(one.start_s + one.waiting_s, one.end_s)
            yield Slice("waiting for slower ranks", "waiting", one.start_s, ends_s)


def _of_works(works: Iterable[Work], *, gap_s: float) -> Iterator[Slice]:
    """Yield a slice for each part, and inside it those of its operators or kernels."""
    parts: list[list[Work]] = []
    for work in works:
        if parts and parts[-1][-1].part == work.part and work.start_s - parts[-1][-1].end_s <= gap_s:
            parts[-1].append(work)
        else:
            parts.append([work])
    for inside in parts:
        part = inside[0].part
        layer = "" if part.layer is None else f", layer {part.layer}"
        name = f"{part.kind}{layer}, {part.phase}"
        yield Slice(name, part.kind, inside[0].start_s, inside[-1].end_s, _of_part(part))
        yield from (Slice(work.name, part.kind, work.start_s, work.end_s) for work in inside)


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread spans over as few lanes as keep them apart, in the order of their start."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        free = next((lane for lane in lanes if lane[-1].end_s <= span.start_s), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _of_part(part: Part) -> dict[str, Any]:
    return {"part": part.kind, "layer": part.layer, "phase": part.phase}


def _metadata(of: str, value: str | int, *, pid: int, tid: int = 0) -> dict[str, Any]:
    """Return a name, or the place of a process or thread among the others."""
    key = "name" if isinstance(value, str) else "sort_index"
    return {"ph": "M", "name": f"{of}_{key}", "pid": pid, "tid": tid, "args": {key: value}}


def _us(time_s: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(time_s * 1e6, 3)
