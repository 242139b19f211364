"""Takes some optimizer steps of a run on random tokens and says what they took.

The run is that of `run_pretrain.py --ds_config FILE`, without data, checkpoints and evaluation.
"""

import json
import os
import statistics
import sys
import time
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from modeling.mesh import build_mesh
from recipe.data.batches import MicroBatch
from recipe.dry_run.live_memory import LiveMemory
from recipe.engine.engine import Engine
from recipe.engine.graphs import remove_graphs
from recipe.launch.start import check_world_size, read_world, start_ranks, stop_ranks
from recipe.settings.arguments import parse_arguments
from recipe.settings.model import read_model, sizes_of
from recipe.train.prepare import (
    Request,
    choose_threads,
    fresh_model,
    model_config,
    quieten_libraries,
    settle_request,
    start_engine,
)

WARM_UP_STEPS = 2  # the first makes the optimizer's states and loads kernels


class Measured(NamedTuple):
    """The median of a rank's steps, and the most memory that its tensors took at once in one of them."""

    step_s: float
    memory_bytes: int


def measure(request: Request, *, num_steps: int) -> Measured:
    """Time the steps of a run. Collective over all ranks, which have met."""
    arguments, settings = request.arguments, request.settings
    config = model_config(request, {})
    mesh = build_mesh(settings.layout, num_key_value_heads=sizes_of(request.model).num_key_value_heads)
    model = fresh_model(config, mesh, seed=arguments.seed, settings=settings, device=request.world.device)
    engine = start_engine(model, arguments=arguments, settings=settings, device=request.world.device)
    try:
        steps_s = [_timed_step(engine, request) for _ in range(WARM_UP_STEPS + num_steps)]
        return Measured(statistics.median(steps_s[WARM_UP_STEPS:]), _peak_bytes(engine, request))
    finally:
        remove_graphs(engine.model)


def _timed_step(engine: Engine, request: Request) -> float:
    parts = [_random_part(engine, request, index=i) for i in range(request.settings.accumulation)]
    _synchronize(request)
    start_s = time.perf_counter()
    engine.accumulate(parts, counts=engine.count(parts))
    engine.update(learning_rate=request.settings.optimizer.learning_rate)
    _synchronize(request)
    return time.perf_counter() - start_s


def _random_part(engine: Engine, request: Request, *, index: int) -> MicroBatch:
    """Make a micro-batch of one document per sequence; every rank of a group gets the same."""
    settings = request.settings
    shape = (settings.num_sequences, settings.block_size)
    generator = torch.Generator().manual_seed(index * settings.layout.dp + engine.mesh.dp_rank)
    ids = torch.randint(0, engine.model.config.vocab_size, shape, generator=generator)
    return MicroBatch(
        input_ids=ids,
        labels=ids.clone(),
        document_starts=((0,),) * settings.num_sequences,
        token_mask=None,
        num_targets=settings.num_sequences * (settings.block_size - 1),
        positions=tuple(range(settings.num_sequences)),
    )


def _peak_bytes(engine: Engine, request: Request) -> int:
    """Measure one more step's memory: the CUDA allocator's count, or every tensor followed, which slows a step."""
    if request.world.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _timed_step(engine, request)
        return torch.cuda.max_memory_allocated()
    memory = LiveMemory()
    memory.name(engine.model.parameters(), kind="weights")
    with memory:
        _timed_step(engine, request)
        memory.restart()
        _timed_step(engine, request)
    return memory.peak_bytes


def _synchronize(request: Request) -> None:
    if request.world.device == "cuda":
        torch.cuda.synchronize()


def measure_run(file: Path, *, num_steps: int, out: Path) -> int:
    """Write what was measured of this rank, or the error, into the file `out`; return the exit code.

    The run is settled as `run_pretrain.py --ds_config FILE` would; nothing is asked about data.
    """
    world = read_world(os.environ)
    with ExitStack() as stack:
        stack.callback(stop_ranks, world)
        try:
            arguments = parse_arguments([f"--ds_config={file}"])
            check_world_size(world, expected=arguments.expect_world_size)
            request = settle_request(arguments, world=world, model=read_model(arguments))
            quieten_libraries(is_first=world.rank == 0)
            choose_threads(request)
            start_ranks(world, environ=os.environ, say=partial(print, file=sys.stderr))
            answer = measure(request, num_steps=num_steps)._asdict()
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write_text(json.dumps(answer))
    return 1 if "error" in answer else 0
