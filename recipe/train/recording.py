"""Records some steps of a run with the PyTorch profiler: a trace of every rank, with names for the parts of a step.

While nothing is recorded nothing is changed. While steps are recorded, modules and the optimizer step run inside named
ranges (scopes.py). On CPU the functions of torch.distributed do, too, since gloo's events do not say who takes part;
NCCL's say it themselves. A decoder block that is replayed as a CUDA graph has one name, that of its layer.
"""

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile, record_function

from modeling.model import GatherMoeForCausalLM
from recipe.engine.engine import Engine
from recipe.shared.scopes import (
    FACTS_KEY,
    FOLDER,
    STEP_PREFIX,
    TRACE_NAMES,
    Scope,
    first_recorded_step,
    ranks_name,
    scope_name,
    trace_name,
)
from recipe.shared.together import on_every, on_first
from recipe.train.prepare import Run

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single"),
)


class StepRecorder:
    """Between `begin` and `end` of a step that --profile_steps asks for, everything is recorded.

    A context manager: at its end nothing of the recording is left in the model, and what was recorded of a run that
    stops early is written.
    """

    def __init__(self, run: Run, engine: Engine, *, after_step: int) -> None:
        """`after_step` is the step that the run goes on from, 0 where it begins; ValueError as `steps_to_record`."""
        self._run, self._engine = run, engine
        self._steps = steps_to_record(run, after_step=after_step)
        self._ended = 0  # the last step that has been recorded
        self._profiler: profile | None = None
        self._open = ExitStack()  # what names the parts of a step, while steps are recorded
        self._step_range = ExitStack()

    def __enter__(self) -> "StepRecorder":
        return self

    def begin(self, step: int) -> None:
        """Before anything of a step, its data included. Collective at the first and behind the last recorded step."""
        if self._steps and step == self._steps[0]:
            self._start()
        if self._profiler is not None:
            self._step_range.enter_context(record_function(f"{STEP_PREFIX}{step}"))

    def end(self, step: int) -> None:
        """Behind a step."""
        if self._profiler is None:
            return
        self._step_range.close()
        self._ended = step
        if step == self._steps[-1]:
            self._write()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._step_range.close()
        self._open.close()
        if self._profiler is None:
            return
        if error is None:
            self._write()
        else:
            self._profiler.stop()
            self._profiler = None

    def _start(self) -> None:
        run, folder = self._run, self._run.folder.path / FOLDER

        def clear() -> None:
            for name in (TRACE_NAMES, f".{TRACE_NAMES}"):
                for old in folder.glob(name):
                    old.unlink()

        on_first(clear, ranks=run.ranks)
        on_every(lambda: folder.mkdir(parents=True, exist_ok=True), ranks=run.ranks)
        on_cpu = run.world.device == "cpu"
        self._open.enter_context(named_parts(self._engine.model, self._engine))
        if on_cpu and run.ranks.world_size > 1:
            self._open.enter_context(named_collectives())
        activities = [ProfilerActivity.CPU, *([] if on_cpu else [ProfilerActivity.CUDA])]
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profiler.start()
        self._profiler.add_metadata_json(FACTS_KEY, json.dumps(self._facts()))
        run.ranks.barrier()  # a profiler takes its time to start, which is no rank's lateness

    def _write(self) -> None:
        run, profiler = self._run, self._profiler
        assert profiler is not None
        profiler.stop()
        self._open.close()
        self._profiler = None
        folder, name = run.folder.path / FOLDER, trace_name(run.ranks.rank)

        def write() -> None:
            profiler.export_chrome_trace(str(folder / f".{name}"))
            os.replace(folder / f".{name}", folder / name)

        on_every(write, ranks=run.ranks)
        first, last = self._steps[0], self._steps[-1]
        cut = "" if self._ended == last else f", where the run stopped, of {_steps(first, last)}"
        run.say(f"recorded {_steps(first, self._ended)}{cut}: gather-moe profile {folder} --out {folder}")

    def _facts(self) -> dict[str, Any]:
        """What a reader of the trace cannot see in it."""
        run, settings = self._run, self._run.settings
        return {
            "rank": run.ranks.rank,
            "world_size": run.ranks.world_size,
            "ranks_per_node": run.world.local_world_size,
            "device": run.world.device,
            "model": Path(str(run.arguments.config_name or run.arguments.model_name_or_path)).name,
            "layout": {"dp": settings.layout.dp, "tp": settings.layout.tp, "ep": settings.layout.ep},
            "execution": asdict(settings.execution),
            "num_layers": run.config.num_hidden_layers,
            "zero_stage": settings.zero_stage,
            "precision": settings.precision,
            "num_sequences": settings.num_sequences,
            "block_size": settings.block_size,
            "accumulation": settings.accumulation,
            "recompute": run.arguments.gradient_checkpointing,
            "memory_bytes_before": None if run.world.device == "cuda" else tensor_bytes(),
        }


def steps_to_record(run: Run, *, after_step: int) -> range:
    """Return the steps that --profile_steps asks for, as far as the run takes them; say which it does not take.

    ValueError where a run that begins has no such steps. One that goes on has been started with them before: it
    records those of them that are to come, if none is behind it.
    """
    arguments, end = run.arguments, run.settings.schedule.max_steps
    assert end is not None
    first = first_recorded_step(arguments.profile_from_step, after_step=after_step)
    last = first + arguments.profile_steps - 1
    if not arguments.profile_steps:
        return range(0)
    if not after_step and last > end:
        raise ValueError(
            f"--profile_steps {arguments.profile_steps} would record {_steps(first, last)}, but this run has {end}; "
            "raise --max_steps, or set --profile_from_step"
        )
    there = f"goes on behind step {after_step} and ends with step {end}"
    if not after_step < first <= end:
        run.say(f"nothing is recorded: --profile_steps is for {_steps(first, last)} here, but the run {there}")
        return range(0)
    if last > end:
        run.say(f"{_steps(first, end)} alone of {_steps(first, last)} will be recorded: the run {there}")
    return range(first, min(last, end) + 1)


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


@contextmanager
def named_parts(model: GatherMoeForCausalLM, engine: Any) -> Iterator[None]:
    """Let the model's modules, the backward and `engine.update` run inside ranges with their names."""
    places: list[tuple[Any, str, Scope]] = [
        (model, "forward", Scope("head")),  # what is around the decoder: the losses
        (model.model, "forward", Scope("embedding")),  # what is around its blocks
        (model.model.norm, "forward", Scope("head")),
        (model.lm_head, "forward", Scope("head")),
        (engine.ds, "backward", Scope("gradients")),  # but for what the backward does in the model's parts
        (engine, "update", Scope("optimizer")),
    ]
    for i, block in enumerate(model.model.layers):
        sparse = hasattr(block.mlp, "gate")
        places += [
            (block, "forward", Scope("norms", i)),  # what is left of a block once its parts have their own names
            # Recomputation starts behind a block's own forward.
            (block.input_layernorm, "forward", Scope("norms", i)),
            (block.post_attention_layernorm, "forward", Scope("norms", i)),
            (block.self_attn, "forward", Scope("attention", i)),
            (block.mlp, "forward", Scope("experts" if sparse else "dense", i)),
        ]
        if sparse:
            places.append((block.mlp.gate, "forward", Scope("router", i)))
    with ExitStack() as stack:
        for owner, name, scope in places:
            stack.enter_context(_replaced(owner, name, _ranged(scope_name(scope))))
        yield


@contextmanager
def named_collectives() -> Iterator[None]:
    """Let the collectives of torch.distributed run inside ranges that name the ranks that take part."""
    with ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(_replaced(dist, name, _with_ranks))
        yield


def tensor_bytes() -> int:
    """Count the bytes of all tensors that Python sees, each storage once; fake ones have none."""
    storages = {}
    for found in gc.get_objects():
        if not issubclass(type(found), torch.Tensor) or issubclass(type(found), FakeTensor):
            continue
        if found.device.type == "cpu" and found.layout == torch.strided:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is the wrapped one; afterwards it is what it was, the class's own where it was that."""
    own = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _ranged(name: str) -> Callable[[Any], Any]:
    def wrap(function: Any) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(name):
                return function(*args, **kwargs)

        return run

    return wrap


def _with_ranks(function: Any) -> Any:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group") or next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None)
        with record_function(ranks_name(dist.get_process_group_ranks(group))):
            return function(*args, **kwargs)

    return run
