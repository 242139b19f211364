"""MoE layers with known weights and routing, by their definition and shared by ranks; models and batches of such."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.execution import Execution, check_copies
from modeling.init import cut, join
from modeling.layout import ParallelLayout
from modeling.mesh import ParallelMesh, one_rank_mesh
from modeling.moe import GatherMoeSparseBlock
from modeling.router import Routing, route
from modeling.shard_table import ShardTable
from tests.engine_runs import model_with
from tests.referee import Batch, Tensors, full_state, random_batch, tiny_config

NUM_TOKENS, NUM_EXPERTS, HIDDEN, WIDTH = 24, 8, 16, 16
ROUTINGS = ("random", "all to one", "last rank idle", "one expert idle", "ties", "padding")


PREFIX = "model.layers.0.mlp.experts."


def table_of(layout: ParallelLayout) -> ShardTable:
    return ShardTable(layout, 2, "none")


class Answer(NamedTuple):
    """Output and every gradient, whole tensors."""

    out: Tensor
    x: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor


def choose(kind: str, num_active: int) -> tuple[Tensor, Tensor]:
    """Expert ids [T, A] and weights [T, A] of all tokens."""
    generator = torch.Generator().manual_seed(num_active)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator, dtype=torch.float64)
    if kind == "all to one":
        logits[:, : NUM_EXPERTS - num_active + 1] -= 100.0
        logits[:, 2] += 300.0
    elif kind == "last rank idle":
        logits[:, -NUM_EXPERTS // 4 :] -= 100.0
    elif kind == "one expert idle":
        logits[:, 3] -= 100.0
    elif kind == "ties":
        logits[:] = 0.0
    mask = torch.arange(NUM_TOKENS) % 3 > 0 if kind == "padding" else None
    routing = route(logits, num_active=num_active, renormalise=True, token_mask_t=mask)
    return routing.expert_ids_tA, routing.weights_tA


def whole_numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, the output's gradient, and both weights."""
    generator = torch.Generator().manual_seed(9)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return (
        draw(NUM_TOKENS, HIDDEN),
        draw(NUM_TOKENS, HIDDEN),
        draw(NUM_EXPERTS, 2 * WIDTH, HIDDEN) * 0.3,
        draw(NUM_EXPERTS, HIDDEN, WIDTH) * 0.3,
    )


@functools.cache
def reference(num_active: int, kind: str, dtype: torch.dtype) -> Answer:
    """Token by token and expert by expert, by autograd."""
    x, grad, gate_up, down = (tensor.requires_grad_(i != 1) for i, tensor in enumerate(whole_numbers(dtype)))
    ids, weights = choose(kind, num_active)
    weights = weights.to(dtype).detach().requires_grad_()
    rows = []
    for token in range(NUM_TOKENS):
        total = torch.zeros(HIDDEN, dtype=dtype)
        for slot in range(num_active):
            expert = int(ids[token, slot])
            if expert < NUM_EXPERTS:
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                total = total + weights[token, slot] * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    out = torch.stack(rows)
    out.backward(grad)
    zeros = torch.zeros_like(weights)
    found = (x.grad, weights.grad if weights.grad is not None else zeros, gate_up.grad, down.grad)
    return Answer(out.detach(), *found)


class Layer(NamedTuple):
    """A rank's part of the layer, whose router returns `routing`, and of its tokens."""

    block: GatherMoeSparseBlock
    x_tD: Tensor
    routing: Routing

    def run(self) -> tuple[Tensor, ...]:
        """Output and gradients of x, weights and both parameters."""
        block, x_tD, routing = self
        out = block(x_tD).out_tD
        grad_TD = whole_numbers(x_tD.dtype)[1]
        out.backward(grad_TD.chunk(block.mesh.layout.tp)[block.mesh.group_rank][: out.shape[0]])
        experts = block.experts
        return out.detach(), x_tD.grad, routing.weights_tA.grad, experts.gate_up_proj.grad, experts.down_proj.grad


def make_layer(
    mesh: ParallelMesh, ids: Tensor, weights: Tensor, *, execution: Execution, dtype: torch.dtype = torch.float32
) -> Layer:
    """This rank's part for expert ids [T, A] and weights [T, A]; tokens are those of `whole_numbers`, or zeros."""
    config = tiny_config(
        hidden_size=HIDDEN, num_experts=NUM_EXPERTS, num_experts_per_tok=ids.shape[1], moe_intermediate_size=WIDTH
    )
    block = GatherMoeSparseBlock(config, mesh=mesh, execution=execution)
    block.experts.to(dtype)
    tokens, _, gate_up, down = whole_numbers(dtype)
    for name, whole in (("gate_up_proj", gate_up), ("down_proj", down)):
        shard = table_of(mesh.layout).shard(PREFIX + name, tuple(whole.shape), group_rank=mesh.group_rank)
        block.experts.get_parameter(name).data.copy_(cut(whole, shard))
    if ids.shape[0] != NUM_TOKENS:
        tokens = torch.zeros(ids.shape[0], HIDDEN, dtype=dtype)
    x_tD, ids_tA, weights_tA = (whole.chunk(mesh.layout.tp)[mesh.group_rank] for whole in (tokens, ids, weights))
    routing = Routing(torch.empty(0), ids_tA, weights_tA.to(dtype).detach().clone().requires_grad_())
    block.gate.forward = lambda *_, **__: routing  # type: ignore[method-assign]
    return Layer(block, x_tD.clone().requires_grad_(), routing)


def join_answer(by_rank: list[Any], layout: ParallelLayout) -> Answer:
    rows = [torch.cat([answer[i] for answer in by_rank]) for i in range(3)]
    shapes = {"gate_up_proj": (NUM_EXPERTS, 2 * WIDTH, HIDDEN), "down_proj": (NUM_EXPERTS, HIDDEN, WIDTH)}
    whole = []
    for i, (name, shape) in enumerate(shapes.items(), start=3):
        shards = [table_of(layout).shard(PREFIX + name, shape, group_rank=rank) for rank in range(layout.tp)]
        whole.append(join([(answer[i], shard) for answer, shard in zip(by_rank, shards, strict=True)]))
    return Answer(*rows, *whole)


def relative_errors(got: Answer, want: Answer) -> dict[str, float]:
    """By tensor, relative to its largest number."""
    return {
        name: (tensor.double() - exact).abs().max().item() / max(exact.abs().max().item(), 1.0)
        for (name, tensor), exact in zip(got._asdict().items(), want, strict=True)
    }


def zipf_routing(
    seed: int, *, num_experts: int = 8, num_active: int = 2, skew: float = 1.0, num_tokens: int = 16384
) -> Tensor:
    """Experts drawn without replacement with probabilities that fall as a power of a shuffled rank: ids [T, A]."""
    generator = torch.Generator().manual_seed(seed)
    logits = -skew * torch.arange(1, num_experts + 1, dtype=torch.float64).log()
    logits = logits[torch.randperm(num_experts, generator=generator)]
    uniform = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    return (logits - (-uniform.log()).log()).topk(num_active).indices


def count(ids: Tensor, num_experts: int) -> Tensor:
    return torch.bincount(ids[ids < num_experts], minlength=num_experts)


def rho(largest: float, counts: Tensor, num_ranks: int) -> float:
    return float(largest) * num_ranks / counts.sum().item()


def optimal_load(loads: Sequence[float], *, holders: Sequence[int], num_ranks: int) -> float:
    """The smallest possible load of the busiest rank, where any holder of an expert may take a share of its rows.

    `holders` has a bit for every rank that holds the expert. A set of ranks must do by itself what no rank outside it
    can do; the densest set decides, and its density can be reached (Hall, 1935, for shares: max-flow min-cut).
    """
    return max(
        math.fsum(load for load, held in zip(loads, holders, strict=True) if not held & ~ranks) / ranks.bit_count()
        for ranks in range(1, 2**num_ranks)
    )


def copies_bound(loads: Sequence[float], *, num_ranks: int, num_copies: int) -> float:
    """No choice of `num_copies` copies on every rank lets the busiest rank have a load below this.

    Out of a set of ranks at most `num_copies` experts for every rank outside it can be copied; what the others were
    sent stays inside.
    """
    check_copies(len(loads), num_ranks=num_ranks, num_copies=num_copies)
    num_local = len(loads) // num_ranks

    def stays_in(ranks: int) -> float:
        inside = sorted((load for i, load in enumerate(loads) if ranks >> i // num_local & 1), reverse=True)
        return math.fsum(inside[num_copies * (num_ranks - ranks.bit_count()) :])

    return max(stays_in(ranks) / ranks.bit_count() for ranks in range(1, 2**num_ranks))


def two_expert_routing() -> tuple[GatherMoeConfig, Tensors]:
    """A model whose tokens below 25 all go to expert 0 and whose others all go to expert 1, in every layer.

    Channel 0 carries the token's class, and neither attention nor experts write to it.
    """
    config = tiny_config(num_experts_per_tok=1, qk_norm="head", norm_topk_prob=False)
    state = full_state(config)
    state["model.embed_tokens.weight"][:25, 0] = 0.3
    state["model.embed_tokens.weight"][25:, 0] = -0.3
    for name, tensor in state.items():
        if name.endswith("o_proj.weight"):
            tensor[0] = 0
        elif name.endswith("experts.down_proj"):
            tensor[:, 0] = 0
        elif name.endswith("mlp.gate.weight"):
            tensor[2:] = 0
            tensor[0], tensor[1] = 0.02 * tensor[0], 0.02 * tensor[1]
            tensor[0, 0], tensor[1, 0] = 2, -2
    return config, state


def two_class_batch(*, first_class_first: bool, num_sequences: int = 4) -> Batch:
    """Half of the sequences go to expert 0 only, the other half to expert 1 only; with two dp ranks, one half each."""
    low = torch.randint(0, 25, (num_sequences // 2, 16), generator=torch.Generator().manual_seed(3))
    parts = [low, low.flip(1) + 25]
    ids = torch.cat(parts if first_class_first else parts[::-1])
    return Batch(ids, ids.clone())


def padded_batch(*, pad_with_a_real_token: bool) -> tuple[Batch, Batch, Batch]:
    """A sequence of five tokens alone, a full one of sixteen, and both together with the short one padded."""
    full = random_batch(seed=5, num_sequences=2)
    short_ids = full.ids[:1, :5]
    ids, labels = full.ids.clone(), full.ids.clone()
    ids[0, 5:], labels[0, 5:] = short_ids[0, 2] if pad_with_a_real_token else 0, -100
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[0, 5:] = False
    return Batch(short_ids, short_ids), Batch(full.ids[1:], full.ids[1:]), Batch(ids, labels, mask)


def one_process_pass(config: GatherMoeConfig, state: Tensors, batch: Batch) -> Any:
    """Logits, expert counts and gradients, the losses divided by the counts of the two sequences together."""
    model = model_with(config, state, one_rank_mesh())
    output = model(
        input_ids=batch.ids,
        labels=batch.labels,
        attention_mask=batch.mask,
        num_items_in_batch=4 + 15,
        num_tokens_in_batch=5 + 16,
        use_cache=False,
    )
    output.loss.backward()
    return output, {name: parameter.grad for name, parameter in model.named_parameters()}
