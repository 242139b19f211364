"""What the engine sends besides the model: steps of it on a narrow model with real tensors, in a fake group.

DeepSpeed cannot be built on fake tensors, and real ones of the full size would not fit. But sizes decide only by its
thresholds how often it sends what: in a model of the same layers with a smaller hidden size every matrix is smaller by
the same factor, and so are the thresholds here. What it was seen to send, parameter by parameter where the weights
themselves are sharded, is then counted with the full sizes and their padding.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from modeling.mesh import ParallelMesh
from modeling.model import GatherMoeForCausalLM
from recipe.data.batches import MicroBatch
from recipe.dry_run.ledger import Booked, Ledger, axis_of
from recipe.dry_run.model_trace import config_of
from recipe.engine.engine import Engine, build_optimizer
from recipe.plan.job import Job
from recipe.plan.parameters import held_modules
from recipe.plan.traffic import ALIGNMENT, Sent, add_up, flat_groups
from recipe.plan.zero3 import Thresholds, persistent, zero_number
from recipe.settings.layout import ACCUMULATION_KEY, MICRO_KEY, TOTAL_KEY
from recipe.settings.resolve import NEVER_PRINT_STEPS
from recipe.settings.training import OptimizerOptions

DECIDES_TRAFFIC = ("bf16", "communication_data_type", "data_types", "disable_allgather", "fp16", "gradient_clipping")
NEEDED = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": NEVER_PRINT_STEPS,
}
WIDTH = 8  # of the narrow model, at least
STATE_BYTES = 16  # of a number: weight, gradient and two moments
MOST_BYTES = 4 * 2**30  # that the narrow model may take, of real memory
SCALAR_BYTES = 8  # a sum that is not longer is of norms or flags, which no size changes
RECORDED = 2  # micro-batches in which ZeRO-3 learns the order of modules, before it fetches ahead
PERSISTENCE_KEYS = ("stage3_param_persistence_threshold", "stage3_model_persistence_threshold")
OF_THE_ENGINE = ("zero", "counts", "norm", "router_bias")
OPTIMIZER = OptimizerOptions(learning_rate=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)


class Narrow(NamedTuple):
    """The job that is really run, and the full one."""

    job: Job
    full: Job

    def scale(self, seen: "Seen") -> float:
        """How much more a collective moves at full size."""
        return _numbers(self.full, seen) / _numbers(self.job, seen)


class Seen(NamedTuple):
    """A collective of the engine.

    names  the parameters in it where they are known; None: its share of what all calls of the kind move
    times  how often it happens in a step of the full job
    """

    booked: Booked
    names: tuple[str, ...] | None
    times: int


def trace_engine(job: Job, mesh: ParallelMesh, *, engine_config: Mapping[str, Any], width: int = WIDTH) -> list[Sent]:
    """What the rank of `mesh` sends in a step for other purposes than the model's own, at the job's full size.

    engine_config  what DeepSpeed gets in the run itself
    width          the least hidden size of the narrow model
    """
    narrow = narrow_job(job, width=width)
    rows = []
    for seen in _see(narrow.job, mesh, engine_config=_narrow_config(engine_config, narrow), of=job):
        entry = seen.booked
        is_scalar = entry.op == "all_reduce" and entry.num_bytes <= SCALAR_BYTES
        sent_bytes = seen.times * entry.sent_bytes * (1 if is_scalar else narrow.scale(seen))
        rows.append(Sent(axis_of(entry.group, mesh), entry.op, entry.purpose, seen.times, sent_bytes))
    return list(add_up(rows))


def narrow_job(job: Job, *, width: int = WIDTH) -> Narrow:
    """A job with as few sequences and micro-batches as show everything, and a model as narrow as decides alike.

    ValueError where that is not narrow: thresholds and sizes of vectors, which a smaller hidden size leaves as they
    are, can be so that nearly the full one is needed.
    """
    hidden = job.sizes.hidden_size
    narrow = (_with_hidden(job, narrower) for narrower in [*range(width, hidden, 8), hidden])
    found = next(small for small in narrow if _kept(small) == _kept(job))
    num_bytes = STATE_BYTES * sum(sum(group.values()) for group in flat_groups(found.sizes, job.layout))
    if num_bytes > MOST_BYTES:
        sizes = {key: zero_number(job.zero, key) for key in PERSISTENCE_KEYS}
        raise ValueError(
            f"{sizes} keep parameters so near to their sizes that ZeRO-3 can only be watched on a model of hidden size "
            f"{found.sizes.hidden_size}, which takes {num_bytes / 2**30:.1f} GiB of real memory; a dry run takes "
            f"{MOST_BYTES / 2**30:.0f}: leave these settings out"
        )
    return Narrow(found, job)


def _kept(job: Job) -> set[str]:
    """Parameters that ZeRO-3 leaves gathered: norms do not become smaller by the same factor as their threshold."""
    return set(persistent(held_modules(job.sizes, job.layout), Thresholds.of(job.zero)))


def _with_hidden(job: Job, hidden: int) -> Job:
    sizes, tp = job.sizes, job.layout.tp
    model = {**job.model, "hidden_size": hidden, "head_dim": sizes.head_dim}
    return replace(
        job,
        model=model,
        num_sequences=1,
        block_size=min(max(2, tp), sizes.max_position_embeddings),
        accumulation=min(2, job.accumulation),
        zero=_narrow_zero(job.zero, hidden / sizes.hidden_size),
        strategy="gather_tokens",
        experts_backend="loop",
        recompute=False,
        device="cpu",
    )


def _narrow_zero(zero: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The block with its thresholds smaller by a factor, so that comparing whole numbers with them decides alike."""
    at = Thresholds.of(zero)
    rounded_up = {
        "stage3_prefetch_bucket_size": at.prefetch,
        "stage3_max_live_parameters": at.max_live,
        "stage3_max_reuse_distance": at.max_reuse,
        "sub_group_size": zero_number(zero, "sub_group_size"),
        "reduce_bucket_size": zero_number(zero, "reduce_bucket_size"),
    }
    rounded_down = {
        "stage3_param_persistence_threshold": at.persistence,
        "stage3_model_persistence_threshold": at.model_persistence,
    }
    up = {key: math.ceil(number * factor) for key, number in rounded_up.items()}
    return {**zero, **up, **{key: math.floor(number * factor) for key, number in rounded_down.items()}}


def _narrow_config(engine_config: Mapping[str, Any], narrow: Narrow) -> dict[str, Any]:
    """What decides what is sent; the rest would write a run's monitors, print or measure."""
    accumulation = narrow.job.accumulation
    return {
        **{key: engine_config[key] for key in DECIDES_TRAFFIC if key in engine_config},
        **NEEDED,
        MICRO_KEY: 1,
        ACCUMULATION_KEY: accumulation,
        TOTAL_KEY: accumulation * narrow.job.layout.dp,
        "zero_optimization": dict(narrow.job.zero),
    }


class _EngineLedger(Ledger):
    """Also knows which sharded parameters a gather is of: by the addresses of the shards that go into its buffer."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._sources: dict[int, list[int]] = {}
        self.names: list[tuple[str, ...] | None] = []
        self.starts: list[int] = []  # of the micro-batches, among what is booked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cat.out:
            self._sources[kwargs["out"].data_ptr()] = [part.data_ptr() for part in args[0]]
        elif func.namespace == "c10d":
            self.names.append(self._parameters(args[1]) if func._opname == "_allgather_base_" else None)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def start_micro_batch(self, *_: Any) -> None:
        self.starts.append(len(self.booked))

    def _parameters(self, sent: torch.Tensor) -> tuple[str, ...] | None:
        address = sent.data_ptr()
        sources = self._sources.get(address, [address])
        return tuple(self._names[source] for source in sources) if all(s in self._names for s in sources) else None


def _see(job: Job, mesh: ParallelMesh, *, engine_config: dict[str, Any], of: Job) -> Iterator[Seen]:
    """What one step of this narrow job's engine sends, after those that ZeRO-3 needs to learn its way."""
    recorded = RECORDED if job.zero_stage == 3 else 0
    with _local_rank(), _one_thread(), torch.random.fork_rng(devices=[]):
        model = GatherMoeForCausalLM(config_of(job), mesh=mesh)
        engine = Engine(model, ds_config=engine_config, optimizer=build_optimizer(model, OPTIMIZER))
        micro_batches = [_micro_batch(job)] * job.accumulation
        for _ in range(1 + -(-recorded // job.accumulation)):
            ledger = _EngineLedger(_shards(model))
            hook = engine.model.register_forward_pre_hook(ledger.start_micro_batch)
            with ledger:
                engine.accumulate(micro_batches, counts=engine.count(micro_batches))
                engine.update(learning_rate=OPTIMIZER.learning_rate)
            hook.remove()
    first, further = ledger.starts[0], [*ledger.starts, len(ledger.booked)][1]
    for i, (entry, names) in enumerate(zip(ledger.booked, ledger.names, strict=True)):
        # What comes between two micro-batches comes as often in every further one.
        is_repeated = job.accumulation > 1 and first <= i < further
        times = 1 + of.accumulation - job.accumulation if is_repeated else 1
        if entry.purpose in OF_THE_ENGINE and entry.group.size() > 1:
            yield Seen(entry, names, times)


def _shards(model: torch.nn.Module) -> dict[int, str]:
    """Where the shards are that ZeRO-3 made of the parameters; none of the other stages."""
    parts = {name: getattr(parameter, "ds_tensor", None) for name, parameter in model.named_parameters()}
    return {part.data_ptr(): name for name, part in parts.items() if part is not None}


def _numbers(job: Job, seen: Seen) -> int:
    """Of parameters, with the padding that goes along."""
    op, dp = seen.booked.op, job.layout.dp
    if seen.booked.purpose != "zero":
        return 1
    groups = flat_groups(job.sizes, job.layout)
    # Flat buffers are padded as a whole, and in low precision stage 1 sums them so; other sums have no padding.
    if job.zero_stage < 3 and (op == "all_gather" or (job.zero_stage == 1 and job.precision != "fp32")):
        step = ALIGNMENT * dp
        return sum(-(-sum(group.values()) // step) * step for group in groups)
    held = {name: numel for group in groups for name, numel in group.items()}
    names = held if seen.names is None else seen.names
    return sum(held[name] if op == "all_reduce" else -(-held[name] // dp) * dp for name in names)


def _micro_batch(job: Job) -> MicroBatch:
    ids = torch.zeros(1, job.block_size, dtype=torch.int64)
    return MicroBatch(ids, ids, ((0,),), None, job.block_size - 1, (0,))


@contextmanager
def _local_rank() -> Iterator[None]:
    """DeepSpeed asks the environment, which a launcher would have filled in."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


@contextmanager
def _one_thread() -> Iterator[None]:
    """For tensors so small that sharing them out takes longer than all the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
