"""The referee: the same weights and the same global batch in one plain process, and a run of ours to hold against it.

The referee is transformers' own class where one expresses the configuration, else our model without a mesh.
"""

import itertools
from collections.abc import Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from modeling.init import build_model, cut, join, normal_at, shard_table
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh, one_rank_mesh
from modeling.model import GatherMoeForCausalLM
from modeling.spec import stock_type

NUM_SEQUENCES, BLOCK_SIZE, NUM_STEPS = 12, 16, 3
LEARNING_RATE, EPS, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-3, 1e-6, 0.1, 0.2


# The smallest model that has everything: 34,336 parameters.
TINY: Mapping[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 64,
    "qk_norm": "none",
}


def tiny_config(**changes: Any) -> GatherMoeConfig:
    """Of TINY, with changes."""
    values = {**TINY, "norm_topk_prob": True, "router_aux_loss_coef": 0.0, "rms_norm_eps": 1e-5}
    return GatherMoeConfig(**(values | changes))


def mixed_config(**changes: Any) -> GatherMoeConfig:
    """Three layers, the first one dense, eight experts of which three are chosen."""
    values = {
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [0],
        "intermediate_size": 48,
        "qk_norm": "head",
        "norm_topk_prob": False,
    }
    return tiny_config(**(values | changes))


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], Execution]:
    """Changes of a model's configuration and how it is executed, from the options of both in one mapping."""
    names = {option.name for option in fields(Execution)}
    model = {name: value for name, value in options.items() if name not in names}
    return model, Execution(**{name: value for name, value in options.items() if name in names})


class Case(NamedTuple):
    """One training set-up."""

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
        """What differs from the defaults."""
        changed = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return " ".join(f"{name}={value}" for name, value in changed.items()) or "one rank"


class RunResult(NamedTuple):
    """losses and norms per step; gradients of the first step and weights after the last, whole tensors by name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def full_state(config: GatherMoeConfig, *, scale: float = 3.0, seed: int = 1) -> dict[str, Tensor]:
    """Weights for every parameter, norms included, large enough that routing and softmaxes are far from uniform."""
    mesh = one_rank_mesh()
    model = build_model(config, mesh=mesh, seed=seed)
    state = {}
    for name, parameter in model.named_parameters():
        noise = normal_at(torch.arange(parameter.numel()), name=name, seed=seed).float().view_as(parameter)
        state[name] = 1 + 0.2 * noise if parameter.dim() == 1 else 0.02 * scale * noise
    return state


def document_starts(step: int, sequence: int) -> tuple[int, ...]:
    """Some sequences hold one document, others two or three."""
    return ((0,), (0, 5), (0, 3, 11))[(step + sequence) % 3]


def global_batch(step: int, *, vocab_size: int, packed: bool) -> tuple[Tensor, Tensor, list[tuple[int, ...]]]:
    """ids and labels [12, 16], and where documents begin; some labels are ignored, unevenly."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, vocab_size, (NUM_SEQUENCES, BLOCK_SIZE), generator=generator)
    labels = ids.clone()
    labels[step % NUM_SEQUENCES, 3:] = -100
    starts = [document_starts(step, i) if packed else (0,) for i in range(NUM_SEQUENCES)]
    for row, first_tokens in enumerate(starts):
        labels[row, list(first_tokens)] = -100
    return ids, labels, starts


def referee_model(
    config: GatherMoeConfig, state: dict[str, Tensor], *, own: bool = False, execution: Execution | None = None
) -> torch.nn.Module:
    """A stock transformers model with these weights, or ours without a mesh."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from recipe.hf.config import SpecialTokens, config_dict

    kind = stock_type(config)
    if own or kind == "gather_moe":
        model: Any = GatherMoeForCausalLM(config, execution=execution)
    else:
        values = config_dict(config, model_type=kind, dtype="float32", tokens=SpecialTokens(None, None, None))
        values.pop("model_type")
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values))
    if config.tie_word_embeddings:
        state = {**state, "lm_head.weight": state["model.embed_tokens.weight"]}
    model.load_state_dict(state)
    return model.train()


def referee_run(config: GatherMoeConfig, state: dict[str, Tensor], case: Case, *, own: bool = False) -> RunResult:
    """Plain torch: one forward over the global batch, one backward, clip, AdamW."""
    model = referee_model(config, state, own=own)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPS)
    losses, norms, gradients = [], [], {}
    for step in range(NUM_STEPS):
        ids, labels, starts = global_batch(step, vocab_size=config.vocab_size, packed=case.packed)
        loss = referee_loss(model, ids, labels, starts)
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return RunResult(losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()})


def referee_loss(
    model: torch.nn.Module, ids: Tensor, labels: Tensor, starts: list[tuple[int, ...]], *, dtype: Any = torch.float32
) -> Tensor:
    """Mean cross-entropy over the batch; each document goes through the model alone."""
    if all(len(first_tokens) == 1 for first_tokens in starts):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].to(dtype)
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    total, count = torch.zeros((), dtype=dtype), 0
    for row, first_tokens in enumerate(starts):
        for start, end in itertools.pairwise((*first_tokens, ids.shape[1])):
            logits = model(input_ids=ids[row : row + 1, start:end], use_cache=False).logits[0, :-1].to(dtype)
            targets = labels[row, start + 1 : end]
            total = total + F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            count += int((targets != -100).sum())
    return total / count


def make_micro_batches(config: GatherMoeConfig, case: Case, *, step: int, dp_rank: int) -> list[Any]:
    """This dp rank's part of the global batch of a step."""
    ids, labels, starts = global_batch(step, vocab_size=config.vocab_size, packed=case.packed)
    size = NUM_SEQUENCES // (case.dp * case.accumulation)
    batches = []
    for a in range(case.accumulation):
        first = (a * case.dp + dp_rank) * size
        here = slice(first, first + size)
        batches.append(
            SimpleNamespace(
                input_ids=ids[here],
                labels=labels[here],
                document_starts=tuple(starts[here]),
                token_mask=None,
                num_targets=int((labels[here, 1:] != -100).sum()),
            )
        )
    return batches


def engine_config(case: Case, *, max_grad_norm: float = MAX_GRAD_NORM, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": NUM_SEQUENCES // (case.dp * case.accumulation),
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": {"stage": case.stage},
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
    return config | changes


def start_engine(
    config: GatherMoeConfig, state: dict[str, Tensor], case: Case, *, frozen: tuple[str, ...] = (), **options: Any
) -> Any:
    """Our engine on this rank, holding its shards of `state`; `frozen` are patterns of parameters' names."""
    from recipe.engine.engine import Engine, build_optimizer, freeze_parameters
    from recipe.settings.training import OptimizerOptions

    layout = ParallelLayout(dp=case.dp, tp=case.tp, ep=case.ep)
    mesh = build_mesh(layout, num_key_value_heads=config.num_key_value_heads)
    model = build_model(config, mesh=mesh, execution=case.execution, seed=0)
    table = shard_table(config, mesh)
    for name, parameter in model.named_parameters():
        shard = table.shard(name, tuple(state[name].shape), group_rank=mesh.group_rank)
        parameter.data.copy_(cut(state[name], shard))
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    freeze_parameters(model, frozen)
    adam = OptimizerOptions(
        learning_rate=LEARNING_RATE, betas=(0.9, 0.999), eps=EPS, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM
    )
    return Engine(model, ds_config=engine_config(case, **options), optimizer=build_optimizer(model, adam))


def our_run(rank: int, world_size: int, config: GatherMoeConfig, state: dict[str, Tensor], case: Case) -> Any:
    """Train under the engine; returns losses, norms, and this rank's shards of gradients and weights."""
    from deepspeed.utils import safe_get_full_grad

    from recipe.checkpoint.native import full_precision_shard

    torch.manual_seed(0)
    engine = start_engine(config, state, case)
    losses, norms, gradients = [], [], {}
    for step in range(NUM_STEPS):
        batches = make_micro_batches(config, case, step=step, dp_rank=engine.mesh.dp_rank)
        counts = engine.count(batches)
        sums = engine.accumulate(batches, counts=counts)
        if step == 0:
            for name, parameter in engine.model.named_parameters():
                gradient = parameter.grad if case.stage == 0 else safe_get_full_grad(parameter)
                gradients[name] = gradient.detach().float().clone().view(_shape(parameter))
        torch.distributed.all_reduce(sums.nll, group=engine.mesh.dp_group)
        losses.append(sums.nll.item() / counts.num_targets)
        norms.append(engine.update(learning_rate=LEARNING_RATE))
    weights = {name: full_precision_shard(p).float().clone() for name, p in engine.model.named_parameters()}
    return losses, norms, gradients, weights


def join_ranks(by_rank: list[Any], config: GatherMoeConfig, case: Case) -> RunResult:
    """Whole tensors from the ranks' results, after checking that all of them report the same numbers."""
    for result in by_rank:
        assert result[0] == by_rank[0][0]
        assert result[1] == by_rank[0][1]
    gradients, weights = (join_tensors([result[part] for result in by_rank], config, case) for part in (2, 3))
    return RunResult(by_rank[0][0], by_rank[0][1], gradients, weights)


def join_tensors(by_rank: list[dict[str, Tensor]], config: GatherMoeConfig, case: Case) -> dict[str, Tensor]:
    """Whole tensors from the shards of the first group; replicas must be the same bits everywhere."""
    table = shard_table(config, SimpleNamespace(layout=ParallelLayout(dp=case.dp, tp=case.tp, ep=case.ep)))
    whole = {}
    for name, tensor in full_state(config).items():
        shards = [table.shard(name, tuple(tensor.shape), group_rank=rank) for rank in range(case.tp)]
        parts = [by_rank[rank][name] for rank in range(case.tp)]
        for rank, tensors in enumerate(by_rank):
            twin = 0 if shards[0].is_replicated else rank % case.tp
            assert torch.equal(tensors[name], parts[twin]), (name, rank)
        whole[name] = join(list(zip(parts, shards, strict=True)))
    return whole


def check_against_referee(got: RunResult, want: RunResult, *, steps: int = NUM_STEPS) -> None:
    """Losses and norms of the first `steps`, the first step's gradients, the final weights where all steps count."""
    torch.testing.assert_close(got.losses[:steps], want.losses[:steps], atol=1e-5, rtol=0)
    torch.testing.assert_close(got.norms[:steps], want.norms[:steps], atol=1e-5, rtol=0)
    assert want.norms[0] > MAX_GRAD_NORM, "clipping must be active"
    compared = [(got.gradients, want.gradients), (got.weights, want.weights)]
    for ours, theirs in compared if steps == NUM_STEPS else compared[:1]:
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def _shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
