"""Whether two GPUs work together as planned: one prepared script for NCCL, at most four minutes.

    torchrun --nproc-per-node 2 benchmarks/gpu_pair_check.py --json FILE

It has never been run on a GPU; tests run its parts on two ranks of a CPU, with emulated graphs. In this order:

    graphs   a group's collectives inside captured blocks: loss and gradients against eager ones, in every strategy that
             leaves the host alone
    waits    a micro-batch of packed documents with overlap in which nothing may make the host wait
    overlap  a micro-batch whose transfers hide behind products, and one where each is waited for; the layers' groups on
             urgent streams and on ordinary ones

Exit code 0 where all is within bounds, 1 where something is not or failed, 2 without two GPUs. Rank 0 prints.
"""

import argparse
import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu_cases import DTYPES, GRAPH_FLOORS, LARGE, SMALL, Case, Row, difference, no_waits, synchronize, time_steps
from gpu_check import describe_machine, print_table
from torch import Tensor

from modeling import mesh as mesh_module
from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from modeling.init import build_model
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh
from recipe.engine.graphs import Capture, CudaCapture, install_graphs

STRATEGIES = {"gather_tokens": 2, "gather_weights": 1}  # and the ep that they are checked with


class Pair(NamedTuple):
    """What is checked, and on what; a test puts two ranks of a CPU and small sizes here."""

    device: torch.device
    small: dict[str, Any]
    large: dict[str, Any]
    batch: tuple[int, int]
    attention: str
    capture: Callable[[], Capture]
    num_timed: int = 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    if torch.cuda.device_count() < 2:
        print(f"gpu_pair_check: torch finds {torch.cuda.device_count()} GPUs here and needs two", file=sys.stderr)
        return 2
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    device = torch.device("cuda", dist.get_rank())
    rows = run_pair(Pair(device, SMALL, LARGE, (2, 4096), "varlen", CudaCapture))
    if dist.get_rank() == 0:
        print_table(rows)
        if arguments.json is not None:
            report = {"machine": describe_machine(), "rows": [row._asdict() for row in rows]}
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    is_good = torch.tensor(float(all(row.is_good for row in rows)), device=device)
    dist.all_reduce(is_good, op=dist.ReduceOp.MIN)
    dist.destroy_process_group()
    return 0 if is_good.item() else 1


def run_pair(pair: Pair) -> list[Row]:
    """The rows of all cases. One that raises is void; if it does on one rank only, NCCL's time limit ends the other."""
    rows = []
    for section, name, measure in pair_cases(pair):
        try:
            rows += measure()
        except Exception as error:
            traceback.print_exc()
            first_line = (str(error).splitlines() or [""])[0]
            rows.append(Row(section, name, "", None, void=f"{type(error).__name__}: {first_line}"[:200]))
        gc.collect()  # a graphed block and its graphs hold each other, and a group ends only after its graphs
        synchronize(pair.device)
    return rows


def pair_cases(pair: Pair) -> Iterator[Case]:
    for strategy in STRATEGIES:
        yield Case("graphs", strategy, partial(check_graphs, pair, strategy))
        yield Case("waits", strategy, partial(check_waits, pair, strategy))
    for is_urgent in (True, False):
        name = "urgent streams" if is_urgent else "ordinary streams"
        yield Case("overlap", name, partial(check_overlap, pair, name, is_urgent))


def make_pair_model(pair: Pair, sizes: dict[str, Any], strategy: str, *, overlap: bool = True) -> Any:
    """Half of a model of bfloat16, the same weights on both ranks."""
    mesh = build_mesh(ParallelLayout(tp=2, ep=STRATEGIES[strategy]), num_key_value_heads=sizes["num_key_value_heads"])
    config = GatherMoeConfig(**sizes)
    config._attn_implementation = pair.attention
    execution = Execution(strategy=strategy, overlap=overlap, experts_backend="auto")
    return build_model(config, mesh=mesh, execution=execution, seed=0, dtype=DTYPES["bf16"], device=pair.device)


def micro_batch(pair: Pair, model: Any) -> Tensor:
    """Forward and backward of documents that are packed alike in every sequence; the loss."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, pair.batch, generator=generator).to(pair.device)
    starts = ((0, pair.batch[1] // 3),) * pair.batch[0]
    counts = {"num_items_in_batch": ids.numel(), "num_tokens_in_batch": ids.numel()}
    loss: Tensor = model(input_ids=ids, labels=ids, document_starts=starts, **counts).loss
    loss.backward()
    return loss.detach()


def check_graphs(pair: Pair, strategy: str) -> list[Row]:
    """Captured with its collectives inside, a block gives what it gives without."""
    found = {}
    for name in ("eager", "again", "graphed"):
        model = make_pair_model(pair, pair.small, strategy)
        if name == "graphed":
            install_graphs(model, capture=pair.capture())
        for _ in range(3):  # the first call of a block is eager, the second records it
            model.zero_grad()
            loss = micro_batch(pair, model)
        found[name] = (loss, [parameter.grad for parameter in model.parameters()])
    rows = []
    for what, at in {"loss": 0, "gradients": 1}.items():

        def compare(name: str, at: int = at) -> float:
            got, want = (found[each][at] if at else [found[each][at]] for each in (name, "eager"))
            return max(difference(a, b) for a, b in zip(got, want, strict=True))

        bound = max(2 * compare("again"), GRAPH_FLOORS["bf16"])
        rows.append(Row("graphs", strategy, f"{what}: graphed", compare("graphed"), bound=bound))
    return rows


def check_waits(pair: Pair, strategy: str) -> list[Row]:
    """On a GPU torch raises where an operator makes the host wait."""
    model = make_pair_model(pair, pair.small, strategy)
    micro_batch(pair, model)  # makes communicators and compiles kernels
    synchronize(pair.device)
    with no_waits(pair.device):
        micro_batch(pair, model)
    return [Row("waits", strategy, "waits of the host in a micro-batch", 0.0, bound=0.0)]


def check_overlap(pair: Pair, name: str, is_urgent: bool) -> list[Row]:
    """Seconds of a micro-batch overlapped, and with every transfer waited for."""
    place, seconds = ("overlap", name), {}
    with nullcontext() if is_urgent else patch.object(mesh_module, "_urgent", lambda: None):
        for what, overlap in (("overlapped", True), ("each waited for", False)):
            model = make_pair_model(pair, pair.large, "gather_tokens", overlap=overlap)
            seconds[what] = time_steps(partial(micro_batch, pair, model), pair, before=dist.barrier)
            del model
    return [Row(*place, f"a micro-batch, {what}", value * 1e3, "ms") for what, value in seconds.items()] + [
        Row(
            *place,
            "of the time waited for, overlap saves",
            100 * (1 - seconds["overlapped"] / seconds["each waited for"]),
            "%",
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
