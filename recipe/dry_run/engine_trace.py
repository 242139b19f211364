"""What DeepSpeed's engine sends in a step: the real engine over the real model at full size, its memory never touched.

DeepSpeed cannot be built on fake tensors, which have no addresses, and real ones of a large model would not fit. So
large tensors here are real ones over reserved addresses that no operator reads or writes: results get the shape they
would have, and all their numbers are 0. Buckets, padding, thresholds and the order of fetches are DeepSpeed's own; its
collectives are booked as they pass.
"""

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from modeling.mesh import ParallelMesh
from modeling.model import GatherMoeForCausalLM
from recipe.data.batches import MicroBatch
from recipe.dry_run.fake_world import config_of
from recipe.dry_run.ledger import Ledger, axis_of
from recipe.engine.engine import Engine, build_optimizer
from recipe.plan.job import Job
from recipe.settings.parallel import ACCUMULATION_KEY, MICRO_KEY, TOTAL_KEY
from recipe.settings.resolve import NEVER_PRINT_STEPS
from recipe.settings.training import OptimizerOptions
from recipe.shared.sent import Sent, add_up

DECIDES_TRAFFIC = ("bf16", "communication_data_type", "data_types", "disable_allgather", "fp16", "gradient_clipping")
NEEDED = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": NEVER_PRINT_STEPS,
}
LEARNED_FROM = 2  # micro-batches in which ZeRO-3 records the order of modules, before it fetches ahead
OF_THE_ENGINE = ("zero", "counts", "norm", "router_bias")
OPTIMIZER = OptimizerOptions(learning_rate=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
LARGE = 2**14  # numbers; smaller tensors are what they are, contents included
NO_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)  # absent outside of Linux
METADATA_ONLY = ("set_", "detach_", "resize_")


def trace_engine(job: Job, mesh: ParallelMesh, *, engine_config: Mapping[str, Any], large: int = LARGE) -> list[Sent]:
    """Count what the rank of `mesh` sends in a step for other purposes than the model's own.

    engine_config  what DeepSpeed gets in the run itself
    large          numbers from which on a tensor's memory is not touched
    """
    few = _with_few_tokens(job)
    num_steps = 1 + (-(-LEARNED_FROM // few.accumulation) if job.zero_stage == 3 else 0)
    with patch.dict(os.environ, {"LOCAL_RANK": "0"}), _one_thread(), torch.random.fork_rng(devices=[]):
        ledger = _last_of(num_steps, few, mesh, engine_config=engine_config, large=large)
    first, second = ledger.starts[0], [*ledger.starts, len(ledger.booked)][1]
    rows = []
    for i, entry in enumerate(ledger.booked):
        if entry.purpose in OF_THE_ENGINE and entry.group.size() > 1 and entry.op != "barrier":
            # What comes between two micro-batches comes as often in every further one.
            times = 1 + job.accumulation - few.accumulation if few.accumulation > 1 and first <= i < second else 1
            rows.append(Sent(axis_of(entry.group, mesh), entry.op, entry.purpose, times, times * entry.sent_bytes))
    return list(add_up(rows))


class UntouchedLedger(Ledger):
    """A ledger under which large tensors have shapes and addresses, but no operator reads or writes their memory."""

    def __init__(self, *, large: int = LARGE) -> None:
        super().__init__()
        self.starts: list[int] = []  # of the micro-batches, among what is booked
        self._large = large

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _touches_nothing(func):
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        is_large = any(x.numel() > self._large for x in tensors)
        if func.namespace == "c10d":
            self.book(func._opname, args)
            return _started(func, args, kwargs) if is_large else func(*args, **kwargs)
        returns_what_it_writes = all(value.alias_info is not None for value in func._schema.returns)
        if func._schema.is_mutable and (returns_what_it_writes or not is_large):
            return _written(func, args, kwargs) if is_large else func(*args, **kwargs)
        is_factory = not tensors or func._opname.startswith("new_")
        if not is_large and not is_factory:
            return _without_garbage(func, func(*args, **kwargs))
        shapes = _on_meta(func, args, kwargs, device=is_factory)
        if not is_large and all(x.numel() <= self._large for x in _tensors(shapes)):
            return _without_garbage(func, func(*args, **kwargs))
        return tree_map_only(Tensor, self._make, shapes)

    def start_micro_batch(self, *_: Any) -> None:
        """Remember where among what is booked a micro-batch begins."""
        self.starts.append(len(self.booked))

    def _make(self, shape: Tensor) -> Tensor:
        """Return a tensor on CPU like one on meta, zeros where it is small."""
        if shape.numel() <= self._large:
            return torch.zeros_like(shape, device="cpu")
        flat = torch.frombuffer(_reserve(shape.untyped_storage().nbytes()), dtype=torch.uint8).view(shape.dtype)
        return flat.as_strided(shape.shape, shape.stride(), shape.storage_offset())


def _with_few_tokens(job: Job) -> Job:
    """Return the same job with as few tokens and micro-batches as show everything that the engine sends."""
    return replace(
        job,
        num_sequences=1,
        block_size=min(max(2, job.layout.tp), job.sizes.max_position_embeddings),
        accumulation=min(2, job.accumulation),
        execution=replace(job.execution, strategy="gather_tokens", experts_backend="loop"),
        device="cpu",
    )


def _last_of(
    num_steps: int, job: Job, mesh: ParallelMesh, *, engine_config: Mapping[str, Any], large: int
) -> UntouchedLedger:
    """Run the engine so many steps; return the ledger of the last one, which is that of a run under way."""
    # Monitors, printing and measuring are left out: they send nothing and write into the run's folders.
    config = {
        **{key: engine_config[key] for key in DECIDES_TRAFFIC if key in engine_config},
        **NEEDED,
        MICRO_KEY: 1,
        ACCUMULATION_KEY: job.accumulation,
        TOTAL_KEY: job.accumulation * job.layout.dp,
        "zero_optimization": dict(job.zero),
    }
    ids = torch.zeros(1, job.block_size, dtype=torch.int64)
    micro_batches = [MicroBatch(ids, ids, ((0,),), None, job.block_size - 1, (0,))] * job.accumulation
    with UntouchedLedger(large=large):
        model = GatherMoeForCausalLM(config_of(job), mesh=mesh, execution=job.execution)
        if job.recompute:
            model.gradient_checkpointing_enable()
        engine = Engine(model, ds_config=config, optimizer=build_optimizer(model, OPTIMIZER))
    for _ in range(num_steps):
        ledger = UntouchedLedger(large=large)
        hook = engine.model.register_forward_pre_hook(ledger.start_micro_batch)
        with ledger:
            engine.accumulate(micro_batches, counts=engine.count(micro_batches))
            engine.update(learning_rate=OPTIMIZER.learning_rate)
        hook.remove()
    assert engine.skipped_steps == 0, "a step was skipped, and what it would have sent after its norm is not counted"
    return ledger


@lru_cache(maxsize=1024)
def _touches_nothing(func: Any) -> bool:
    """Whether an operator only makes views, changes metadata, or has to do with no tensor's memory at all."""
    schema = func._schema
    if func.namespace == "c10d":
        return False
    if func.namespace == "profiler" or func._opname in METADATA_ONLY:
        return True
    aliases = [result.alias_info for result in schema.returns]
    if aliases and all(alias is not None and not alias.is_write for alias in aliases):
        return True
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return not takes_tensors and all(argument.name != "device" for argument in schema.arguments)


def _without_garbage(func: Any, result: Any) -> Any:
    """Return zeros where an operator leaves memory as it found it: DeepSpeed skips a step whose norm is no number."""
    if "empty" in func._opname:
        tree_map_only(Tensor, lambda x: x.zero_() if x.numel() else x, result)
    return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _started(func: Any, args: Any, kwargs: Any) -> Any:
    """Start a collective over empty tensors; its results are the tensors that it was given."""
    *_, work = func(*tree_map_only(Tensor, lambda x: x.new_empty(0), args), **kwargs)
    results = len(func._schema.returns) - 1
    return (*args[:results], work)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operator would have written to and returns."""
    written = [
        kwargs.get(argument.name) if i >= len(args) else args[i]
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    num_returns = len(func._schema.returns)
    return written[0] if num_returns == 1 else tuple(written[:num_returns]) or None


def _on_meta(func: Any, args: Any, kwargs: Any, *, device: bool) -> Any:
    """Run an operator on tensors without memory; `device` where it takes one and is given none of them."""

    def without_memory(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    args, kwargs = tree_map_only(Tensor, without_memory, (args, dict(kwargs)))
    if device or "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    return func(*args, **kwargs)


def _reserve(num_bytes: int) -> mmap.mmap:
    """Reserve addresses, of which none takes memory before it is written to."""
    try:
        return mmap.mmap(-1, num_bytes, flags=NO_RESERVE)
    except OSError as error:
        raise ValueError(
            f"no {num_bytes / 2**30:.1f} GiB of addresses could be reserved for a tensor that takes no memory "
            f"({error.strerror}); raise `ulimit -v`, or set vm.overcommit_memory to 0 or 1"
        ) from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: small tensors take longer to share out than to work on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
