"""The time of a step against sums done by hand, and what must not change it, or change it in one direction only."""

from dataclasses import replace
from typing import Any

import pytest

from modeling.layout import ParallelLayout
from recipe.plan.compute_time import num_launches
from recipe.plan.hardware import Hardware, Link, find_hardware
from recipe.plan.job import Job
from recipe.plan.search import Arrangement, make_job
from recipe.plan.step_time import TimePlan, mfu, predict_time
from recipe.plan.traffic import planned_traffic, ring_bytes
from recipe.plan.transfer_time import Lanes, Ring, call_seconds, describe_overlap, ring_of
from recipe.shared.flops import model_flops_per_token
from tests.plan_hardware import flat_hardware, plan_request
from tests.traffic_jobs import MODEL as SMALL
from tests.traffic_jobs import changed, small_job

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 96, "head_dim": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "qk_norm": "head"}
MODEL: dict[str, Any] = {**SMALL, **SIZES, **HEADS, "num_hidden_layers": 3, "max_position_embeddings": 4096}


def job(*, dp: int = 1, tp: int = 1, ep: int = 1, overlap: bool = True, **changes: Any) -> Job:
    return changed(small_job(dp, tp, ep), **{"model": MODEL, "block_size": 256, "overlap": overlap, **changes})


def timed(hardware: Hardware | None = None, *, ranks_per_node: int | None = None, **changes: Any) -> TimePlan:
    return predict_time(job(**changes), hardware=hardware or flat_hardware(), ranks_per_node=ranks_per_node)


def computing_s(plan: TimePlan) -> float:
    return plan.attention_s + plan.experts_s + plan.router_s + plan.dense_s + plan.head_s + plan.other_s


@pytest.mark.parametrize("changes", [{}, {"mlp_only_layers": [1]}, {"num_experts_per_tok": 1, "qk_norm": "none"}])
def test_products_at_a_flat_rate_take_the_models_flops(changes: dict[str, Any]) -> None:
    """Nothing of the model is left out and nothing counted twice: the count is that of MFU."""
    one, hardware = job(model={**MODEL, **changes}), flat_hardware(rate=1e9)
    want_s = model_flops_per_token(one.sizes, attention_length=256) * one.tokens_per_step / 1e9
    plan = predict_time(one, hardware=hardware)
    assert [computing_s(plan), plan.step_s] == pytest.approx([want_s, want_s], rel=1e-6)
    assert mfu(one, plan.step_s, hardware) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("ep", "strategy"),
    [(1, "gather_tokens"), (4, "gather_tokens"), (2, "gather_tokens"), (4, "all_to_all"), (1, "gather_weights")],
)
def test_a_group_shares_the_products(ep: int, strategy: str) -> None:
    """With an even routing four ranks do a quarter each; heads, experts, router and vocabulary all divide by four."""
    model = {**MODEL, "num_key_value_heads": 4}
    shared = timed(model=model, tp=4, ep=ep, strategy=strategy)
    assert computing_s(shared) == pytest.approx(computing_s(timed(model=model)) / 4, rel=1e-6)


def test_repeated_work_is_paid_again() -> None:
    once, twice, again = timed(), timed(accumulation=2), timed(recompute=True)
    assert computing_s(twice) == pytest.approx(2 * computing_s(once))
    assert again.experts_s == pytest.approx(once.experts_s * 4 / 3)
    assert again.head_s == once.head_s


def test_the_busiest_rank_decides_where_experts_are_whole() -> None:
    even, skewed = ({ep: timed(tp=2, ep=ep, rho=rho).experts_s for ep in (1, 2)} for rho in (1.0, 1.5))
    assert skewed == pytest.approx({1: even[1], 2: 1.5 * even[2]})


def test_room_for_more_rows_is_memory_not_time() -> None:
    """Kernels stop at the last real row, however many their buffers hold."""
    slow_memory = flat_hardware(rate=1e30, pass_s=1e-6)
    loop, grouped = ({"tp": 4, "ep": 4, "experts_backend": backend} for backend in ("loop", "grouped"))
    assert job(**grouped).expert_rows.buffer > 1.9 * job(**grouped).expert_rows.rows
    assert timed(slow_memory, **grouped).experts_s <= timed(slow_memory, **loop).experts_s
    assert timed(**grouped).experts_s == pytest.approx(timed(**loop).experts_s)


def test_what_is_gathered_again_is_multiplied_again_where_buffers_have_room_for_more() -> None:
    grouped = {"tp": 4, "experts_backend": "grouped"}
    # Gate and up are two thirds of two products, of which a backward has twice as many; slices keep them.
    for ep, share in ((4, 2 / 9), (1, 0.0)):
        kept, again = (timed(**grouped, ep=ep, regather=regather).experts_s for regather in (False, True))
        assert again / kept == pytest.approx(1 + share, rel=1e-3)


def test_without_overlap_every_collective_is_waited_for() -> None:
    one = job(tp=2, dp=2, overlap=False)
    hardware = flat_hardware(rate=1e30, alpha_s=1e-3, bytes_per_s=1e6)
    steps = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "broadcast": 1}
    rows = planned_traffic(one)
    want_s = sum(r.num_calls * steps[r.op] * 1e-3 + r.sent_bytes / 1e6 for r in rows)
    plan = predict_time(one, hardware=hardware)
    assert plan.communication_s + plan.data_parallel_s == pytest.approx(want_s)
    assert plan.data_parallel_s > 0 == plan.hidden_s


def test_overlap_hides_what_products_are_long_enough_for() -> None:
    big, shares = {"tp": 2, "num_sequences": 8, "block_size": 1024}, []
    assert job(**big).num_chunks > 1
    for rate in (1e12, 1e8):
        beside, apart = (timed(flat_hardware(rate=rate, bytes_per_s=1e8), **big, overlap=on) for on in (True, False))
        assert beside.step_s < apart.step_s
        assert beside.communication_s + beside.hidden_s == pytest.approx(apart.communication_s, rel=0.01)
        shares.append(beside.hidden_s / (beside.hidden_s + beside.communication_s))
    assert shares[0] < 0.1 < 0.6 < shares[1]


def test_a_link_that_keeps_the_rank_busy_hides_nothing() -> None:
    assert timed(flat_hardware(rate=1e8, bytes_per_s=1e8, busy=1.0), tp=2).hidden_s == pytest.approx(0, abs=1e-9)
    hardware = flat_hardware(rate=1e8, bytes_per_s=1e8, inter=Link(alpha_s=0.0, bytes_per_s=1e8, busy=1.0))
    assert timed(hardware, ranks_per_node=2, tp=2).hidden_s > 0
    across = timed(hardware, ranks_per_node=1, tp=2)  # as busy as the network makes it
    assert across.hidden_s == pytest.approx(0, abs=1e-9)


def test_lanes_by_hand() -> None:
    lanes = Lanes(busy=0.0)
    first = lanes.send(2.0)
    second = lanes.send(2.0)  # behind the first, until 4
    lanes.wait(first)
    lanes.work(1.0)  # until 3
    lanes.wait(second)
    assert (lanes.sent_s, lanes.exposed_s) == (4.0, 3.0)
    busy = Lanes(busy=0.5)
    arrival = busy.send(2.0)  # takes the rank until 1 and arrives at 2
    busy.work(0.5)
    busy.wait(arrival)
    assert busy.exposed_s == 1.5


def test_where_the_ranks_of_an_axis_are() -> None:
    one = job(dp=8, tp=4)
    places = (("group", 8), ("group", 2), ("kv", 8), ("dp", 8), ("dp", 4))
    found = [ring_of(axis, one, ranks_per_node=number) for axis, number in places]
    assert found == [(4, 4), (4, 2), (2, 2), (8, 2), (8, 1)]


def test_a_ring_across_nodes_goes_at_its_slowest_parts_pace() -> None:
    inter = Link(alpha_s=0.0, bytes_per_s=1e8, busy=0.0)
    hardware = flat_hardware(bytes_per_s=3e8, inter=inter)
    for ring, want_s in ((Ring(8, 8), 1.0), (Ring(16, 1), 3.0), (Ring(16, 2), 1.5), (Ring(16, 8), 1.0)):
        assert call_seconds("all_gather", 3e8, ring=ring, hardware=hardware) == pytest.approx(want_s)
    exchanged_s = call_seconds("all_to_all", 15e8, ring=Ring(16, 8), hardware=hardware)
    assert exchanged_s == pytest.approx(8e8 / 1e8)  # 8 of 15 others are outside
    assert ring_bytes("all_gather", 16.0, size=16) == 15.0


@pytest.mark.parametrize(
    ("hardware", "changes", "message"),
    [
        (flat_hardware(ranks_per_node=2), {"tp": 4}, "flat has no link between nodes, .*plan for at most 2 ranks"),
        (find_hardware("h100"), {}, "hardware h100 is a cuda, but the job is for device cpu"),
        (
            flat_hardware(ranks_per_node=1),
            {"dp": 2, "ranks_per_node": 2},
            r"flat was measured as 1 rank\(s\) on a node, and 2 would .* probe --ranks 2",
        ),
        (flat_hardware(), {"ranks_per_node": 0}, "ranks_per_node=0 must be at least 1"),
        (
            replace(flat_hardware(), intra=None),
            {"tp": 2},
            "flat has no link between the ranks of a node, .*`gather-moe probe --ranks N`",
        ),
    ],
    ids=["nodes", "device", "ranks", "no ranks", "no link"],
)
def test_what_was_not_probed_is_refused(hardware: Hardware, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timed(hardware, **changes)


def test_a_rank_alone_needs_no_link() -> None:
    assert timed(replace(flat_hardware(), intra=None)).communication_s == 0


def test_kernels_launched_one_by_one_are_a_wall_of_their_own() -> None:
    small = job(device="cuda", precision="bf16", experts_backend="grouped", tp=2)
    hardware = find_hardware("h100")
    graphed, eager = (predict_time(changed(small, cuda_graph=on), hardware=hardware) for on in (True, False))
    assert graphed.launch_s == 0 < eager.launch_s
    assert eager.step_s >= num_launches(small) * hardware.launch_s
    assert num_launches(changed(small, experts_backend="loop")) > num_launches(small)


def test_a_planned_job_is_graphed_where_the_run_would_be() -> None:
    """The rule is the trainer's: by default attention on a GPU leaves the host alone, and blocks computed again."""
    request = plan_request(MODEL, hardware="h100", gpus=2, block_size=256, sequences_per_step=2)
    found = {}
    for attention in ("sdpa", "auto", "flash_attention_2"):
        asked = replace(request, attention=attention)
        for ep, strategy, stage in ((1, "gather_tokens", 1), (1, "gather_tokens", 3), (2, "all_to_all", 1)):
            arrangement = Arrangement(ParallelLayout(tp=2, ep=ep), strategy)
            one = make_job(asked, arrangement, num_sequences=2, zero_stage=stage, overlap=True, recompute=True)
            found[attention, strategy, stage] = one.execution.cuda_graph
            assert not make_job(
                asked, arrangement, num_sequences=2, zero_stage=stage, overlap=True
            ).execution.cuda_graph
    graphed = [("auto", "gather_tokens", 1), ("flash_attention_2", "gather_tokens", 1)]
    assert [key for key, is_graphed in found.items() if is_graphed] == graphed


def test_more_of_anything_is_never_slower() -> None:
    base = find_hardware("a100-80g")
    one = job(device="cuda", precision="bf16", experts_backend="grouped", tp=4, dp=4, block_size=2048, cuda_graph=True)
    step_s = predict_time(one, hardware=base).step_s
    for better in (
        replace(base, memory_bytes_per_s=2 * base.memory_bytes_per_s),
        replace(base, intra=replace(base.intra, bytes_per_s=2 * base.intra.bytes_per_s)),
        replace(base, peak_flops_per_s={name: 2 * peak for name, peak in base.peak_flops_per_s.items()}),
    ):
        assert predict_time(one, hardware=better).step_s < step_s
    crossing = predict_time(one, hardware=base, ranks_per_node=2)
    assert crossing.communication_s > predict_time(one, hardware=base).communication_s


def test_zero_spreads_the_update() -> None:
    memory = flat_hardware(rate=1e30, pass_s=1e-6)
    assert timed(memory, dp=4).optimizer_s < timed(memory, dp=1).optimizer_s
    once, every = (timed(memory, dp=4, zero={"stage": s}, accumulation=4).optimizer_s for s in (1, 2))
    assert once < every


def test_strategies_pay_for_what_they_put_together() -> None:
    """Joined slices forward and backward and gradients in their order; rows looked up, weighted and added."""

    def elements(**changes: Any) -> float:
        """That a layer's experts read or write in passes, all of which cost the same here."""
        seconds = timed(flat_hardware(rate=1e30, pass_s=1e-6), **changes).experts_s
        return seconds / MODEL["num_hidden_layers"] / 1e-6 * 2**10

    # A rank on its own with as many tokens has the same rows and experts, and nothing to join.
    joined = elements(tp=2, strategy="gather_weights") - elements(num_sequences=1)
    assert joined == pytest.approx(3 * (3 * 8 * 96 * 64))
    # Of gathered tokens a rank has the same rows, each of which is looked up once.
    exchanged = elements(tp=2, ep=2, strategy="all_to_all") - elements(tp=2, ep=2)
    assert exchanged == pytest.approx(6 * (256 * 2 * 64))


def test_a_dense_layer_has_an_overlap_of_its_own() -> None:
    """Its products are as long as its transfers, whatever the experts beside it do."""
    model = {**MODEL, "mlp_only_layers": [1]}

    def hidden(width: int) -> float:
        shape = {"tp": 2, "num_sequences": 8, "block_size": 1024, "model": model | {"intermediate_size": width}}
        beside, apart = (timed(flat_hardware(rate=1e9, bytes_per_s=1e8), **shape, overlap=on) for on in (True, False))
        return beside.hidden_s / apart.communication_s

    assert hidden(8192) > hidden(8)


def test_a_sum_over_many_nodes_takes_the_cheaper_of_ring_and_tree() -> None:
    h100 = find_hardware("h100")
    assert h100.intra is not None
    assert h100.inter is not None
    ring = Ring(1024, 8)
    small_s = call_seconds("all_reduce", 1e3, ring=ring, hardware=h100)
    calls_s = h100.intra.call_s + h100.inter.call_s
    assert small_s == pytest.approx(calls_s + 2 * (7 * h100.intra.alpha_s + 7 * h100.inter.alpha_s), rel=0.01)
    large_s = call_seconds("all_reduce", 1e12, ring=ring, hardware=h100)
    assert large_s == pytest.approx(1e12 / 8 / h100.inter.ops["all_reduce"].bytes_per_s, rel=0.01)
    gloo = flat_hardware(alpha_s=1e-3, inter=Link(alpha_s=1e-2, bytes_per_s=1e9, busy=0.0))
    gloo_s = call_seconds("all_reduce", 0.0, ring=Ring(8, 2), hardware=gloo)
    assert gloo_s == pytest.approx(2 * (3 * 1e-2 + 4 * 1e-3))  # seven steps each way, three of them between nodes


def test_an_interval_is_wider_where_transfers_and_the_host_are_waited_for() -> None:
    h100 = find_hardware("h100")
    fields = dict.fromkeys(TimePlan._fields, 0.0)
    widths = []
    for kinds in (
        {"attention_s": 3.0, "experts_s": 1.0},
        {"attention_s": 2.0, "communication_s": 2.0},
        {"launch_s": 4.0},
    ):
        found = TimePlan(**{**fields, **kinds})
        low_s, high_s = found.interval(h100)
        assert low_s < found.step_s == 4.0 < high_s
        assert low_s * high_s == pytest.approx(found.step_s**2)
        widths.append(high_s - low_s)
    assert widths == sorted(widths)
    hidden = TimePlan(**{**fields, "attention_s": 4.0, "hidden_s": 2.0})
    assert hidden.step_s == 4.0
    assert hidden.interval(h100).high_s > TimePlan(**{**fields, "attention_s": 4.0}).interval(h100).high_s


def zero_plan(stage: int, *, precision: str = "bf16", accumulation: int = 2, **block: Any) -> TimePlan:
    run = {"device": "cuda", "precision": precision, "experts_backend": "grouped", "accumulation": accumulation}
    return timed(find_hardware("h100"), model=LARGE, dp=16, zero={"stage": stage, **block}, block_size=2048, **run)


# Its blocks have 100 million numbers, twice of what DeepSpeed fetches ahead.
LARGE = {**MODEL, "hidden_size": 1024, "moe_intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 32000}


@pytest.mark.parametrize(
    ("stage", "precision", "hides"),
    [(0, "fp32", 0), (1, "fp32", 1), (1, "bf16", 0), (2, "fp32", 1), (2, "bf16", 1), (3, "bf16", 1)],
)
def test_zeros_transfers_travel_beside_the_backward_where_the_stage_sends_them_so_early(
    stage: int, precision: str, hides: int
) -> None:
    apart, beside = (zero_plan(stage, precision=precision, overlap_comm=on, reduce_bucket_size=10**7) for on in (0, 1))
    moved_s = beside.hidden_s - apart.hidden_s
    assert moved_s == pytest.approx(apart.data_parallel_s - beside.data_parallel_s)
    assert (moved_s > 0) == bool(hides)
    if stage == 3:
        assert zero_plan(3, reduce_bucket_size=10**7) == beside


def test_stage_1_hides_in_one_micro_batch_and_stage_2_in_each() -> None:
    options: dict[str, Any] = {"accumulation": 4, "overlap_comm": True, "reduce_bucket_size": 10**7}
    once, each = (zero_plan(stage, precision="fp32", **options) for stage in (1, 2))
    assert each.hidden_s == pytest.approx(4 * once.hidden_s)


def test_weights_of_stage_3_hide_only_as_far_as_they_are_fetched_ahead() -> None:
    """Nothing ahead hides nothing; everything ahead is one gather, which is waited for before the first part."""
    for ahead, hides in ((0, False), (10**7, True), (5 * 10**7, True), (10**9, False)):
        plan = zero_plan(3, stage3_prefetch_bucket_size=ahead, stage3_max_live_parameters=10**10)
        hidden = plan.hidden_s / (plan.hidden_s + plan.data_parallel_s)
        assert (1e-9 < hidden < 0.5) if hides else (hidden == pytest.approx(0, abs=1e-9)), ahead


def test_what_is_assumed_of_zero_is_said() -> None:
    def said(stage: int, **block: Any) -> str:
        return describe_overlap(job(dp=2, device="cuda", precision="bf16", zero={"stage": stage, **block}))

    assert "gathered ahead by 50,000,000 numbers (stage3_prefetch_bucket_size)" in said(3)
    assert said(3, overlap_comm=False) == said(0) == said(2) == "ZeRO's transfers are waited for in full"
    assert said(2, overlap_comm=True) == "ZeRO's sums of gradients travel beside the backward"
    assert describe_overlap(job()) == ""
