"""A decoder block's forward and backward have static shapes and show the host no number: a graph can hold them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.decoder import OwnTokens
from modeling.experts_grouped import sort_rows
from modeling.init import build_model
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh
from modeling.noise import NoiseOrigin, token_counters
from tests.ranks import run_ranks
from tests.referee import mixed_config, split_options
from tests.static_shapes import plain_inputs, static_shapes

BATCH, BLOCK = 2, 8


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: int(x.sum()),
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), torch.zeros(())),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.long().bincount(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.tensor_split(x, torch.tensor([1, 2])),
    ],
)
def test_the_mode_refuses_what_a_graph_cannot_hold(read: Any) -> None:
    with pytest.raises(RuntimeError, match="depends on data"), static_shapes():
        read(torch.arange(4.0))


def test_the_mode_lets_static_operators_through() -> None:
    x = torch.arange(4.0)
    with static_shapes():
        assert x[torch.tensor([1, 2])].shape == (2,)
        assert x.repeat_interleave(2).shape == (8,)
        x[torch.tensor([0])] = 1.0
        x.masked_fill_(x > 2, 0.0)


def _block(rank: int, _: int, ep: int, options: dict[str, Any], mode: bool) -> tuple[list[Tensor], str]:
    """Forward and backward of a sparse block on this rank, under the mode or without it."""
    changes, execution = split_options(options)
    config = mixed_config(num_experts=4, num_experts_per_tok=2, mlp_only_layers=[], **changes)
    mesh = build_mesh(ParallelLayout(tp=2, ep=ep), num_key_value_heads=config.sizes.num_key_value_heads)
    model = build_model(config, mesh=mesh, execution=execution, seed=1)
    block = model.model.layers[1]
    num_tokens = BATCH * BLOCK // 2
    tokens = rank * num_tokens + torch.arange(num_tokens)
    inputs = plain_inputs(config, block_size=BLOCK, dtype=torch.float32)
    noise_t = token_counters(tokens, origin=NoiseOrigin(1, 0), layer_idx=1) if config.router_jitter_noise else None
    own = OwnTokens(BATCH, tokens // BLOCK, torch.arange(num_tokens) > 1, noise_t)
    x = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    try:
        with static_shapes() if mode else nullcontext():
            out, _, probs_BE, z_B, *_ = block(x, inputs=inputs, tokens=own)
            (out.square().sum() + probs_BE.square().sum() + z_B.sum()).backward()
    except RuntimeError as error:
        return [], str(error)
    assert x.grad is not None
    gradients = [p.grad for p in block.parameters()]
    assert all(g is not None for g in gradients)
    return [out.detach(), x.grad, *gradients], ""


ROUTER = {"score_function": "sigmoid", "router_bias": True, "router_jitter_noise": 0.1}


@pytest.mark.parametrize(
    ("ep", "options"),
    [
        *(
            (ep, {"strategy": strategy, "qk_norm": qk_norm})
            for strategy, ep in (("gather_tokens", 2), ("gather_tokens", 1), ("gather_weights", 1))
            for qk_norm in ("none", "head", "full")
        ),
        (2, ROUTER),
    ],
    ids=str,
)
def test_the_block_has_static_shapes(ep: int, options: dict[str, Any]) -> None:
    options = options | {"experts_backend": "grouped"}
    under_the_mode, without = (run_ranks(_block, 2, ep, options, mode) for mode in (True, False))
    for (tensors, refused), (want, _) in zip(under_the_mode, without, strict=True):
        assert refused == ""
        assert len(tensors) == len(want) > 8
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))


@pytest.mark.parametrize(
    ("ep", "options"),
    [
        (2, {"experts_backend": "loop"}),
        (1, {"experts_backend": "loop"}),
        (2, {"experts_backend": "grouped", "strategy": "all_to_all"}),
    ],
    ids=["whole experts", "sliced experts", "rows exchanged"],
)
def test_the_loop_and_an_exchange_of_rows_read_counts_on_the_host(ep: int, options: dict[str, Any]) -> None:
    for _, refused in run_ranks(_block, 2, ep, options, True):
        assert refused == "tolist depends on data"


def test_shapes_do_not_depend_on_the_routing() -> None:
    """All tokens to one expert, or spread evenly: the same operators on the same shapes."""
    spread = torch.arange(16).view(8, 2) % 4
    piled = torch.tensor([[0, 1]]).expand(8, 2)
    away = torch.tensor([[2, 3]]).expand(8, 2)
    shapes = {tuple(sort_rows(ids, num_slots=2).token_R.shape) for ids in (spread, piled, away)}
    assert shapes == {(16,)}
