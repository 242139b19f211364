"""Rows of experts: torch's lines and, in Triton's interpreter, the kernels, against plain loops in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.rows import PAIRS_BY_SLOTS, Rows, clear_empty, combine, permute, sort_rows, swiglu, swiglu_back
from recipe.dry_run.kernels import KernelCount
from tests.triton_kernels import TRITON_NAMES, compile_for, counted_bytes

HIDDEN, WIDTH, ACTIVE, NUM_SLOTS = 40, 24, 3, 5  # no power of two


def slots_of(case: str) -> Tensor:
    """[T, A] int64: which of five slots each pair is for, or another number."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.rand(67, 16, generator=generator).topk(ACTIVE).indices  # five of sixteen are here
    return {
        "some": drawn,
        "no row": torch.full((67, ACTIVE), -1),
        "one expert": torch.tensor([[9, 2, -1]]).repeat(67, 1),
        "experts without rows": torch.where((drawn == 1) | (drawn == 4), 11, drawn),
        "every pair": torch.rand(67, NUM_SLOTS, generator=generator).topk(ACTIVE).indices,
        "padding": torch.where(torch.arange(67)[:, None] % 3 == 1, -1, drawn),
        "one token": drawn[:1],
        "many blocks": torch.rand(300, 16, generator=generator).topk(ACTIVE).indices,
    }[case]


CASES = ("some", "no row", "one expert", "experts without rows", "every pair", "padding", "one token", "many blocks")


def randn(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pairs_in_order(slots_TA: Tensor) -> list[tuple[int, int]]:
    """(slot, pair) of every row."""
    found = [(slot, pair) for pair, slot in enumerate(slots_TA.flatten().tolist()) if 0 <= slot < NUM_SLOTS]
    return sorted(found)


def with_rows(real: Tensor, rows: Rows, *, seed: int = 0) -> Tensor:
    """The rows that are there, and NaN in the others."""
    out = real.new_full((len(rows.pair_R), real.shape[1]), torch.nan)
    out[: len(real)] = real
    return out


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    # The interpreter cuts bfloat16 off instead of rounding to nearest.
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def check(case: str, dtype: torch.dtype) -> None:
    slots_TA = slots_of(case)
    num_tokens = len(slots_TA)
    rows, wanted = sort_rows(slots_TA, num_slots=NUM_SLOTS), pairs_in_order(slots_TA)
    pairs = [pair for _, pair in wanted]
    num_rows = len(pairs)
    assert rows.offsets_e.dtype == torch.int32
    assert rows.offsets_e.tolist() == [sum(slot <= end for slot, _ in wanted) for end in range(NUM_SLOTS)]
    assert len(rows.pair_R) == num_tokens * ACTIVE
    assert rows.pair_R[:num_rows].tolist() == pairs
    row_of_pair = {pair: row for row, pair in enumerate(pairs)}
    assert rows.row_TA.flatten().tolist() == [row_of_pair.get(pair, -1) for pair in range(num_tokens * ACTIVE)]

    x_TD = randn(num_tokens, HIDDEN, dtype=dtype)
    got_RD = permute(x_TD, rows)
    tokens = torch.tensor(pairs, dtype=torch.int64) // ACTIVE
    assert torch.equal(got_RD[:num_rows], x_TD[tokens])
    # Rows of another order, found through what is known of pairs.
    other = torch.arange(num_tokens * ACTIVE, dtype=torch.int32).flip(0).view_as(slots_TA)
    source = randn(num_tokens * ACTIVE, HIDDEN, dtype=dtype, seed=2)
    got_RD = permute(source, rows, through_TA=other)
    assert torch.equal(got_RD[:num_rows], source[other.flatten()[pairs].long()])

    y = randn(num_rows, HIDDEN, dtype=dtype, seed=3)
    want_TD = torch.zeros(num_tokens, HIDDEN, dtype=torch.float64).index_add_(0, tokens, y.double())
    wide = torch.promote_types(dtype, torch.float32)
    for out_dtype in {dtype, wide}:
        got_TD = combine(with_rows(y, rows), rows, dtype=out_dtype)
        assert got_TD.dtype == out_dtype
        close(got_TD, want_TD, out_dtype)

    gate_up = randn(num_rows, 2 * WIDTH, dtype=dtype, seed=4)
    weights_TA = torch.rand(num_tokens, ACTIVE, generator=torch.Generator().manual_seed(5)).to(wide)
    grad = randn(num_rows, WIDTH, dtype=dtype, seed=6)
    exact_gate_up, exact_weights = (x.double().requires_grad_() for x in (gate_up, weights_TA))
    gate, up = exact_gate_up.chunk(2, dim=1)
    exact = gate * gate.sigmoid() * up * exact_weights.view(-1)[pairs, None]
    exact.backward(grad.double())
    got_Rf = swiglu(with_rows(gate_up, rows), weights_TA, rows)
    close(got_Rf[:num_rows], exact.detach(), dtype)
    grad_gate_up_R2f = torch.full_like(with_rows(gate_up, rows), torch.nan)
    act_Rf = torch.full_like(got_Rf, torch.nan)
    grad_weights = swiglu_back(
        with_rows(grad, rows),
        with_rows(gate_up, rows),
        weights_TA,
        rows,
        grad_gate_up_R2f=grad_gate_up_R2f,
        act_Rf=act_Rf,
    )
    assert torch.equal(act_Rf[:num_rows], got_Rf[:num_rows])
    assert act_Rf[num_rows:].isnan().all()  # nothing is written there
    close(grad_gate_up_R2f[:num_rows], exact_gate_up.grad, dtype)
    assert grad_weights.dtype == wide
    close(grad_weights, exact_weights.grad, wide)

    gradients = torch.full((NUM_SLOTS, HIDDEN, WIDTH), torch.nan, dtype=dtype)
    cleared = clear_empty(gradients, rows)
    counts = [sum(slot == found for found, _ in wanted) for slot in range(NUM_SLOTS)]
    for count, gradient in zip(counts, cleared, strict=True):
        assert gradient.isnan().all() if count else (gradient == 0).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_torchs_lines_are_the_definition(case: str, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_are_the_definition(interpreter: Callable[..., Any], case: str, dtype: torch.dtype) -> None:
    interpreter(check, case, dtype)


def counted(case: str) -> dict[str, tuple[float, float]]:
    """Bytes that each operator's kernels moved, and those it is declared to."""
    slots_TA = slots_of(case)
    hidden, width, dtype = 256, 128, torch.bfloat16
    num_rows, found = len(pairs_in_order(slots_TA)), {}
    weights_TA = torch.rand(slots_TA.shape)

    def record(name: str, call: Callable[[], Any]) -> Any:
        share = num_rows / slots_TA.numel()
        with counted_bytes() as moved, KernelCount(torch.nn.Module(), share_of_rows=share) as declared:
            result = call()
            found[name] = (sum(moved()), declared.own_bytes)
        return result

    rows = record("sort_rows", lambda: sort_rows(slots_TA, num_slots=NUM_SLOTS))
    x_TD = randn(len(slots_TA), hidden, dtype=dtype)
    x_RD = record("permute", lambda: permute(x_TD, rows))
    record("permute through", lambda: permute(x_RD, rows, through_TA=rows.row_TA))
    record("combine", lambda: combine(x_RD, rows, dtype=dtype))
    gate_up_R2f = with_rows(randn(num_rows, 2 * width, dtype=dtype), rows)
    act_Rf = record("swiglu", lambda: swiglu(gate_up_R2f, weights_TA, rows))
    outs = {"grad_gate_up_R2f": torch.empty_like(gate_up_R2f), "act_Rf": torch.empty_like(act_Rf)}
    record("swiglu_back", lambda: swiglu_back(act_Rf, gate_up_R2f, weights_TA, rows, **outs))
    return found


def cleared(case: str) -> tuple[int, int]:
    """Bytes that zeros for experts without rows take, and those that they should."""
    slots_TA = slots_of(case)
    gradients = torch.empty(NUM_SLOTS, 256, 128, dtype=torch.bfloat16)
    rows = sort_rows(slots_TA, num_slots=NUM_SLOTS)
    with counted_bytes() as moved:
        clear_empty(gradients, rows)
        num_empty = NUM_SLOTS - len({slot for slot, _ in pairs_in_order(slots_TA)})
        return sum(moved()), num_empty * gradients[0].nbytes


FEW = 2500  # bytes: counts and offsets that every program or block reads


@pytest.mark.slow
@pytest.mark.parametrize("case", ["some", "every pair", "experts without rows", "no row"])
def test_kernels_move_what_the_dry_run_says(interpreter: Callable[..., Any], case: str) -> None:
    for name, (moved, declared) in interpreter(counted, case).items():
        assert 0.95 * declared - FEW <= moved <= 1.05 * declared + FEW, (name, moved, declared)
    moved, wanted = interpreter(cleared, case)
    assert wanted <= moved <= wanted + FEW


KERNELS = ("count_pairs", "place_pairs", "permute_rows", "combine_rows", "swiglu_rows", "swiglu_rows_back")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kernel", [*KERNELS, "clear_without_rows"])
def test_kernels_compile_for_gpus(
    capability: int, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For bfloat16 and the sizes of a large model."""
    from modeling import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where nobody has chosen
    function = getattr(kernels, kernel)
    numbers = f"*{TRITON_NAMES[torch.bfloat16]}"
    types = {name: numbers for name in function.arg_names if name.startswith(("x", "y_", "out", "gate", "grad"))}
    types |= {"slots_P": "*i64", "weight_P": "*fp32", "grad_weight_P": "*fp32"}
    whole = ("counts_eB", "ends_eB", "pair_R", "row_P", "through", "offsets_e")
    types |= dict.fromkeys(whole, "*i32")
    for slots in (16, 128, 512) if kernel in KERNELS[:2] else (16,):
        known = {"SLOTS": slots, "BLOCK": max(16, min(256, PAIRS_BY_SLOTS // slots)), "NUM_ACTIVE": 8, "THROUGH": False}
        known |= {"ROWS": 4, "COLUMNS": 512 if kernel == "swiglu_rows_back" else 1024}
        usage = compile_for(capability, function, types=types, known=known)
        assert usage.spilled == 0, usage
        assert usage.shared <= 48 * 1024, usage
