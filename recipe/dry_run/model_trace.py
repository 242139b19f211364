"""One micro-batch of the real model on fake tensors, of which only a few layers are run and the others added.

Layers of a kind send alike and keep alike, so two more layers than one tell what each further one adds.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from modeling.config import GatherMoeConfig
from modeling.mesh import ParallelMesh
from modeling.model import GatherMoeForCausalLM
from modeling.noise import NoiseOrigin
from recipe.dry_run.even_routing import stand_in
from recipe.dry_run.ledger import Ledger
from recipe.dry_run.live_memory import LiveMemory
from recipe.dry_run.phases import PhasePeaks, Phases
from recipe.plan.job import Job
from recipe.plan.traffic import Sent, add_up

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Layers(NamedTuple):
    """How many of each kind a model has."""

    moe: int
    dense: int

    @property
    def total(self) -> int:
        return self.moe + self.dense


class Trace(NamedTuple):
    """One micro-batch: what was sent, and the bytes alive at the fullest moment of each part of it, by kind."""

    rows: tuple[Sent, ...]
    phases: Phases

    @property
    def fullest(self) -> str:
        """The part with the highest peak."""
        return max(self.phases, key=lambda phase: self.phases[phase].total())


def trace_micro_batch(job: Job, mesh: ParallelMesh, *, all_layers: bool, say: Callable[[str], None]) -> Trace:
    """Forward and backward on the rank of `mesh`, and forward again where blocks are recomputed.

    Parameters and their gradients are those of a rank without ZeRO, in the type that is computed with.
    """
    layers = Layers(job.sizes.num_moe_layers, len(job.sizes.dense_layers))

    def run(some: Layers) -> Trace:
        say(f"the model with {some.moe} MoE and {some.dense} dense layers of {layers.moe} and {layers.dense}")
        return _run(with_layers(job, some), mesh)

    if all_layers:
        return run(layers)
    base = Layers(min(layers.moe, 1), min(layers.dense, 1))
    found = run(base)
    parts = [(found, 1)]
    for more in ("moe", "dense"):
        num_further = getattr(layers, more) - getattr(base, more)
        if num_further:
            longer = run(base._replace(**{more: 2}))
            parts += [(longer, num_further), (found, -num_further)]
    return _combine(parts)


def with_layers(job: Job, layers: Layers) -> Job:
    """The same job with a model of so many layers, the dense ones first."""
    changes = {
        "num_hidden_layers": layers.total,
        "mlp_only_layers": list(range(layers.dense)),
        "decoder_sparse_step": 1,
    }
    return replace(job, model={**job.model, **changes})


def on_cpu(job: Job) -> Job:
    """The same job as it can be run with a CPU's tensors: what depends on the device is said outright."""
    wire = replace(job.wire, overlap_chunks=job.num_chunks) if job.wire.overlap else job.wire
    return replace(job, wire=wire, device="cpu")


def config_of(job: Job) -> GatherMoeConfig:
    """The configuration that a run of this job would have."""
    options = {**asdict(job.wire), "strategy": job.strategy, "experts_backend": job.experts_backend}
    config = GatherMoeConfig(**{**job.model, **options}, use_cache=False)
    config._attn_implementation = "sdpa"
    return config


def _run(job: Job, mesh: ParallelMesh) -> Trace:
    config = config_of(on_cpu(job))
    with FakeTensorMode(), torch.random.fork_rng():
        # What a fake tensor is cannot be changed any more.
        with _default_dtype(DTYPES[job.precision]):
            model: Any = GatherMoeForCausalLM(config, mesh=mesh)
        model.train()
        if job.recompute:
            model.gradient_checkpointing_enable()
        ids = torch.zeros(job.num_sequences, job.block_size, dtype=torch.int64)
        memory = LiveMemory()
        memory.name(model.parameters(), kind="weights")
        memory.name_gradients(model.parameters())
        peaks = PhasePeaks(memory, model)
        stand_in(model, job)
        with memory, Ledger() as ledger:
            output = model(
                input_ids=ids,
                labels=ids.clone(),
                document_starts=((0,),) * job.num_sequences,
                use_cache=False,
                output_logits=False,
                num_items_in_batch=job.num_tokens,
                num_tokens_in_batch=job.num_tokens,
                noise=NoiseOrigin(0, 0) if config.router_jitter_noise else None,
            )
            output.loss.backward()
        return Trace(ledger.rows(mesh), peaks.finish())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _combine(parts: list[tuple[Trace, int]]) -> Trace:
    """The sum of traces, each so many times."""
    rows = [
        row._replace(num_calls=times * row.num_calls, sent_bytes=times * row.sent_bytes)
        for trace, times in parts
        for row in trace.rows
    ]
    phases: dict[str, Counter[str]] = {}
    for trace, times in parts:
        for phase, kinds in trace.phases.items():
            total = phases.setdefault(phase, Counter())
            for kind, num_bytes in kinds.items():
                total[kind] += times * num_bytes
    return Trace(add_up(rows), {phase: phases[phase] for phase in parts[0][0].phases})
