"""A summary and its savings in words, as JSON, and as one HTML page; beside them the timeline for Perfetto."""

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from recipe.profile.savings import find_savings
from recipe.profile.summary import EXPOSED, IDLE, WAITING, WORK, Summary
from recipe.profile.timeline import write_timeline
from recipe.profile.trace_file import REPORT_NAME
from recipe.shared.units import duration

FORMAT = 2
SCRIPTS = ("tools.js", "charts.js", "main.js")
TIMELINE_NAME = "profile.trace.gz"  # named unlike a profiler's own, so that it is never read as one
DECIMALS = 9  # of seconds: nanoseconds


class Written(NamedTuple):
    """The page, and the text of the JSON that lies beside it."""

    page: Path
    json: str


def write_report(summary: Summary, *, folder: Path) -> Written:
    """Write profile.html, profile.json and the timeline for Perfetto into a folder, which need not exist."""
    content = as_json(summary)
    text = json.dumps(content, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT_NAME).write_text(text + "\n", encoding="utf-8")
    write_timeline(folder / TIMELINE_NAME, summary.timeline, memory=summary.memory, facts=summary.facts)
    page = folder / "profile.html"
    page.write_text(as_page(content), encoding="utf-8")
    return Written(page, text)


def check_place(folder: Path, *, traces: Sequence[Path]) -> None:
    """ValueError where one of the traces would be overwritten."""
    target = (folder / REPORT_NAME).resolve()
    if target in (path.resolve() for path in traces):
        raise ValueError(f"{folder / REPORT_NAME} is one of the traces and would be overwritten; give another --out")


def describe(summary: Summary) -> Iterator[str]:
    """Lines for a terminal: where a step's time goes, what would save most, and what could not be told."""
    shares = {
        name: sum(sum(row.seconds) for row in summary.time if row.state == state) / len(summary.ranks)
        for state, name in ((WORK, "work"), (EXPOSED, "exposed transfers"), (WAITING, "waiting"), (IDLE, "idle"))
    }
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in shares.items())
    yield f"a step takes {duration(summary.step_s)} on the slowest of {len(summary.ranks)} ranks: {parts}"
    for number, saving in enumerate(find_savings(summary)[:3], start=1):
        yield f"{number}. {saving.title}. {saving.words}"
    for note in summary.notes:
        yield f"note: {note}"


def as_json(summary: Summary) -> dict[str, Any]:
    """What --json prints, profile.json holds, and the page draws: names of fields as in Summary, times in seconds.

    `timeline` names the file for Perfetto that lies beside it.
    """
    facts = summary.facts
    model = facts.get("model", "")
    return {
        "format": FORMAT,
        "title": f"Where a step of {model.rpartition('/')[2].removesuffix('.json')} goes"
        if model
        else "Where a step goes",
        "device": summary.device,
        "world_size": summary.world_size,
        "layout": facts.get("layout"),
        "facts": dict(facts),
        "step_s": summary.step_s,
        **{name: _plain(getattr(summary, name)) for name in ("ranks", "steps", "step_seconds", "idle_before_s")},
        "savings": _plain(find_savings(summary)),
        **{name: _plain(getattr(summary, name)) for name in ("time", "transfers", "points", "imbalance")},
        "memory": [{**_plain(line), "points": [[_plain(t), num] for t, num in line.points]} for line in summary.memory],
        "timeline": TIMELINE_NAME,
        "notes": summary.notes,
    }


def as_page(content: dict[str, Any]) -> str:
    """The HTML of what `as_json` gives. Its policy lets nothing in but its own script and style."""
    folder = resources.files("recipe.profile") / "page"
    style, script = (
        (folder / "page.css").read_text("utf-8"),
        "\n".join((folder / n).read_text("utf-8") for n in SCRIPTS),
    )
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src data:; base-uri 'none'"
    )
    page = (folder / "page.html").read_text("utf-8")
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
    """NamedTuples as objects, other sequences as lists, numbers short."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(field) for name, field in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return round(value, DECIMALS) if isinstance(value, float) else value
