"""Operators on every element: torch's lines and, in Triton's interpreter, the kernels, against float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling import operators
from modeling.operators import (
    COLUMNS,
    in_three_parts,
    logit_gradients_,
    logit_sums_,
    turn,
    wide_linear,
    wide_linear_back,
)
from recipe.dry_run.kernels import KernelCount
from tests.triton_kernels import TRITON_NAMES, compile_for, counted_bytes

TYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    # The interpreter cuts bfloat16 off instead of rounding to nearest; torch's lines round between steps.
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-5}[dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def heads_of(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, h, S, K] and the tables [B or 1, S, K]."""
    size, num_heads = (24, 5) if case != "large" else (128, 32)
    x = randn(2, 7, num_heads, size, dtype=dtype)
    if case == "part of a tensor":
        x = randn(2, 7, num_heads, 3 * size, dtype=dtype)[..., size : 2 * size]
    if case == "channels apart":
        x = randn(2, 7, size, num_heads, dtype=dtype).transpose(2, 3)
    angles = randn(2 if case == "own positions" else 1, 7, size // 2, dtype=torch.float64, seed=2)
    cos, sin = (torch.cat([part, part], -1).to(dtype) for part in (angles.cos(), angles.sin()))
    return x.transpose(1, 2), cos, sin


def check_turn(case: str, dtype: torch.dtype) -> None:
    x, cos, sin = heads_of(case, dtype)
    got = turn(x, cos, sin, sign=1)
    assert got.dtype == dtype
    if case != "channels apart":
        assert got.transpose(1, 2).is_contiguous()  # heads lie as they lay
    first, second = x.double().chunk(2, -1)
    c, s = (part.double().unsqueeze(1) for part in (cos, sin))
    want = x.double() * c + torch.cat([-second, first], -1) * s
    close(got, want, dtype)
    close(turn(got, cos, sin, sign=-1), x, dtype)


HEADS = ("shared positions", "own positions", "part of a tensor", "channels apart", "large")


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, *TYPES], ids=str)
def test_heads_are_turned_and_turned_back(case: str, dtype: torch.dtype) -> None:
    check_turn(case, dtype)


def test_heads_keep_their_type_beside_wider_tables() -> None:
    x, cos, sin = heads_of("shared positions", torch.bfloat16)
    got = turn(x, cos.float(), sin.float(), sign=1)
    assert got.dtype == torch.bfloat16
    close(got, turn(x.double(), cos.double(), sin.double(), sign=1), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_kernel_turns_them_alike(interpreter: Callable[..., Any], case: str, dtype: torch.dtype) -> None:
    interpreter(check_turn, case, dtype)


# Vocabulary here, of it without padding.
VOCABULARIES = {"whole": (50, 50), "padded": (50, 41), "padding alone": (8, 0), "wide": (COLUMNS + 9, COLUMNS + 3)}


def logits_of(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    num_columns, num_real = VOCABULARIES[case]
    logits_cv = 4 * randn(6, num_columns, dtype=dtype)
    logits_cv[:, num_real:] = torch.nan  # must not be seen
    column_c = torch.tensor([0, max(num_real - 1, 0), -1, -1, num_real // 2, 0])
    return logits_cv, column_c if num_real else torch.full((6,), -1), num_real


def check_logits(case: str, dtype: torch.dtype) -> None:
    logits_cv, column_c, num_real = logits_of(case, dtype)
    exact = logits_cv[:, :num_real].double().clone()
    highest_c, sum_c, found_c = logit_sums_(logits_cv, column_c, num_real=num_real)
    wide = torch.promote_types(dtype, torch.float32)
    assert highest_c.dtype == sum_c.dtype == found_c.dtype == wide
    if not num_real:
        assert (highest_c == -torch.inf).all()
        assert (sum_c == 0).all()
        assert (found_c == 0).all()
    else:
        assert torch.equal(highest_c.double(), exact.amax(1))
        close(sum_c, (exact - exact.amax(1, keepdim=True)).exp().sum(1), wide)
        picked = exact.gather(1, column_c.clamp(min=0)[:, None]).squeeze(1)
        assert torch.equal(found_c.double(), torch.where(column_c >= 0, picked, 0.0))
    factor_c = torch.tensor([0.01, 0.02, 0.0, 0.03, 1.0, 0.5], dtype=wide)
    everyones_c = highest_c.clamp(min=0) + 0.5  # of the ranks together, of which another one has the highest
    want = torch.zeros(logits_cv.shape, dtype=torch.float64)
    want[:, :num_real] = (exact - everyones_c.double()[:, None]).exp() * factor_c.double()[:, None]
    for row, column in enumerate(column_c.tolist()):
        if column >= 0:
            want[row, column] -= 1.0
    grad_cv = logit_gradients_(logits_cv, column_c, highest_c, everyones_c, factor_c, num_real=num_real)
    assert grad_cv is logits_cv
    close(grad_cv, want, dtype)
    assert (grad_cv[:, num_real:] == 0).all()


@pytest.mark.parametrize("case", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float64, *TYPES], ids=str)
def test_logits_are_summed_and_become_their_gradients(case: str, dtype: torch.dtype) -> None:
    check_logits(case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", VOCABULARIES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_kernels_do_the_same_with_logits(interpreter: Callable[..., Any], case: str, dtype: torch.dtype) -> None:
    interpreter(check_logits, case, dtype)


def check_float64() -> None:
    x, cos, sin = heads_of("shared positions", torch.float64)
    back = turn(turn(x, cos, sin, sign=1), cos, sin, sign=-1)
    torch.testing.assert_close(back, x, rtol=1e-13, atol=1e-13)
    check_logits("whole", torch.float64)


@pytest.mark.slow
def test_kernels_leave_float64_to_torch(interpreter: Callable[..., Any]) -> None:
    interpreter(check_float64)


def check_wide_linear(dtype: torch.dtype) -> None:
    x, weight = randn(6, 40, dtype=dtype), randn(5, 40, dtype=dtype, seed=2)
    wide = torch.promote_types(dtype, torch.float32)
    grad = randn(6, 5, dtype=wide, seed=3)
    got = wide_linear(x, weight)
    assert got.dtype == wide
    close(got, x.double() @ weight.double().t(), wide)
    grad_x, grad_weight = wide_linear_back(grad, x, weight)
    assert (grad_x.dtype, grad_weight.dtype) == (dtype, dtype)
    # Rounded once: half a step of bfloat16 is 2 ** -9 of the number.
    tolerance = {torch.bfloat16: 2.0**-8, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for ours, exact in ((grad_x, grad.double() @ weight.double()), (grad_weight, grad.double().t() @ x.double())):
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, *TYPES], ids=str)
def test_a_product_is_in_float32_whatever_it_is_of(dtype: torch.dtype) -> None:
    check_wide_linear(dtype)


def test_so_it_is_by_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's product of bfloat16 numbers with sums and result in float32, which a CPU does not have."""
    real = torch.mm

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        assert (a.dtype, b.dtype, out_dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        return real(a.float(), b.float())

    monkeypatch.setattr(operators, "by_tensor_cores", lambda x, _: x.dtype == torch.bfloat16)
    monkeypatch.setattr(torch, "mm", mm)
    check_wide_linear(torch.bfloat16)


def test_the_weights_gradient_may_stay_in_float32() -> None:
    """Where ranks that share a weight add theirs up."""
    x, weight, grad = randn(6, 40, dtype=torch.bfloat16), randn(5, 40, dtype=torch.bfloat16), torch.ones(6, 5)
    _, grad_weight = wide_linear_back(grad, x, weight, weight_dtype=torch.float32)
    assert grad_weight.dtype == torch.float32
    close(grad_weight, grad.double().t() @ x.double(), torch.float32)


def test_a_float32_is_three_bfloat16s() -> None:
    x = randn(40, 30, dtype=torch.float32) * torch.logspace(-10, 10, 30)
    assert torch.equal(in_three_parts(x).double().unflatten(1, (3, -1)).sum(1), x.double())


def counted() -> dict[str, tuple[float, float]]:
    """Bytes that each operator's kernels moved, and those it is declared to."""
    x, cos, sin = heads_of("large", torch.bfloat16)
    logits_cv = randn(6, 9000, dtype=torch.bfloat16)
    column_c, number_c = torch.arange(6), torch.ones(6)
    works: dict[str, Callable[[], Any]] = {
        "turn": lambda: turn(x, cos, sin, sign=1),
        "logit_sums_": lambda: logit_sums_(logits_cv, column_c, num_real=8990),
        "logit_gradients_": lambda: logit_gradients_(logits_cv, column_c, *[number_c] * 3, num_real=8990),
    }
    found = {}
    for name, work in works.items():
        with counted_bytes() as moved, KernelCount(torch.nn.Module(), share_of_rows=1.0) as declared:
            work()
        found[name] = (sum(moved()), declared.own_bytes)
    return found


@pytest.mark.slow
def test_kernels_move_what_the_dry_run_says(interpreter: Callable[..., Any]) -> None:
    for name, (moved, declared) in interpreter(counted).items():
        assert moved == pytest.approx(declared, rel=0.05), name


KNOWN = {"turn_heads": {"SIGN": 1, "HEADS": 32, "HALF": 64}, "sum_logits": {}, "logit_gradients": {}}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kernel", KNOWN)
def test_kernels_compile_for_gpus(
    capability: int, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modeling import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where nobody has chosen
    types = dict.fromkeys(("x", "cos", "sin", "out", "logits"), f"*{TRITON_NAMES[torch.bfloat16]}")
    types |= {"column_c": "*i64", **dict.fromkeys(("out_3c", "highest_c", "factor_c"), "*fp32")}
    known = {"COLUMNS": COLUMNS, **KNOWN[kernel]}
    usage = compile_for(capability, getattr(kernels, kernel), types=types, known=known)
    assert usage.spilled == 0, usage
    assert usage.shared <= 48 * 1024, usage
