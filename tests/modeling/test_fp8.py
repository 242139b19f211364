"""Tokens in 8 bits: exact scales, the errors that the docstring names, a layer whose gradient skips the rounding."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.comm import FP8_LARGEST as LARGEST
from modeling.comm import pack_fp8, unpack_fp8
from modeling.execution import Execution
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh
from modeling.moe import GatherMoeSparseBlock
from modeling.router import Routing
from tests.ranks import run_ranks
from tests.referee import tiny_config


def rounded(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    unpack_fp8(pack_fp8(x), out=out)
    return out


def relative_rms(got: Tensor, want: Tensor) -> float:
    return ((got - want).square().mean() / want.square().mean()).sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_8_bits_can_hold_comes_back_as_it_was(dtype: torch.dtype) -> None:
    x = torch.tensor([[LARGEST, 1.0, -0.875, 0.0], [2.0**-6, -(2.0**-7), 2.0**-9, 0.0], [0.0] * 4], dtype=dtype)
    assert torch.equal(rounded(x), x)
    assert pack_fp8(x).shape == (3, 4 + 4)
    assert rounded(x).dtype == dtype


def test_tokens_of_any_size_keep_their_precision() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for scale in (1e-30, 1e-3, 1e4, 1e30):
        assert relative_rms(rounded(x * scale) / scale, x) < 0.03, scale


def test_an_empty_token_stays_empty_where_denormals_are_flushed() -> None:
    try:
        torch.set_flush_denormal(True)
        assert torch.equal(rounded(torch.zeros(2, 8)), torch.zeros(2, 8))
    finally:
        torch.set_flush_denormal(False)


def test_the_errors_are_those_of_the_docstring() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2048, 512, generator=generator)
    gate_up = torch.randn(1536, 512, generator=generator) / 512**0.5
    down = torch.randn(512, 768, generator=generator) / 768**0.5

    def expert(x: Tensor) -> Tensor:
        gate, up = (x @ gate_up.t()).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ down.t()

    in_bf16 = x.bfloat16().float()
    assert relative_rms(rounded(x), x) == pytest.approx(0.026, abs=5e-4)
    assert relative_rms(in_bf16, x) == pytest.approx(0.0017, abs=5e-5)
    assert relative_rms(expert(rounded(x)), expert(x)) == pytest.approx(0.038, abs=1e-3)
    assert relative_rms(expert(in_bf16), expert(x)) == pytest.approx(0.0024, abs=1e-4)


def _as_routed(routing: Routing, *_: Any, **__: Any) -> Routing:
    return routing


def _layer(rank: int, world_size: int, num_chunks: int, regather: bool) -> None:
    """A layer with 8-bit tokens is the exact layer on rounded tokens, forward and in every gradient."""
    found = []
    options: dict[str, Any] = {"overlap": True, "overlap_chunks": num_chunks, "regather": regather}
    for token_dtype in ("float8_e4m3", "auto"):
        mesh = build_mesh(ParallelLayout(tp=world_size, ep=world_size), num_key_value_heads=2)
        execution = Execution(**options, token_dtype=token_dtype)
        block = GatherMoeSparseBlock(tiny_config(num_experts=4), mesh=mesh, execution=execution)
        generator = torch.Generator().manual_seed(3)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, generator=generator)
        x = torch.randn(10, block.sizes.hidden_size, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        # Tokens are routed before they are rounded.
        block.gate.forward = partial(_as_routed, block.gate(x.detach()))
        tokens = x if token_dtype != "auto" else x + (rounded(x.detach()) - x.detach())
        out, _ = block(tokens)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in block.experts.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("num_chunks", "regather"), [(1, False), (3, True)])
def test_a_layer_works_on_rounded_tokens(num_chunks: int, regather: bool) -> None:
    run_ranks(_layer, 2, num_chunks, regather)
