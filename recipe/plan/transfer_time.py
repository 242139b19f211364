"""Seconds of a step's transfers: each as if alone, and what of them costs nothing, the rank computing meanwhile.

Alone: alpha times the steps of a ring plus bytes over bandwidth, by where ranks are; between a GPU's nodes for sums the
cheaper of a ring and a tree, as NCCL chooses (src/graph/tuning.cc, whose counts of steps these are). gloo sums in a
ring whatever the size is.

Beside work: a layer's order of products and transfers, chunk by chunk as modeling/ sends and waits for them, is played
through on a rank's computing and its link side by side. So is ZeRO's, module by module as DeepSpeed 0.19.8 sends it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import gcd, log2
from typing import NamedTuple

from recipe.plan.compute_time import Both, LayerTimes, Times
from recipe.plan.hardware import LINK_OPS, Hardware, Link
from recipe.plan.job import Job
from recipe.plan.parameters import Module, held_modules
from recipe.plan.traffic import SUM_BYTES, weights_of
from recipe.plan.zero3 import Step, Thresholds, zero_number

# How often a rank sends in one collective of a ring of n ranks.
STEPS: Mapping[str, Callable[[int], int]] = dict.fromkeys(LINK_OPS, lambda n: n - 1) | {
    "all_reduce": lambda n: 2 * n - 2
}


class Ring(NamedTuple):
    """Ranks that send to each other: how many there are, and how many of them share a node."""

    num_ranks: int
    per_node: int

    @property
    def num_nodes(self) -> float:
        return self.num_ranks / self.per_node


def ring_of(axis: str, job: Job, *, ranks_per_node: int) -> Ring:
    """Return the ranks of one axis: a group's are neighbours, those of the others are a group apart."""
    size = job.num_ranks(axis)
    if axis == "dp":
        return Ring(size, min(size, max(1, ranks_per_node // job.layout.tp)))
    # Where groups do not fill nodes, some are cut; no piece is smaller than this.
    per_node = size if job.layout.world_size <= ranks_per_node else gcd(size, ranks_per_node)
    return Ring(size, per_node)


def call_seconds(op: str, sent_bytes: float, *, ring: Ring, hardware: Hardware) -> float:
    """Return the seconds of one collective in which every rank sends this much, counted as in a ring.

    An exchange sends each part by its own way, inside and between nodes at the same time.
    ValueError where the hardware has no such link.
    """
    size, here = ring
    if size == 1:
        return 0.0
    if size <= here:
        return _through(_within_node(hardware), op, num_steps=STEPS[op](size), sent_bytes=sent_bytes)
    if op == "all_to_all":
        outside = (size - here) / (size - 1)
        outside_bytes, inside_bytes = outside * sent_bytes, (1 - outside) * sent_bytes
        outside_s = _through(_between_nodes(hardware), op, num_steps=STEPS[op](size), sent_bytes=outside_bytes)
        if here == 1:
            return outside_s
        return max(outside_s, _through(_within_node(hardware), op, num_steps=here - 1, sent_bytes=inside_bytes))
    ring_s = _crossing(op, sent_bytes, steps=_ring_steps(op, ring), ring=ring, hardware=hardware)
    if op == "all_reduce" and hardware.device == "cuda":
        tree_bytes = sent_bytes * size / (size - 1)  # a ring spares every rank its own part
        return min(ring_s, _crossing(op, tree_bytes, steps=_tree_steps(ring), ring=ring, hardware=hardware))
    return ring_s


def busy_share(ring: Ring, *, hardware: Hardware) -> float:
    """Return the share of a transfer's time for which it keeps a rank of the ring from computing."""
    if ring.num_ranks == 1:
        return 0.0
    return (_between_nodes if ring.num_ranks > ring.per_node else _within_node)(hardware).busy


def fewest_steps(op: str, size: int, *, device: str) -> int:
    """Return the steps among nodes of one rank each, by which a fit of measured times divides its constant."""
    if op == "all_reduce" and device == "cuda":
        return min(STEPS[op](size), round(_tree_steps(Ring(size, 1)).outside))
    return STEPS[op](size)


class Steps(NamedTuple):
    """Sends that follow each other, inside nodes and between them."""

    inside: float
    outside: float


def _ring_steps(op: str, ring: Ring) -> Steps:
    """Return the steps of a ring, which leaves each node once in a turn."""
    total = STEPS[op](ring.num_ranks)
    outside = total * (ring.num_nodes - 1) / (ring.num_ranks - 1)
    return Steps(total - outside, outside)


def _tree_steps(ring: Ring) -> Steps:
    """Return the steps up and down a chain in each node and a binary tree over the nodes."""
    return Steps(2.0 * (ring.per_node - 1), 2 * log2(ring.num_nodes))


def _crossing(op: str, sent_bytes: float, *, steps: Steps, ring: Ring, hardware: Hardware) -> float:
    """Return the seconds at the pace of the slowest part: links inside, or the network of a node's ranks together."""
    inter = _between_nodes(hardware)
    if ring.per_node == 1:
        return _through(inter, op, num_steps=steps.outside, sent_bytes=sent_bytes)
    intra = _within_node(hardware)
    wait_s = inter.wait_s(op, num_steps=steps.outside) + intra.wait_s(op, num_steps=steps.inside)
    return wait_s + max(inter.transfer_s(op, sent_bytes / ring.per_node), intra.transfer_s(op, sent_bytes))


def _through(link: Link, op: str, *, num_steps: float, sent_bytes: float) -> float:
    return link.wait_s(op, num_steps=num_steps) + link.transfer_s(op, sent_bytes)


def _within_node(hardware: Hardware) -> Link:
    if hardware.intra is None:
        raise ValueError(
            f"hardware {hardware.name} has no link between the ranks of a node, for it was measured with one on each; "
            "plan for one, or run `gather-moe probe --ranks N`"
        )
    return hardware.intra


def _between_nodes(hardware: Hardware) -> Link:
    if hardware.inter is None:
        raise ValueError(
            f"hardware {hardware.name} has no link between nodes, for it was measured on one; plan for at most "
            f"{hardware.ranks_per_node} ranks, or run `gather-moe probe` on ranks of several nodes"
        )
    return hardware.inter


class Lanes:
    """Time passes by `work`; transfers queue on the link, and each keeps the rank busy for a share of its time."""

    def __init__(self, *, busy: float) -> None:
        self._busy = busy
        self._now_s = self._link_free_s = 0.0
        self.sent_s = 0.0  # of all transfers, as if each were alone
        self.exposed_s = 0.0  # of that, what was waited for or kept the rank busy

    def work(self, seconds: float) -> None:
        self._now_s += seconds

    def send(self, seconds: float) -> float:
        """Start a transfer; return when it will have arrived, for `wait`."""
        host_s = self._busy * seconds
        self._now_s += host_s
        starts_s = self._now_s if self._now_s > self._link_free_s else self._link_free_s
        self._link_free_s = starts_s + seconds - host_s
        self.sent_s += seconds
        self.exposed_s += host_s
        return self._link_free_s

    def wait(self, arrival_s: float) -> None:
        if arrival_s > self._now_s:
            self.exposed_s += arrival_s - self._now_s
            self._now_s = arrival_s

    @property
    def exposed_share(self) -> float:
        return self.exposed_s / self.sent_s if self.sent_s else 1.0


def exposed_shares(
    job: Job, *, layer: LayerTimes, calls: Mapping[tuple[str, str], float], busy: float
) -> dict[str, float]:
    """Return the shares of the seconds of gathers, scatters and exchanges that are waited for, by purpose.

    Each purpose is played through alone, and all has arrived at its end; what is not in the result is waited for.

    calls  seconds of one transfer by purpose and op; what is not there takes none
    """
    if not job.execution.overlap or job.layout.tp == 1:
        return {}
    plays = {name: _Play(job, calls, purpose=name, busy=busy) for name in ("attention", "dense", "experts", "head")}
    for _ in range(2 if job.recompute else 1):
        plays["attention"].products(layer["attention"].forward)
        plays["dense"].products(layer["dense"].forward)
        plays["experts"].experts_forward(layer)
    plays["attention"].products(layer["attention"].backward, is_backward=True)
    plays["dense"].products(layer["dense"].backward, is_backward=True)
    plays["experts"].experts_backward(layer)
    plays["head"].wait_all(
        plays["head"].scatter(layer["head"].forward.sums, arrivals=plays["head"].gather(job.num_chunks))
    )
    shares = {purpose: play.exposed_share for purpose, play in plays.items()}
    return {**shares, "routing": shares["experts"]}


class _Play(Lanes):
    """One part of a layer, forward and backward, on a rank and its link."""

    def __init__(self, job: Job, calls: Mapping[tuple[str, str], float], *, purpose: str, busy: float) -> None:
        super().__init__(busy=busy)
        self._chunks = job.num_expert_chunks if purpose == "experts" else job.num_chunks
        self._chunks_again = self._chunks if job.execution.regather else 0
        self._strategy = job.moe_strategy
        ops = ("all_gather", "reduce_scatter", "all_to_all")
        self._gather_s, self._scatter_s, self._exchange_s = (calls.get((purpose, op), 0.0) for op in ops)
        self._routing_s = {op: calls.get(("routing", op), 0.0) for op in ops[:2]}

    def wait_all(self, arrivals: Sequence[float]) -> None:
        self.wait(max(arrivals, default=0.0))

    def gather(self, num: int) -> list[float]:
        """Start gathers; return when each will have arrived."""
        return [self.send(self._gather_s) for _ in range(num)]

    def scatter(self, seconds: float, *, arrivals: list[float]) -> list[float]:
        """Compute on chunks as they arrive and start the scatter of each one's sums."""
        sums = []
        for arrival in arrivals:
            self.wait(arrival)
            self.work(seconds / len(arrivals))
            sums.append(self.send(self._scatter_s))
        return sums

    def products(self, times: Times, *, is_backward: bool = False) -> None:
        """Run attention or a dense layer: products on gathered tokens, and products whose sums are scattered."""
        self.work(times.before)
        for arrival in self.gather(self._chunks):
            self.wait(arrival)
            self.work(times.chunked / self._chunks)
        self.work(times.between)
        tokens = self.gather(self._chunks_again if is_backward else 0)
        sums = self.scatter(times.sums, arrivals=[0.0] * self._chunks)
        self.wait_all(tokens)
        self.work(times.weights)
        self.wait_all(sums)
        self.work(times.after)

    def experts_forward(self, layer: LayerTimes) -> None:
        times, router_s = layer["experts"].forward, layer["router"].forward.total
        self.work(times.before)
        if self._strategy == "gather_tokens":
            arrivals = self.gather(1)
            self.work(router_s)
            routing = self.send(self._routing_s["all_gather"])
            arrivals += self.gather(self._chunks - 1)
            self.wait(routing)
            self.wait_all(self.scatter(times.sums, arrivals=arrivals))
            self.work(times.after)
        else:  # borrowed weights travel while the router works; exchanged rows are waited for
            borrowed = self._borrow()
            self.work(router_s)
            self._wait_for(borrowed)
            self.work(times.sums + times.after)

    def experts_backward(self, layer: LayerTimes) -> None:
        times, router_s = layer["experts"].backward, layer["router"].backward.total
        if self._strategy == "gather_tokens":
            arrivals, tokens = self.gather(self._chunks), self.gather(self._chunks_again)
            sums = self.scatter(times.sums, arrivals=arrivals)
            sums.append(self.send(self._routing_s["reduce_scatter"]))
            self.wait_all(tokens)
            self.work(times.weights)
        else:
            borrowed = self._borrow()
            self._wait_for(borrowed)
            self.work(times.sums + times.weights)
            sums = [self.send(self._scatter_s) for _ in borrowed]
        self.wait_all(sums)
        self.work(times.after + router_s)

    def _borrow(self) -> list[float]:
        """Gather an expert's two tensors of weights from the other ranks."""
        return self.gather(2 if self._strategy == "gather_weights" else 0)

    def _wait_for(self, borrowed: list[float]) -> None:
        """Wait for weights, or else exchange rows."""
        self.wait_all(borrowed or [self.send(self._exchange_s) for _ in range(2)])


# Buckets of gradients that may be under way while another is filled, by ZeRO stage.
UNDER_WAY = {1: 1, 2: 1, 3: 2}


def hidden_seconds(job: Job, *, layer: LayerTimes, busy: float, call_s: Callable[[str, float], float]) -> float:
    """Return the seconds of a step's transfers over dp that no rank waits for.

    A micro-batch is played through module by module. Weights of stage 3 are ahead by "stage3_prefetch_bucket_size"
    numbers, which is less than most blocks with experts have, so that the rest of each block is waited for. Gradients
    travel beside the backward, bucket by bucket; those of stage 1 in the last micro-batch only.

    call_s  seconds of a collective over dp, by its kind and the bytes of the whole
    """
    if not overlaps(job):
        return 0.0
    modules = held_modules(job.sizes, job.layout)
    if job.zero_stage == 3:
        steps = weights_of(job).steps
    else:  # all weights are there
        forward = [Step(0, 0, 0, module, is_backward=False) for module in modules]
        steps = (*forward, *(step._replace(is_backward=True) for step in reversed(forward)))
    play = _ZeroPlay(job, layer, modules, busy=busy, call_s=call_s)
    play.run(steps)
    return (1 if job.zero_stage == 1 else job.accumulation) * (play.sent_s - play.exposed_s)


class _ZeroPlay(Lanes):
    """One micro-batch of one job on a rank and its link to other groups."""

    def __init__(
        self,
        job: Job,
        layer: LayerTimes,
        modules: Sequence[Module],
        *,
        busy: float,
        call_s: Callable[[str, float], float],
    ) -> None:
        super().__init__(busy=busy)
        self._element_bytes, self._call_s = job.element_bytes, cache(call_s)
        self._bucket, self._filled = zero_number(job.zero, "reduce_bucket_size"), 0
        self._op, parts = ("reduce_scatter", job.layout.dp) if job.zero_stage == 3 else ("all_reduce", 1)
        self._under_way = UNDER_WAY[job.zero_stage]
        self._sums = [0.0] * self._under_way  # when each bucket has arrived
        self._seconds = _module_seconds(layer, recompute=job.recompute)
        self._gradients = {
            module.kind: [-(-number // parts) * parts for number in module.parameters.values()] for module in modules
        }

    def run(self, steps: Sequence[Step]) -> None:
        """Gather the weights of each module, compute it, and in the backward sum its gradients."""
        ahead: list[float] = []
        for step in steps:
            if step.missing:
                self.wait(self._gather(step.missing))
            if step.waits_for:
                self.wait(ahead[step.waits_for - 1])
            if step.ahead:
                ahead.append(self._gather(step.ahead))
            if step.module is not None:
                self.work(self._seconds[step.module.kind][step.is_backward])
                if step.is_backward:
                    self._add_up(self._gradients[step.module.kind])
        if self._filled:
            self._send_bucket()
        self.wait(self._sums[-1])

    def _gather(self, numbers: int) -> float:
        return self.send(self._call_s("all_gather", self._element_bytes * numbers))

    def _add_up(self, numbers: Sequence[int]) -> None:
        """Put gradients into the bucket, which is sent when the next one has no room in it."""
        for number in numbers:
            if self._filled and self._filled + number > self._bucket:
                self._send_bucket()
            self._filled += number

    def _send_bucket(self) -> None:
        self.wait(self._sums[-self._under_way])
        self._sums.append(self.send(self._call_s(self._op, SUM_BYTES * self._filled)))
        self._filled = 0


def _module_seconds(layer: LayerTimes, *, recompute: bool) -> dict[str, tuple[float, float]]:
    """Return what each kind of module computes forward and backward, what is computed again included there."""

    def together(*parts: Both) -> tuple[float, float]:
        forward_s = sum(part.forward.total for part in parts)
        return forward_s, (forward_s if recompute else 0.0) + sum(part.backward.total for part in parts)

    other = layer["other"]
    return {
        "embedding": (other.forward.before, other.backward.after),
        "experts": together(layer["attention"], layer["router"], layer["experts"]),
        "dense": together(layer["attention"], layer["dense"]),
        "norm": (other.forward.after, other.backward.before),
        "head": (layer["head"].forward.total, layer["head"].backward.total),  # its gradients are made in its forward
    }


def overlaps(job: Job) -> bool:
    """Tell whether anything of ZeRO's travels beside computing: on a GPU's own stream, with "overlap_comm"."""
    if job.layout.dp == 1 or job.device == "cpu" or not job.zero.get("overlap_comm", job.zero_stage == 3):
        return False
    return job.zero_stage >= 2 or (job.zero_stage == 1 and job.precision == "fp32")


def describe_overlap(job: Job) -> str:
    """Say for people what is assumed of ZeRO's transfers in this job; nothing where there are none."""
    if job.layout.dp == 1:
        return ""
    if not overlaps(job):
        return "ZeRO's transfers are waited for in full"
    if job.zero_stage == 3:
        return (
            f"ZeRO's weights are gathered ahead by {Thresholds.of(job.zero).prefetch:,} numbers "
            "(stage3_prefetch_bucket_size), beside the part before; the rest of a block is waited for; gradients "
            "travel beside the backward"
        )
    return f"ZeRO's sums of gradients travel beside the backward{' of the last micro-batch' * (job.zero_stage == 1)}"
