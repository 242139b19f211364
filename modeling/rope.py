"""Rotary position embedding (Su et al., 2104.09864), its tables always computed in float32 at least.

The frequencies are derived from the configuration in every forward and are no buffer of the model, so nothing that
casts a model can round them: in bfloat16 positions 256 and 257 would already be the same.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

BY_REACH = ("dynamic", "longrope")  # types whose frequencies depend on the furthest position, which the host reads


class RotaryTables(NamedTuple):
    """cos and sin, each [B or 1, S, K], in the type they are applied in."""

    cos: Tensor
    sin: Tensor


def rotary_tables(config: Any, position_ids: Tensor, *, dtype: torch.dtype) -> RotaryTables:
    """Tables for position_ids [B or 1, S]; angles in float32 (float64 when dtype is), cast to `dtype` at the end."""
    exact = torch.promote_types(dtype, torch.float32)
    device = position_ids.device
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=exact, device=device) / config.head_dim
        frequencies, scaling = 1.0 / (rope["rope_theta"] ** exponents), 1.0
    else:
        # A token decoded with a cache stands far along although the call is one token long.
        reach = int(position_ids.max()) + 1 if rope["rope_type"] in BY_REACH else None
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=device, seq_len=reach)
    angles = position_ids[..., None].to(exact) * frequencies.to(exact)
    angles = torch.cat((angles, angles), dim=-1)
    return RotaryTables((angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype))


def rotate(x: Tensor, tables: RotaryTables) -> Tensor:
    """x [B, heads, S, K] turned by its positions; channel i pairs with channel i + K/2, as in transformers."""
    return _Rotate.apply(x, tables.cos.unsqueeze(1), tables.sin.unsqueeze(1))


class _Rotate(torch.autograd.Function):
    """Its backward turns the gradient the other way; nothing but the tables is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, sign=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _turn(grad, *ctx.saved_tensors, sign=-1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
    """By the angles of the tables, or for sign=-1 back; both halves of the tables hold the same angles."""
    out = x * cos
    half = x.shape[-1] // 2
    out[..., :half].addcmul_(x[..., half:], sin[..., half:], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., :half], value=sign)
    return out
