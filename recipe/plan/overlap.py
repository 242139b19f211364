"""Which share of a group's transfers is waited for: a layer's order of products and transfers, played through.

Chunks are sent and waited for as modeling/linear.py, moe.py and experts.py do it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from recipe.plan.compute_time import Both
from recipe.plan.job import Job
from recipe.plan.lanes import Lanes
from recipe.plan.model_traffic import num_chunks


class LayerTimes(NamedTuple):
    """Computing of a layer with experts, and of a dense one; `head` is that of the whole model."""

    attention: Both
    router: Both
    experts: Both
    dense: Both
    head: Both


# Seconds of one transfer by purpose and op; what is not there takes none.
Calls = Mapping[tuple[str, str], float]


class ExposedShares(NamedTuple):
    """Of the seconds of transfers by what they are for, between 0 and 1; `experts` with the routing."""

    attention: float
    experts: float
    dense: float
    head: float


def exposed_shares(job: Job, *, layer: LayerTimes, calls: Calls, busy: float) -> ExposedShares:
    """1 where nothing overlaps. At the end of each part all has arrived, so that parts do not meet."""
    if not job.wire.overlap or job.layout.tp == 1:
        return ExposedShares(1.0, 1.0, 1.0, 1.0)
    forwards = 2 if job.recompute else 1
    attention, experts, dense, head = (Lanes(busy=busy) for _ in range(4))
    for _ in range(forwards):
        _products_forward(attention, job, layer.attention, calls, purpose="attention")
    _products_backward(attention, job, layer.attention, calls, purpose="attention")
    if job.sizes.num_moe_layers:
        for _ in range(forwards):
            _experts_forward(experts, job, layer, calls)
        _experts_backward(experts, job, layer, calls)
    if job.sizes.dense_layers:
        for _ in range(forwards):
            _products_forward(dense, job, layer.dense, calls, purpose="dense")
        _products_backward(dense, job, layer.dense, calls, purpose="dense")
    _through(head, job, calls, purpose="head", work_s=layer.head.forward.sums)
    return ExposedShares(*(_share(lanes) for lanes in (attention, experts, dense, head)))


def _share(lanes: Lanes) -> float:
    return lanes.exposed_s / lanes.sent_s if lanes.sent_s else 1.0


def _through(lanes: Lanes, job: Job, calls: Calls, *, purpose: str, work_s: float) -> None:
    """Chunks arrive, are worked on, and their sums leave; all of these have arrived in the end."""
    chunks = num_chunks(job)
    arrivals = _gather(lanes, calls, purpose=purpose, num=chunks)
    for arrival in _scatter(lanes, calls, purpose=purpose, work_s=work_s, arrivals=arrivals):
        lanes.wait(arrival)


def _gather(lanes: Lanes, calls: Calls, *, purpose: str, num: int) -> list[float]:
    return [lanes.send(calls.get((purpose, "all_gather"), 0.0)) for _ in range(num)]


def _work(lanes: Lanes, *, arrivals: list[float], work_s: float) -> None:
    for arrival in arrivals:
        lanes.wait(arrival)
        lanes.work(work_s / len(arrivals))


def _scatter(lanes: Lanes, calls: Calls, *, purpose: str, work_s: float, arrivals: list[float]) -> list[float]:
    sums = []
    for arrival in arrivals:
        lanes.wait(arrival)
        lanes.work(work_s / len(arrivals))
        sums.append(lanes.send(calls.get((purpose, "reduce_scatter"), 0.0)))
    return sums


def _products_forward(lanes: Lanes, job: Job, part: Both, calls: Calls, *, purpose: str) -> None:
    """Attention or a dense layer: products on gathered tokens, and products whose sums are scattered."""
    times, chunks = part.forward, num_chunks(job)
    lanes.work(times.before)
    _work(lanes, arrivals=_gather(lanes, calls, purpose=purpose, num=chunks), work_s=times.chunked)
    lanes.work(times.between)
    for arrival in _scatter(lanes, calls, purpose=purpose, work_s=times.sums, arrivals=[0.0] * chunks):
        lanes.wait(arrival)
    lanes.work(times.after)


def _products_backward(lanes: Lanes, job: Job, part: Both, calls: Calls, *, purpose: str) -> None:
    times, chunks = part.backward, num_chunks(job)
    _work(lanes, arrivals=_gather(lanes, calls, purpose=purpose, num=chunks), work_s=times.chunked)
    lanes.work(times.between)
    tokens = _gather(lanes, calls, purpose=purpose, num=chunks if job.wire.regather else 0)
    sums = _scatter(lanes, calls, purpose=purpose, work_s=times.sums, arrivals=[0.0] * chunks)
    for arrival in tokens:
        lanes.wait(arrival)
    lanes.work(times.weights)
    for arrival in sums:
        lanes.wait(arrival)
    lanes.work(times.after)


def _experts_forward(lanes: Lanes, job: Job, layer: LayerTimes, calls: Calls) -> None:
    times, routing_s = layer.experts.forward, calls.get(("routing", "all_gather"), 0.0)
    lanes.work(times.before)
    if job.moe_strategy != "gather_tokens":
        # Borrowed weights travel while the router works; exchanged rows are waited for.
        borrowed = _gather(lanes, calls, purpose="experts", num=2 if job.moe_strategy == "gather_weights" else 0)
        lanes.work(layer.router.forward.total)
        for arrival in borrowed or _exchange(lanes, calls, num=2):
            lanes.wait(arrival)
        lanes.work(times.sums + times.after)
        return
    chunks = num_chunks(job)
    arrivals = _gather(lanes, calls, purpose="experts", num=1)
    lanes.work(layer.router.forward.total)
    routing = lanes.send(routing_s)
    arrivals += _gather(lanes, calls, purpose="experts", num=chunks - 1)
    lanes.wait(routing)
    for arrival in _scatter(lanes, calls, purpose="experts", work_s=times.sums, arrivals=arrivals):
        lanes.wait(arrival)
    lanes.work(times.after)


def _experts_backward(lanes: Lanes, job: Job, layer: LayerTimes, calls: Calls) -> None:
    times = layer.experts.backward
    if job.moe_strategy != "gather_tokens":
        borrowed = _gather(lanes, calls, purpose="experts", num=2 if job.moe_strategy == "gather_weights" else 0)
        for arrival in borrowed or _exchange(lanes, calls, num=2):
            lanes.wait(arrival)
        lanes.work(times.sums + times.weights)
        homes = [lanes.send(calls.get(("experts", "reduce_scatter"), 0.0)) for _ in borrowed]
        for arrival in homes:
            lanes.wait(arrival)
        lanes.work(times.after + layer.router.backward.total)
        return
    chunks = num_chunks(job)
    arrivals = _gather(lanes, calls, purpose="experts", num=chunks)
    tokens = _gather(lanes, calls, purpose="experts", num=chunks if job.wire.regather else 0)
    sums = _scatter(lanes, calls, purpose="experts", work_s=times.sums, arrivals=arrivals)
    sums.append(lanes.send(calls.get(("routing", "reduce_scatter"), 0.0)))
    for arrival in tokens:
        lanes.wait(arrival)
    lanes.work(times.weights)
    for arrival in sums:
        lanes.wait(arrival)
    lanes.work(times.after + layer.router.backward.total)


def _exchange(lanes: Lanes, calls: Calls, *, num: int) -> list[float]:
    return [lanes.send(calls.get(("experts", "all_to_all"), 0.0)) for _ in range(num)]
