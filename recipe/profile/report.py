"""A summary in words, as JSON, and as one HTML page, with what would save most; and the timeline for Perfetto."""

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from recipe.profile.summary import COPIES, EXPOSED, IDLE, WAITING, WORK, Summary, TransferRow, execution_in
from recipe.profile.timeline import write_timeline
from recipe.profile.trace_file import REPORT_NAME
from recipe.shared.units import duration, sent_size, size

FORMAT = 2
SCRIPTS = ("tools.js", "charts.js", "main.js")
TIMELINE_NAME = "profile.trace.gz"  # named unlike a profiler's own, so that it is never read as one
DECIMALS = 9  # of seconds: nanoseconds


def write_report(summary: Summary, *, folder: Path) -> Path:
    """Write profile.html, profile.json and the timeline for Perfetto into a folder, which need not exist.

    Return the page.
    """
    content = as_json(summary)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT_NAME).write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
    write_timeline(folder / TIMELINE_NAME, summary.spans, memory=summary.memory, facts=summary.facts)
    page = folder / "profile.html"
    page.write_text(as_page(content), encoding="utf-8")
    return page


def check_place(folder: Path, *, traces: Sequence[Path]) -> None:
    """Raise ValueError where one of the traces would be overwritten."""
    target = (folder / REPORT_NAME).resolve()
    if target in (path.resolve() for path in traces):
        raise ValueError(f"{folder / REPORT_NAME} is one of the traces and would be overwritten; give another --out")


def describe(summary: Summary) -> Iterator[str]:
    """Yield lines for a terminal: where a step's time goes, what would save most, and what could not be told."""
    names = ((WORK, "work"), (EXPOSED, "exposed transfers"), (WAITING, "waiting"), (IDLE, "idle"))
    parts = ", ".join(f"{name} {duration(_mean_seconds(summary, state))}" for state, name in names)
    yield f"a step takes {duration(summary.step_s)} on the slowest of {len(summary.ranks)} ranks: {parts}"
    for number, saving in enumerate(find_savings(summary)[:3], start=1):
        yield f"{number}. {saving.title}. {saving.words}"
    for note in summary.notes:
        yield f"note: {note}"


def as_json(summary: Summary) -> dict[str, Any]:
    """Return what --json prints, profile.json holds and the page draws: fields named as in Summary, times in seconds.

    `timeline` names the file for Perfetto that lies beside it.
    """
    model = summary.facts.get("model", "").rpartition("/")[2].removesuffix(".json")
    counted = {name: _plain(value) for name, value in summary._asdict().items() if name != "spans"}
    return {
        "format": FORMAT,
        "title": f"Where a step of {model} goes" if model else "Where a step goes",
        "layout": summary.facts.get("layout"),
        "step_s": summary.step_s,
        "savings": _plain(find_savings(summary)),
        **counted,
        "timeline": TIMELINE_NAME,
    }


def as_page(content: dict[str, Any]) -> str:
    """Return the HTML of what `as_json` gives. Its policy lets nothing in but its own script and style."""
    folder = resources.files("recipe.profile") / "page"
    page, style, *scripts = ((folder / name).read_text("utf-8") for name in ("page.html", "page.css", *SCRIPTS))
    script = "\n".join(scripts)
    own = f"script-src {_digest(script)}; style-src {_digest(style)}"
    policy = f"default-src 'none'; {own}; img-src data:; base-uri 'none'"
    # A "<" could end the element that holds the data.
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {"policy": policy, "title": html.escape(content["title"]), "style": style, "data": data, "script": script}
    head, *pieces = page.split("{{")
    for piece in pieces:
        name, _, rest = piece.partition("}}")
        head += parts[name] + rest
    return head


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _plain(value: Any) -> Any:
    """Return NamedTuples as objects, other sequences as lists, numbers short."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(field) for name, field in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return round(value, DECIMALS) if isinstance(value, float) else value


SHORT_BYTES = 16 * 1024  # that a rank sends in a collective; below it the number of calls is what counts
LEAST_SHARE = 0.002  # of a step, to be worth a sentence
NAMES = {
    "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters",
    "all_reduce": "all-reduces",
    "all_to_all": "all-to-alls",
    "broadcast": "broadcasts",
    "send_recv": "sends",
    "send": "sends",
}


class Saving(NamedTuple):
    """`seconds` of a step, the mean over ranks, are the most that could be saved: those that are lost now.

    The savings of one summary are of different seconds.
    """

    seconds: float
    title: str
    words: str


def find_savings(summary: Summary) -> list[Saving]:
    """Find what could be saved, the largest first."""
    found = [*_exposed(summary), *_waiting(summary), *_idle(summary), *_recompute(summary), *_copies(summary)]
    return sorted((s for s in found if s.seconds > LEAST_SHARE * summary.step_s), key=lambda s: -s.seconds)


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _exposed(summary: Summary) -> Iterator[Saving]:
    for row in summary.transfers:
        name, among = NAMES.get(row.route.op, row.route.op), f"{row.route.purpose} ({row.route.among})"
        total_s = row.exposed_s + row.hidden_s
        if not total_s:
            continue
        words = (
            f"{_count(row.num_calls)} {name} a step move for {duration(total_s)}, of which "
            f"{row.hidden_s / total_s:.0%} is behind work.{_speed(row)} {_hide(row, summary)}"
        )
        yield Saving(row.exposed_s, f"Hide {duration(row.exposed_s)} of {name} for {among}", words)


def _speed(row: TransferRow) -> str:
    if row.bytes_per_s is None:
        return ""
    assert row.sent_bytes is not None
    if row.sent_bytes / row.num_calls < SHORT_BYTES:
        return f" A rank sends {sent_size(row.sent_bytes / row.num_calls)} in each, so most of it is latency."
    achieved = f" A rank sends {sent_size(row.bytes_per_s)}/s"
    if row.link_bytes_per_s is None:
        return f"{achieved}."
    return f"{achieved}, {row.bytes_per_s / row.link_bytes_per_s:.0%} of the link."


def _hide(row: TransferRow, summary: Summary) -> str:
    """Name the setting that hides a transfer, or makes it rarer."""
    facts, execution, purpose = summary.facts, execution_in(summary.facts), row.route.purpose
    if execution is None:
        return "Start them before the work that does not need them, or cut them in chunks."
    short = row.sent_bytes is not None and row.sent_bytes / row.num_calls < SHORT_BYTES
    if row.route.among.startswith("dp") or purpose in ("gradients", "optimizer"):
        return _rarer(purpose, facts)
    if not execution["overlap"]:
        return 'Set "overlap": true in the "parallel" block.'
    if purpose in ("attention", "experts", "dense", "head") and not short:
        chunks = execution["overlap_chunks"]
        now = "chosen for the link it assumes" if chunks is None else f"now {chunks}"
        more = 2 if chunks is None else 2 * chunks
        return f'Try another "overlap_chunks" ({now}), {more} say, or more tokens in a micro-batch.'
    return "More tokens in a micro-batch make it a smaller share."


def _rarer(purpose: str, facts: Mapping[str, Any]) -> str:
    """Advise how to send less often: stage 2 sums gradients in every micro-batch, stage 3 fetches weights there, too.

    The update's own transfers come once a step in any stage.
    """
    stage, times = facts["zero_stage"], facts["accumulation"]
    if stage < 2 or purpose == "optimizer":
        return f"More gradient_accumulation_steps than {times} make them a smaller share of a step."
    per_batch = "gathers weights and sums gradients" if stage == 3 else "sums gradients"
    return (
        f"ZeRO-{stage} {per_batch} in every micro-batch: more tokens in one make it a smaller share, and a lower stage "
        "sends less often where memory allows it."
    )


def _waiting(summary: Summary) -> Iterator[Saving]:
    waiting_s = _mean_seconds(summary, WAITING)
    if len(summary.ranks) < 2 or not summary.imbalance:
        return
    worst = max(summary.imbalance, key=lambda entry: max(entry.seconds) - sum(entry.seconds) / len(entry.seconds))
    mean_s = sum(worst.seconds) / len(worst.seconds)
    extra_s, rank = max(worst.seconds) - mean_s, summary.ranks[worst.seconds.index(max(worst.seconds))]
    words = (
        f"Ranks wait for slower ones in collectives. The work that differs most is {worst.kind}: rank {rank} takes "
        f"{worst.max_over_mean:.3g} times the mean, {duration(extra_s)} more."
    )
    if extra_s < waiting_s / 4:
        words += " That explains little of it: ranks come late for what the host does, not for their work."
    elif worst.kind == "experts" and summary.facts.get("layout", {}).get("ep", 1) > 1:
        words += ' Even whole experts out with "resident_experts" or `gather-moe place`, or slice them ("ep": 1).'
    yield Saving(waiting_s, f"Even out the ranks: {duration(waiting_s)} of waiting", words)


def _idle(summary: Summary) -> Iterator[Saving]:
    idle_s, before_s = _mean_seconds(summary, IDLE), summary.idle_before_s
    words = f"Neither work nor a transfer runs for {idle_s / summary.step_s:.0%} of the step."
    if before_s > idle_s / 2:
        words += f" {duration(before_s)} of it is before anything runs: data comes late, try --dataloader_num_workers."
    elif summary.device == "cuda":
        words += " The host launches too slowly: CUDA graphs, or more tokens in a micro-batch."
    else:
        words += " It is what the host does between operators: more tokens in a micro-batch make it a smaller share."
    yield Saving(idle_s, f"Fill {duration(idle_s)} in which nothing runs", words)


def _recompute(summary: Summary) -> Iterator[Saving]:
    rows = [row for row in summary.time if row.part is not None and row.part.phase == "recompute"]
    seconds = sum(sum(row.seconds) for row in rows if row.state == WORK) / len(summary.ranks)
    peak = max((line.peak_bytes for line in summary.memory if line.whole), default=None)
    words = "Blocks are computed again in the backward: without gradient_checkpointing where memory allows"
    words += "." if peak is None else f"; the peak is {size(peak)} now."
    yield Saving(seconds, f"Keep activations: {duration(seconds)} of recomputation", words)


def _copies(summary: Summary) -> Iterator[Saving]:
    seconds = _mean_seconds(summary, COPIES)
    words = "Copies from or to the host run with nothing beside them: pinned memory and non_blocking=True, or fewer."
    yield Saving(seconds, f"Hide {duration(seconds)} of copies", words)


def _mean_seconds(summary: Summary, state: str) -> float:
    return sum(sum(row.seconds) for row in summary.time if row.state == state) / len(summary.ranks)
