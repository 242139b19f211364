"""Traces of several ranks beside each other: who waited, over which link, and whose each trace is."""

from pathlib import Path

import pytest

from recipe.profile.spans import Part, Transfer
from recipe.profile.trace_file import read_trace
from recipe.profile.transfers import Links, route_of
from tests.profile_traces import (
    STEP_US,
    comms,
    event,
    gpu_events,
    in_us,
    kernel,
    lagging_steps,
    take_apart,
    write_gpu_traces,
    write_ranks,
    write_trace,
)


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
