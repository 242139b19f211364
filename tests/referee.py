"""The referee: small models, made-up batches, and training in one plain process, to hold every run of ours against.

It is transformers' own class where one expresses the configuration, else our model without a mesh.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from modeling.init import build_model, normal_at
from modeling.mesh import one_rank_mesh
from modeling.model import GatherMoeForCausalLM
from modeling.spec import stock_type

Tensors = dict[str, Tensor]  # by parameter name
NUM_SEQUENCES, BLOCK_SIZE, NUM_STEPS = 12, 16, 3
# Of sums near 1 in another order: 2**-24, half a unit in the last place, times the root of their 12 * 16 * 50 terms is
# 6e-6. Machines differ in the order, as their vectors have 4, 8 or 16 numbers. Logits and losses are up to 16.
FP32_ATOL, LOGITS_ATOL = 1e-5, 1e-4

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
    """Return the configuration of TINY, with changes."""
    values = {**TINY, "norm_topk_prob": True, "router_aux_loss_coef": 0.0, "rms_norm_eps": 1e-5}
    return GatherMoeConfig(**(values | changes))


def mixed_config(**changes: Any) -> GatherMoeConfig:
    """Return one of three layers, the first one dense, with eight experts of which three are chosen."""
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


# One model of each stock type.
STOCK_CONFIGS: Mapping[str, Callable[[], GatherMoeConfig]] = {
    "mixtral": lambda: tiny_config(qk_norm="none"),
    "qwen3_moe": lambda: mixed_config(qk_norm="head"),
    "olmoe": lambda: tiny_config(qk_norm="full", norm_topk_prob=False),
}


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], Execution]:
    """Split options of both in one mapping into changes of a model's configuration and how it is executed."""
    names = {option.name for option in fields(Execution)}
    model = {name: value for name, value in options.items() if name not in names}
    return model, Execution(**{name: value for name, value in options.items() if name in names})


def full_state(config: GatherMoeConfig, *, scale: float = 3.0, seed: int = 1) -> Tensors:
    """Draw weights for every parameter, norms included, so large that routing and softmaxes are far from uniform."""
    state = {}
    for name, parameter in build_model(config, mesh=one_rank_mesh(), seed=seed).named_parameters():
        noise = normal_at(torch.arange(parameter.numel()), name=name, seed=seed).float().view_as(parameter)
        state[name] = 1 + 0.2 * noise if parameter.dim() == 1 else 0.02 * scale * noise
    return state


class Batch(NamedTuple):
    """A global batch: ids and labels [sequences, positions]; mask is False for padding.

    starts  first positions of each sequence's documents; None where every sequence is one document
    """

    ids: Tensor
    labels: Tensor
    mask: Tensor | None = None
    starts: list[tuple[int, ...]] | None = None


def random_batch(*, seed: int = 7, num_sequences: int = 8, block_size: int = 16, vocab_size: int = 50) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (num_sequences, block_size), generator=generator)
    labels = ids.clone()
    labels[0, block_size // 2 :] = -100
    return Batch(ids, labels)


def global_batch(step: int, *, vocab_size: int, packed: bool = True) -> Batch:
    """Return a step's 12 sequences, some labels ignored, unevenly; packed ones hold one, two or three documents."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, vocab_size, (NUM_SEQUENCES, BLOCK_SIZE), generator=generator)
    labels = ids.clone()
    labels[step % NUM_SEQUENCES, 3:] = -100
    kinds = ((0,), (0, 5), (0, 3, 11)) if packed else ((0,),)
    starts = [kinds[(step + i) % len(kinds)] for i in range(NUM_SEQUENCES)]
    for row, first_tokens in enumerate(starts):
        labels[row, list(first_tokens)] = -100
    return Batch(ids, labels, starts=starts if packed else None)


class Training(NamedTuple):
    """How to train. `adam_eps=None` is plain SGD, whose steps do not blow rounding up; otherwise AdamW.

    balance_coef, z_coef  of the auxiliary losses; where both are 0, those of the model's configuration
    zero                  more of DeepSpeed's block `zero_optimization`
    """

    learning_rate: float = 1e-3
    adam_eps: float | None = 1e-6
    weight_decay: float = 0.1
    max_grad_norm: float = 0.0
    num_steps: int = 1
    balance_coef: float = 0.0
    z_coef: float = 0.0
    zero: dict[str, Any] = {}  # noqa: RUF012

    def set_coefficients(self, config: GatherMoeConfig) -> None:
        if self.balance_coef or self.z_coef:
            config.router_aux_loss_coef, config.router_z_loss_coef = self.balance_coef, self.z_coef


PLAIN = Training()
# The run of most parity tests: so short a bound that every step is clipped.
CLIPPED = Training(max_grad_norm=0.2, num_steps=NUM_STEPS)


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


def referee_model(
    config: GatherMoeConfig, state: Tensors, *, own: bool = False, execution: Execution | None = None
) -> torch.nn.Module:
    """Build a stock transformers model with these weights, or ours without a mesh."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from recipe.hf.config import config_dict

    kind = stock_type(config)
    if own or kind == "gather_moe":
        model: Any = GatherMoeForCausalLM(config, execution=execution)
    else:
        values = config_dict(config, model_type=kind, dtype="float32")
        values.pop("model_type")
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values))
    if config.tie_word_embeddings:
        state = {**state, "lm_head.weight": state["model.embed_tokens.weight"]}
    model.load_state_dict(state)
    return model.train()


def our_model(config: GatherMoeConfig, *, execution: Execution | None = None) -> Any:
    """Build our model with the weights of `full_state`, for one process."""
    return referee_model(config, full_state(config), own=True, execution=execution)


def gradients_of(model: torch.nn.Module) -> Tensors:
    """Copy the gradients of all parameters that have one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def referee_run(
    config: GatherMoeConfig,
    state: Tensors,
    *,
    batches: Sequence[Batch],
    training: Training = PLAIN,
    own: bool = False,
    frozen: Sequence[str] = (),
    losses: Callable[[Any, Batch, int], tuple[Tensor, Tensor, Tensor]] | None = None,
) -> Outcome:
    """Train in plain torch: per step one forward over the global batch, one backward, clip, update.

    frozen  patterns of names of parameters that stay as they are
    losses  of a model, a batch and the number of the step: cross-entropy, balance loss and z-loss; by default by their
            definitions, sequence by sequence
    """
    from recipe.engine.engine import freeze_parameters

    training.set_coefficients(config)
    model = referee_model(config, state, own=own)
    freeze_parameters(model, frozen)
    optimizer = plain_optimizer(model, training)
    curves, gradients = Curves([], [], [], []), {}
    losses = losses or _losses
    for step in range(training.num_steps):
        loss, balance, z = losses(model, batches[step % len(batches)], step)
        total = loss
        for coefficient, part in ((config.router_aux_loss_coef, balance), (config.router_z_loss_coef, z)):
            if coefficient:
                total = total + coefficient * part
        total.backward()
        gradients = gradients or gradients_of(model)
        bound = training.max_grad_norm or float("inf")
        curves.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), bound).item())
        optimizer.step()
        optimizer.zero_grad()
        for curve, value in zip(curves, (loss, balance, z), strict=False):
            curve.append(value.item())
    return Outcome(curves, gradients, {name: p.detach() for name, p in model.named_parameters()})


def plain_optimizer(model: torch.nn.Module, training: Training) -> torch.optim.Optimizer:
    """Make torch's own, with weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    if training.adam_eps is None:
        return torch.optim.SGD(groups, lr=training.learning_rate)
    return torch.optim.AdamW(groups, lr=training.learning_rate, eps=training.adam_eps)


def _losses(model: Any, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross-entropy over the targets; balance and z-loss by their definitions, sequence by sequence.

    Those two are not a number for packed documents, which go through the model one by one, and without MoE layers.
    """
    if batch.starts is not None:
        unknown = torch.tensor(float("nan"))
        return referee_loss(model, batch), unknown, unknown
    output = model(input_ids=batch.ids, use_cache=False, output_router_logits=True)
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=-100)
    balance, z = [], []
    for logits in output.router_logits:
        for logits_SE in logits.float().view(len(batch.ids), -1, logits.shape[-1]):
            num_experts = logits_SE.shape[-1]
            probs_SE = logits_SE.softmax(-1)
            chosen = F.one_hot(probs_SE.topk(model.config.num_experts_per_tok).indices, num_experts).sum(1).float()
            balance.append(num_experts * (chosen.mean(0) * probs_SE.mean(0)).sum())
            z.append(logits_SE.logsumexp(-1).square().mean())
    return loss, torch.stack(balance).mean(), torch.stack(z).mean()


def referee_loss(model: Any, batch: Batch, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the mean cross-entropy over a batch; each packed document goes through the model alone."""
    ids, labels = batch.ids, batch.labels
    if batch.starts is None:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].to(dtype)
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    total, count = torch.zeros((), dtype=dtype), 0
    for row, first_tokens in enumerate(batch.starts):
        for start, end in itertools.pairwise((*first_tokens, ids.shape[1])):
            logits = model(input_ids=ids[row : row + 1, start:end], use_cache=False).logits[0, :-1].to(dtype)
            targets = labels[row, start + 1 : end]
            total = total + F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            count += int((targets != -100).sum())
    return total / count


def assert_all_match(got: Tensors, want: Tensors, *, atol: float = FP32_ATOL) -> None:
    """Assert that tensors by name are as close as asked; the message names the one that is not."""
    assert got.keys() <= want.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def distance(got: Tensors, want: Tensors) -> float:
    """The root of all squared differences."""
    return sum((got[name] - tensor).square().sum().item() for name, tensor in want.items()) ** 0.5


def assert_runs_match(got: Outcome, want: Outcome) -> None:
    """Assert equal curves, as far as the referee knows them, first gradients and last weights."""
    for name, curve in want.curves._asdict().items():
        if not any(map(math.isnan, curve)):
            torch.testing.assert_close(getattr(got.curves, name), curve, atol=FP32_ATOL, rtol=0, msg=name)
    assert_all_match(got.gradients, want.gradients)
    assert_all_match(got.weights, want.weights)
