"""What cannot be told from a recording's traces, in sentences for whoever reads the numbers."""

from collections.abc import Iterator, Sequence

from recipe.profile.spans import RankSpans
from recipe.profile.transfers import Matched, Unpaired


def notes_of(ranks: Sequence[RankSpans], matched: Matched) -> Iterator[str]:
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
    if trace.facts.get("parallel", {}).get("cuda_graph"):
        yield "blocks that are replayed as CUDA graphs have one name: their time counts as their layer's rest"
    if trace.device == "cpu":
        yield "on a CPU idle is also Python between operators, which the recording itself makes slower"


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
