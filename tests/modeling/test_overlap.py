"""Overlapped transfers in a whole model: no bit changes, and nothing but the order of sums does with the chunks."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.init import build_model
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh
from tests.ranks import run_ranks
from tests.referee import mixed_config, split_options


def gradients(
    ep: int, *, checkpointing: bool = False, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Tensor]:
    """Loss and all gradients of a model with dense and sparse layers, shared by two ranks."""
    changes, execution = split_options(options)
    config = mixed_config(router_aux_loss_coef=0.1, router_z_loss_coef=0.1, logits_z_loss_coef=0.01, **changes)
    config._attn_implementation = "sdpa"
    mesh = build_mesh(ParallelLayout(tp=2, ep=ep), num_key_value_heads=config.sizes.num_key_value_heads)
    model = build_model(config, mesh=mesh, execution=execution, seed=1, dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.randint(0, config.vocab_size, (2, 21), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    loss = model(input_ids=ids, labels=ids.masked_fill(mask == 0, -100), attention_mask=mask).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _all_alike(rank: int, _: int, ep: int, options: dict[str, Any]) -> list[str]:
    """Which settings change a bit against those without overlap and recomputation."""
    plain = gradients(ep, overlap=False, **options)
    assert len(plain) > 20
    different = []
    for overlap, checkpointing, regather in itertools.product((False, True), repeat=3):
        found = gradients(ep, overlap=overlap, checkpointing=checkpointing, regather=regather, **options)
        if not all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)):
            different.append(f"{overlap=} {checkpointing=} {regather=}")
    return different


@pytest.mark.parametrize(
    ("ep", "options"),
    [
        (2, {"overlap_chunks": 1}),
        pytest.param(
            *(2, {"overlap_chunks": 4, "dtype": torch.bfloat16, "combine_dtype": "float32"}), marks=pytest.mark.slow
        ),
        (1, {"overlap_chunks": 3, "experts_backend": "grouped", "qk_norm": "full"}),
        (1, {"strategy": "gather_weights", "overlap_chunks": 2}),
        pytest.param(*(2, {"strategy": "all_to_all", "overlap_chunks": 2}), marks=pytest.mark.slow),
    ],
    ids=["one chunk", "bf16", "grouped", "gather_weights", "all_to_all"],
)
def test_overlap_recomputation_and_gathering_again_change_no_bit(ep: int, options: dict[str, Any]) -> None:
    assert run_ranks(_all_alike, 2, ep, options) == [[], []]


def _by_chunks(rank: int, _: int) -> None:
    one = gradients(2, overlap=True, overlap_chunks=1, dtype=torch.float64)
    for num_chunks in (2, 5, 100):
        more = gradients(2, overlap=True, overlap_chunks=num_chunks, dtype=torch.float64)
        for got, want in zip(more, one, strict=True):
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


def test_the_number_of_chunks_changes_the_order_of_sums_alone() -> None:
    run_ranks(_by_chunks, 2)
