"""Names of the parts of a step in a trace: written while a run is recorded, read when its trace is taken apart."""

from collections.abc import Sequence
from typing import NamedTuple

PREFIX = "gather_moe/"
RANKS_PREFIX = "gather_moe_ranks/"
STEP_PREFIX = "ProfilerStep#"  # the PyTorch profiler's own name, so that any reader of traces knows it
FACTS_KEY = "gather_moe"  # of a trace, whose value says what was recorded
FOLDER = "profile"  # of a run, with a trace of every rank
TRACE_NAMES = "rank-*.json.gz"  # there
WARM_UP_STEPS = 2


class Scope(NamedTuple):
    """A part of the model or of the step: "attention", "experts", "optimizer", …; `layer` is None outside blocks."""

    kind: str
    layer: int | None = None


def scope_name(scope: Scope) -> str:
    """Like gather_moe/layers/3/attention, or gather_moe/head."""
    return PREFIX + (scope.kind if scope.layer is None else f"layers/{scope.layer}/{scope.kind}")


def read_scope(name: str) -> Scope | None:
    """The scope of such a name; None for any other."""
    if not name.startswith(PREFIX):
        return None
    *layer, kind = name.removeprefix(PREFIX).split("/")
    return Scope(kind, int(layer[1]) if layer else None)


def ranks_name(ranks: Sequence[int]) -> str:
    """The name of whoever takes part in a collective, like gather_moe_ranks/0:8:2 for 0, 2, 4 and 6."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    regular = range(ranks[0], ranks[-1] + 1, step) if step > 0 else range(0)
    if list(regular) == list(ranks):
        return f"{RANKS_PREFIX}{regular.start}:{regular.stop}:{regular.step}"
    return RANKS_PREFIX + ",".join(map(str, ranks))


def read_ranks(name: str) -> tuple[int, ...] | None:
    """The ranks of such a name; None for any other."""
    if not name.startswith(RANKS_PREFIX):
        return None
    text = name.removeprefix(RANKS_PREFIX)
    if ":" in text:
        return tuple(range(*map(int, text.split(":"))))
    return tuple(map(int, text.split(",")))


def trace_name(rank: int) -> str:
    return TRACE_NAMES.replace("*", str(rank))


def first_recorded_step(wanted: int | None, *, after_step: int) -> int:
    """`wanted` as --profile_from_step has it; `after_step` is the step that a run goes on from, 0 at its start."""
    return wanted or after_step + WARM_UP_STEPS + 1
