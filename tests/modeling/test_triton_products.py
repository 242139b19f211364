"""The Triton grouped products, on Triton's interpreter, against a float64 loop over the experts."""

import importlib.util
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.dynamic_module_utils import get_imports

from modeling import experts_grouped
from modeling.experts_grouped import (
    Tile,
    choose_tile,
    fp32_precision,
    grouped_backend,
    multiply,
    multiply_outer,
    num_row_tiles,
)
from tests.triton_kernels import TRITON_NAMES, compile_for

pytestmark = pytest.mark.slow

SMALL = Tile(height=16, width=16, depth=16, num_warps=4, num_stages=2)
OUT, IN = 24, 40  # no multiples of a tile's side

# Rows of each expert, then rows that belong to none.
ROUTINGS: dict[str, tuple[list[int], int]] = {
    "whole tiles": ([16, 32, 16], 0),
    "one row more or less": ([15, 17, 1], 0),
    "all rows to one expert": ([0, 0, 50, 0], 0),
    "experts without rows": ([0, 7, 0, 0, 33, 0], 0),
    "rows that nobody owns": ([5, 0, 18], 29),
    "no expert owns a row": ([0, 0, 0], 20),
    "no row at all": ([0, 0], 0),
    "one expert": ([37], 3),
    "more experts than rows": ([1, 0, 1, 1, 0, 0, 0, 1, 0], 1),
    "every row tile of the grid": ([17, 1, 1, 17, 1], 1),  # eight, a whole band
}
# Of a result's last rounding. The interpreter cuts bfloat16 off instead of rounding to nearest.
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}


class Problem(NamedTuple):
    """x [R, I], grad [R, O], weight [e, O, I] in one dtype; offsets [e] int32. Rows that nobody owns are NaN."""

    x_RI: Tensor
    grad_RO: Tensor
    weight_eOI: Tensor
    offsets_e: Tensor

    def segments(self) -> Iterator[tuple[int, slice]]:
        for expert, (start, end) in enumerate(itertools.pairwise([0, *self.offsets_e.tolist()])):
            yield expert, slice(start, end)


class Triple(NamedTuple):
    """One tensor for each product."""

    forward_RO: Tensor
    back_RI: Tensor
    weights_eOI: Tensor


def problem(routing: str, dtype: torch.dtype) -> Problem:
    counts, unowned = ROUTINGS[routing]
    generator = torch.Generator().manual_seed(3)
    num_rows = sum(counts) + unowned

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x_RI, grad_RO, weight_eOI = randn(num_rows, IN), randn(num_rows, OUT), randn(len(counts), OUT, IN)
    x_RI[sum(counts) :] = torch.nan
    grad_RO[sum(counts) :] = torch.nan
    return Problem(x_RI, grad_RO, weight_eOI, torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32))


def products(given: Problem, *, tile: Tile = SMALL) -> Triple:
    x_RI, grad_RO, weight_eOI, offsets_e = given
    return Triple(
        multiply(x_RI, weight_eOI, offsets_e, triton=True, tile=tile),
        multiply(grad_RO, weight_eOI.transpose(1, 2), offsets_e, triton=True, tile=tile),
        multiply_outer(grad_RO, x_RI, offsets_e, triton=True, tile=tile),
    )


def plainly(given: Problem, *, change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Triple:
    """The definition in float64, of the numbers or of what `change` makes of them."""
    x_RI, grad_RO, weight_eOI = (change(tensor.double()) for tensor in given[:3])
    want = Triple(*(torch.zeros(shape, dtype=torch.float64) for shape in (grad_RO.shape, x_RI.shape, weight_eOI.shape)))
    for expert, here in given.segments():
        want.forward_RO[here] = x_RI[here] @ weight_eOI[expert].t()
        want.back_RI[here] = grad_RO[here] @ weight_eOI[expert]
        want.weights_eOI[expert] = grad_RO[here].t() @ x_RI[here]
    return want


def check(routing: str, dtype: torch.dtype) -> None:
    """Every element is within what rounding once to its dtype and a sum in float32 can do."""
    given = problem(routing, dtype)
    want, magnitudes = plainly(given), plainly(given, change=Tensor.abs)
    for name, got, exact, magnitude in zip(Triple._fields, products(given), want, magnitudes, strict=True):
        assert got.dtype == dtype, name
        assert got.shape == exact.shape, name
        assert got.is_contiguous(), name
        terms = max(OUT, IN, len(given.x_RI))
        bound = ROUNDOFF[dtype] * exact.abs() + terms * 2.0**-24 * magnitude + 2.0**-25
        worst = ((got.double() - exact).abs() / bound).nan_to_num(torch.inf, torch.inf)
        assert (worst <= 1).all(), f"{name}: {worst.max():.2f} times the bound"
        if dtype == torch.float32:
            torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5, msg=name)


def check_strides() -> None:
    """Rows and weights that are views of something else."""
    given = problem("rows that nobody owns", torch.float32)
    want = products(given)
    x_RI, grad_RO = given.x_RI.t().contiguous().t(), given.grad_RO.repeat_interleave(2, 1)[:, ::2]
    weight_eOI = given.weight_eOI.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for got, exact in zip(
        products(given._replace(x_RI=x_RI, grad_RO=grad_RO, weight_eOI=weight_eOI)), want, strict=True
    ):
        assert torch.equal(got, exact)


def check_tiles() -> None:
    """No result depends on how it is cut, beyond the order of sums."""
    given = problem("rows that nobody owns", torch.float32)
    default = choose_tile(height=len(given.x_RI), width=OUT, dtype=torch.float32)
    for tile in (default, Tile(height=32, width=16, depth=16, num_warps=4, num_stages=2), Tile(16, 64, 32, 4, 2)):
        for got, exact in zip(products(given, tile=tile), plainly(given), strict=True):
            torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)


def check_repeats() -> None:
    given = problem("experts without rows", torch.bfloat16)
    for first, second in zip(products(given), products(given), strict=True):
        assert torch.equal(first, second)


def check_torch_agrees() -> None:
    """What torch's own grouped product leaves undefined aside, the two are one function."""
    import torch.nn.functional as F

    x_RI, grad_RO, weight_eOI, offsets_e = given = problem("experts without rows", torch.float32)
    got = products(given)
    want = Triple(
        F.grouped_mm(x_RI, weight_eOI.transpose(1, 2), offs=offsets_e),
        F.grouped_mm(grad_RO, weight_eOI, offs=offsets_e),
        F.grouped_mm(grad_RO.t(), x_RI, offs=offsets_e),
    )
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def check_compiles() -> None:
    """Dynamo makes one graph of them, and the shapes are known without running them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = problem("rows that nobody owns", torch.float32)
    compiled = torch.compile(products, fullgraph=True, backend="eager")
    for got, want in zip(compiled(given), products(given), strict=True):
        assert torch.equal(got, want)
    with FakeTensorMode() as mode:
        fakes = products(Problem(*(mode.from_tensor(tensor) for tensor in given)))
    for fake, real in zip(fakes, products(given), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize(
    ("routing", "dtype"),
    [*itertools.product(ROUTINGS, (torch.float32, torch.bfloat16)), ("rows that nobody owns", torch.float16)],
    ids=str,
)
def test_products_match_a_float64_loop(interpreter: Any, routing: str, dtype: torch.dtype) -> None:
    interpreter(check, routing, dtype)


@pytest.mark.parametrize("check", [check_strides, check_tiles, check_repeats, check_torch_agrees, check_compiles])
def test_products(interpreter: Any, check: Callable[[], None]) -> None:
    interpreter(check)


def test_the_grid_has_a_tile_for_every_routing() -> None:
    """`num_row_tiles` knows no routing; experts' rows, and those of nobody, begin tiles of their own."""
    generator = random.Random(5)
    reached = 0
    for _ in range(2000):
        num_experts, num_rows, height = generator.randint(1, 9), generator.randint(0, 70), generator.choice([16, 32])
        ends = sorted(generator.choices(range(num_rows + 1), k=num_experts))
        needed = sum(-(-(end - start) // height) for start, end in itertools.pairwise([0, *ends, num_rows]))
        bound = num_row_tiles(num_rows, num_experts=num_experts, height=height)
        assert needed <= bound
        reached += needed == bound
    assert reached > 10  # no tile too many


@pytest.mark.parametrize(
    ("dtype", "capability", "backend"),
    [
        (torch.bfloat16, (9, 0), "grouped"),
        (torch.bfloat16, (10, 0), "grouped"),
        (torch.bfloat16, (10, 3), "grouped"),
        (torch.bfloat16, (8, 0), "triton"),
        (torch.bfloat16, (8, 9), "triton"),
        (torch.bfloat16, (12, 0), "triton"),
        (torch.float32, (9, 0), "triton"),
        (torch.float16, (9, 0), "triton"),
        (torch.float64, (9, 0), "loop"),
    ],
)
def test_torchs_product_is_chosen_where_it_leaves_the_host_alone(
    dtype: torch.dtype, capability: tuple[int, int], backend: str
) -> None:
    assert grouped_backend(dtype, capability=capability) == backend


@pytest.mark.parametrize(("height", "chosen"), [(0, 16), (1, 16), (17, 32), (100, 128), (10**6, 128)])
def test_tiles_are_no_higher_than_rows_ask_for(height: int, chosen: int) -> None:
    assert choose_tile(height=height, width=4096, dtype=torch.bfloat16).height == chosen
    assert choose_tile(height=height, width=4096, dtype=torch.float32).height == min(chosen, 64)
    assert choose_tile(height=4096, width=height, dtype=torch.bfloat16).width == chosen


def test_float32_is_rounded_to_tf32_only_where_torch_is_told_so() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert fp32_precision("cuda") == "tf32"
        assert fp32_precision("cpu") == "ieee"
        torch.set_float32_matmul_precision("highest")
        assert fp32_precision("cuda") == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'triton' .* is not installed; `pip install triton`.*'grouped' or 'loop'"):
        products(problem("one expert", torch.float32))


def test_float64_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'triton' .* not torch\.float64; .*experts_backend='loop'"):
        products(problem("one expert", torch.float64))


def test_a_cpu_is_refused_unless_triton_interprets() -> None:
    with pytest.raises(ValueError, match=r"'triton' needs a GPU, .* on cpu; .*'loop' or 'grouped'"):
        products(problem("one expert", torch.float32))


def test_a_checkpoint_with_this_code_loads_without_triton() -> None:
    """transformers refuses to load code whose imports, also those inside functions, are not installed."""
    for name in ("experts_grouped", "kernels"):
        path = experts_grouped.__file__.replace("experts_grouped", name)
        assert "triton" not in get_imports(path)


@pytest.mark.parametrize(
    ("capability", "dtype", "precision"),
    [
        (80, torch.bfloat16, "ieee"),
        (89, torch.float32, "ieee"),
        (90, torch.float16, "ieee"),
        (90, torch.float32, "tf32"),
        (100, torch.bfloat16, "ieee"),
        (120, torch.bfloat16, "ieee"),
    ],
)
@pytest.mark.parametrize("kernel", ["multiply_rows", "sum_outer"])
def test_kernels_compile_for_gpus(
    kernel: str,
    capability: int,
    dtype: torch.dtype,
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter takes what the compiler does not. 99 KiB is what a block may have on the smallest, 8.9."""
    from modeling import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where nobody has chosen
    tile = choose_tile(height=4096, width=4096, dtype=dtype)
    known: dict[str, Any] = {"stride_x_in": 1, "stride_weight_in": 1, "stride_grad_out": 1, "WIDEN": False}
    known |= {"SEGMENTS": 16, "BAND": experts_grouped.BAND, "PRECISION": precision}
    known |= {"HEIGHT": tile.height, "WIDTH": tile.width, "DEPTH": tile.depth}
    types = dict.fromkeys(("x_RI", "grad_RO", "weight_eOI", "out_RO", "out_eOI"), f"*{TRITON_NAMES[dtype]}")
    usage = compile_for(
        capability,
        getattr(kernels, kernel),
        types=types | {"offsets_e": "*i32"},
        known=known,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    assert usage.spilled == 0, usage
    assert usage.shared <= 99 * 1024, usage
