"""Traces of all ranks taken apart into one summary: where each step's time goes, and what its transfers achieve.

Every moment of a rank's step counts once. With work it counts as work, whatever else happens in it, and transfers in it
are hidden. Without work a transfer is exposed, unless it is in the part of it for which this rank only waits for slower
ones. So the sums are of unions of intervals, never of durations that overlap, and they add up to the step.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from recipe.profile.spans import Copy, Part, RankSpans, Step, Transfer, Work, read_spans
from recipe.profile.trace_file import Trace
from recipe.profile.transfers import Links, Route, Unpaired, match, route_of

WORK, EXPOSED, WAITING, COPIES, IDLE = "work", "exposed", "waiting", "copies", "idle"
RowKey = tuple[str, Part | None, str | None]  # state, part, op
NUM_BUCKETS = 600  # of a line of memory: as few points as a page needs, and no peak left out


class TimeRow(NamedTuple):
    """Seconds of a step by rank, the mean over the steps. All rows of a rank add up to its step.

    state  WORK; EXPOSED: a transfer and no work; WAITING for slower ranks in one; COPIES; IDLE: none of these
    part   what the work is of, or what the transfer serves; None for copies and idle
    op     the collective; None for all but transfers
    """

    state: str
    part: Part | None
    op: str | None
    seconds: list[float]


class TransferRow(NamedTuple):
    """Collectives of one route in a step, the mean over ranks and steps.

    sent_bytes   what a rank sends; None where a trace does not say
    hidden_s     behind work
    exposed_s    with no work beside it, and moving
    waiting_s    with no work beside it, before the slowest rank has come
    bytes_per_s  sent while moving, waiting left out; None where nothing is known to be sent
    """

    route: Route
    num_calls: float
    sent_bytes: float | None
    hidden_s: float
    exposed_s: float
    waiting_s: float
    bytes_per_s: float | None
    link_bytes_per_s: float | None


class BandwidthPoint(NamedTuple):
    """Collectives of one route and size: the median and the range of what a rank sent in a second."""

    route: Route
    sent_bytes: float
    num_calls: int
    bytes_per_s: float
    lowest: float
    highest: float
    link_bytes_per_s: float | None


class Imbalance(NamedTuple):
    """Work of one kind: seconds of a step by rank, the busiest rank's over the mean, and the same step by step."""

    kind: str
    seconds: list[float]
    max_over_mean: float
    by_step: list[float]


class MemoryLine(NamedTuple):
    """
    whole   counted from nothing; otherwise from what was there when the recording began, which the trace does not say
    points  (seconds since the first step began, bytes): the most held in each of some hundred equal times
    """

    rank: int
    on_gpu: bool
    whole: bool
    peak_bytes: int
    points: list[tuple[float, int]]


class Summary(NamedTuple):
    """
    step_seconds  by step, by rank
    idle_before_s of a step, before anything runs; the mean over ranks and steps
    spans         what all of it was counted from, rank by rank
    notes         what could not be told from these traces
    """

    device: str
    world_size: int
    ranks: list[int]
    steps: list[int]
    facts: Mapping[str, Any]
    step_seconds: list[list[float]]
    idle_before_s: float
    time: list[TimeRow]
    transfers: list[TransferRow]
    points: list[BandwidthPoint]
    imbalance: list[Imbalance]
    memory: list[MemoryLine]
    spans: list[RankSpans]
    notes: list[str]

    @property
    def step_s(self) -> float:
        """Mean over the steps of the slowest rank's."""
        return fmean(max(by_rank) for by_rank in self.step_seconds)


def summarise(traces: Sequence[Trace], *, links: Links) -> Summary:
    """Take apart what `read_traces` gave. ValueError where the ranks' traces are not of the same steps."""
    ranks = [read_spans(trace) for trace in traces]
    _check_steps(ranks)
    facts = traces[0].facts
    layout = (facts["layout"]["dp"], facts["layout"]["tp"]) if "layout" in facts else None
    if "ranks_per_node" in facts:  # of the run itself; the hardware's number is only usual
        links = links._replace(ranks_per_node=facts["ranks_per_node"])
    unpaired = match(ranks)
    for spans in ranks:
        for step in spans.steps:
            account(step, works=spans.works, copies=spans.copies)
    by_route: defaultdict[Route, list[Transfer]] = defaultdict(list)
    for transfer in (transfer for spans in ranks for step in spans.steps for transfer in step.transfers):
        by_route[route_of(transfer, links=links, layout=layout)].append(transfer)
    return Summary(
        device=traces[0].device,
        world_size=traces[0].world_size or len(traces),
        ranks=[trace.rank for trace in traces],
        steps=[step.number for step in ranks[0].steps],
        facts=facts,
        step_seconds=[[step.end_s - step.start_s for step in at_once] for at_once in _by_step(ranks)],
        idle_before_s=fmean(step.idle_before_s for spans in ranks for step in spans.steps),
        time=_time_rows(ranks),
        transfers=_transfer_rows(by_route, links=links, num_steps=sum(len(spans.steps) for spans in ranks)),
        points=_points(by_route, links=links),
        imbalance=_imbalances(ranks),
        memory=[line for line in map(memory_line, ranks) if line is not None],
        spans=ranks,
        notes=list(_notes(ranks, unpaired)),
    )


def _by_step(ranks: Sequence[RankSpans]) -> Iterator[tuple[Step, ...]]:
    """Yield each step as all ranks have it."""
    return zip(*(spans.steps for spans in ranks), strict=True)


def _check_steps(ranks: Sequence[RankSpans]) -> None:
    first = ranks[0]
    for other in ranks[1:]:
        ours, theirs = ([step.number for step in spans.steps] for spans in (first, other))
        if ours != theirs:
            raise ValueError(
                f"{first.trace.path} is of steps {ours} and {other.trace.path} of steps {theirs}; give traces of the "
                "same recording"
            )


def account(step: Step, *, works: Sequence[Work], copies: Sequence[Copy]) -> None:
    """Share out the seconds of a step among work, its transfers, copies and idleness.

    Where several of one kind are under way, the first that began counts.
    """
    work, transfer, waiting, copy = lanes = range(4)  # the first that is busy is what a moment counts as
    spans: list[tuple[int, float, float, Any]] = [(work, one.start_s, one.end_s, one) for one in works]
    spans += [(copy, one.start_s, one.end_s, one) for one in copies]
    for one in step.transfers:
        moves_from_s = min(one.start_s + one.wait_s, one.end_s)
        spans += [(waiting, one.start_s, moves_from_s, one), (transfer, moves_from_s, one.end_s, one)]
    edges: list[tuple[float, bool, int, int, Any]] = [(step.end_s, False, work, -1, None)]
    for number, (lane, start_s, end_s, one) in enumerate(spans):
        start_s, end_s = max(start_s, step.start_s), min(end_s, step.end_s)
        if start_s < end_s:
            edges += [(start_s, True, lane, number, one), (end_s, False, lane, number, one)]
    active: list[dict[int, Any]] = [{} for _ in lanes]
    time_s, any_yet = step.start_s, False
    for edge_s, begins, lane, number, one in sorted(edges):  # at one moment ends come first
        passed_s, time_s = edge_s - time_s, edge_s
        busy = next((lane for lane in lanes if active[lane]), None)
        first: Any = None if busy is None else next(iter(active[busy].values()))
        if busy is None:
            step.idle_s += passed_s
            step.idle_before_s += 0.0 if any_yet else passed_s
        elif busy == work:
            step.work_s[first.part] += passed_s
            under_way = active[transfer] or active[waiting]
            if under_way:
                next(iter(under_way.values())).hidden_s += passed_s
        elif busy == transfer:
            first.exposed_s += passed_s
        elif busy == waiting:
            first.waiting_s += passed_s
        else:
            step.copies_s += passed_s
        any_yet = any_yet or begins
        if begins:
            active[lane][number] = one
        else:
            active[lane].pop(number, None)


def _time_rows(ranks: Sequence[RankSpans]) -> list[TimeRow]:
    """Return the time table, the largest row first."""
    rows: defaultdict[RowKey, list[float]] = defaultdict(lambda: [0.0] * len(ranks))
    for r, spans in enumerate(ranks):
        for step in spans.steps:
            spent: list[tuple[RowKey, float]] = [((WORK, part, None), seconds) for part, seconds in step.work_s.items()]
            spent += [((EXPOSED, one.part, one.op), one.exposed_s) for one in step.transfers if one.exposed_s]
            spent += [((WAITING, one.part, one.op), one.waiting_s) for one in step.transfers if one.waiting_s]
            spent += [((COPIES, None, None), step.copies_s), ((IDLE, None, None), step.idle_s)]
            for key, seconds in spent:
                rows[key][r] += seconds / len(spans.steps)
    return [TimeRow(*key, seconds) for key, seconds in sorted(rows.items(), key=lambda row: -sum(row[1]))]


def _transfer_rows(by_route: Mapping[Route, Sequence[Transfer]], *, links: Links, num_steps: int) -> list[TransferRow]:
    """Sum up routes, the longest first; `num_steps` are those of all ranks together."""
    rows = []
    for route, calls in by_route.items():
        given = [call.sent_bytes for call in calls if call.sent_bytes is not None]
        sent, moves_s = sum(given) if len(given) == len(calls) else None, sum(call.moves_s for call in calls)
        hidden_s, exposed_s, waiting_s = (
            sum(getattr(call, name) for call in calls) / num_steps for name in ("hidden_s", "exposed_s", "waiting_s")
        )
        rows.append(
            TransferRow(
                route=route,
                num_calls=len(calls) / num_steps,
                sent_bytes=None if sent is None else sent / num_steps,
                hidden_s=hidden_s,
                exposed_s=exposed_s,
                waiting_s=waiting_s,
                bytes_per_s=sent / moves_s if sent and moves_s > 0 else None,
                link_bytes_per_s=links.of(route),
            )
        )
    return sorted(rows, key=lambda row: -(row.exposed_s + row.waiting_s + row.hidden_s))


def _points(by_route: Mapping[Route, Sequence[Transfer]], *, links: Links) -> list[BandwidthPoint]:
    """Return points in the order of their size; without collectives that send nothing or do not say how much."""
    rates: defaultdict[tuple[Route, float], list[float]] = defaultdict(list)
    for route, calls in by_route.items():
        for call in calls:
            if call.sent_bytes and call.moves_s > 0:
                rates[route, call.sent_bytes].append(call.sent_bytes / call.moves_s)
    points = [
        BandwidthPoint(route, sent, len(of), statistics.median(of), min(of), max(of), links.of(route))
        for (route, sent), of in rates.items()
    ]
    return sorted(points, key=lambda point: point.sent_bytes)


def _imbalances(ranks: Sequence[RankSpans]) -> list[Imbalance]:
    """Compare the ranks in every kind of work, the longest first."""
    kinds = {part.kind for spans in ranks for step in spans.steps for part in step.work_s}
    found = []
    for kind in kinds:
        by_step = [
            [sum(s for part, s in step.work_s.items() if part.kind == kind) for step in at_once]
            for at_once in _by_step(ranks)
        ]
        seconds = [fmean(of_rank) for of_rank in zip(*by_step, strict=True)]
        found.append(Imbalance(kind, seconds, max_over_mean(seconds), [max_over_mean(step) for step in by_step]))
    return sorted(found, key=lambda entry: -sum(entry.seconds))


def max_over_mean(values: Sequence[float]) -> float:
    """Return the ratio, 1.0 where all are zero."""
    mean = fmean(values)
    return max(values) / mean if mean > 0 else 1.0


def memory_line(spans: RankSpans) -> MemoryLine | None:
    """Trace memory, the GPU's where there is one; None where the profiler did not watch memory (profile_memory=True).

    A GPU's allocator says its total. The CPU's counts from the recording's start on and misses what was there before,
    and its releases; our recorder says how much that was. The line begins with what the first step began with.
    """
    on_gpu = any(event.on_gpu for event in spans.trace.memory)
    before = None if on_gpu else spans.trace.facts.get("memory_bytes_before")
    start_s, end_s = spans.steps[0].start_s, spans.steps[-1].end_s
    points: list[tuple[float, int]] = []
    offset = level = int(before or 0)
    for event in (event for event in spans.trace.memory if event.on_gpu == on_gpu):
        if not points:
            level += 0 if event.total_bytes is None else event.total_bytes - event.num_bytes
            points.append((0.0, level))
        level = level + event.num_bytes if event.total_bytes is None else offset + event.total_bytes
        if event.time_s <= start_s:
            points[0] = (0.0, level)
        elif event.time_s <= end_s:
            points.append((event.time_s - start_s, level))
    if not points:
        return None
    points.append((end_s - start_s, points[-1][1]))
    peak_bytes = max(num_bytes for _, num_bytes in points)
    highest: dict[int, tuple[float, int]] = {}
    for time_s, num_bytes in points:
        bucket = int(time_s / max(end_s - start_s, 1e-9) * NUM_BUCKETS)
        if bucket not in highest or num_bytes > highest[bucket][1]:
            highest[bucket] = (time_s, num_bytes)
    return MemoryLine(spans.trace.rank, on_gpu, on_gpu or before is not None, peak_bytes, list(highest.values()))


def _notes(ranks: Sequence[RankSpans], unpaired: Sequence[Unpaired]) -> Iterator[str]:
    """Say what cannot be told from these traces."""
    trace = ranks[0].trace
    if not all(spans.trace.says_rank for spans in ranks):
        yield "some traces do not say their rank: they are numbered in the order of their names"
    if trace.world_size is not None and trace.world_size > len(ranks):
        yield f"{len(ranks)} of {trace.world_size} ranks have a trace here; waiting is counted among those alone"
    elif len(ranks) == 1:
        yield "one rank alone cannot show for whom it waits; all of an exposed transfer counts as moving"
    yield from _unpaired(unpaired)
    if not any(step.number for step in ranks[0].steps):
        yield "the program marked no steps (torch.profiler's step()); the whole trace counts as one"
    transfers = [transfer for spans in ranks for step in spans.steps for transfer in step.transfers]
    if any(transfer.sent_bytes is None and transfer.op not in ("recv", "send_recv") for transfer in transfers):
        yield "some collectives do not say how much they carry; the profiler of torch 2.2 and later writes it"
    if not any(work.part.layer is not None for spans in ranks for work in spans.works):
        yield "no layers are named in this trace; record with --profile_steps, or with_stack=True elsewhere"
    if (execution_in(trace.facts) or {}).get("cuda_graph"):
        yield "blocks that are replayed as CUDA graphs have one name: their time counts as their layer's rest"
    if trace.device == "cpu":
        yield "on a CPU idle is also Python between operators, which the recording itself makes slower"


def execution_in(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return how the recorded steps were executed; None where the trace is another program's."""
    if "parallel" in facts:  # as traces said it before they had "execution"
        return {**facts["parallel"]["wire"], "cuda_graph": facts["parallel"]["cuda_graph"]}
    return facts.get("execution")


def _unpaired(groups: Sequence[Unpaired]) -> Iterator[str]:
    """Yield one sentence an operation and cause, however many groups there are."""
    for op in sorted({group.op for group in groups}):
        alone = [group for group in groups if group.op == op and len(group.num_calls) == 1]
        uneven = [group for group in groups if group.op == op and len(group.num_calls) > 1]
        if alone:
            ranks = ", ".join(map(str, sorted({rank for group in alone for rank in group.num_calls})[:4]))
            more = ", …" if len(alone) > 4 else ""
            yield (
                f"no other trace has the {op} calls of rank {ranks}{more}, or it does not say so; waiting in them "
                "counts as moving"
            )
        if uneven:
            calls = uneven[0].num_calls
            few, many = min(calls, key=lambda rank: calls[rank]), max(calls, key=lambda rank: calls[rank])
            yield (
                f"{op} calls of {len(uneven)} group{'s' if len(uneven) > 1 else ''} cannot be paired, since ranks have "
                f"different numbers of them (rank {few} {calls[few]}, rank {many} {calls[many]}); waiting in them "
                "counts as moving"
            )
