"""Trains on batches that a test makes up: on ranks under the engine, or in one plain process to hold it against."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from modeling.init import build_model, cut, join, shard_table
from modeling.layout import ParallelLayout
from modeling.mesh import ParallelMesh, build_mesh
from tests.parity import Case, referee_model
from tests.ranks import run_ranks

Tensors = dict[str, Tensor]  # by parameter name
ONE_RUN_S = 60  # no run may hang; reaching this is a failure


def slow(*values: Any) -> Any:
    """Parameters of a test that is left out of the fast part; others that stay in it meet the same code."""
    return pytest.param(*values, marks=pytest.mark.slow)


class Batch(NamedTuple):
    """A global batch: ids and labels [sequences, positions], each sequence one document; mask is False for padding."""

    ids: Tensor
    labels: Tensor
    mask: Tensor | None = None


class Training(NamedTuple):
    """How to train. `adam_eps=None` is plain SGD, whose steps do not blow rounding up; otherwise AdamW."""

    learning_rate: float = 1e-3
    adam_eps: float | None = 1e-6
    weight_decay: float = 0.1
    max_grad_norm: float = 0.0
    num_steps: int = 1
    balance_coef: float = 0.0
    z_coef: float = 0.0
    zero: dict[str, Any] = {}  # noqa: RUF012


PLAIN = Training()


class Curves(NamedTuple):
    """Per step: mean cross-entropy, balance loss and z-loss without their coefficients, norm before clipping."""

    losses: list[float]
    balance: list[float]
    z: list[float]
    norms: list[float]


class Outcome(NamedTuple):
    """Curves, and whole tensors by name: gradients of the first step, weights after the last one."""

    curves: Curves
    gradients: Tensors
    weights: Tensors


def train(
    config: GatherMoeConfig, state: Tensors, case: Case, *, batches: list[Batch], training: Training = PLAIN
) -> Outcome:
    """Train under the engine on as many ranks as the case has; `batches` are taken in turn.

    Asserts that all ranks report the same curves and that ranks which hold the same part agree bit for bit.
    """
    by_rank = run_ranks(_train_on_rank, case.dp * case.tp, config, state, case, batches, training, timeout_s=ONE_RUN_S)
    for curves, _, _ in by_rank:
        assert curves == by_rank[0][0]
    gradients, weights = (
        join_shards([result[part] for result in by_rank], config, case, whole=state) for part in (1, 2)
    )
    return Outcome(by_rank[0][0], gradients, weights)


def _train_on_rank(
    rank: int,
    world_size: int,
    config: GatherMoeConfig,
    state: Tensors,
    case: Case,
    batches: list[Batch],
    training: Training,
) -> tuple[Curves, Tensors, Tensors]:
    engine = start(config, state, case, training=training, num_sequences=len(batches[0].ids))
    curves = Curves([], [], [], [])
    gradients: Tensors = {}
    for step in range(training.num_steps):
        parts = micro_batches(batches[step % len(batches)], case, dp_rank=engine.mesh.dp_rank)
        counts = engine.count(parts)
        sums = engine.accumulate(parts, counts=counts)
        gradients = gradients or gradient_shards(engine)
        totals = torch.stack([sums.nll, sums.balance_L.mean(), sums.z_L.mean()])
        torch.distributed.all_reduce(totals, group=engine.mesh.dp_group)
        curves.losses.append(totals[0].item() / max(counts.num_targets, 1))
        curves.balance.append(totals[1].item() / counts.num_tokens)
        curves.z.append(totals[2].item() / counts.num_tokens)
        curves.norms.append(engine.update(learning_rate=training.learning_rate))
    return curves, gradients, weight_shards(engine)


def start(
    config: GatherMoeConfig,
    state: Tensors,
    case: Case,
    *,
    training: Training = PLAIN,
    num_sequences: int = 8,
    prepare: Callable[[Any], None] = lambda model: None,
) -> Any:
    """Our engine on this rank; `prepare` sees the model before DeepSpeed does."""
    from recipe.engine.engine import Engine

    config.router_aux_loss_coef, config.router_z_loss_coef = training.balance_coef, training.z_coef
    model = model_with(config, state, make_mesh(config, case), execution=case.execution)
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    prepare(model)
    settings = ds_config(case, training, num_sequences=num_sequences)
    return Engine(model, ds_config=settings, optimizer=optimizer_for(model, training))


def make_mesh(config: GatherMoeConfig, case: Case) -> ParallelMesh:
    layout = ParallelLayout(dp=case.dp, tp=case.tp, ep=case.ep)
    return build_mesh(layout, num_key_value_heads=config.sizes.num_key_value_heads)


def model_with(
    config: GatherMoeConfig, state: Tensors, mesh: ParallelMesh, *, execution: Execution | None = None
) -> Any:
    """Our model on this rank, holding its shards of `state`."""
    model = build_model(config, mesh=mesh, execution=execution, seed=0)
    table = shard_table(config, mesh)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(cut(state[name], table.shard(name, tuple(state[name].shape), group_rank=mesh.group_rank)))
    return model


def ds_config(case: Case, training: Training = PLAIN, *, num_sequences: int = 8) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": num_sequences // (case.dp * case.accumulation),
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
    """Weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if training.adam_eps is None:
        return torch.optim.SGD(groups, lr=training.learning_rate)
    return torch.optim.AdamW(groups, lr=training.learning_rate, eps=training.adam_eps)


def random_batch(*, seed: int = 7, num_sequences: int = 8, block_size: int = 16, vocab_size: int = 50) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (num_sequences, block_size), generator=generator)
    labels = ids.clone()
    labels[0, block_size // 2 :] = -100
    return Batch(ids, labels)


def micro_batches(batch: Batch, case: Case, *, dp_rank: int) -> list[Any]:
    """This dp rank's part of a global batch, cut as the loader cuts its stream."""
    size = len(batch.ids) // (case.dp * case.accumulation)
    parts = []
    for a in range(case.accumulation):
        first = (a * case.dp + dp_rank) * size
        here = slice(first, first + size)
        parts.append(
            SimpleNamespace(
                input_ids=batch.ids[here],
                labels=batch.labels[here],
                document_starts=((0,),) * size,
                token_mask=None if batch.mask is None else batch.mask[here],
                num_targets=int((batch.labels[here, 1:] != -100).sum()),
            )
        )
    return parts


def accumulate(engine: Any, batch: Batch, case: Case) -> Any:
    """Forward and backward of one global batch; returns the engine's sums."""
    parts = micro_batches(batch, case, dp_rank=engine.mesh.dp_rank)
    return engine.accumulate(parts, counts=engine.count(parts))


def gradient_shards(engine: Any) -> Tensors:
    """This rank's shards of the reduced gradients; an AssertionError where one is None."""
    from deepspeed.utils import safe_get_full_grad

    shards = {}
    for name, parameter in engine.model.named_parameters():
        gradient = parameter.grad if engine.zero_stage == 0 else safe_get_full_grad(parameter)
        assert gradient is not None, name
        shape = getattr(parameter, "ds_shape", parameter.shape)
        shards[name] = gradient.detach().float().clone().view(shape)
    return shards


def weight_shards(engine: Any) -> Tensors:
    from recipe.checkpoint.native import full_precision_shard

    return {name: full_precision_shard(p).float().clone() for name, p in engine.model.named_parameters()}


def used_gradients(engine: Any, batch: Batch, case: Case) -> tuple[float, Tensors]:
    """One SGD step of learning rate 1: the reported norm, and this rank's shards of what the optimizer subtracted."""
    before = weight_shards(engine)
    accumulate(engine, batch, case)
    norm = engine.update(learning_rate=1.0)
    after = weight_shards(engine)
    return norm, {name: before[name] - after[name] for name in before}


def join_shards(shards: list[Tensors], config: GatherMoeConfig, case: Case, *, whole: Tensors) -> Tensors:
    """Tensors of the shapes of `whole` from every rank's shards; ranks with the same part must agree bit for bit."""
    mesh: Any = SimpleNamespace(layout=ParallelLayout(dp=case.dp, tp=case.tp, ep=case.ep))
    table = shard_table(config, mesh)
    joined = {}
    for name, tensor in whole.items():
        places = [table.shard(name, tuple(tensor.shape), group_rank=rank % case.tp) for rank in range(len(shards))]
        first_with: dict[Any, int] = {}
        for rank, place in enumerate(places):
            twin = first_with.setdefault(place.ranges, rank)
            assert torch.equal(shards[rank][name], shards[twin][name]), f"{name} differs on ranks {twin} and {rank}"
        joined[name] = join([(shards[rank][name], places[rank]) for rank in range(case.tp)])
    return joined


def plain_training(
    config: GatherMoeConfig, state: Tensors, *, batches: list[Batch], training: Training = PLAIN
) -> Outcome:
    """The same in one plain process, with transformers' own model and the auxiliary losses written out again."""
    model = referee_model(config, state)
    optimizer = optimizer_for(model, training)
    curves = Curves([], [], [], [])
    gradients: Tensors = {}
    for step in range(training.num_steps):
        loss, balance, z = _plain_losses(model, batches[step % len(batches)], num_active=config.num_experts_per_tok)
        (loss + training.balance_coef * balance + training.z_coef * z).backward()
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        bound = training.max_grad_norm or float("inf")
        curves.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), bound).item())
        optimizer.step()
        optimizer.zero_grad()
        for curve, value in zip(curves, (loss, balance, z), strict=False):
            curve.append(value.item())
    return Outcome(curves, gradients, {name: p.detach() for name, p in model.named_parameters()})


def _plain_losses(model: Any, batch: Batch, *, num_active: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy over the targets; balance and z-loss by their definitions, sequence by sequence."""
    output = model(input_ids=batch.ids, use_cache=False, output_router_logits=True)
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=-100)
    balance, z = [], []
    for logits in output.router_logits:
        for logits_SE in logits.float().view(len(batch.ids), -1, logits.shape[-1]):
            num_experts = logits_SE.shape[-1]
            probs_SE = logits_SE.softmax(-1)
            chosen = F.one_hot(probs_SE.topk(num_active).indices, num_experts).sum(1).float()
            balance.append(num_experts * (chosen.mean(0) * probs_SE.mean(0)).sum())
            z.append(logits_SE.logsumexp(-1).square().mean())
    return loss, torch.stack(balance).mean(), torch.stack(z).mean()


def train_in_trainer(model: Any, batch: Batch, *, folder: Path, accumulation: int = 1, **options: Any) -> None:
    """One optimizer step of Hugging Face's Trainer on the whole batch, in this process."""
    from transformers import Trainer, TrainingArguments

    rows: Any = [{"input_ids": ids, "labels": labels} for ids, labels in zip(batch.ids, batch.labels, strict=True)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=len(rows) // accumulation,
        gradient_accumulation_steps=accumulation,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()


def export(rank: int, world_size: int, config: GatherMoeConfig, state: Tensors, case: Case, folder: Path) -> None:
    """Write the weights that an engine was given as Hugging Face files; a function for `run_ranks`."""
    from modeling.spec import stock_type
    from recipe.checkpoint.files import Files, complete
    from recipe.checkpoint.native import full_precision_shard
    from recipe.hf.weights import WeightSource, write_weights
    from recipe.shared.ranks import TorchRanks

    engine = start(config, state, case)
    source = WeightSource(engine.model, config, engine.mesh, full_precision_shard)
    files = Files()
    write_weights(folder, source=source, model_type=stock_type(config), dtype=torch.float32, files=files)
    complete(files, ranks=TorchRanks())


def read_export(folder: Path) -> Tensors:
    """All tensors of the files in a folder; an AssertionError where one is there twice."""
    from safetensors.torch import load_file

    found: Tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        assert not tensors.keys() & found.keys()
        found |= tensors
    return found


def assert_all_match(got: Tensors, want: Tensors, *, atol: float = 1e-5) -> None:
    """Tensors by name are as close as asked; the message names the one that is not."""
    assert got.keys() <= want.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
