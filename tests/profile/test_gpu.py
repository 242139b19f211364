"""Traces of GPUs taken apart: every number of made-up steps is known, on one rank and on several beside each other."""

import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from modeling.execution import Execution
from recipe.profile.host import collective_op, dtype_bytes, kind_of_kernel, module_scope
from recipe.profile.report import find_savings
from recipe.profile.spans import Copy, Part, Step, Transfer, Work, sent_bytes
from recipe.profile.summary import account
from recipe.profile.trace_file import read_trace
from recipe.profile.transfers import Links, Route, route_of
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
    lagging_steps,
    launch,
    memory,
    take_apart,
    time_in_us,
    write_gpu_traces,
    write_ranks,
    write_trace,
)


def test_every_moment_of_a_step_is_accounted_for_once(tmp_path: Path) -> None:
    summary = take_apart(write_gpu_traces(tmp_path))
    rows = time_in_us(summary)
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
    points = [(round(time_s * 1e6), num_bytes) for time_s, num_bytes in first.points]
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
        assert [(round(time_s * 1e6), num_bytes) for time_s, num_bytes in line.points][: len(points)] == points
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
    assert time_in_us(summary) == {
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
    assert (summary.points, summary.memory) == ([], [])
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
    assert time_in_us(summary, state="work") == {
        ("work", ("experts", 1, "forward"), None): [6],
        ("work", ("experts", 1, "recompute"), None): [10],
        ("work", ("experts", 1, "backward"), None): [15],
        ("work", ("gradients", None, "backward"), None): [4],
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
    assert time_in_us(summary, state="work") == {
        ("work", ("experts", 1, "backward"), None): [30],
        ("work", ("attention", 0, "backward"), None): [50],
    }


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
    assert time_in_us(summary) == {
        ("exposed", ("other", None, "forward"), "all_reduce"): [200],
        ("work", ("gradients", None, "backward"), None): [100],
        ("work", ("other", None, "forward"), None): [110],
        ("copies", None, None): [200],
        ("idle", None, None): [390],
    }


PLAIN, OVERLAPPED = ({"execution": asdict(Execution(overlap=overlap))} for overlap in (False, True))
RARER = "More gradient_accumulation_steps than 4 make them a smaller share"


@pytest.mark.parametrize(
    ("scope", "facts", "advice"),
    [
        ("gradients", {**PLAIN, "zero_stage": 1}, RARER),
        ("gradients", {**PLAIN, "zero_stage": 2}, "ZeRO-2 sums gradients in every micro-batch: more tokens in one"),
        ("gradients", {**PLAIN, "zero_stage": 3}, "ZeRO-3 gathers weights and sums gradients in every micro-batch: m"),
        ("optimizer", {**PLAIN, "zero_stage": 3}, RARER),  # comes once a step in any stage
        ("layers/0/attention", PLAIN, 'Set "overlap": true'),
        ("layers/0/attention", OVERLAPPED, 'Try another "overlap_chunks" (chosen for the link it assumes), 2 say'),
        ("layers/0/router", OVERLAPPED, "More tokens in a micro-batch make it a smaller share"),
        # As traces said it before they had "execution".
        ("head", {"parallel": {"wire": {"overlap": False}, "cuda_graph": False}}, 'Set "overlap": true'),
        ("head", {}, "Start them before the work that does not need them"),
    ],
)
def test_what_hides_a_transfer_or_makes_it_rarer_depends_on_how_the_steps_were_executed(
    tmp_path: Path, scope: str, facts: dict[str, Any], advice: str
) -> None:
    given = comms("allreduce", given=10**6, taken=10**6)
    events = [
        event(f"gather_moe/{scope}", "user_annotation", 0, 50),
        launch(0, 10),
        kernel("ncclDevKernel_AllReduce", 0, 0, 200, stream=20, **given),
        kernel("k", 9, 990, 1000),
    ]
    trace = write_trace(tmp_path / "rank-0.json", events, gather_moe=facts and {**facts, "accumulation": 4})
    [words] = [saving.words for saving in find_savings(take_apart(trace)) if "all-reduce" in saving.title]
    assert advice in words


def test_what_a_ring_sends() -> None:
    def sent(op: str, num_ranks: int = 4) -> float | None:
        return sent_bytes(op, given_bytes=40, num_ranks=num_ranks)

    ops = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier")
    assert [sent(op) for op in ops] == [120, 30, 60, 30, 30, 0]
    assert [sent(op, 2) for op in ("send", "recv")] == [40, None]


def test_names_of_collectives() -> None:
    base = ("_allgather_base", "c10d::_reduce_scatter_base_", "gloo:all_to_all", "AllReduce")
    assert [collective_op(name) for name in base] == ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]
    others = ("all_to_allv", "SendRecv", "nccl:something")
    assert [collective_op(name) for name in others] == ["all_to_all", "send_recv", None]


def test_names_of_types_and_kernels() -> None:
    assert [dtype_bytes(n) for n in ("c10::BFloat16", "long int", "unsigned char", "Float", "?")] == [2, 8, 1, 4, None]
    kinds = [kind_of_kernel(n) for n in ("pytorch_flash::flash_fwd", "multi_tensor_apply", "sm90_xmma_gemm", "copy")]
    assert kinds == ["attention", "optimizer", "products", "other"]


def test_a_models_name_in_that_of_a_module_says_nothing() -> None:
    of_qwen = {"RMSNorm": "norms", "RotaryEmbedding": "embedding", "ForCausalLM": "head", "Model": "embedding"}
    of_qwen |= {"Attention": "attention", "TopKRouter": "router", "SparseMoeBlock": "experts"}
    others = {"GPT2LMHeadModel": "head", "OlmoeSparseMoeBlock": "experts", "LayerNormMLP": "dense", "Linear": None}
    for name, kind in ({f"Qwen3Moe{name}": kind for name, kind in of_qwen.items()} | others).items():
        assert module_scope(f"nn.Module: {name}_7") == (kind and Scope(kind)), name
    assert module_scope("nn.Module: Qwen3MoeDecoderLayer_11") == Scope("norms", 11)


@pytest.mark.parametrize("lag", [0, 200, 900])
def test_gpus_that_lag_their_hosts_differently_do_not_make_each_other_wait(tmp_path: Path, lag: float) -> None:
    """With a lag of 200 us every fourth gather of a rank is in the next step of its clock."""
    folder = write_ranks(tmp_path, [lagging_steps(0, lag=0), lagging_steps(1, lag=lag)])
    summary = take_apart(folder)
    [row] = summary.transfers
    assert (round(row.num_calls, 6), summary.steps) == (4, [1, 2, 3])
    assert in_us([row.waiting_s, row.exposed_s]) == [0, 300]
    assert row.bytes_per_s == pytest.approx(4 * 2000 / 300e-6)
    assert not any("paired" in note for note in summary.notes)
    late = write_ranks(tmp_path, [lagging_steps(0, lag=0), lagging_steps(1, lag=lag, late=20)])
    [row] = take_apart(late).transfers
    assert in_us([row.waiting_s, row.exposed_s]) == [20, 260]  # rank 0's: twice 20 a step, and the mean over ranks


def test_groups_of_one_size_are_apart_where_their_links_are(tmp_path: Path) -> None:
    """Four ranks on two nodes: the tp ranks are neighbours, the dp ranks are not."""
    events = []
    for rank in range(4):
        tp, dp = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
        step = event("ProfilerStep#1", "user_annotation", 0, STEP_US)
        given = [
            comms("_allgather_base", given=1000, taken=2000, ranks=str(r), group=name)
            for r, name in ((tp, f"tp {tp}"), (dp, f"dp {dp}"))
        ]
        name = "ncclDevKernel_AllGather_RING"
        within = kernel(name, 1, 100, 200 - 10 * (rank % 2), stream=20, **given[0])
        between = kernel(name, 2, 300, 500 - 10 * (rank // 2), stream=20, **given[1])
        events.append([step, kernel("gemm", 9, 0, 10), within, between])
    links = Links(within=300e9, between=25e9, ranks_per_node=2)
    summary = take_apart(write_ranks(tmp_path, events), links=links)
    slow, fast = summary.transfers
    assert (fast.route.among, fast.link_bytes_per_s) == ("2 ranks", 300e9)
    assert (slow.route.among, slow.link_bytes_per_s) == ("2 ranks between nodes", 25e9)
    assert in_us([fast.waiting_s, fast.exposed_s, slow.waiting_s, slow.exposed_s]) == [5, 90, 5, 190]
    points = [(p.num_calls, p.link_bytes_per_s, round(p.bytes_per_s / 1e6, 1)) for p in summary.points]
    assert sorted(points, key=lambda point: point[2]) == [(4, 25e9, 10.5), (4, 300e9, 22.2)]
    # The run says that all of its ranks were on one node, whatever such nodes usually have.
    one_node = take_apart(write_ranks(tmp_path, events, gather_moe={"ranks_per_node": 4}), links=links)
    assert [(row.route.among, row.link_bytes_per_s) for row in one_node.transfers] == [("2 ranks", 300e9)]


def test_collectives_that_cannot_be_paired_make_nobody_wait_and_are_named(tmp_path: Path) -> None:
    folder = write_gpu_traces(tmp_path)
    extra = kernel("ncclDevKernel_ReduceScatter", 9, 980, 985, stream=20, **comms("reduce_scatter", given=8, taken=4))
    nameless = comms("allreduce", given=8, taken=8, ranks="", group="")
    alone = kernel("ncclDevKernel_AllReduce", 10, 985, 990, stream=20, **nameless | {"Group size": 4})
    info = {"rank": 1, "world_size": 2}
    write_trace(folder / "trace-1.json.gz", [*gpu_events(1), extra, alone], distributedInfo=info)
    summary = take_apart(folder)
    assert sum(row.waiting_s for row in summary.transfers if row.route.op == "reduce_scatter") == 0
    [first, second] = [note for note in summary.notes if "counts as moving" in note]
    assert first.startswith("no other trace has the all_reduce calls of rank 1, or it does not say so;")
    assert "reduce_scatter calls of 1 group cannot be paired" in second
    assert "(rank 0 1, rank 1 2); waiting in them counts as moving" in second
    lacking = [e for e in gpu_events(1) if "ReduceScatter" not in e["name"]]
    write_trace(folder / "trace-1.json.gz", lacking, distributedInfo=info)
    assert any("(rank 1 0, rank 0 1)" in note for note in take_apart(folder).notes)


@pytest.mark.parametrize("op", ["broadcast", "reduce", "send", "recv"])
def test_whoever_leaves_a_broadcast_early_has_made_nobody_wait(tmp_path: Path, op: str) -> None:
    given = comms(op, given=1000, taken=1000)
    step = event("ProfilerStep#1", "user_annotation", 0, STEP_US)
    calls = [kernel("ncclDevKernel_Any", 1, 100, end, stream=20, **given) for end in (110, 300)]
    summary = take_apart(write_ranks(tmp_path, [[step, call] for call in calls]))
    [row] = summary.transfers
    assert (row.route.op, *in_us([row.waiting_s, row.exposed_s])) == (op, 0, 105)


def test_ranks_of_several_nodes_are_held_against_the_link_between_them() -> None:
    links = Links(within=300e9, between=25e9, ranks_per_node=4)
    part = Part("experts", None, "forward")

    def link(num_ranks: int | None, ranks: tuple[int, ...] | None) -> float | None:
        transfer = Transfer(0, 1, "all_gather", part, num_ranks, ranks, "", 1.0)
        return links.of(route_of(transfer, links=links, layout=None))

    assert [link(4, (0, 1, 2, 3)), link(2, (3, 4))] == [300e9, 25e9]
    assert [link(None, None), link(4, None), link(8, None)] == [300e9, 300e9, 25e9]


def test_ranks_that_no_trace_says_are_counted_in_the_order_of_the_names(tmp_path: Path) -> None:
    for number in range(1, 12):
        write_trace(tmp_path / f"trace_{number}.json", [kernel("gemm", 1, 0, number)])
    summary = take_apart(tmp_path)
    assert in_us(summary.time[0].seconds) == list(range(1, 12))
    assert "some traces do not say their rank: they are numbered in the order of their names" in summary.notes
    assert not any("say their rank" in note for note in take_apart(write_gpu_traces(tmp_path / "named")).notes)


def test_a_rank_is_known_by_the_trace_or_else_by_its_name(tmp_path: Path) -> None:
    events = gpu_events(0)
    said = write_trace(tmp_path / "rank-3.json", events, distributedInfo={"rank": 5})
    named = write_trace(tmp_path / "x_rank12.json", events)
    assert [read_trace(said).rank, read_trace(named).rank, read_trace(named, default_rank=4).rank] == [5, 12, 12]


LAST = 60


def some_intervals(random: random.Random, most: int) -> list[tuple[int, int]]:
    starts = [random.randrange(LAST) for _ in range(random.randrange(most + 1))]
    return sorted((start, min(LAST, start + random.randrange(12))) for start in starts)


def test_the_account_of_a_step_is_that_of_its_units() -> None:
    for seed in range(200):
        generator = random.Random(seed)
        part = Part("a", None, "forward")
        works = [Work(s, e, part, "") for s, e in some_intervals(generator, 6)]
        transfers = [
            Transfer(s, e, "all_gather", part, 2, (0, 1), "", 1.0, wait_s=generator.randrange(6))
            for s, e in some_intervals(generator, 5)
        ]
        copies = [Copy(s, e, "") for s, e in some_intervals(generator, 3)]
        step = Step(1, 10, 50, transfers)
        account(step, works=works, copies=copies)

        counted: Counter[str] = Counter()
        for unit in range(10, 50):
            at = [t for t in transfers if t.start_s <= unit < t.end_s]
            if any(w.start_s <= unit < w.end_s for w in works):
                counted["work"] += 1
                counted["hidden"] += bool(at)
            elif at:
                counted["exposed" if any(unit >= t.start_s + t.wait_s for t in at) else "waiting"] += 1
            else:
                counted["copies" if any(c.start_s <= unit < c.end_s for c in copies) else "idle"] += 1
        sums = {name: sum(getattr(t, f"{name}_s") for t in transfers) for name in ("hidden", "exposed", "waiting")}
        sums |= {"work": sum(step.work_s.values()), "copies": step.copies_s, "idle": step.idle_s}
        assert sums == {name: counted[name] for name in sums}
        starts = [s.start_s for s in (*works, *transfers, *copies) if s.end_s > max(10, s.start_s)]
        assert step.idle_before_s == min((max(start, 10) for start in starts if start < 50), default=50) - 10
