"""The experts' one autograd Function: both backends against a plain loop, in output and every gradient."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.execution import Execution
from modeling.experts import GatherMoeExperts
from modeling.experts_grouped import sort_rows
from modeling.experts_loop import count_rows
from modeling.layout import ParallelLayout
from tests.engine_runs import mesh_without_groups
from tests.referee import tiny_config

TOKENS, HIDDEN, WIDTH, EXPERTS, ACTIVE = 24, 32, 32, 8, 3
NAMES = ("output", "x", "weights", "gate_up", "down")


class Problem(NamedTuple):
    """What one rank's experts are given, and the gradient that arrives at their output."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    grad: Tensor


def problem(dtype: torch.dtype, *, skip: tuple[int, ...] = (), pad_every: int = TOKENS + 1) -> Problem:
    """Random tokens, of which none choose the experts in `skip`, and every so many is padding."""
    generator = torch.Generator().manual_seed(2)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scores = randn(TOKENS, EXPERTS)
    scores[:, list(skip)] = -torch.inf
    ids = scores.topk(ACTIVE).indices
    weights = randn(TOKENS, ACTIVE).softmax(-1)
    ids[pad_every - 1 :: pad_every], weights[pad_every - 1 :: pad_every] = EXPERTS, 0.0
    exact = torch.promote_types(dtype, torch.float32)
    return Problem(
        x=randn(TOKENS, HIDDEN).to(dtype),
        ids=ids,
        weights=weights.to(exact),
        gate_up=randn(EXPERTS, 2 * WIDTH, HIDDEN).mul(0.2).to(dtype),
        down=randn(EXPERTS, HIDDEN, WIDTH).mul(0.2).to(dtype),
        grad=randn(TOKENS, HIDDEN).to(dtype),
    )


def experts_module(backend: str, *, ep: int = 1, group_rank: int = 0) -> GatherMoeExperts:
    config = tiny_config(num_experts=EXPERTS, num_experts_per_tok=ACTIVE)
    mesh = mesh_without_groups(ParallelLayout(tp=ep, ep=ep), group_rank)
    return GatherMoeExperts(config, mesh=mesh, execution=Execution(experts_backend=backend))


def run(backend: str, given: Problem, *, ep: int = 1, group_rank: int = 0) -> dict[str, Tensor]:
    """Output and gradients of the module."""
    module = experts_module(backend, ep=ep, group_rank=group_rank)
    e = EXPERTS // ep
    mine = slice(group_rank * e, (group_rank + 1) * e)
    module.gate_up_proj = torch.nn.Parameter(given.gate_up[mine].clone())
    module.down_proj = torch.nn.Parameter(given.down[mine].clone())
    x, weights = given.x.clone().requires_grad_(), given.weights.clone().requires_grad_()
    out = module(x, given.ids, weights)
    out.backward(given.grad)
    gradients = (x.grad, weights.grad, module.gate_up_proj.grad, module.down_proj.grad)
    return dict(zip(NAMES, (out.detach(), *gradients), strict=True))


def run_plainly(given: Problem, *, experts: range = range(EXPERTS)) -> dict[str, Tensor]:
    """The definition, in float64 and by autograd: every token through every expert that it chose."""
    inputs = [t.double().requires_grad_() for t in (given.x, given.weights, given.gate_up, given.down)]
    x, weights, gate_up, down = inputs
    out = 0.0 * x
    for token in range(TOKENS):
        for slot in range(ACTIVE):
            expert = int(given.ids[token, slot])
            if expert in experts:
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                row = F.one_hot(torch.tensor(token), TOKENS)[:, None] * (down[expert] @ (F.silu(gate) * up))
                out = out + weights[token, slot] * row
    *of_tokens, of_gate_up, of_down = torch.autograd.grad(out, inputs, given.grad.double(), materialize_grads=True)
    mine = slice(experts.start, experts.stop)
    return dict(zip(NAMES, (out.detach(), *of_tokens, of_gate_up[mine], of_down[mine]), strict=True))


# Errors relative to the largest number of each tensor.
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
CASES: dict[str, dict[str, Any]] = {
    "all experts": {},
    "experts without rows": {"skip": (0, 3, 7)},
    "padding, experts without rows": {"pad_every": 5, "skip": (1, 2, 6)},
    "nothing but padding": {"pad_every": 1},
    "the first of four ranks": {"pad_every": 5, "group_rank": 0},
    "the last of four ranks": {"pad_every": 5, "group_rank": 3},
    "a rank without rows": {"skip": (0, 1, 4), "group_rank": 0},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("loop", torch.float64),
        ("loop", torch.float32),
        ("loop", torch.bfloat16),
        ("grouped", torch.float32),
        ("grouped", torch.bfloat16),
    ],
    ids=str,
)
def test_backends_match_the_definition_and_repeat_bitwise(backend: str, dtype: torch.dtype, case: str) -> None:
    """A share of the experts makes its share of the sum, and an expert that nobody chose a gradient of zero."""
    options = dict(CASES[case])
    group_rank = options.pop("group_rank", None)
    given = problem(dtype, **options)
    mine, ep = (range(EXPERTS), 1) if group_rank is None else (range(2 * group_rank, 2 * group_rank + 2), 4)
    got, again = (run(backend, given, ep=ep, group_rank=group_rank or 0) for _ in range(2))
    want = run_plainly(given, experts=mine)
    for name in NAMES:
        assert got[name].dtype == (torch.promote_types(dtype, torch.float32) if name == "weights" else dtype)
        assert torch.isfinite(got[name]).all(), name
        error = (got[name].double() - want[name]).abs().max() / want[name].abs().max().clamp(min=1e-12)
        assert error < BOUNDS[dtype], f"{name}: {error:.2e}"
        assert torch.equal(got[name], again[name]), name
    for name in ("gate_up", "down"):
        assert [bool(part.any()) for part in got[name]] == [bool(part.any()) for part in want[name]]


def _poisoned(original: Any, value: float) -> Any:
    """torch's grouped product, with the rows past the last offset filled on purpose: they are uninitialised memory."""

    def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        out = original(a, b, offs=offs)
        if b.dim() == 3:
            out[int(offs[-1]) :] = value
        return out

    return grouped_mm


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 6.5e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uninitialised_rows_reach_nobody(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: float) -> None:
    given = problem(dtype, pad_every=5)
    want = run("grouped", given, ep=2, group_rank=1)
    monkeypatch.setattr(F, "grouped_mm", _poisoned(F.grouped_mm, value))
    got = run("grouped", given, ep=2, group_rank=1)
    for name in NAMES:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_frozen_experts_cost_no_weight_gradient(backend: str) -> None:
    given, module = problem(torch.float32), experts_module(backend)
    module.gate_up_proj = torch.nn.Parameter(given.gate_up, requires_grad=False)
    module.down_proj = torch.nn.Parameter(given.down, requires_grad=False)
    x = given.x.clone().requires_grad_()
    module(x, given.ids, given.weights).backward(given.grad)
    assert module.gate_up_proj.grad is None
    assert module.down_proj.grad is None
    torch.testing.assert_close(x.grad, run_plainly(given)["x"].float(), atol=1e-5, rtol=0)


def test_the_sum_over_experts_is_made_in_float32() -> None:
    """256 + 1 is 256 in bfloat16: with a running sum in it the last two experts of a token would be lost."""
    gate_up = torch.ones(EXPERTS, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16)
    down = torch.zeros(EXPERTS, HIDDEN, WIDTH, dtype=torch.bfloat16)
    down[:, 0, 0] = 1.0
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    x[0, 0] = 16.0
    for backend in ("loop", "grouped"):
        module = experts_module(backend)
        module.gate_up_proj, module.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
        out = module(x, torch.tensor([[0, 1, 2]]), torch.tensor([[1.0, 2.0**-8, 2.0**-8]]))
        assert out[0, 0].item() == 258.0, backend  # silu(16) * 16 rounds to 256


def test_rows_are_sorted_by_slot_and_cut_to_what_can_be_here() -> None:
    slots = torch.tensor([[2, 0], [5, 3], [3, 2], [9, 9]]) - 2
    fixed = sort_rows(slots, num_slots=2)
    assert fixed.token_R.shape[0] == 4 * 2
    assert fixed.valid_R.tolist() == [True] * 4 + [False] * 4
    assert fixed.offsets_e.tolist() == [2, 4]
    assert fixed.pair_R[:4].tolist() == [0, 5, 3, 4]
    one = sort_rows(slots, num_slots=1)
    assert one.token_R.shape[0] == 4  # a token chooses an expert at most once


def test_counted_rows_know_where_each_chunk_of_tokens_ends() -> None:
    slots = torch.tensor([[2, 0], [5, 3], [3, 2], [9, 9]]) - 2
    counted = count_rows(slots, num_slots=2, token_ends=[2, 3, 4])
    assert counted.pair_R.tolist() == [0, 5, 3, 4]
    assert counted.token_R.tolist() == [0, 2, 1, 2]
    assert counted.ends == [[1, 2, 2], [3, 4, 4]]
    assert [counted.rows(slot) for slot in (0, 1)] == [slice(0, 2), slice(2, 4)]
    assert [counted.rows_in_chunk(1, k) for k in (0, 1, 2)] == [slice(2, 3), slice(3, 4), slice(4, 4)]
    nobody = count_rows(torch.full((4, 2), 7), num_slots=2, token_ends=[2, 4])
    assert nobody.ends == [[0, 0], [0, 0]]
    assert nobody.pair_R.numel() == 0


def test_auto_is_the_loop_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "grouped_mm", None)
    assert torch.isfinite(run("auto", problem(torch.float32))["output"]).all()
    with pytest.raises(TypeError, match="not callable"):
        run("grouped", problem(torch.float32))
