"""Finds and reads traces that the PyTorch profiler wrote, one a rank: ours, or those of any other program."""

import gzip
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recipe.shared.scopes import FACTS_KEY

SUFFIXES = (".json", ".json.gz")
# What the profilers of older releases called the same.
OLD_CATEGORIES = {"operator": "cpu_op", "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)
BROKEN = (LookupError, TypeError, AttributeError, OverflowError)  # what reading an event that is none comes to
REPORT_NAME = "profile.json"  # what this program itself writes about traces
REPORT_START = b'{"format": '


class Event(NamedTuple):
    """Something that lasted. Seconds are since the trace's `origin_us`; `thread` is a host thread or a GPU's stream."""

    name: str
    category: str
    thread: tuple[Any, Any]
    start_s: float
    end_s: float
    args: Mapping[str, Any]


class MemoryEvent(NamedTuple):
    """One allocation (`num_bytes` > 0) or release; `total_bytes` afterwards, where the profiler knows it."""

    time_s: float
    num_bytes: int
    total_bytes: int | None
    on_gpu: bool


class Trace(NamedTuple):
    """One rank's. `facts` are what our recorder says of the run; empty in traces of other programs.

    `says_rank`: the trace or its name does; otherwise it is the place among those that were given.
    """

    path: Path
    rank: int
    says_rank: bool
    world_size: int | None
    device: str
    facts: Mapping[str, Any]
    events: list[Event]
    memory: list[MemoryEvent]


def find_traces(places: Sequence[Path]) -> list[Path]:
    """Return the trace files among these and, by name with numbers in their order, in these folders.

    ValueError where there is none.
    """
    paths: list[Path] = []
    for place in places:
        if place.is_dir():
            found = sorted((path for path in place.iterdir() if _may_be_trace(path)), key=_in_order)
            ours = [p for p in found if RANK_IN_NAME.search(p.name) and p.name.startswith("rank")]
            if not found:
                raise ValueError(f"{place} holds no traces; the PyTorch profiler writes .json or .json.gz files")
            paths += ours or found
        elif place.is_file():
            paths.append(place)
        else:
            raise ValueError(f"{place} does not exist; name a trace of the PyTorch profiler, or a folder of them")
    return paths


def _may_be_trace(path: Path) -> bool:
    if not path.name.endswith(SUFFIXES) or path.name.startswith("."):
        return False
    if path.name != REPORT_NAME or not path.is_file():
        return True
    with path.open("rb") as file:
        return file.read(len(REPORT_START)) != REPORT_START


def _in_order(path: Path) -> list[tuple[bool, int, str]]:
    """Return a key that sorts trace_2 before trace_10."""
    return [(word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in re.split(r"(\d+)", path.name)]


def read_traces(paths: Sequence[Path]) -> list[Trace]:
    """Read traces, in the order of their ranks. ValueError where one is broken, or two are of the same rank."""
    traces = [read_trace(path, default_rank=i) for i, path in enumerate(paths)]
    by_rank: dict[int, Trace] = {}
    for trace in traces:
        twin = by_rank.setdefault(trace.rank, trace)
        if twin is not trace:
            raise ValueError(f"{twin.path} and {trace.path} are both of rank {trace.rank}; give one trace a rank")
    sizes = {trace.world_size for trace in traces if trace.world_size is not None}
    if len(sizes) > 1:
        raise ValueError(f"the traces are of runs with {sorted(sizes)} ranks; give those of one run")
    devices = {trace.device for trace in traces}
    if len(devices) > 1:
        raise ValueError("some of the traces are of GPUs and some of CPUs alone; give those of one run")
    return [by_rank[rank] for rank in sorted(by_rank)]


def read_trace(path: Path, *, default_rank: int = 0) -> Trace:
    """Read one trace; `default_rank` counts where neither the trace nor its name says which rank's it is.

    Raises ValueError for a file that cannot be read, is cut off, or is not the PyTorch profiler's.
    """
    content = _read_json(path)
    raw = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(raw, list) or not all(isinstance(event, dict) for event in raw):
        raise ValueError(f"{path} is not a trace of the PyTorch profiler: it has no list of traceEvents")
    try:
        return _trace(path, content, raw, default_rank=default_rank)
    except BROKEN as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ValueError:
    """Return the error of a trace whose events are not what the profiler writes."""
    return ValueError(f"{path} is not a trace of the PyTorch profiler that can be read: {error!r}")


def _read_json(path: Path) -> Any:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return json.loads(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is cut off or damaged ({error}); record the trace again") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a complete JSON file ({error}); record the trace again") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _trace(path: Path, content: dict[str, Any], raw: list[dict[str, Any]], *, default_rank: int) -> Trace:
    lasting = [event for event in raw if event.get("ph") == "X" and event.get("cat") != "Trace"]
    origin_us = min((_number(event["ts"]) for event in lasting), default=0.0)
    events = [_event(event, origin_us=origin_us) for event in lasting]
    categories = {event.category for event in events}
    if not categories & {"kernel", "cpu_op"}:
        raise ValueError(f"{path} holds neither an operator nor a kernel; nothing was recorded in it")
    facts, info = content.get(FACTS_KEY) or {}, content.get("distributedInfo") or {}
    in_name = RANK_IN_NAME.search(path.name)
    said = info.get("rank", facts.get("rank", int(in_name[1]) if in_name else None))
    world_size = info.get("world_size", facts.get("world_size"))
    in_memory = [event for event in raw if event.get("name") == "[memory]" and "Bytes" in event["args"]]
    return Trace(
        path=path,
        rank=default_rank if said is None else whole_number(said),
        says_rank=said is not None,
        world_size=None if world_size is None else whole_number(world_size),
        device="cuda" if "kernel" in categories else "cpu",
        facts=facts,
        events=events,
        memory=sorted((_memory_event(e, origin_us=origin_us) for e in in_memory), key=lambda e: e.time_s),
    )


def _event(raw: Mapping[str, Any], *, origin_us: float) -> Event:
    start_s = (_number(raw["ts"]) - origin_us) / 1e6
    category = str(raw.get("cat", "")).lower()
    return Event(
        name=str(raw["name"]),
        category=OLD_CATEGORIES.get(category, category),
        thread=(raw.get("pid"), raw.get("tid")),
        start_s=start_s,
        end_s=start_s + max(_number(raw.get("dur", 0)), 0.0) / 1e6,
        args=raw.get("args") or {},
    )


def _memory_event(raw: Mapping[str, Any], *, origin_us: float) -> MemoryEvent:
    args = raw["args"]
    total_bytes = args.get("Total Allocated")
    return MemoryEvent(
        time_s=(_number(raw["ts"]) - origin_us) / 1e6,
        num_bytes=whole_number(args["Bytes"]),
        total_bytes=None if total_bytes is None else whole_number(total_bytes),
        on_gpu=args.get("Device Type", 0) != 0,
    )


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def whole_number(value: Any) -> int:
    """Read a whole number from a number or a text of digits. TypeError for anything else."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return int(_number(value))
