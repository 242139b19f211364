"""A MoE layer with known weights and routing: by its definition, and shared by ranks."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling.execution import Execution
from modeling.init import cut, join
from modeling.layout import ParallelLayout
from modeling.mesh import ParallelMesh
from modeling.moe import GatherMoeSparseBlock
from modeling.router import Routing, route
from modeling.shard_table import ShardTable
from tests.referee import tiny_config

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
    masks = {"padding": torch.arange(NUM_TOKENS) % 3 > 0, "all padding": torch.zeros(NUM_TOKENS, dtype=torch.bool)}
    mask = masks.get(kind)
    routing = route(logits, num_active=num_active, renormalise=True, token_mask_t=mask)
    return routing.expert_ids_tA, routing.weights_tA


def whole_numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, the output's gradient, and both weights: numbers that bfloat16 holds, in any dtype."""
    generator = torch.Generator().manual_seed(9)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).bfloat16().to(dtype)

    return (
        draw(NUM_TOKENS, HIDDEN),
        draw(NUM_TOKENS, HIDDEN),
        draw(NUM_EXPERTS, 2 * WIDTH, HIDDEN, scale=0.3),
        draw(NUM_EXPERTS, HIDDEN, WIDTH, scale=0.3),
    )


@functools.cache
def reference(num_active: int, kind: str, experts: range = range(NUM_EXPERTS)) -> Answer:
    """Token by token and expert by expert, in float64 and by autograd; of these experts alone, with whole gradients."""
    x, grad, gate_up, down = (tensor.requires_grad_(i != 1) for i, tensor in enumerate(whole_numbers(torch.float64)))
    ids, weights = choose(kind, num_active)
    weights = weights.detach().requires_grad_()
    rows = []
    for token in range(NUM_TOKENS):
        total = 0.0 * x[token]
        for slot in range(num_active):
            expert = int(ids[token, slot])
            if expert in experts:
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                total = total + weights[token, slot] * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    out = torch.stack(rows)
    inputs = (x, weights, gate_up, down)
    return Answer(out.detach(), *torch.autograd.grad(out, inputs, grad, materialize_grads=True))


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


def count(ids: Tensor, num_experts: int) -> Tensor:
    return torch.bincount(ids[ids < num_experts], minlength=num_experts)
