"""Traces of all ranks taken apart into one summary: where each step's time goes, and what its transfers achieve."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from recipe.profile.account import Account, MemoryLine, account_for, memory_line
from recipe.profile.spans import Part, RankSpans, read_spans
from recipe.profile.timeline import RankTimeline, rank_timeline
from recipe.profile.trace_file import Trace
from recipe.profile.transfers import (
    BandwidthPoint,
    Layout,
    Links,
    Matched,
    Route,
    Sent,
    Unpaired,
    bandwidth_points,
    match,
    route_of,
)

WORK, EXPOSED, WAITING, COPIES, IDLE = "work", "exposed", "waiting", "copies", "idle"


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


class Imbalance(NamedTuple):
    """Work of one kind: seconds of a step by rank, the busiest rank's over the mean, and the same step by step."""

    kind: str
    seconds: list[float]
    max_over_mean: float
    by_step: list[float]


class Summary(NamedTuple):
    """
    step_seconds  by step, by rank
    idle_before_s of a step, before anything runs; the mean over ranks and steps
    timeline      of all steps
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
    timeline: list[RankTimeline]
    notes: list[str]

    @property
    def step_s(self) -> float:
        """Mean over the steps of the slowest rank's."""
        return _mean([max(by_rank) for by_rank in self.step_seconds])


def summarise(traces: Sequence[Trace], *, links: Links) -> Summary:
    """Take apart what `read_traces` gave. ValueError where the ranks' traces are not of the same steps."""
    ranks = [read_spans(trace) for trace in traces]
    _check_steps(ranks)
    facts = traces[0].facts
    layout = (facts["layout"]["dp"], facts["layout"]["tp"]) if "layout" in facts else None
    if "ranks_per_node" in facts:  # of the run itself; the hardware's number is only usual
        links = links._replace(ranks_per_node=facts["ranks_per_node"])
    matched = match(ranks)
    sent_of = _by_rank_and_step(matched.sent, ranks)
    accounts = [_accounts(spans, steps) for spans, steps in zip(ranks, sent_of, strict=True)]
    step_seconds = [[s.windows[i].end_s - s.windows[i].start_s for s in ranks] for i in range(len(ranks[0].windows))]
    return Summary(
        device=traces[0].device,
        world_size=traces[0].world_size or len(traces),
        ranks=[trace.rank for trace in traces],
        steps=[window.step for window in ranks[0].windows],
        facts=facts,
        step_seconds=step_seconds,
        idle_before_s=_mean([account.idle_before for by_step in accounts for account in by_step]),
        time=_time_rows(accounts, sent_of),
        transfers=_transfer_rows(accounts, sent_of, links=links, layout=layout),
        points=bandwidth_points(matched.sent, links=links, layout=layout),
        imbalance=_imbalances(accounts),
        memory=[line for line in map(memory_line, ranks) if line is not None],
        timeline=[rank_timeline(*of_rank) for of_rank in zip(ranks, accounts, sent_of, strict=True)],
        notes=list(_notes(ranks, matched)),
    )


def _check_steps(ranks: Sequence[RankSpans]) -> None:
    first = ranks[0]
    for other in ranks[1:]:
        ours, theirs = ([window.step for window in spans.windows] for spans in (first, other))
        if ours != theirs:
            raise ValueError(
                f"{first.trace.path} is of steps {ours} and {other.trace.path} of steps {theirs}; give traces of the "
                "same recording"
            )


def _by_rank_and_step(sent: Iterable[Sent], ranks: Sequence[RankSpans]) -> list[list[list[Sent]]]:
    """Each rank's collectives, step by step in the order of their start."""
    found: dict[tuple[int, int], list[Sent]] = {}
    for one in sorted(sent, key=lambda one: one.transfer.start_s):
        found.setdefault((one.rank, one.step), []).append(one)
    return [[found.get((spans.trace.rank, window.step), []) for window in spans.windows] for spans in ranks]


def _accounts(spans: RankSpans, sent: Sequence[Sequence[Sent]]) -> list[Account]:
    return [
        account_for(
            window,
            works=[w for w in spans.works if w.end_s > window.start_s and w.start_s < window.end_s],
            transfers=[one.transfer for one in step],
            waits_s=[one.wait_s for one in step],
            copies=[c for c in spans.copies if c.end_s > window.start_s and c.start_s < window.end_s],
        )
        for window, step in zip(spans.windows, sent, strict=True)
    ]


def _time_rows(accounts: Sequence[Sequence[Account]], sent: Sequence[Sequence[Sequence[Sent]]]) -> list[TimeRow]:
    """The largest first."""
    rows: dict[tuple[str, Part | None, str | None], list[float]] = {}
    for rank, (by_step, sent_by_step) in enumerate(zip(accounts, sent, strict=True)):
        share = 1 / len(by_step)

        def add(key: tuple[str, Part | None, str | None], seconds: float, *, r: int = rank, s: float = share) -> None:
            rows.setdefault(key, [0.0] * len(accounts))[r] += seconds * s

        for account, step in zip(by_step, sent_by_step, strict=True):
            for part, seconds in account.work.items():
                add((WORK, part, None), seconds)
            for state, by_number in ((EXPOSED, account.exposed), (WAITING, account.waiting)):
                for number, seconds in by_number.items():
                    add((state, step[number].transfer.part, step[number].transfer.op), seconds)
            add((COPIES, None, None), account.copies)
            add((IDLE, None, None), account.idle)
    return [TimeRow(*key, seconds) for key, seconds in sorted(rows.items(), key=lambda row: -sum(row[1]))]


def _transfer_rows(
    accounts: Sequence[Sequence[Account]],
    sent: Sequence[Sequence[Sequence[Sent]]],
    *,
    links: Links,
    layout: Layout | None,
) -> list[TransferRow]:
    share = 1 / sum(len(by_step) for by_step in accounts)
    rows: dict[Route, TransferRow] = {}
    moved: defaultdict[Route, float] = defaultdict(float)
    unsaid = set()
    for by_step, sent_by_step in zip(accounts, sent, strict=True):
        for account, step in zip(by_step, sent_by_step, strict=True):
            for number, one in enumerate(step):
                route = route_of(one.transfer, links=links, layout=layout)
                row = rows.get(route) or TransferRow(route, 0, 0, 0, 0, 0, None, links.of(route))
                if one.transfer.sent_bytes is None:
                    unsaid.add(route)
                rows[route] = row._replace(
                    num_calls=row.num_calls + share,
                    sent_bytes=(row.sent_bytes or 0) + (one.transfer.sent_bytes or 0) * share,
                    hidden_s=row.hidden_s + account.hidden.get(number, 0) * share,
                    exposed_s=row.exposed_s + account.exposed.get(number, 0) * share,
                    waiting_s=row.waiting_s + account.waiting.get(number, 0) * share,
                )
                moved[route] += one.moves_s * share
    found = []
    for route, row in rows.items():
        speed = row.sent_bytes / moved[route] if row.sent_bytes and moved[route] > 0 else None
        found.append(row._replace(sent_bytes=None) if route in unsaid else row._replace(bytes_per_s=speed))
    return sorted(found, key=lambda row: -(row.exposed_s + row.waiting_s + row.hidden_s))


def _imbalances(accounts: Sequence[Sequence[Account]]) -> list[Imbalance]:
    """Compare the ranks in every kind of work, the longest first."""
    kinds = {part.kind for by_step in accounts for account in by_step for part in account.work}
    found = []
    for kind in kinds:
        by_step = [
            [sum(s for part, s in by_step[i].work.items() if part.kind == kind) for by_step in accounts]
            for i in range(len(accounts[0]))
        ]
        seconds = [_mean([step[r] for step in by_step]) for r in range(len(accounts))]
        found.append(Imbalance(kind, seconds, max_over_mean(seconds), [max_over_mean(step) for step in by_step]))
    return sorted(found, key=lambda entry: -sum(entry.seconds))


def max_over_mean(values: Sequence[float]) -> float:
    """1.0 where all are zero."""
    mean = _mean(values)
    return max(values) / mean if mean > 0 else 1.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _notes(ranks: Sequence[RankSpans], matched: Matched) -> Iterator[str]:
    """Say what cannot be told from these traces."""
    trace = ranks[0].trace
    if not all(spans.trace.says_rank for spans in ranks):
        yield "some traces do not say their rank: they are numbered in the order of their names"
    if trace.world_size is not None and trace.world_size > len(ranks):
        yield f"{len(ranks)} of {trace.world_size} ranks have a trace here; waiting is counted among those alone"
    elif len(ranks) == 1:
        yield "one rank alone cannot show for whom it waits; all of an exposed transfer counts as moving"
    yield from _unpaired(matched.unpaired)
    if not any(window.step for window in ranks[0].windows):
        yield "the program marked no steps (torch.profiler's step()); the whole trace counts as one"
    if any(one.transfer.sent_bytes is None and one.transfer.op not in ("recv", "send_recv") for one in matched.sent):
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
    """One sentence an operation and cause, however many groups there are."""
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
