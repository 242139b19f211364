"""The experts' one autograd Function: both backends against a plain loop, in output and every gradient."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling import cost, experts_grouped
from modeling.comm import Chunks, GatherInChunks
from modeling.execution import Execution
from modeling.experts import GatherMoeExperts
from modeling.experts_grouped import GroupedExperts
from modeling.experts_loop import count_rows
from modeling.layout import ParallelLayout
from modeling.rows import sort_rows
from tests.engine_runs import mesh_without_groups
from tests.moe_layers import HIDDEN, NUM_EXPERTS, WIDTH, Answer, choose, reference, whole_numbers
from tests.referee import tiny_config

ACTIVE = 3


def experts_module(
    backend: str, gate_up: Tensor, down: Tensor, *, rank: int | None = None, trained: bool = True
) -> GatherMoeExperts:
    """All experts, or those of one of four ranks, with these weights."""
    config = tiny_config(
        hidden_size=HIDDEN, num_experts=NUM_EXPERTS, num_experts_per_tok=ACTIVE, moe_intermediate_size=WIDTH
    )
    layout = ParallelLayout() if rank is None else ParallelLayout(tp=4, ep=4)
    execution = Execution(experts_backend=backend)
    module = GatherMoeExperts(config, mesh=mesh_without_groups(layout, rank or 0), execution=execution)
    module.gate_up_proj = torch.nn.Parameter(gate_up.clone(), requires_grad=trained)
    module.down_proj = torch.nn.Parameter(down.clone(), requires_grad=trained)
    return module


def held_by(rank: int | None) -> range:
    return range(NUM_EXPERTS) if rank is None else range(2 * rank, 2 * rank + 2)


def run(
    backend: str, *, kind: str = "random", dtype: torch.dtype = torch.float32, rank: int | None = None, **options: bool
) -> Answer:
    """Output and gradients of the module; None for those of frozen parameters."""
    x, grad, gate_up, down = whole_numbers(dtype)
    mine = slice(held_by(rank).start, held_by(rank).stop)
    module = experts_module(backend, gate_up[mine], down[mine], rank=rank, **options)
    ids, weights = choose(kind, ACTIVE)
    x.requires_grad_()
    weights = weights.to(torch.promote_types(dtype, torch.float32)).detach().requires_grad_()
    out = module(x, ids, weights)
    out.backward(grad)
    return Answer(out.detach(), x.grad, weights.grad, module.gate_up_proj.grad, module.down_proj.grad)


# Errors relative to the largest number of each tensor.
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
# Where tokens go, and which of four ranks has the experts; None has all.
CASES: dict[str, tuple[str, int | None]] = {
    "all experts": ("random", None),
    "experts without rows": ("last rank idle", None),
    "padding": ("padding", None),
    "nothing but padding": ("all padding", None),
    "the first of four ranks": ("padding", 0),
    "the last of four ranks": ("padding", 3),
    "a rank without rows": ("last rank idle", 3),
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
    kind, rank = CASES[case]
    experts = held_by(rank)
    got, again = (run(backend, kind=kind, dtype=dtype, rank=rank) for _ in range(2))
    want = reference(ACTIVE, kind, experts)
    want = want._replace(gate_up=want.gate_up[list(experts)], down=want.down[list(experts)])
    for name, tensor in got._asdict().items():
        exact = getattr(want, name)
        assert tensor.dtype == (torch.promote_types(dtype, torch.float32) if name == "weights" else dtype)
        assert torch.isfinite(tensor).all(), name
        error = (tensor.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-12)
        assert error < BOUNDS[dtype], f"{name}: {error:.2e}"
        assert torch.equal(tensor, getattr(again, name)), name
    for got_e, want_e in ((got.gate_up, want.gate_up), (got.down, want.down)):
        assert [bool(part.any()) for part in got_e] == [bool(part.any()) for part in want_e]


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
    want = run("grouped", kind="padding", dtype=dtype, rank=1)
    monkeypatch.setattr(F, "grouped_mm", _poisoned(F.grouped_mm, value))
    got = run("grouped", kind="padding", dtype=dtype, rank=1)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_frozen_experts_cost_no_weight_gradient(backend: str) -> None:
    got = run(backend, trained=False)
    assert got.gate_up is None
    assert got.down is None
    torch.testing.assert_close(got.x.double(), reference(ACTIVE, "random").x, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_the_sum_over_experts_is_made_in_float32(backend: str) -> None:
    """256 + 1 is 256 in bfloat16: with a running sum in it the last two experts of a token would be lost."""
    gate_up = torch.ones(NUM_EXPERTS, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16)
    down = torch.zeros(NUM_EXPERTS, HIDDEN, WIDTH, dtype=torch.bfloat16)
    down[:, 0, 0] = 1.0
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    x[0, 0] = 16.0
    module = experts_module(backend, gate_up, down)
    out = module(x, torch.tensor([[0, 1, 2]]), torch.tensor([[1.0, 2.0**-8, 2.0**-8]]))
    assert out[0, 0].item() == 258.0  # silu(16) * 16 rounds to 256


def test_rows_are_sorted_by_slot_and_cut_to_what_can_be_here() -> None:
    slots = torch.tensor([[2, 0], [5, 3], [3, 2], [9, 9]]) - 2
    fixed = sort_rows(slots, num_slots=2)
    assert fixed.pair_R.shape[0] == 4 * 2
    assert fixed.row_TA.tolist() == [[0, -1], [-1, 2], [3, 1], [-1, -1]]
    assert fixed.offsets_e.tolist() == [2, 4]
    assert fixed.pair_R[:4].tolist() == [0, 5, 3, 4]
    one = sort_rows(slots, num_slots=1)
    assert one.pair_R.shape[0] == 4  # a token chooses an expert at most once


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


@pytest.mark.parametrize("kind", ["random", "padding", "last rank idle", "all padding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("most", [10**6, 7, 3])
def test_pieces_of_any_size_give_the_same(
    monkeypatch: pytest.MonkeyPatch, most: int, num_chunks: int, dtype: torch.dtype, kind: str
) -> None:
    """Several groups, of one piece or more, whose weights' gradients are added; and one, whose products are kept."""
    monkeypatch.setattr(experts_grouped, "tokens_at_once", lambda *_, **__: most)
    x, grad, gate_up, down = whole_numbers(dtype)
    ids, weights = choose(kind, ACTIVE)
    weights = weights.to(torch.promote_types(dtype, torch.float32))
    chunks = Chunks(len(x), num_chunks=num_chunks)
    forward = GroupedExperts((gate_up, down), ids, weights, chunks)
    places = [chunks.gathered_rows(k) for k in range(num_chunks)]
    out = torch.cat([forward.forward_chunk(k, x[here], dtype=dtype) for k, here in enumerate(places)])
    kept = forward.to_keep()
    assert len(kept) == (num_chunks if most > len(x) else 0)
    back = GroupedExperts((gate_up, down), ids, weights, chunks, kept)
    assert (back.pieces[-1].group > 0) == (most < len(x))
    grads, tokens = GatherInChunks(grad, chunks), GatherInChunks(x, chunks)
    grad_x = torch.cat([back.backward_chunk(k, grads, tokens) for k in range(num_chunks)])
    routing = back.routing_gradient()
    got = Answer(out, grad_x, routing, *back.weight_gradients(grad, x))
    for name, tensor in got._asdict().items():
        exact = getattr(reference(ACTIVE, kind), name)
        assert tensor.dtype == (weights.dtype if name == "weights" else dtype)
        error = (tensor.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-12)
        assert error < BOUNDS[dtype], f"{name}: {error:.2e}"


def test_no_buffer_of_rows_is_larger_than_a_gibibyte() -> None:
    qwen, mixtral = ((8, 2048, 2 * 768), (1, 4096, 2 * 14336))
    assert cost.tokens_at_once(*qwen, element_bytes=2) == 2**15
    assert 2**30 - 2**16 < cost.tokens_at_once(*mixtral, element_bytes=2) * 2 * 28672 <= 2**30


def test_auto_is_the_loop_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "grouped_mm", None)
    assert torch.isfinite(run("auto").out).all()
    with pytest.raises(TypeError, match="not callable"):
        run("grouped")
