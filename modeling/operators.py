"""Operators of torch's that are one kernel on a GPU and a few lines of torch on a CPU, and how they are defined.

As an operator each is one thing to torch.compile and to fake tensors. They are defined when first used; a CPU needs no
Triton. Here are the RMS norm (torch's own kernels on a GPU), the turn by rotary angles, the two halves of the loss of
some logits, between which ranks that share a vocabulary talk to each other, and the router's product in float32.
rows.py has those of experts' rows.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .comm import wide

# A checkpoint may bring another version of this code along, whose operators must not replace these.
NAMESPACE = re.sub(r"[^0-9A-Za-z_]", lambda found: f"_{ord(found[0]):x}_", __name__)  # torch takes ASCII alone
COLUMNS = 4096  # of a row of logits that a program works on at a time


def normalise(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """x [..., C] over its root mean square, times weight [C]; and what each row was multiplied by, [..., 1].

    The first is rounded once from float32, or what is wider, to x's type; the second stays in that.
    """
    return _operators().rms_norm(x, weight, eps)


def normalise_back(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and the weight, each in its type."""
    return _operators().rms_norm_back(grad, x, weight, scale)


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
    """x [B, h, S, K] by the angles of cos and sin [B or 1, S, K], or back for sign=-1: in x's type and order of memory.

    Channel i pairs with channel i + K/2; both halves of the tables hold the same angles.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _operators().turn(x, cos, sin, sign)


def logit_sums_(logits_cv: Tensor, column_c: Tensor, *, num_real: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row's first `num_real` logits the largest, the sum of exponentials over it, and the one at `column_c`.

    logits [c, v], column [c] int64 (-1: none, for which 0 is returned) -> three of [c], float32 at least. Where there
    is no logit the largest is -inf and the sum 0. The logits are then for `logit_gradients_` alone: a CPU leaves the
    exponentials in their place, which it would not make twice.
    """
    return _operators().logit_sums_(logits_cv, column_c, num_real)


def logit_gradients_(
    logits_cv: Tensor, column_c: Tensor, own_highest_c: Tensor, highest_c: Tensor, factor_c: Tensor, *, num_real: int
) -> Tensor:
    """Write exp(logit - highest) * factor - (1 at `column_c`) over what `logit_sums_` left, zeros after `num_real`.

    own_highest [c] is what that returned, highest and factor [c] float32 at least; rounded once.
    """
    _operators().logit_gradients_(logits_cv, column_c, own_highest_c, highest_c, factor_c, num_real)
    return logits_cv


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [t, I] times weight [O, I] transposed, in float32 at least whatever their type is: [t, O].

    Products of two bfloat16 are exact in float32, in which a GPU's tensor cores add them up.
    """
    return _operators().wide_linear(x, weight)


def wide_linear_back(
    grad: Tensor, x: Tensor, weight: Tensor, *, weight_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x in its type and of the weight in its own or another, each rounded once, from [t, O]."""
    return _operators().wide_linear_back(grad, x, weight, weight_dtype or weight.dtype)


Operator = tuple[Callable[..., Any], Callable[..., Any], Collection[str]]


def define_operators(namespace: str, operators: Collection[Operator]) -> None:
    """Define functions `_name` as operators `name`: each with its fake, and the arguments that it changes."""
    for function, fake, changes in operators:
        name = function.__name__.removeprefix("_")
        torch.library.custom_op(f"{namespace}::{name}", function, mutates_args=changes).register_fake(fake)


def by_kernel(x: Tensor) -> bool:
    """Whether kernels work on x: on a GPU with Triton, or in its interpreter; float64 they do not know."""
    where = x.is_cuda and importlib.util.find_spec("triton") is not None
    return (where or os.environ.get("TRITON_INTERPRET") == "1") and x.dtype != torch.float64


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _operators() -> Any:
    define_own()
    return getattr(torch.ops, NAMESPACE)


# torch.compile calls it while it traces and keeps the answer: it cannot look into what defines an operator.
@torch.compiler.assume_constant_result
def define_own() -> bool:
    """Define the operators of this file, once."""
    return _define_once()


@cache
def _define_once() -> bool:
    operators: list[Operator] = [
        (_rms_norm, lambda x, _, __: (x.new_empty(x.shape), _one_per_row(x)), ()),
        (_rms_norm_back, lambda _, x, weight, __: (x.new_empty(x.shape), torch.empty_like(weight)), ()),
        (_turn, lambda x, *_: torch.empty_like(x), ()),
        (_logit_sums_, lambda logits_cv, *_: tuple(_one_per_row(logits_cv)[:, 0] for _ in range(3)), ("logits_cv",)),
        (_logit_gradients_, lambda *_: None, ("logits_cv",)),
        (_wide_linear, lambda x, weight: wide(x[:, :0]).new_empty(len(x), len(weight)), ()),
        (_wide_linear_back, lambda _, x, w, dtype: (x.new_empty(x.shape), w.new_empty(w.shape, dtype=dtype)), ()),
    ]
    define_operators(NAMESPACE, operators)
    ours = getattr(torch.ops, NAMESPACE)
    # torch's counter sees shapes; for it the gradient's products are two, however they are made.
    register_flop_formula(ours.wide_linear)(lambda x, weight, **_: 2 * x[0] * x[1] * weight[0])
    register_flop_formula(ours.wide_linear_back)(lambda _, x, weight, *__, **___: 4 * x[0] * x[1] * weight[0])
    return True


def _one_per_row(x: Tensor) -> Tensor:
    return wide(x[..., :0]).new_empty(*x.shape[:-1], 1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        return fused_rms_norm(x, weight, eps)
    x_wide = wide(x)
    scale = torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)
    return (x_wide * scale).mul_(wide(weight)).to(x.dtype).contiguous(), scale


def _rms_norm_back(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        return fused_rms_norm_back(grad, x, weight, scale)
    grad_wide, unit = wide(grad), wide(x) * scale
    grad_weight = (grad_wide * unit).flatten(0, -2).sum(0).to(weight.dtype)
    grad_unit = grad_wide * wide(weight)
    along = (grad_unit * unit).mean(-1, keepdim=True)
    return grad_unit.sub_(unit.mul_(along)).mul_(scale).to(x.dtype).contiguous(), grad_weight


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """torch's kernel, and the number per row that its backward needs; the weight in x's type, as it asks for."""
    return torch.ops.aten._fused_rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def fused_rms_norm_back(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward(
        grad, x, weight.shape, scale, weight.to(x.dtype), [True, True]
    )
    return grad_x, grad_weight.to(weight.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    if not by_kernel(x):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., half:], value=-sign)
        out[..., half:].addcmul_(x[..., :half], sin[..., :half], value=sign)
        return out.to(x.dtype)
    from .kernels import turn_heads

    out = torch.empty_like(x)
    num_sequences, num_heads, length, _ = x.shape
    cos, sin = (part if part.stride(-1) == 1 else part.contiguous() for part in (cos, sin))
    heads = min(next_power_of_2(num_heads), max(1, COLUMNS // next_power_of_2(half)))
    with torch.cuda.device_of(x):
        turn_heads[(length, num_sequences, -(-num_heads // heads))](
            x,
            cos,
            sin,
            out,
            num_heads,
            half,
            *x.stride()[:3],
            *out.stride()[:3],
            cos.stride(0) if len(cos) > 1 else 0,
            cos.stride(1),
            SIGN=sign,
            HEADS=heads,
            HALF=next_power_of_2(half),
        )
    return out


def _logit_sums_(logits_cv: Tensor, column_c: Tensor, num_real: int) -> tuple[Tensor, Tensor, Tensor]:
    if not by_kernel(logits_cv):
        real = logits_cv[:, :num_real]
        if not num_real:
            none_c = _one_per_row(logits_cv)[:, 0]
            return torch.full_like(none_c, -torch.inf), torch.zeros_like(none_c), torch.zeros_like(none_c)
        highest_c = wide(real.amax(dim=-1))
        found_c = wide(real.gather(1, column_c.clamp(min=0)[:, None]).squeeze(1))
        shifted = real.sub_(highest_c[:, None]) if _is_wide(real) else wide(real) - highest_c[:, None]
        return highest_c, shifted.exp_().sum(dim=-1), torch.where(column_c >= 0, found_c, 0.0)
    from .kernels import sum_logits

    out_3c = logits_cv.new_empty(3, len(logits_cv), dtype=torch.float32)
    with torch.cuda.device_of(logits_cv):
        sum_logits[(len(logits_cv),)](
            logits_cv, column_c, out_3c, len(logits_cv), num_real, logits_cv.stride(0), COLUMNS=COLUMNS
        )
    highest_c, sum_c, found_c = (out.clone() for out in out_3c.unbind())  # an operator's results share no memory
    return highest_c, sum_c, found_c


def _logit_gradients_(
    logits_cv: Tensor, column_c: Tensor, own_highest_c: Tensor, highest_c: Tensor, factor_c: Tensor, num_real: int
) -> None:
    if not by_kernel(logits_cv):
        logits_cv[:, num_real:] = 0.0
        real = logits_cv[:, :num_real]
        if _is_wide(real):
            grad = real.mul_((factor_c * (own_highest_c - highest_c).exp())[:, None])
        else:
            grad = (wide(real) - highest_c[:, None]).exp_().mul_(factor_c[:, None])
        if num_real:
            grad.scatter_add_(1, column_c.clamp(min=0)[:, None], -(column_c >= 0).to(grad.dtype)[:, None])
        if not _is_wide(real):
            real.copy_(grad)
        return
    from .kernels import logit_gradients

    num_rows, num_columns = logits_cv.shape
    with torch.cuda.device_of(logits_cv):
        logit_gradients[(num_rows,)](
            logits_cv, column_c, highest_c, factor_c, num_real, num_columns, logits_cv.stride(0), COLUMNS=COLUMNS
        )


def _is_wide(x: Tensor) -> bool:
    """Whether x is not narrower than float32, so that what is made of it may take its place."""
    return x.dtype == wide(x[:0]).dtype


def _wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    if by_tensor_cores(x, weight):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return wide(x) @ wide(weight).t()


def _wide_linear_back(grad: Tensor, x: Tensor, weight: Tensor, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not by_tensor_cores(x, weight):
        return (grad @ wide(weight)).to(x.dtype), (grad.t() @ wide(x)).to(weight_dtype)
    parts = in_three_parts(grad)
    grad_weight = torch.mm(parts.t(), x, out_dtype=torch.float32).unflatten(0, (3, -1)).sum(0)
    return parts @ weight.repeat(3, 1), grad_weight.to(weight_dtype)


def by_tensor_cores(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16


def in_three_parts(x: Tensor) -> Tensor:
    """Cut float32 numbers [t, O] into bfloat16 ones whose sum they are: [t, 3 O], the largest parts first.

    Three times the 8 bits of a bfloat16 are a float32's 24.
    """
    parts = []
    for _ in range(3):
        parts.append(x.bfloat16())
        x = x - parts[-1]
    return torch.cat(parts, dim=1)
