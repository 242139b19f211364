"""Traces as the PyTorch profiler writes them on GPUs, made up so that every number of their account is known."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from recipe.profile.summary import Summary, summarise
from recipe.profile.trace_file import find_traces, read_traces
from recipe.profile.transfers import Links

HOST, FORWARD, BACKWARD = 100, 100, 200  # process, and threads of it
EVALUATE = "autograd::engine::evaluate_function"
STEP_US = 1000


def event(name: str, category: str, start: float, end: float, *, tid: int = FORWARD, **args: Any) -> dict[str, Any]:
    times = {"ts": 5_000_000 + start, "dur": end - start}
    return {"ph": "X", "name": name, "cat": category, "pid": HOST, "tid": tid, **times, "args": args}


def launch(correlation: int, at: float, *, tid: int = FORWARD) -> dict[str, Any]:
    return event("cudaLaunchKernel", "cuda_runtime", at, at + 1, tid=tid, correlation=correlation)


def kernel(name: str, correlation: int, start: float, end: float, *, stream: int = 7, **args: Any) -> dict[str, Any]:
    return event(name, "kernel", start, end, tid=stream, correlation=correlation, stream=stream, **args)


def memory(at: float, num_bytes: int, total: int) -> dict[str, Any]:
    args = {"Device Type": 1, "Device Id": 0, "Bytes": num_bytes, "Total Allocated": total}
    return {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "ts": 5_000_000 + at, "args": args}


def comms(name: str, *, given: int, taken: int, ranks: str = "[0, 1]", group: str = "1") -> dict[str, Any]:
    return {
        "Collective name": name,
        "In msg nelems": given,
        "Out msg nelems": taken,
        "Group size": 2,
        "dtype": "BFloat16",
        "Process Group Name": group,
        "Process Group Ranks": ranks,
    }


def gpu_events(rank: int, *, experts_end: float = 500) -> list[dict[str, Any]]:
    """One step of 1,000 us. In us, on rank 0: 400 of work, 250 exposed, 100 of waiting, 20 of copies, 230 idle.

    Rank 1 is 50 late for the gather, behind work, and 100 late for the scatter, where it has nothing else to do.
    """
    gather, scatter = comms("_allgather_base", given=1000, taken=2000), comms("reduce_scatter", given=4000, taken=2000)
    return [
        event("ProfilerStep#7", "user_annotation", 0, STEP_US),
        event("ProfilerStep#7", "gpu_user_annotation", 100, 950, tid=7),
        event("gather_moe/layers/0/norms", "user_annotation", 5, 160),
        event("gather_moe/layers/0/attention", "user_annotation", 10, 100),
        event("aten::mm", "cpu_op", 12, 20, **{"Sequence number": 5, "Fwd thread id": 0}),
        launch(1, 13),
        event("record_param_comms", "cpu_op", 30, 40, **gather),
        launch(2, 31),
        event("gather_moe/layers/0/experts", "user_annotation", 110, 150),
        launch(4, 120),
        event(f"{EVALUATE}: MmBackward0", "cpu_op", 200, 260, tid=BACKWARD, **{"Sequence number": 5}),
        launch(3, 210, tid=BACKWARD),
        launch(7, 240, tid=BACKWARD),
        event("gather_moe/optimizer", "user_annotation", 300, 350),
        launch(5, 310),
        kernel("nvjet_tst_128x256", 1, 100, 300),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2, 200 + 50 * rank, 450, stream=20),
        kernel("cutlass::Kernel<grouped>", 4, 400, experts_end),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16", 7, 500 + 100 * rank, 800, stream=20, **scatter),
        kernel("nvjet_tst_64x64", 3, 700, 750),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 800, 820, tid=7, correlation=6),
        kernel("multi_tensor_apply_kernel<FusedAdam>", 5, 900, 950),
        memory(90, 512, 4096),
        memory(400, 2048, 6144),
        memory(960, -2048, 4096),
    ]


def lagging_steps(rank: int, *, lag: float, late: float = 0) -> list[dict[str, Any]]:
    """Three steps with four gathers each, of 30 to 120 us; the GPU runs them `lag` behind the host.

    The rank comes `late` to every second one, which then is as much shorter for it.
    """
    given = comms("_allgather_base", given=1000, taken=2000)
    events = [event(f"ProfilerStep#{i + 1}", "user_annotation", STEP_US * i, STEP_US * (i + 1)) for i in range(3)]
    for i in range(12):
        start, end = 100 + 250 * i + lag + late * (i % 2), 130 + 250 * i + lag + i % 4 * 30
        name = "ncclDevKernel_AllGather_RING"
        events += [launch(i + 1, 50 + 250 * i), kernel(name, i + 1, start, end, stream=20, **given)]
    return [*events, kernel("gemm", 99, 0, 5)]


def write_ranks(folder: Path, events: Sequence[list[dict[str, Any]]], **content: Any) -> Path:
    """A trace of every rank, which says which it is."""
    for rank, of_rank in enumerate(events):
        info = {"backend": "nccl", "rank": rank, "world_size": len(events)}
        write_trace(folder / f"trace-{rank}.json.gz", of_rank, distributedInfo=info, **content)
    return folder


def write_trace(path: Path, events: list[dict[str, Any]], **content: Any) -> Path:
    """Compressed where the name says so."""
    text = json.dumps({"schemaVersion": 1, **content, "traceEvents": events}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def write_gpu_traces(folder: Path, **options: Any) -> Path:
    """Of two ranks."""
    return write_ranks(folder, [gpu_events(rank, **options) for rank in range(2)])


def take_apart(place: Path, *, links: Links | None = None) -> Summary:
    return summarise(read_traces(find_traces([place])), links=links or Links(within=40e6))


def in_us(seconds: Iterable[float]) -> list[float]:
    return [round(s * 1e6, 6) for s in seconds]


def time_in_us(summary: Summary, *, state: str | None = None) -> dict[Any, list[float]]:
    """The time table, or its rows of one state: us by rank of each state, part and operation."""
    rows = [row for row in summary.time if state in (None, row.state)]
    return {(row.state, row.part and tuple(row.part), row.op): in_us(row.seconds) for row in rows}
