"""Traces of GPUs taken apart: every number of a made-up step is known."""

from pathlib import Path
from typing import Any

import pytest

from recipe.profile.host import collective_op, dtype_bytes, kind_of_kernel, module_scope
from recipe.profile.report import find_savings
from recipe.profile.spans import sent_bytes
from recipe.profile.transfers import Route
from recipe.shared.scopes import Scope
from tests.profile_traces import (
    BACKWARD,
    EVALUATE,
    STEP_US,
    comms,
    event,
    gpu_events,
    in_us,
    kernel,
    launch,
    memory,
    take_apart,
    write_gpu_traces,
    write_trace,
)


def test_every_moment_of_a_step_is_accounted_for_once(tmp_path: Path) -> None:
    summary = take_apart(write_gpu_traces(tmp_path))
    rows: dict[Any, list[float]] = {(r.state, r.part and tuple(r.part), r.op): in_us(r.seconds) for r in summary.time}
    assert rows == {
        ("work", ("attention", 0, "forward"), None): [200, 200],
        ("work", ("experts", 0, "forward"), None): [100, 100],
        ("work", ("attention", 0, "backward"), None): [50, 50],
        ("work", ("optimizer", None, "update"), None): [50, 50],
        ("exposed", ("attention", 0, "forward"), "all_gather"): [100, 100],
        ("exposed", ("attention", 0, "backward"), "reduce_scatter"): [150, 150],
        ("waiting", ("attention", 0, "backward"), "reduce_scatter"): [100, 0],
        ("copies", None, None): [20, 20],
        ("idle", None, None): [230, 330],
    }
    assert [sum(values) for values in zip(*rows.values(), strict=True)] == [STEP_US, STEP_US]
    assert (summary.device, summary.ranks, summary.steps, summary.world_size) == ("cuda", [0, 1], [7], 2)
    assert round(summary.step_s * 1e6, 6) == STEP_US
    assert round(summary.idle_before_s * 1e6, 6) == 100


def test_transfers_say_what_they_sent_how_fast_and_what_hid_them(tmp_path: Path) -> None:
    summary = take_apart(write_gpu_traces(tmp_path))
    scatter, gather = summary.transfers
    assert gather.route == Route("all_gather", "attention", "2 ranks")
    # A ring sends each rank's 1,000 numbers of 2 bytes once; they move for 200 us, since that is what rank 1 takes.
    assert (gather.num_calls, gather.sent_bytes, gather.link_bytes_per_s) == (1, 2000, 40e6)
    assert gather.bytes_per_s == pytest.approx(2000 / 200e-6)
    # Of rank 0's 250 us work hides the first 100 and the last 50, of rank 1's 200 us the first and the last 50.
    assert in_us([gather.hidden_s, gather.exposed_s, gather.waiting_s]) == [125, 100, 0]
    assert scatter.sent_bytes == 4000
    assert in_us([scatter.hidden_s, scatter.exposed_s, scatter.waiting_s]) == [50, 150, 50]
    assert [(p.sent_bytes, p.num_calls, round(p.bytes_per_s)) for p in summary.points] == [
        (2000, 2, 10_000_000),
        (4000, 2, 20_000_000),
    ]


def test_the_largest_savings_are_what_is_lost(tmp_path: Path) -> None:
    savings = find_savings(take_apart(write_gpu_traces(tmp_path)))
    assert in_us([saving.seconds for saving in savings]) == [280, 150, 100, 50, 20]
    idle, scatter, gather, waiting, copies = savings
    assert idle.title == "Fill 280 µs in which nothing runs"
    assert scatter.title == "Hide 150 µs of reduce-scatters for attention (2 ranks)"
    assert "move for 200 µs, of which 25% is behind work. A rank sends 4 kB in each" in scatter.words
    assert gather.title == "Hide 100 µs of all-gathers for attention (2 ranks)"
    assert waiting.title == "Even out the ranks: 50.0 µs of waiting"
    assert copies.title == "Hide 20.0 µs of copies"


def test_the_busiest_rank_is_found(tmp_path: Path) -> None:
    folder = write_gpu_traces(tmp_path)
    info = {"rank": 1, "world_size": 2}
    write_trace(folder / "trace-1.json.gz", gpu_events(1, experts_end=600), distributedInfo=info)
    summary = take_apart(folder)
    experts = next(entry for entry in summary.imbalance if entry.kind == "experts")
    assert in_us(experts.seconds) == [100, 200]
    assert (experts.max_over_mean, experts.by_step) == (pytest.approx(200 / 150), [pytest.approx(200 / 150)])
    waiting = next(s for s in find_savings(summary) if "waiting" in s.title)
    assert "differs most is experts: rank 1 takes 1.33 times the mean, 50.0 µs more." in waiting.words


def test_memory_follows_the_allocator_of_the_gpu(tmp_path: Path) -> None:
    first, second = take_apart(write_gpu_traces(tmp_path)).memory
    assert (first.rank, second.rank, first.on_gpu, first.whole, first.peak_bytes) == (0, 1, True, True, 6144)
    points = [(round(p.time_s * 1e6), p.num_bytes) for p in first.points]
    assert points == [(0, 3584), (90, 4096), (400, 6144), (960, 4096), (1000, 4096)]


def test_memory_that_the_first_step_begins_with_is_in_its_line(tmp_path: Path) -> None:
    events = [
        memory(-100, 300, 12_000),
        memory(-50, -2000, 10_000),
        event("ProfilerStep#1", "user_annotation", 0, 1000),
        kernel("gemm", 1, 10, 1000),
    ]
    for more, points, peak in (
        ([], [(0, 10_000), (1000, 10_000)], 10_000),
        ([memory(300, -4000, 6000), memory(400, 9000, 15_000)], [(0, 10_000), (300, 6000), (400, 15_000)], 15_000),
    ):
        [line] = take_apart(write_trace(tmp_path / "trace.json", [*events, *more])).memory
        assert [(round(p.time_s * 1e6), p.num_bytes) for p in line.points][: len(points)] == points
        assert line.peak_bytes == peak


def test_a_trace_of_another_program_is_read_by_modules_and_kernel_names(tmp_path: Path) -> None:
    events = [
        event("nn.Module: LlamaDecoderLayer_3", "python_function", 0, 90),
        event("nn.Module: LlamaAttention_3", "python_function", 5, 40),
        launch(1, 10),
        event("nn.Module: LlamaMLP_3", "python_function", 50, 80),
        launch(2, 60),
        kernel("void gemm", 1, 20, 50),
        kernel("void gemm", 2, 60, 100),
        kernel("flash_fwd_kernel", 77, 100, 120),
        kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 78, 110, 150, stream=9),
        kernel("vectorized_elementwise_kernel", 79, 150, 160),
    ]
    summary = take_apart(write_trace(tmp_path / "foreign.json", events))
    rows = {(r.state, r.part and tuple(r.part), r.op): in_us(r.seconds) for r in summary.time}
    assert rows == {
        ("work", ("attention", 3, "forward"), None): [30],
        ("work", ("dense", 3, "forward"), None): [40],
        ("work", ("attention", None, "forward"), None): [20],
        ("work", ("other", None, "forward"), None): [10],
        ("exposed", ("other", None, "forward"), "all_reduce"): [30],
        ("copies", None, None): [0],
        ("idle", None, None): [10],
    }
    assert summary.transfers[0].sent_bytes is None
    assert summary.transfers[0].route.among == "unknown ranks"
    assert summary.points == []
    assert any("do not say how much they carry" in note for note in summary.notes)
    assert any("marked no steps" in note for note in summary.notes)
    assert any("one rank alone" in note for note in summary.notes)


def test_traces_of_old_profilers_are_read(tmp_path: Path) -> None:
    events = [event("aten::mm", "Operator", 0, 5), kernel("sgemm", 1, 2, 9) | {"cat": "Kernel"}]
    summary = take_apart(write_trace(tmp_path / "old.json", events))
    assert summary.device == "cuda"
    assert [(r.part.kind, in_us(r.seconds)) for r in summary.time if r.part] == [("products", [7])]


def test_recomputation_is_a_phase_of_its_own(tmp_path: Path) -> None:
    events = [
        event("gather_moe/layers/1/experts", "user_annotation", 0, 20),
        event("aten::mm", "cpu_op", 2, 8, **{"Sequence number": 3}),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 30, 80, tid=200, **{"Sequence number": 3}),
        event("gather_moe/layers/1/experts", "user_annotation", 35, 50, tid=200),
        event("aten::mm", "cpu_op", 36, 46, tid=200, **{"Sequence number": 9}),
        event("aten::mm", "cpu_op", 60, 75, tid=200),
        event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", "cpu_op", 90, 99, tid=200),
        event("aten::add_", "cpu_op", 91, 95, tid=200),
    ]
    summary = take_apart(write_trace(tmp_path / "recompute.json", events))
    rows = {row.part and tuple(row.part): in_us(row.seconds) for row in summary.time if row.state == "work"}
    assert rows == {
        ("experts", 1, "forward"): [6],
        ("experts", 1, "recompute"): [10],
        ("experts", 1, "backward"): [15],
        ("gradients", None, "backward"): [4],
    }
    [keep] = [s for s in find_savings(summary) if s.title.startswith("Keep")]
    assert (in_us([keep.seconds]), keep.title) == ([10], "Keep activations: 10.0 µs of recomputation")


def test_a_number_of_what_is_computed_again_does_not_take_the_place_of_the_forwards(tmp_path: Path) -> None:
    """Each thread numbers its operators for itself: layer 1's product is 5 where it is computed again."""
    number = "Sequence number"
    first, second = "gather_moe/layers/0/attention", "gather_moe/layers/1/experts"
    events = [
        event(first, "user_annotation", 0, 20),
        event("aten::mm", "cpu_op", 2, 8, **{number: 5, "Fwd thread id": 0}),
        event(second, "user_annotation", 20, 40),
        event("aten::mm", "cpu_op", 22, 28, **{number: 6, "Fwd thread id": 0}),
        event(f"{EVALUATE}: CheckpointFunctionBackward", "cpu_op", 50, 80, tid=BACKWARD, **{number: 6}),
        event(second, "user_annotation", 52, 60, tid=BACKWARD),
        event("aten::mm", "cpu_op", 53, 58, tid=BACKWARD, **{number: 5, "Fwd thread id": 0}),
        # Only what is computed again with a graph of its own has nodes of its own, inside the one it is for.
        event(f"{EVALUATE}: MmBackward0", "cpu_op", 62, 78, tid=BACKWARD, **{number: 5, "Fwd thread id": 2}),
        launch(1, 70, tid=BACKWARD),
        event(f"{EVALUATE}: MmBackward0", "cpu_op", 85, 99, tid=BACKWARD, **{number: 5, "Fwd thread id": 1}),
        launch(2, 90, tid=BACKWARD),
        kernel("gemm", 1, 100, 130),
        kernel("gemm", 2, 130, 180),
    ]
    summary = take_apart(write_trace(tmp_path / "trace.json", events))
    rows = {row.part and tuple(row.part): in_us(row.seconds) for row in summary.time if row.state == "work"}
    assert rows == {("experts", 1, "backward"): [30], ("attention", 0, "backward"): [50]}


def test_transfers_are_known_by_what_they_carry_and_copies_by_where_they_go(tmp_path: Path) -> None:
    given = comms("allreduce", given=1000, taken=1000)
    events = [
        event("ProfilerStep#1", "user_annotation", 0, STEP_US),
        event("gather_moe/gradients", "user_annotation", 0, 50),
        launch(3, 10),
        kernel("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16", 1, 0, 100),
        kernel("some_new_kernel", 2, 100, 200, **given),
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 200, 300, tid=7, correlation=3),
        event("Memset (Device)", "gpu_memset", 300, 400, tid=7, correlation=4),
        event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 400, 500, tid=7, correlation=5),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 500, 600, tid=7, correlation=6),
    ]
    summary = take_apart(write_trace(tmp_path / "rank-0.json", [*events, kernel("k", 7, 990, 1000)]))
    rows = {(r.state, r.part and r.part.kind, r.op): in_us(r.seconds) for r in summary.time}
    assert rows == {
        ("exposed", "other", "all_reduce"): [200],
        ("work", "gradients", None): [100],
        ("work", "other", None): [110],
        ("copies", None, None): [200],
        ("idle", None, None): [390],
    }


@pytest.mark.parametrize(
    ("stage", "advice"),
    [
        (1, "More gradient_accumulation_steps than 4 make them a smaller share"),
        (2, "ZeRO-2 sums gradients in every micro-batch: more tokens in one"),
        (3, "ZeRO-3 gathers weights and sums gradients in every micro-batch: more tokens in one"),
    ],
)
def test_what_makes_sums_of_gradients_rarer_depends_on_the_stage(tmp_path: Path, stage: int, advice: str) -> None:
    facts = {"execution": {"overlap": False}, "zero_stage": stage, "accumulation": 4}
    given = comms("allreduce", given=10**6, taken=10**6)
    events = []
    for i, scope in enumerate(("gradients", "optimizer")):
        events += [
            event(f"gather_moe/{scope}", "user_annotation", 100 * i, 100 * i + 50),
            launch(i, 100 * i + 10),
            kernel("ncclDevKernel_AllReduce", i, 300 * i, 300 * i + 200 + 50 * i, stream=20, **given),
        ]
    trace = write_trace(tmp_path / "rank-0.json", [*events, kernel("k", 9, 990, 1000)], gather_moe=facts)
    words = {
        saving.title.split()[-3]: saving.words for saving in find_savings(take_apart(trace)) if "Hide" in saving.title
    }
    assert advice in words["gradients"]
    assert "More gradient_accumulation_steps" in words["optimizer"]  # which comes once a step in any stage


@pytest.mark.parametrize(
    ("op", "given", "num_ranks", "sent"),
    [
        ("all_gather", 10, 4, 30),
        ("reduce_scatter", 40, 4, 30),
        ("all_reduce", 40, 4, 60),
        ("all_to_all", 40, 4, 30),
        ("broadcast", 40, 4, 30),
        ("send", 40, 2, 40),
        ("barrier", 40, 4, 0),
        ("recv", 40, 2, None),
    ],
)
def test_what_a_ring_sends(op: str, given: float, num_ranks: int, sent: float | None) -> None:
    assert sent_bytes(op, given_bytes=given, num_ranks=num_ranks) == sent


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("_allgather_base", "all_gather"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("gloo:all_to_all", "all_to_all"),
        ("AllReduce", "all_reduce"),
        ("all_to_allv", "all_to_all"),
        ("SendRecv", "send_recv"),
        ("nccl:something", None),
    ],
)
def test_names_of_collectives(name: str, op: str | None) -> None:
    assert collective_op(name) == op


def test_names_of_types_kernels_and_modules() -> None:
    assert [dtype_bytes(n) for n in ("c10::BFloat16", "long int", "unsigned char", "Float", "?")] == [2, 8, 1, 4, None]
    kinds = [kind_of_kernel(n) for n in ("pytorch_flash::flash_fwd", "multi_tensor_apply", "sm90_xmma_gemm", "copy")]
    assert kinds == ["attention", "optimizer", "products", "other"]
    assert module_scope("nn.Module: Qwen3MoeDecoderLayer_11") == Scope("norms", 11)
    assert module_scope("nn.Module: Qwen3MoeSparseMoeBlock_11") == Scope("experts")
    assert module_scope("nn.Module: Linear_4") is None


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("Qwen3MoeRMSNorm", "norms"),
        ("Qwen3MoeRotaryEmbedding", "embedding"),
        ("Qwen3MoeForCausalLM", "head"),
        ("GPT2LMHeadModel", "head"),
        ("Qwen3MoeModel", "embedding"),
        ("Qwen3MoeAttention", "attention"),
        ("Qwen3MoeTopKRouter", "router"),
        ("OlmoeSparseMoeBlock", "experts"),
        ("LayerNormMLP", "dense"),
    ],
)
def test_a_models_name_in_that_of_a_module_says_nothing(module: str, kind: str) -> None:
    assert module_scope(f"nn.Module: {module}_7") == Scope(kind)
