"""A step that sends nothing: what a rank of any number would send in it, and the memory of one micro-batch.

The model's part is one micro-batch of the real model on fake tensors, of which only a few layers are run: layers of a
kind send alike and keep alike, so two more layers than one tell what each further one adds. The engine's part is the
real engine at full size (engine_trace.py). Nothing here is computed by the planner.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_utils import local_torch_dtype

from modeling.mesh import ParallelMesh
from modeling.model import GatherMoeForCausalLM
from modeling.noise import NoiseOrigin
from recipe.dry_run.engine_trace import trace_engine
from recipe.dry_run.fake_world import config_of, fake_world, share_of_rows, without_data
from recipe.dry_run.kernels import KernelCount, KernelReport
from recipe.dry_run.ledger import Ledger
from recipe.dry_run.live_memory import LiveMemory, PhasePeaks, Phases
from recipe.plan.job import Job
from recipe.shared.sent import Sent, add_up

LAYERS_RUN_AT_ONCE = 4  # a model of more is put together from fewer
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DryRun(NamedTuple):
    """What was counted.

    rows          of a whole step of the rank
    memory_bytes  alive at the fullest moment of a micro-batch, by kind: weights and gradients as without ZeRO
    moment        when that is
    notes         what was assumed, in words
    kernels       operators of a micro-batch, where they were asked for
    """

    rows: tuple[Sent, ...]
    memory_bytes: Mapping[str, int]
    moment: str
    notes: tuple[str, ...]
    kernels: KernelReport | None = None

    @property
    def sent_bytes(self) -> float:
        return sum(row.sent_bytes for row in self.rows)


class Trace(NamedTuple):
    """One micro-batch: what was sent, and the bytes alive at the fullest moment of each part of it, by kind."""

    rows: tuple[Sent, ...]
    phases: Phases

    @property
    def fullest(self) -> str:
        """The part with the highest peak."""
        return max(self.phases, key=lambda phase: self.phases[phase].total())


def dry_run(
    job: Job,
    *,
    engine_config: Mapping[str, Any],
    rank: int = 0,
    all_layers: bool = False,
    kernels: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> DryRun:
    """Run a step of the job as `rank`, in a process without a process group.

    engine_config  what DeepSpeed gets in the run itself, with the job's zero block
    all_layers     run all of many layers, instead of a few of each kind for all
    kernels        count operators too

    ValueError for copies of experts, which go by the loads of earlier steps.
    """
    num_copies = job.execution.resident_experts
    if num_copies:
        raise ValueError(
            f"resident_experts={num_copies} are copied by the loads of the step before, which a dry run has not; use "
            "resident_experts=0"
        )
    all_layers = all_layers or job.sizes.num_hidden_layers <= LAYERS_RUN_AT_ONCE
    with fake_world(job.layout, num_key_value_heads=job.sizes.num_key_value_heads, rank=rank) as mesh:
        trace = trace_micro_batch(job, mesh, all_layers=all_layers, say=say)
        say("DeepSpeed's engine with all layers")
        engine_rows = trace_engine(job, mesh, engine_config=engine_config)
        counted = count_kernels(job, mesh) if kernels else None
    rows = add_up([*(row.times(job.accumulation) for row in trace.rows), *engine_rows])
    moment = trace.fullest
    return DryRun(rows, trace.phases[moment], moment, tuple(_notes(job, all_layers=all_layers)), counted)


def trace_micro_batch(job: Job, mesh: ParallelMesh, *, all_layers: bool, say: Callable[[str], None]) -> Trace:
    """Run forward and backward on the rank of `mesh`, and forward again where blocks are recomputed.

    Parameters and their gradients are those of a rank without ZeRO, in the type that is computed with.
    """
    num_moe, num_dense = job.sizes.num_moe_layers, len(job.sizes.dense_layers)

    def run(moe: int, dense: int) -> Trace:
        """Run a model of so many layers: all as they are, or some of each kind, the dense ones first."""
        say(f"the model with {moe} MoE and {dense} dense layers of {num_moe} and {num_dense}")
        some = {"num_hidden_layers": moe + dense, "mlp_only_layers": list(range(dense)), "decoder_sparse_step": 1}
        return _run(job if all_layers else replace(job, model={**job.model, **some}), mesh)

    if all_layers:
        return run(num_moe, num_dense)
    moe, dense = min(num_moe, 1), min(num_dense, 1)
    one = run(moe, dense)
    # What the second layer of a kind adds, every further one adds.
    parts = [(one, 1)]
    if num_moe > 1:
        parts += [(run(2, dense), num_moe - 1), (one, 1 - num_moe)]
    if num_dense > 1:
        parts += [(run(moe, 2), num_dense - 1), (one, 1 - num_dense)]
    phases = {phase: Counter[str]() for phase in one.phases}
    for trace, times in parts:
        for phase, total in phases.items():
            for kind, num_bytes in trace.phases[phase].items():
                total[kind] += times * num_bytes
    return Trace(add_up(row.times(times) for trace, times in parts for row in trace.rows), phases)


def _run(job: Job, mesh: ParallelMesh) -> Trace:
    with fake_model(job, mesh) as model:
        memory = LiveMemory()
        memory.name(model.parameters(), kind="weights")
        memory.name_gradients(model.parameters())
        peaks = PhasePeaks(memory, model)
        with without_data(job), memory, Ledger() as ledger:
            run_micro_batch(job, model)
        return Trace(ledger.rows(mesh), peaks.finish())


@contextmanager
def fake_model(job: Job, mesh: ParallelMesh) -> Iterator[Any]:
    """Build the job's model of fake tensors, which live as long as this context."""
    config = config_of(job)
    with FakeTensorMode(), torch.random.fork_rng():
        # What a fake tensor is cannot be changed any more.
        with local_torch_dtype(DTYPES[job.precision]):
            model: Any = GatherMoeForCausalLM(config, mesh=mesh, execution=job.execution)
        model.train()
        if job.recompute:
            model.gradient_checkpointing_enable()
        yield model


def run_micro_batch(job: Job, model: Any) -> None:
    """Run forward and backward of one micro-batch on a model of `fake_model`."""
    ids = torch.zeros(job.num_sequences, job.block_size, dtype=torch.int64)
    starts = tuple(range(0, job.block_size, round(job.attention_length or job.block_size)))  # of its documents
    output = model(
        input_ids=ids,
        labels=ids.clone(),
        document_starts=(starts,) * job.num_sequences,
        use_cache=False,
        output_logits=False,
        num_items_in_batch=job.num_tokens,
        num_tokens_in_batch=job.num_tokens,
        noise=NoiseOrigin(0, 0) if job.model.get("router_jitter_noise") else None,
    )
    output.loss.backward()


def count_kernels(job: Job, mesh: ParallelMesh) -> KernelReport:
    """Count the operators of one MoE layer, and of a whole micro-batch put together from layers of each kind."""

    def run(moe: int, dense: int) -> KernelCount:
        some = {"num_hidden_layers": moe + dense, "mlp_only_layers": list(range(dense)), "decoder_sparse_step": 1}
        with fake_model(replace(job, model={**job.model, **some}), mesh) as model:
            count = KernelCount(model, share_of_rows=share_of_rows(job))
            with without_data(job, on_wait=count.wait), count:
                run_micro_batch(job, model)
        return count

    num_moe, num_dense = job.sizes.num_moe_layers, len(job.sizes.dense_layers)
    counts = [(run(min(num_moe, 1), 0 if num_moe else 1), max(num_moe, 1))]
    if num_moe and num_dense:
        counts.append((run(0, 1), num_dense))
    return KernelReport.of(counts)


def _notes(job: Job, *, all_layers: bool) -> Iterator[str]:
    if not all_layers:
        yield (
            f"of {job.sizes.num_hidden_layers} layers one and two of a kind were run; every further one adds what the "
            "second did"
        )
    if job.moe_strategy == "all_to_all" or not job.static_rows:
        yield "routing is taken to be perfectly even: as many rows for every expert and from every rank"
    yield "what DeepSpeed sends was booked while its own engine ran at full size, on memory that is never touched"
