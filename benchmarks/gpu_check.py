"""Whether the GPU path is right and how fast it is: one prepared script for one GPU, at most six minutes.

    python benchmarks/gpu_check.py --json FILE

It has never been run on a GPU; tests run its parts on a CPU, with emulated graphs. There is one rank, so nothing is
said about transfers. In this order, the last ones left out when time runs out:

    rows       the operators on experts' rows and on every element against the same on a CPU, and bytes a second; norms;
               attention over documents; a micro-batch in which nothing may make the host wait
    products   the grouped products of Triton and of torch against float64, and their speed
    precision  loss and gradients in float32, TF32 and bfloat16 against float64
    graphs     replayed blocks against eager ones: loss, gradients, twenty steps; beside them what eager differs by when
               it is repeated, since attention's backward may sum in any order
    speed      step time, MFU, launches, kernels and memory: eager, graphed, compiled block by block; also with the
               shapes of one rank of a group of eight, whose transfers are left out

Exit code 0 where all is within bounds, 1 where something is not or failed, 2 without a GPU.
"""

import argparse
import gc
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from gpu_cases import LARGE, SMALL, TORCH, TRITON, Bench, Case, Row, cases
from gpu_layers import layer_cases

from recipe.engine.graphs import CudaCapture, install_graphs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit-s", type=float, default=270.0, help="no case is begun after so many seconds")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("gpu_check: torch finds no GPU here, so there is nothing to check", file=sys.stderr)
        return 2
    start_s = time.monotonic()
    bench = gpu_bench()
    rows = run_cases(chain(layer_cases(bench), cases(bench)), limit_s=arguments.limit_s)
    report = {"machine": describe_machine(), "seconds": time.monotonic() - start_s, "rows": [r._asdict() for r in rows]}
    print(json.dumps(report["machine"]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(row.is_good for row in rows) else 1


def gpu_bench() -> Bench:
    return Bench(
        device=torch.device("cuda"),
        models={"small": SMALL, "large": LARGE},
        product_sizes=(16384, 1536, 2048, 32),
        batch=(4, 2048),
        products={"triton": TRITON, "torch": TORCH},
        variants={
            "eager": lambda model: None,
            "graphed": lambda model: install_graphs(model, capture=CudaCapture()),
            "compiled": compile_blocks,
        },
    )


def compile_blocks(model: Any) -> None:
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, dynamic=False)


def run_cases(todo: Iterator[Case], *, limit_s: float) -> list[Row]:
    """The rows of all cases, printed as they come. One that raises is void, and the others still run."""
    start_s, rows = time.monotonic(), []
    for section, name, measure in todo:
        case_s = time.monotonic()
        if case_s - start_s > limit_s:
            new = [Row(section, name, "", None, void=f"left out: {limit_s:.0f} s were over")]
        else:
            try:
                new = measure()
            except Exception as error:
                traceback.print_exc()
                first_line = (str(error).splitlines() or [""])[0]
                new = [Row(section, name, "", None, void=f"{type(error).__name__}: {first_line}"[:200])]
            print(f"{section} {name}: {time.monotonic() - case_s:.1f} s", file=sys.stderr)
        print_table(new)
        rows += new
        if torch.cuda.is_available():
            gc.collect()  # a graphed block and its graphs hold each other
            torch.cuda.empty_cache()
    return rows


def describe_machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    root = Path(__file__).parent.parent
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
    properties = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "gpu": properties.name if properties else None,
        "capability": f"{properties.major}.{properties.minor}" if properties else None,
        "memory_bytes": properties.total_memory if properties else None,
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit.stdout.strip() or "not a git checkout",
    }


def print_table(rows: Sequence[Row]) -> None:
    for row in rows:
        place = f"{row.section:<10} {row.case:<16} {row.what:<60}"
        if row.void is not None:
            print(f"{place} void: {row.void}", flush=True)
            continue
        bound = "" if row.bound is None else f"  {'ok' if row.is_good else 'TOO MUCH'}, bound {row.bound:.1e}"
        print(f"{place} {row.value:>12.5g} {row.unit}{bound}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
