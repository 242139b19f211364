"""One rank's trace as three kinds of spans on one clock: work, transfers and copies, each with the part it belongs to.

On a GPU these are its kernels and copies, whatever the stream, placed by where the host launched them; a copy within
its memory is work as a kernel is. On a CPU they are the operators of the threads that train, and gloo's own work on its
collectives.
"""

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recipe.profile.host import (
    NCCL,
    Context,
    Host,
    Placed,
    collective_op,
    dtype_bytes,
    kind_of_kernel,
    read_host,
)
from recipe.profile.trace_file import BROKEN, Event, Trace, unreadable, whole_number
from recipe.shared.scopes import Scope

FROM_OR_TO_HOST = ("HtoD", "DtoH")
COMMS_NAME = "Collective name"
# Of the arguments of a c10d operator, the one that holds what this rank gives.
INPUT_ARGUMENT = {"c10d::allreduce_": 0, "c10d::broadcast_": 0, "c10d::allreduce_coalesced_": 0}


class Part(NamedTuple):
    """A part of the model and of the step; `layer` is None outside blocks. See scopes.py and host.py."""

    kind: str
    layer: int | None
    phase: str


class Work(NamedTuple):
    start_s: float
    end_s: float
    part: Part
    name: str


class Copy(NamedTuple):
    """From the host or to it."""

    start_s: float
    end_s: float
    name: str


@dataclass
class Transfer:
    """One collective of one rank.

    num_ranks   that take part; None: not in the trace
    ranks       which; None: not in the trace
    group       what tells its group from others where the ranks are not known
    sent_bytes  what a rank has to send, a gather, scatter or all-reduce as a ring does; None: not in the trace

    What other ranks' traces say of it (transfers.py):

    wait_s      for how long from its start this rank only waits for slower ones

    What its seconds count as in its step (summary.py):

    hidden_s    behind work
    exposed_s   with neither work nor waiting
    waiting_s   waiting, without work
    """

    start_s: float
    end_s: float
    op: str
    part: Part
    num_ranks: int | None
    ranks: tuple[int, ...] | None
    group: str
    sent_bytes: float | None
    wait_s: float = 0.0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def moves_s(self) -> float:
        return self.end_s - self.start_s - self.wait_s


@dataclass
class Step:
    """A step of one rank, and what its seconds count as, each once (summary.py).

    transfers  those that start in it, in the order of their start
    work_s     by the part it belongs to
    copies_s   with neither work nor a transfer
    idle_s     with nothing at all; `idle_before_s` of it lies before the step's first span
    """

    number: int
    start_s: float
    end_s: float
    transfers: list[Transfer] = field(default_factory=list)
    work_s: defaultdict[Part, float] = field(default_factory=lambda: defaultdict(float))
    copies_s: float = 0.0
    idle_s: float = 0.0
    idle_before_s: float = 0.0


class RankSpans(NamedTuple):
    """All in the order of their start; `transfers` are those outside the steps, too."""

    trace: Trace
    steps: list[Step]
    works: list[Work]
    transfers: list[Transfer]
    copies: list[Copy]


def read_spans(trace: Trace) -> RankSpans:
    """Read a rank's spans from its trace.

    ValueError where nothing in it is work or a transfer of the threads that train, and for broken events.
    """
    spans = RankSpans(trace, [], [], [], [])
    try:
        host = read_host(trace.events)
        if trace.device == "cuda":
            _add_of_gpu(spans, host)
        else:
            _add_of_cpu(spans, host)
    except BROKEN as error:
        raise unreadable(trace.path, error) from error
    busy: list[Work | Transfer | Copy] = [*spans.works, *spans.transfers, *spans.copies]
    if not busy:
        raise ValueError(f"{trace.path} holds neither work nor transfers of the threads that train")
    spans.works.sort(key=lambda work: work.start_s)
    spans.transfers.sort(key=lambda transfer: transfer.start_s)
    spans.copies.sort(key=lambda copy: copy.start_s)
    last_end_s = max(span.end_s for span in busy)
    for number, event in sorted(host.steps, key=lambda step: step[1].start_s):
        spans.steps.append(Step(number, event.start_s, event.end_s))
    if not spans.steps:
        spans.steps.append(Step(0, min(span.start_s for span in busy), last_end_s))
    if trace.device == "cuda":  # what a GPU still does behind the last step of the host's clock belongs to that
        spans.steps[-1].end_s = max(spans.steps[-1].end_s, last_end_s)
    for transfer in spans.transfers:
        step = next((step for step in spans.steps if step.start_s <= transfer.start_s < step.end_s), None)
        if step is not None:
            step.transfers.append(transfer)
    return spans


def _add_of_gpu(spans: RankSpans, host: Host) -> None:
    for event in spans.trace.events:
        if event.category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        context = host.launches.get(event.args.get("correlation", -1), Context())
        nccl = NCCL.search(event.name)
        if nccl is not None or COMMS_NAME in event.args:
            spans.transfers.append(_nccl_transfer(event, context, in_name=nccl and nccl["op"]))
        elif event.category == "gpu_memcpy" and any(way in event.name for way in FROM_OR_TO_HOST):
            spans.copies.append(Copy(event.start_s, event.end_s, event.name))
        else:
            spans.works.append(Work(event.start_s, event.end_s, _part(context, event.name), event.name))


def _nccl_transfer(event: Event, context: Context, *, in_name: str | None) -> Transfer:
    """Read what the profiler says of a collective, in the kernel or around its launch; old ones say the name alone."""
    said = event.args if COMMS_NAME in event.args else context.comms or {}
    op = collective_op(str(said.get(COMMS_NAME, in_name))) or collective_op(in_name or "") or "other"
    num_ranks = whole_number(said["Group size"]) if said.get("Group size") else None
    ranks = _listed_ranks(said.get("Process Group Ranks"), num_ranks=num_ranks)
    given = None if said.get("In msg nelems") is None else whole_number(said["In msg nelems"])
    if op == "all_gather" and given == 0 and num_ranks is not None:
        given = whole_number(said.get("Out msg nelems") or 0) // num_ranks
    size = dtype_bytes(str(said.get("dtype", "")))
    name, words = str(said.get("Process Group Name", "")), str(said.get("Process Group Description", ""))
    group = f"{name} {words}".strip()
    return _transfer(event, context, op=op, num_ranks=num_ranks, ranks=ranks, group=group, size=size, given=given)


def _transfer(
    event: Event,
    context: Context,
    *,
    op: str,
    num_ranks: int | None,
    ranks: tuple[int, ...] | None,
    group: str,
    size: int | None,
    given: int | None,
) -> Transfer:
    """Make a transfer to which this rank gives so many numbers of so many bytes, as far as they are known."""
    sent = None
    if size is not None and num_ranks is not None and given is not None:
        sent = sent_bytes(op, given_bytes=given * size, num_ranks=num_ranks)
    kind, layer = context.scope or Scope("other")
    if kind == "experts" and size == 1:
        kind = "routing"  # ids and weights, which travel as bytes
    part = Part(kind, layer, context.phase)
    return Transfer(event.start_s, event.end_s, op, part, num_ranks, ranks, group, sent)


def _listed_ranks(text: Any, *, num_ranks: int | None) -> tuple[int, ...] | None:
    """Read ranks from "[0, 1, 2, 3]"; None where the profiler has left some out, as it does with long lists."""
    if not isinstance(text, str) or not text.strip("[] "):
        return None
    words = text.strip("[] ").split(",")
    if not all(word.strip().isdecimal() for word in words) or (num_ranks is not None and len(words) != num_ranks):
        return None
    return tuple(int(word) for word in words)


def _add_of_cpu(spans: RankSpans, host: Host) -> None:
    spans.works.extend(Work(e.start_s, e.end_s, _part(context, e.name), e.name) for e, context in host.operators)
    waiting: defaultdict[tuple[str, int], deque[Placed]] = defaultdict(deque)
    for call in host.calls:
        dims, place = call.event.args.get("Input Dims", []), INPUT_ARGUMENT.get(call.event.name, 1)
        given = _numel(dims[place] if len(dims) > place else [])
        waiting[collective_op(call.event.name) or "other", given].append(call)
    for event in sorted(host.gloo, key=lambda e: e.start_s):
        op = collective_op(event.name) or "other"
        queue = waiting[op, _numel(event.args.get("Input Dims", []))]
        # Gloo works on equal calls in their order; what it was given before the recording has no call in the trace.
        known = queue and queue[0].event.start_s <= event.start_s
        transfer = _gloo_transfer(event, queue.popleft() if known else None, op=op)
        if transfer.num_ranks != 1:
            spans.transfers.append(transfer)


def _gloo_transfer(event: Event, call: Placed | None, *, op: str) -> Transfer:
    context = call.context if call is not None else Context()
    types, given = event.args.get("Input type") or [""], _numel(event.args.get("Input Dims", []))
    size, ranks = dtype_bytes(types[0]), context.ranks
    num_ranks = len(ranks) if ranks is not None else _ranks_by_shape(call)
    return _transfer(event, context, op=op, num_ranks=num_ranks, ranks=ranks, group="", size=size, given=given)


def _ranks_by_shape(call: Placed | None) -> int | None:
    """Count the ranks whose parts the gathered or the scattered tensor holds, of an operator with (output, input)."""
    if call is None or call.event.name not in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
        return None
    sizes = sorted(_numel(dims) for dims in call.event.args.get("Input Dims", [])[:2])
    return sizes[1] // sizes[0] if len(sizes) == 2 and sizes[0] and sizes[1] % sizes[0] == 0 else None


def sent_bytes(op: str, *, given_bytes: float, num_ranks: int) -> float | None:
    """Return what a rank that gives so much to a collective has to send by the algorithm, whatever a backend does.

    Of an exchange even parts are assumed. None where it depends on which end of it a rank is.
    """
    share = given_bytes * (num_ranks - 1) / num_ranks
    once = dict.fromkeys(("reduce_scatter", "all_to_all", "broadcast", "reduce"), share)
    others = {"all_gather": share * num_ranks, "all_reduce": 2 * share, "send": given_bytes, "barrier": 0.0}
    return {**once, **others}.get(op)


def _numel(dims: Any) -> int:
    """Count the elements of one shape, or of a list of them together."""
    if isinstance(dims, list) and any(isinstance(entry, list) for entry in dims):
        return sum(_numel(entry) for entry in dims)
    return math.prod(dims) if isinstance(dims, list) and all(isinstance(n, int) for n in dims) else 0


def _part(context: Context, name: str) -> Part:
    kind, layer = context.scope or Scope(kind_of_kernel(name))
    return Part(kind, layer, context.phase)
