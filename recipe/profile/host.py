"""The host's side of a trace: the part of the model and the pass over it that every operator and launch belongs to.

Names of kernels, operators, modules and collectives are those of any program that the profiler watched.

An event lies inside the ranges that are open on its thread when it starts. The backward's nodes are outside the model's
ranges; each carries the number of the operator it differentiates, and so belongs to where that was. Every thread
numbers its operators for itself, so what a thread of the backward computes again has numbers of the forward's, too.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from recipe.profile.trace_file import Event
from recipe.shared.scopes import PREFIX, STEP_PREFIX, Scope, read_ranks, read_scope

HOST_CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
EVALUATE = "autograd::engine::evaluate_function"
ACCUMULATE = "AccumulateGrad"
PHASES = {"optimizer": "update", "gradients": "backward"}  # of what is no part of the model
GLOO_PREFIX = "gloo:"
C10D_PREFIX = "c10d::"
PARAM_COMMS = "record_param_comms"
# Namespaces of operators that only wrap others.
NOT_WORK = ("c10d", "autograd", "torch", "_c10d_functional", "profiler")

# The first pattern that is found decides; what no range and no module around a kernel says, its name may.
KERNEL_KINDS = (
    (re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE), "attention"),
    (re.compile(r"grouped|group_gemm|moe", re.IGNORECASE), "experts"),
    (re.compile(r"adam|multi_tensor|lamb|foreach", re.IGNORECASE), "optimizer"),
    (re.compile(r"nll_loss|cross_entropy|log_softmax", re.IGNORECASE), "head"),
    (re.compile(r"gemm|nvjet|cutlass|xmma|cublas|::(b|add|badd)?mm\b|::linear|::matmul", re.IGNORECASE), "products"),
    (re.compile(r"embedding|indexSelect", re.IGNORECASE), "embedding"),
    (re.compile(r"norm", re.IGNORECASE), "norms"),
)
MODULE_PREFIX = "nn.Module: "  # with_stack=True adds these
# Names of models are in those of their modules: Qwen3MoeRMSNorm is no expert.
MODULE_KINDS = (
    (re.compile(r"norm(?:gated|\dd)?$", re.IGNORECASE), "norms"),  # LayerNormMLP is more than one
    (re.compile(r"embedding", re.IGNORECASE), "embedding"),
    (re.compile(r"For[A-Z]\w+$|LMHeadModel$"), "head"),  # what is around the decoder
    (re.compile(r"Model$"), "embedding"),  # what is around its blocks
    (re.compile(r"attention|attn", re.IGNORECASE), "attention"),
    (re.compile(r"router|gate$|gating|topk", re.IGNORECASE), "router"),
    (re.compile(r"expert|moe|sparse", re.IGNORECASE), "experts"),
    (re.compile(r"mlp|feedforward|feed_forward|ffn", re.IGNORECASE), "dense"),
    (re.compile(r"lmhead|lm_head|crossentropy|cross_entropy", re.IGNORECASE), "head"),
)
BLOCK = re.compile(r"(?:DecoderLayer|EncoderLayer|TransformerLayer|TransformerBlock|DecoderBlock|^Block)_(\d+)$")
OPTIMIZER_PREFIX = "Optimizer.step#"
# Symmetric memory has kernels of its own, called Sym or Symk.
NCCL = re.compile(r"[nr]ccl(?:Symk?)?(?:Dev|Generic)?Kernel(?:_(?P<op>[A-Za-z]+))?")
# Without underscores: NCCL's names, torch's, gloo's and c10d's.
OPS = {
    **dict.fromkeys(("allgather", "allgatherintotensor", "allgatherintotensorcoalesced"), "all_gather"),
    **dict.fromkeys(("reducescatter", "reducescattertensorcoalesced"), "reduce_scatter"),
    **dict.fromkeys(("allreduce", "allreducecoalesced"), "all_reduce"),
    **dict.fromkeys(("alltoall", "alltoallv"), "all_to_all"),
    **{op: op for op in ("broadcast", "reduce", "send", "recv", "barrier")},
    "sendrecv": "send_recv",
}
# In these every rank needs something of every other, so that all end together.
AMONG_ALL = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "barrier")
DTYPE_BYTES = {
    **dict.fromkeys(("double", "long", "longint", "int64"), 8),
    **dict.fromkeys(("float", "int", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "half", "short", "shortint", "uint16"), 2),
    **dict.fromkeys(("byte", "char", "unsignedchar", "signedchar", "bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8e4m3fn", "float8e5m2", "float8e4m3fnuz", "float8e5m2fnuz"), 1),
}


class Context(NamedTuple):
    """What is around an event.

    phase    "forward", "backward", "recompute" (a forward inside the backward) or "update"
    ranks    who takes part in the collectives here, where our recorder named them
    comms    what the profiler says of the collective here
    working  inside an operator whose whole time counts as work already
    nested   inside a node of the backward
    """

    scope: Scope | None = None
    phase: str = "forward"
    ranks: tuple[int, ...] | None = None
    comms: Mapping[str, Any] | None = None
    working: bool = False
    nested: bool = False


# Where operators with a sequence number were: (None, number) in the forward, (thread, number) in a recomputation.
Scopes = dict[tuple[Any, int], Scope | None]


class Placed(NamedTuple):
    """An event and what is around it."""

    event: Event
    context: Context


class Host(NamedTuple):
    """
    operators    of the threads that train, where a program marks its steps; none lies inside another
    calls        operators that start a collective, in the order of their start
    gloo         gloo's own events: when it worked on a collective
    launches     what is around the launch of a kernel, by its correlation number
    steps        (number, event) of every step that the program marked
    """

    operators: list[Placed]
    calls: list[Placed]
    gloo: list[Event]
    launches: dict[int, Context]
    steps: list[tuple[int, Event]]


def read_host(events: Iterable[Event]) -> Host:
    """Go through the host's events in time, all threads at once, since a backward may have a thread of its own."""
    host = Host([], [], [], {}, [])
    open_ranges: dict[Any, list[Placed]] = {}
    scopes: Scopes = {}
    training_threads = set()
    for event in sorted((e for e in events if _is_hosts(e)), key=lambda e: (e.start_s, -e.end_s)):
        stack = open_ranges.setdefault(event.thread, [])
        while stack and stack[-1].event.end_s <= event.start_s:
            stack.pop()
        outer = stack[-1].context if stack else Context()
        context = _inside(event, outer, scopes)
        if event.name.startswith((STEP_PREFIX, EVALUATE)):
            training_threads.add(event.thread)
        _note(host, event, outer, context)
        stack.append(Placed(event, context))
    if host.steps:
        host.operators[:] = [placed for placed in host.operators if placed.event.thread in training_threads]
    return host


def _is_hosts(event: Event) -> bool:
    if event.category == "python_function":
        return event.name.startswith(MODULE_PREFIX)
    return event.category in HOST_CATEGORIES


def _inside(event: Event, outer: Context, scopes: Scopes) -> Context:
    """Return what is around the events inside this one; note in `scopes` where a numbered operator was."""
    name, number = event.name, event.args.get("Sequence number", -1)
    if name.startswith(EVALUATE):
        # A leaf's node only adds up a gradient, and runs what hooks do with it.
        own = Scope("gradients") if name.endswith(ACCUMULATE) else outer.scope
        # Nodes of what the backward computes again are run inside the node that computed it.
        again = outer.nested and (event.thread, number) in scopes
        scope = scopes[event.thread, number] if again else scopes.get((None, number), own)
        return outer._replace(scope=scope, phase="backward", nested=True)
    if event.category == "cpu_op":
        if number >= 0 and not event.args.get("Fwd thread id") and outer.phase in ("forward", "recompute"):
            # Operators without a gradient show the number that the next one with a gradient gets: the last counts.
            scopes[None if outer.phase == "forward" else event.thread, number] = outer.scope
        if name == PARAM_COMMS:
            return outer._replace(comms=event.args)
        return outer._replace(working=True) if _is_work(event) else outer
    if name.startswith(OPTIMIZER_PREFIX):
        return outer._replace(scope=Scope("optimizer"), phase="update")
    if name.startswith(GLOO_PREFIX):
        return outer._replace(working=True)
    ranks = read_ranks(name)
    if ranks is not None:
        return outer._replace(ranks=ranks)
    scope = read_scope(name) if name.startswith(PREFIX) else module_scope(name)
    return outer if scope is None else _entered(scope, outer)


def _entered(scope: Scope, outer: Context) -> Context:
    if scope.kind in PHASES:
        return outer._replace(scope=scope, phase=PHASES[scope.kind])
    if scope.layer is None and outer.scope is not None:
        scope = scope._replace(layer=outer.scope.layer)
    again = outer.phase in ("backward", "recompute")
    return outer._replace(scope=scope, phase="recompute" if again else "forward")


def _is_work(event: Event) -> bool:
    """Return whether an operator is one of a library's; the others are Python functions that may wait for something."""
    namespace, _, rest = event.name.partition("::")
    return bool(rest) and namespace not in NOT_WORK


def _note(host: Host, event: Event, outer: Context, context: Context) -> None:
    if event.name.startswith(STEP_PREFIX) and event.name.removeprefix(STEP_PREFIX).isdecimal():
        host.steps.append((int(event.name.removeprefix(STEP_PREFIX)), event))
    elif event.category in ("cuda_runtime", "cuda_driver"):
        if "correlation" in event.args:
            host.launches[event.args["correlation"]] = context
    elif event.name.startswith(GLOO_PREFIX):
        host.gloo.append(event)
    elif event.category == "cpu_op" and event.name.startswith(C10D_PREFIX):
        host.calls.append(Placed(event, outer))
    elif event.category == "cpu_op" and _is_work(event) and not outer.working:
        host.operators.append(Placed(event, outer))


def kind_of_kernel(name: str) -> str:
    """Return the part of a kernel or an operator about which nothing around it says more."""
    return _first(KERNEL_KINDS, name) or "other"


def module_scope(name: str) -> Scope | None:
    """Return the part that `nn.Module: Qwen3MoeAttention_7` names; only a block's number is its layer's."""
    if not name.startswith(MODULE_PREFIX):
        return None
    name = name.removeprefix(MODULE_PREFIX)
    block = BLOCK.search(name)
    if block is not None:
        return Scope("norms", int(block[1]))
    kind = _first(MODULE_KINDS, re.sub(r"_\d+$", "", name))
    return None if kind is None else Scope(kind)


def collective_op(name: str) -> str | None:
    """Return the operation of a name like _allgather_base, c10d::allreduce_, gloo:all_to_all or AllGather, if known."""
    bare = re.sub(r"_|base", "", name.removeprefix("c10d::").removeprefix("gloo:")).lower()
    return OPS.get(bare)


def dtype_bytes(name: str) -> int | None:
    """Return the bytes of a number of such a type, under any of the names that traces have for it; None: unknown."""
    return DTYPE_BYTES.get(re.sub(r"c10::|[_ ]", "", name).lower())


def _first(table: Sequence[tuple[re.Pattern[str], str]], name: str) -> str | None:
    return next((kind for pattern, kind in table if pattern.search(name)), None)
