"""Copies of other ranks' experts change who computes what, and no result: against all experts on one rank."""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from modeling.copies import ExpertsWithCopies, HeldCopies, choose_copies, copy_traffic
from modeling.execution import Execution
from modeling.experts import GatherMoeExperts
from modeling.layout import ParallelLayout
from modeling.mesh import ParallelMesh, build_mesh, one_rank_mesh
from modeling.moe import GatherMoeSparseBlock
from tests.engine_runs import mesh_without_groups, slow
from tests.moe_layers import (
    NUM_EXPERTS,
    ROUTINGS,
    Layer,
    choose,
    count,
    join_answer,
    make_layer,
    reference,
    relative_errors,
    whole_numbers,
)
from tests.ranks import run_ranks
from tests.referee import tiny_config
from tests.static_shapes import static_shapes

LOOP, GROUPED = ({"resident_experts": 1, "experts_backend": backend} for backend in ("loop", "grouped"))


def copied_layer(mesh: ParallelMesh, ids: Tensor, weights: Tensor, dtype: torch.dtype, **options: Any) -> Layer:
    """A layer in two overlapping chunks, which holds the copies that its routing asks for."""
    execution = Execution(overlap=True, overlap_chunks=2, regather=True, **options)
    num_copies = execution.resident_experts
    layer = make_layer(mesh, ids, weights, execution=execution, dtype=dtype)
    if num_copies:
        fill(layer, hottest(ids, num_ranks=mesh.layout.ep, num_copies=num_copies))
    return layer


def hottest(ids: Tensor, *, num_ranks: int, num_copies: int) -> Any:
    return choose_copies(count(ids, NUM_EXPERTS)[None], num_ranks=num_ranks, num_copies=num_copies)[0].tolist()


def fill(layer: Layer, copies: Sequence[Sequence[int]]) -> ExpertsWithCopies:
    experts = layer.block.experts
    assert isinstance(experts, ExpertsWithCopies)
    experts.fill(copies)
    return experts


def mesh_of(world_size: int, ep: int) -> ParallelMesh:
    return build_mesh(ParallelLayout(tp=world_size, ep=ep), num_key_value_heads=2)


def all_answers(
    rank: int, world_size: int, ep: int, num_copies: int, backend: str, dtype: torch.dtype
) -> dict[Any, Any]:
    """This rank's outputs and gradients of every case, and how many rows its copies took."""
    mesh, answers = mesh_of(world_size, ep), {}
    for num_active, kind in itertools.product((1, 2, 3, 8), ROUTINGS):
        ids, weights = choose(kind, num_active)
        layer = copied_layer(mesh, ids, weights, dtype, resident_experts=num_copies, experts_backend=backend)
        answers[num_active, kind] = (layer.run(), rows_of_copies(layer, ids))
    return answers


def rows_of_copies(layer: Layer, ids: Tensor) -> int:
    experts = layer.block.experts
    if not isinstance(experts, ExpertsWithCopies) or experts.held is None:
        return 0
    slots, num_local, num_copies = experts.slots(ids), experts.num_local, experts.num_slots
    return int(((slots >= num_local) & (slots < num_local + num_copies)).sum())


@pytest.mark.parametrize(("world_size", "ep", "num_copies"), [(2, 2, 1), (2, 2, 3), slow(4, 4, 1), slow(4, 2, 2)])
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"), [("loop", torch.float64, 1e-12), ("grouped", torch.float32, 1e-5)], ids=str
)
def test_layers_with_copies_equal_one_rank(
    world_size: int, ep: int, num_copies: int, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    by_rank = run_ranks(all_answers, world_size, ep, num_copies, backend, dtype)
    for case in by_rank[0]:
        got = join_answer([answers[case][0] for answers in by_rank], ParallelLayout(tp=world_size, ep=ep))
        errors = relative_errors(got, reference(*case))
        assert max(errors.values()) <= tolerance, (case, errors)
    for case in ((1, "all to one"), (2, "last rank idle"), (3, "padding")):
        assert sum(answers[case][1] for answers in by_rank) > 0, (case, "no row moved")


def answers_without_the_way_home(rank: int, world_size: int) -> dict[Any, Any]:
    with patch.object(HeldCopies, "add_home", lambda *_, **__: None):
        return all_answers(rank, world_size, 2, 1, "loop", torch.float64)


def test_without_the_way_home_the_owners_gradient_is_wrong() -> None:
    by_rank = run_ranks(answers_without_the_way_home, 2)
    case = (1, "all to one")
    got = join_answer([answers[case][0] for answers in by_rank], ParallelLayout(tp=2, ep=2))
    errors = relative_errors(got, reference(*case))
    assert errors["gate_up"] > 0.1
    assert errors["down"] > 0.1
    assert max(errors[name] for name in ("out", "x", "weights")) < 1e-5


def share_of_rows_in_chunks(rank: int, world_size: int) -> list[float]:
    """For each of two chunks, the part of all its pairs that this rank computes."""
    ids = torch.zeros(64, 1, dtype=torch.int64)
    layer = copied_layer(mesh_of(world_size, 2), ids, torch.ones(64, 1), torch.float32, **LOOP)
    experts = layer.block.experts
    with patch.object(experts, "start_pass", side_effect=experts.start_pass) as start, torch.no_grad():
        layer.block(layer.x_tD)
    rows = experts.start_pass(*start.call_args.args).rows
    by_chunk = [[rows.rows_in_chunk(slot, k) for slot in range(len(rows.ends))] for k in range(2)]
    return [sum(here.stop - here.start for here in chunk) / 32 for chunk in by_chunk]


def test_every_chunk_is_as_even_as_the_whole() -> None:
    assert run_ranks(share_of_rows_in_chunks, 2) == [[0.5, 0.5], [0.5, 0.5]]


def gradients_in_bfloat16(rank: int, world_size: int) -> Tensor:
    """Two copies of expert 0 on the other rank, whose gradients are lost one by one beside a large one."""
    config = tiny_config(hidden_size=3, num_experts=4, moe_intermediate_size=2)
    execution = Execution(resident_experts=2)
    experts = ExpertsWithCopies(config, mesh=mesh_of(world_size, 2), execution=execution).bfloat16()
    experts.fill([[0, 1], [0, 0]])
    own = [torch.full_like(weight, 256.0) for weight in experts.parameters()]
    experts.held.add_home(own, of_copies=[torch.ones_like(weight) for weight in own])
    return own[1][:, 0, 0]


def test_gradients_that_come_home_are_added_in_float32() -> None:
    assert [x.tolist() for x in run_ranks(gradients_in_bfloat16, 2)] == [[258.0, 256.0], [256.0, 256.0]]


def life_of_slots(rank: int, world_size: int) -> dict[str, Any]:
    ids, weights = choose("all to one", 2)
    layer = copied_layer(mesh_of(world_size, 2), ids, weights, torch.float32, **GROUPED)
    hot = hottest(ids, num_ranks=2, num_copies=1)
    experts = fill(layer, hot)
    place, first = experts.held.weights[0].data_ptr(), experts.held.weights[0].clone()
    with torch.no_grad():
        experts.gate_up_proj += 1.0
    experts.fill(hot)
    moved = experts.held.weights[0] - first
    found = {
        "same place": experts.held.weights[0].data_ptr() == place,
        "moved": [moved.min().item(), moved.max().item()],
    }
    out = layer.block(layer.x_tD).out_tD
    experts.drop()
    found["used after drop"] = rows_of_copies(layer, ids)
    experts.fill(hot)
    try:
        out.sum().backward()
    except RuntimeError as error:
        found["error"] = str(error)
    experts.fill([[0], [4]])
    found["empty"] = experts.held is None
    return found


def test_slots_are_one_buffer_that_is_refilled_only_between_steps() -> None:
    holder = run_ranks(life_of_slots, 2)[1]
    assert holder["same place"]
    assert holder["moved"] == pytest.approx([1.0, 1.0])
    assert holder["used after drop"] == 0
    assert "modified by an inplace operation" in holder["error"]
    assert holder["empty"]


def collectives_of_a_layer(rank: int, world_size: int, recompute: bool) -> tuple[int, list[Tensor]]:
    """All-to-alls with uneven splits in a forward and backward, which nothing shows the host a number in."""
    from torch.utils.checkpoint import checkpoint

    ids, weights = choose("all to one", 2)
    layer = copied_layer(mesh_of(world_size, 2), ids, weights, torch.float32, **GROUPED)

    def forward(x_tD: Tensor) -> Tensor:
        return layer.block(x_tD).out_tD

    exchange = dist.all_to_all_single
    with patch.object(dist, "all_to_all_single", side_effect=exchange) as exchanges, static_shapes():
        x_tD = layer.x_tD
        out = checkpoint(forward, x_tD, use_reentrant=False) if recompute else forward(x_tD)
        out.backward(whole_numbers(torch.float32)[1].chunk(world_size)[rank])
    with_splits = [call for call in exchanges.call_args_list if len(call.args) > 2]
    return len(with_splits), [p.grad for p in layer.block.experts.parameters() if p.grad is not None]


def test_a_micro_batch_sends_gradients_home_and_nothing_else_recomputed_or_not() -> None:
    plain, recomputed = (run_ranks(collectives_of_a_layer, 2, recompute) for recompute in (False, True))
    for (num, gradients), (num_again, gradients_again) in zip(plain, recomputed, strict=True):
        assert num == num_again == 2  # of gate_up and of down
        assert len(gradients) == 2
        assert all(a.equal(b) for a, b in zip(gradients, gradients_again, strict=True))


def test_weights_travel_between_ranks_with_the_same_slice() -> None:
    """Two shares of four experts on four ranks: share 0 lends expert 1 twice, share 1 lends expert 3 (its second)."""
    layout, copies = ParallelLayout(tp=4, ep=2), [[3, 0], [1, 1]]
    by_rank = [copy_traffic(copies, num_local=2, mesh=mesh_without_groups(layout, rank)) for rank in range(4)]
    assert [t.lent for t in by_rank] == [[1, 1], [1, 1], [1], [1]]
    assert [t.filled for t in by_rank] == [[0], [0], [0, 1], [0, 1]]
    assert [t.splits.send for t in by_rank] == [[0, 0, 2, 0], [0, 0, 0, 2], [1, 0, 0, 0], [0, 1, 0, 0]]
    assert [t.splits.receive for t in by_rank] == [[0, 0, 1, 0], [0, 0, 0, 1], [2, 0, 0, 0], [0, 2, 0, 0]]


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (ParallelLayout(tp=2, ep=1), {}, r"resident_experts=1 needs ep > 1: with ep=1 every rank holds a slice"),
        (
            ParallelLayout(tp=2, ep=2),
            {"strategy": "all_to_all"},
            r"=1 is for strategy gather_tokens, .* not for all_to",
        ),
        (ParallelLayout(tp=2, ep=2), {"strategy": "auto"}, r"is for strategy gather_tokens, .* not for auto; use 0"),
        (
            ParallelLayout(tp=2, ep=2),
            {"resident_experts": 5},
            r"resident_experts=5: 5 copies do not fit: .* can copy 0 to 4",
        ),
        (ParallelLayout(tp=16, ep=16), {"num_experts": 16}, r"2 \*\* 16 sets of ranks; use ep of at most 12"),
    ],
)
def test_copies_that_a_layout_cannot_have_are_refused(
    layout: ParallelLayout, options: dict[str, Any], message: str
) -> None:
    values = {"resident_experts": 1} | options
    config = tiny_config(num_experts=values.pop("num_experts", 8))
    with pytest.raises(ValueError, match=message):
        ExpertsWithCopies(config, mesh=mesh_without_groups(layout), execution=Execution(**values))


def test_a_model_on_one_process_makes_no_copies() -> None:
    block = GatherMoeSparseBlock(tiny_config(), mesh=one_rank_mesh(), execution=Execution(resident_experts=1))
    assert type(block.experts) is GatherMoeExperts
