"""Runs of the engine on made-up batches: one frozen case describes a run, as many ranks as it has train it.

What comes back are curves and whole tensors, of the same type as the referee's.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from modeling.init import build_model, cut, join, shard_table
from modeling.layout import ParallelLayout
from modeling.mesh import ParallelMesh, build_mesh
from tests.ranks import run_ranks
from tests.referee import (
    CLIPPED,
    NUM_SEQUENCES,
    PLAIN,
    Batch,
    Curves,
    Outcome,
    Tensors,
    Training,
    global_batch,
    plain_optimizer,
)

ONE_RUN_S = 90  # no run may hang; reaching this is a failure


def slow(*values: Any) -> Any:
    """Mark parameters that are left out of the fast part; others of the test stay in it and meet the same code."""
    return pytest.param(*values, marks=pytest.mark.slow)


class Case(NamedTuple):
    """One training set-up. `packed` sequences of `global_batch` hold several documents."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    stage: int = 0
    accumulation: int = 1
    checkpointing: bool = False
    bf16: bool = False
    packed: bool = True
    execution: Execution = Execution()

    def __str__(self) -> str:
        """Name what differs from the defaults."""
        changed = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return " ".join(f"{name}={value}" for name, value in changed.items()) or "one rank"

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(dp=self.dp, tp=self.tp, ep=self.ep)


def three_steps(config: GatherMoeConfig, case: Case) -> dict[str, Any]:
    """Return the batches and the training of most parity tests, for `train` and `referee_run` alike."""
    steps = range(CLIPPED.num_steps)
    batches = [global_batch(step, vocab_size=config.vocab_size, packed=case.packed) for step in steps]
    return {"batches": batches, "training": CLIPPED}


def train(
    config: GatherMoeConfig,
    state: Tensors,
    case: Case,
    *,
    batches: Sequence[Batch],
    training: Training = PLAIN,
    change: Callable[[Any], None] | None = None,
) -> Outcome:
    """Train under the engine on as many ranks as the case has; `batches` are taken in turn.

    change  is called with each rank's engine before the first step; importable

    Asserts that all ranks report the same curves and that ranks which hold the same part agree bit for bit.
    """
    arguments = (config, state, case, batches, training, change)
    return join_ranks(run_ranks(train_on_rank, case.num_ranks, *arguments, timeout_s=ONE_RUN_S), config, case)


def train_on_rank(
    rank: int,
    world_size: int,
    config: GatherMoeConfig,
    state: Tensors,
    case: Case,
    batches: Sequence[Batch],
    training: Training,
    change: Callable[[Any], None] | None = None,
) -> Outcome:
    """Train one rank of `train`; gradients and weights are this rank's shards."""
    engine = start_engine(config, state, case, training=training)
    if change is not None:
        change(engine)
    curves, gradients = Curves([], [], [], []), {}
    for step in range(training.num_steps):
        parts = micro_batches(batches[step % len(batches)], case, dp_rank=engine.mesh.dp_rank)
        counts = engine.count(parts)
        sums = engine.accumulate(parts, counts=counts)
        gradients = gradients or gradient_shards(engine)
        num_layers = max(1, len(sums.z_L))
        totals = torch.stack([sums.nll, sums.balance_L.sum() / num_layers, sums.z_L.sum() / num_layers])
        torch.distributed.all_reduce(totals, group=engine.mesh.dp_group)
        curves.losses.append(totals[0].item() / max(counts.num_targets, 1))
        curves.balance.append(totals[1].item() / counts.num_tokens)
        curves.z.append(totals[2].item() / counts.num_tokens)
        curves.norms.append(engine.update(learning_rate=training.learning_rate))
    return Outcome(curves, gradients, weight_shards(engine))


def join_ranks(by_rank: Sequence[Outcome], config: GatherMoeConfig, case: Case) -> Outcome:
    for result in by_rank:
        assert result.curves == by_rank[0].curves
    gradients, weights = (join_shards([result[part] for result in by_rank], config, case) for part in (1, 2))
    return Outcome(by_rank[0].curves, gradients, weights)


def train_steps(
    engine: Any, config: GatherMoeConfig, case: Case, steps: range, *, learning_rate: float = CLIPPED.learning_rate
) -> tuple[list[float], list[float]]:
    """Train an engine that runs already on the case's batches of these steps; losses and norms."""
    losses, norms = [], []
    for step in steps:
        batches = make_micro_batches(config, case, step=step, dp_rank=engine.mesh.dp_rank)
        counts = engine.count(batches)
        nll = engine.accumulate(batches, counts=counts).nll
        torch.distributed.all_reduce(nll, group=engine.mesh.dp_group)
        losses.append(nll.item() / counts.num_targets)
        norms.append(engine.update(learning_rate=learning_rate))
    return losses, norms


def start_engine(
    config: GatherMoeConfig,
    state: Tensors,
    case: Case,
    *,
    training: Training = CLIPPED,
    frozen: Sequence[str] = (),
    prepare: Callable[[Any], None] = lambda model: None,
    **ds_changes: Any,
) -> Any:
    """Start our engine on this rank.

    frozen      patterns of names of parameters that stay as they are
    prepare     sees the model before DeepSpeed does
    ds_changes  of DeepSpeed's configuration
    """
    from recipe.engine.engine import Engine, freeze_parameters

    training.set_coefficients(config)
    model = model_with(config, state, make_mesh(config, case), execution=case.execution)
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    freeze_parameters(model, frozen)
    prepare(model)
    return Engine(model, ds_config=ds_config(case, training) | ds_changes, optimizer=optimizer_for(model, training))


def make_mesh(config: GatherMoeConfig, case: Case) -> ParallelMesh:
    return build_mesh(case.layout, num_key_value_heads=config.num_key_value_heads)


def mesh_without_groups(layout: ParallelLayout, rank: int = 0, *, group: Any = None) -> ParallelMesh:
    """Make the mesh of one rank by itself: enough to build modules and to compute what no other rank is asked for.

    group  anything in place of the group: whole models are built as a shared one is
    """
    return ParallelMesh(layout=layout, rank=rank, tp_group=group, dp_group=None, kv_group=None)


def model_with(
    config: GatherMoeConfig, state: Tensors, mesh: ParallelMesh, *, execution: Execution | None = None
) -> Any:
    """Build our model on this rank, holding its shards of `state`."""
    model = build_model(config, mesh=mesh, execution=execution, seed=0)
    table = shard_table(config, mesh)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(cut(state[name], table.shard(name, tuple(state[name].shape), group_rank=mesh.group_rank)))
    return model


def ds_config(case: Case, training: Training = PLAIN) -> dict[str, Any]:
    config: dict[str, Any] = {
        # DeepSpeed only counts samples by it.
        "train_micro_batch_size_per_gpu": max(1, NUM_SEQUENCES // (case.dp * case.accumulation)),
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": training.max_grad_norm,
        "zero_optimization": {"stage": case.stage, **training.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if case.bf16:
        config |= {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
    return config


def optimizer_for(model: torch.nn.Module, training: Training) -> torch.optim.Optimizer:
    """Make the optimizer of a real run, or SGD where that is asked for."""
    from recipe.engine.engine import build_optimizer
    from recipe.settings.training import OptimizerOptions

    if training.adam_eps is None:
        return plain_optimizer(model, training)
    options = OptimizerOptions(
        learning_rate=training.learning_rate,
        betas=(0.9, 0.999),
        eps=training.adam_eps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
    )
    return build_optimizer(model, options)


def micro_batches(batch: Batch, case: Case, *, dp_rank: int) -> list[Any]:
    """Cut this dp rank's part out of a global batch, as the loader cuts its stream."""
    size = len(batch.ids) // (case.dp * case.accumulation)
    parts = []
    for a in range(case.accumulation):
        first = (a * case.dp + dp_rank) * size
        here = slice(first, first + size)
        parts.append(
            SimpleNamespace(
                input_ids=batch.ids[here],
                labels=batch.labels[here],
                document_starts=((0,),) * size if batch.starts is None else tuple(batch.starts[here]),
                token_mask=None if batch.mask is None else batch.mask[here],
                num_targets=int((batch.labels[here, 1:] != -100).sum()),
            )
        )
    return parts


def make_micro_batches(config: GatherMoeConfig, case: Case, *, step: int, dp_rank: int) -> list[Any]:
    """Cut this dp rank's part out of the case's global batch of a step."""
    return micro_batches(global_batch(step, vocab_size=config.vocab_size, packed=case.packed), case, dp_rank=dp_rank)


def accumulate(engine: Any, batch: Batch, case: Case) -> Any:
    """Run forward and backward of one global batch; returns the engine's sums."""
    parts = micro_batches(batch, case, dp_rank=engine.mesh.dp_rank)
    return engine.accumulate(parts, counts=engine.count(parts))


def gradient_shards(engine: Any) -> Tensors:
    """Copy this rank's shards of the reduced gradients; an AssertionError where a trained parameter has none."""
    from deepspeed.utils import safe_get_full_grad

    shards = {}
    for name, parameter in engine.model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad if engine.zero_stage == 0 else safe_get_full_grad(parameter)
            assert gradient is not None, name
            shape = getattr(parameter, "ds_shape", parameter.shape)
            shards[name] = gradient.detach().float().clone().view(shape)
    return shards


def weight_shards(engine: Any) -> Tensors:
    """Copy this rank's shards of the weights, as exact as they are kept."""
    from recipe.checkpoint.native import full_precision_shard

    return {name: full_precision_shard(p).float().clone() for name, p in engine.model.named_parameters()}


def used_gradients(engine: Any, batch: Batch, case: Case) -> tuple[float, Tensors]:
    """Take one SGD step of learning rate 1: the reported norm, and this rank's shards of what was subtracted."""
    before = weight_shards(engine)
    accumulate(engine, batch, case)
    norm = engine.update(learning_rate=1.0)
    after = weight_shards(engine)
    return norm, {name: before[name] - after[name] for name in before}


def join_shards(shards: Sequence[Tensors], config: GatherMoeConfig, case: Case) -> Tensors:
    """Join every rank's shards to whole tensors; ranks with the same part must agree bit for bit."""
    table = shard_table(config, SimpleNamespace(layout=case.layout))  # type: ignore[arg-type]
    joined = {}
    for name, local in shards[0].items():
        shape = table.full_shape(name, tuple(local.shape), vocab_size=config.vocab_size)
        places = [table.shard(name, shape, group_rank=rank % case.tp) for rank in range(len(shards))]
        first_with: dict[Any, int] = {}
        for rank, place in enumerate(places):
            twin = first_with.setdefault(place.ranges, rank)
            assert torch.equal(shards[rank][name], shards[twin][name]), f"{name} differs on ranks {twin} and {rank}"
        joined[name] = join([(shards[rank][name], places[rank]) for rank in range(case.tp)])
    return joined
