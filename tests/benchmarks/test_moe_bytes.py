"""The ledger books what leaves a rank, and the MoE layers beside each other send what their formulas say."""

import json
from pathlib import Path
from typing import Any

import moe_bytes
import pytest
import torch
import torch.distributed as dist
from moe_bytes import Measured, Problem, Row, formula_payload, rows_for, summarise
from torch import Tensor

from recipe.dry_run.ledger import Ledger, Volume
from tests.launching import run_cluster_ranks_here
from tests.ranks import run_ranks


class SumBackward(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def booked(rank: int, world_size: int) -> dict[str, float]:
    """Bytes of every kind of collective on tensors of eight rows of 3 float32, 96 bytes, from this one of 4 ranks."""
    x = torch.zeros(8, 3)

    def whole_and_parts(rows: int, num: int) -> tuple[Tensor, list[Tensor]]:
        whole = torch.zeros(rows * num, 3)
        return whole, [torch.zeros(rows, 3) for _ in range(num)]

    gathered, gathered_list = whole_and_parts(8, world_size)
    part, parts = torch.zeros(2, 3), [torch.zeros(2, 3) for _ in range(world_size)]
    # Rank r sends r + s rows to rank s, so that it sends 4 r + 6.
    to_each = [rank + other for other in range(world_size)]
    uneven = torch.zeros(sum(to_each), 3)
    calls = {
        "gather": lambda: dist.all_gather_single(gathered, x),
        "gather, not waited for": lambda: dist.all_gather_single(gathered, x, async_op=True).wait(),
        "gather, as a list": lambda: dist.all_gather(gathered_list, x),
        "scatter": lambda: dist.reduce_scatter_single(part, x),
        "scatter, as a list": lambda: dist.reduce_scatter(part, parts),
        "sum": lambda: dist.all_reduce(x),
        "sum, in the backward": lambda: SumBackward.apply(x.clone().requires_grad_()).sum().backward(),
        "exchange": lambda: dist.all_to_all_single(torch.zeros(8, 3), x),
        "exchange, uneven": lambda: dist.all_to_all_single(torch.zeros_like(uneven), uneven, to_each, to_each),
        "to the next": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None,
        "from the first": lambda: dist.broadcast(x, 0),
        "sum, on the first": lambda: dist.reduce(x, 0),
        "barrier": dist.barrier,
    }
    return {name: _bytes_of(call) for name, call in calls.items()}


def _bytes_of(call: Any) -> float:
    with Ledger() as ledger:
        call()
    return ledger.volume().total


def test_every_kind_of_collective_is_booked() -> None:
    for rank, sent in enumerate(run_ranks(booked, 4)):
        assert sent == {
            "gather": 3 * 96,
            "gather, not waited for": 3 * 96,
            "gather, as a list": 3 * 96,
            "scatter": 3 / 4 * 96,
            "scatter, as a list": 3 / 4 * 96,
            "sum": 2 * 3 / 4 * 96,
            "sum, in the backward": 2 * 3 / 4 * 96,
            "exchange": 3 / 4 * 96,
            "exchange, uneven": (4 * rank + 6 - 2 * rank) * 12,
            "to the next": 96 if rank == 0 else 0,
            "from the first": 3 / 4 * 96,
            "sum, on the first": 3 / 4 * 96,
            "barrier": 0,
        }


def unknown_collective(rank: int, world_size: int) -> str:
    with Ledger(), pytest.raises(ValueError) as caught:
        dist.gather(torch.zeros(2), [torch.zeros(2) for _ in range(world_size)] if rank == 0 else None, dst=0)
    return str(caught.value)


def test_a_collective_without_a_rule_is_refused() -> None:
    for text in run_ranks(unknown_collective, 2):
        assert text.startswith("the ledger has no rule for c10d.gather_; it knows ['_allgather_base_', ")


def narrow_and_wide(rank: int, world_size: int) -> Volume:
    with Ledger() as ledger:
        dist.all_reduce(torch.zeros(5, 2))  # 8 bytes a row
        dist.all_reduce(torch.zeros(5, 3))  # 12
        dist.all_reduce(torch.zeros(7, dtype=torch.int64))  # 8: numbers without rows
    return ledger.volume(narrow_bytes=8)


def test_narrow_rows_are_routing() -> None:
    assert run_ranks(narrow_and_wide, 2) == [Volume(payload=60.0, routing=40.0 + 56.0)] * 2


PROBLEMS = [Problem(2048, num_active, routing) for num_active in (2, 8) for routing in moe_bytes.ROUTINGS]
Results = dict[tuple[Row, Problem], list[Measured]]


@pytest.fixture(scope="module")
def measured() -> Results:
    """Everything the benchmark runs on four ranks."""
    by_rank = run_ranks(measure_all, 4)
    return {pair: [results[pair] for results in by_rank] for pair in by_rank[0]}


def measure_all(rank: int, world_size: int) -> dict[tuple[Row, Problem], Measured]:
    results = {}
    for problem in PROBLEMS:
        want = moe_bytes.reference(problem)
        for row in rows_for(world_size):
            results[row, problem] = moe_bytes.measure(row, problem=problem, want=want)
    return results


@pytest.mark.slow
def test_every_rank_computes_what_one_does_and_sends_what_the_formula_says(measured: Results) -> None:
    for (row, problem), by_rank in measured.items():
        assert max(m.error for m in by_rank) < 1e-5, (row, problem)
        if row.strategy != "all_to_all" or problem.routing != "random":
            want = [formula_payload(row, problem=problem, size=4, rank=rank) for rank in range(4)]
            assert [m.sent.payload for m in by_rank] == want, (row, problem)


def payloads(measured: Results, row: Row) -> list[float]:
    """In T*D*bytes, the busiest rank of each problem."""
    return [summarise(row, problem=problem, by_rank=measured[row, problem])["payload"] for problem in PROBLEMS]


@pytest.mark.slow
def test_tokens_travel_four_times_and_once_more_where_gathered_again(measured: Results) -> None:
    assert payloads(measured, Row("gather-moe", "gather_tokens", 4)) == [3.0] * 4
    assert payloads(measured, Row("gather-moe", "gather_tokens", 1)) == [3.0] * 4
    assert payloads(measured, Row("gather-moe", "gather_tokens", 4, regather=True)) == [3.75] * 4


@pytest.mark.slow
def test_deepspeed_sends_every_pair_of_token_and_expert_and_pads(measured: Results) -> None:
    """A * (3 + 4/N) + 2 times (N-1)/N with even loads; uneven ones are padded to the rank that kept most pairs."""
    row = Row("deepspeed-folded-autoep")
    even, random, *all_experts = payloads(measured, row)
    assert even == 7.5
    assert round(random, 2) == 7.52
    assert all_experts == [25.5, 25.5]


def test_a_row_is_its_busiest_rank_and_void_where_it_computes_or_sends_something_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    problem, row = Problem(32, 2, "random"), Row("gather-moe", "all_to_all", 2)
    by_rank = [Measured(Volume(4096.0, 10.0), 0.0), Measured(Volume(8192.0, 20.0), 2e-4)]
    summary = summarise(row, problem=problem, by_rank=by_rank)
    assert summary["payload_bytes"] == 8192.0
    assert summary["routing_bytes"] == 20.0
    assert summary["payload"] == 1.0
    assert summary["void"] == "its result differs from one rank's by 2.0e-04 of the largest number"
    assert "void" in summarise(row, problem=problem, by_rank=[by_rank[0], Measured(by_rank[1].sent, float("nan"))])
    assert "void" not in summarise(row, problem=problem, by_rank=by_rank[:1] * 2)
    even = summarise(row, problem=problem._replace(routing="even"), by_rank=by_rank[:1] * 2)
    assert even["void"] == "it sent 4096 bytes of payload, where the formula says 16384"
    moe_bytes.print_table([summary])
    assert "void: its result differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "3"], r"--ranks 3 cannot share 8 experts; take 2, 4 or 8"),
        (["--tokens", "100"], r"--tokens 100 must be a multiple of 32 to be routed evenly"),
        (["--active", "2", "9"], r"--active \[9\] must lie between 1 and 8"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_bytes.main(words)


@pytest.mark.slow
def test_the_script_prints_and_writes_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_cluster_ranks_here(moe_bytes, tmp_path, monkeypatch)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert (
        moe_bytes.main(["--ranks", "2", "--active", "2", "--tokens", "64", "--json", str(tmp_path / "out.json")]) == 0
    )
    assert "void" not in capsys.readouterr().out
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 2 * len(rows_for(2))
    assert {row["payload"] for row in rows if row["strategy"] == "gather_tokens"} == {2.0, 2.5}
