"""The time of a step against sums done by hand, and what must not change it, or change it in one direction only."""

from dataclasses import replace
from typing import Any

import pytest

from modeling.layout import ParallelLayout
from recipe.plan.compute_time import num_launches
from recipe.plan.hardware import find_hardware
from recipe.plan.hardware_values import Link
from recipe.plan.job import Job
from recipe.plan.overlap import Lanes, describe_overlap
from recipe.plan.space import Arrangement, PlanRequest, make_job
from recipe.plan.step_time import TimePlan, mfu, predict_time
from recipe.plan.traffic import planned_traffic, ring_bytes
from recipe.plan.wire_time import Ring, call_seconds, ring_of
from recipe.shared.flops import model_flops_per_token
from tests.plan_hardware import flat_hardware
from tests.traffic_jobs import MODEL as SMALL
from tests.traffic_jobs import WIRE as WITHOUT_OVERLAP
from tests.traffic_jobs import small_job

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 96, "head_dim": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "qk_norm": "head"}
MODEL: dict[str, Any] = {**SMALL, **SIZES, **HEADS, "num_hidden_layers": 3, "max_position_embeddings": 4096}
WIRE = replace(WITHOUT_OVERLAP, overlap=True)


def job(*, dp: int = 1, tp: int = 1, ep: int = 1, overlap: bool = True, **changes: Any) -> Job:
    values = {"model": MODEL, "block_size": 256, "wire": replace(WIRE, overlap=overlap), **changes}
    return replace(small_job(dp, tp, ep), **values)


def computing_s(plan: TimePlan) -> float:
    return plan.attention_s + plan.experts_s + plan.router_s + plan.dense_s + plan.head_s + plan.other_s


@pytest.mark.parametrize("changes", [{}, {"dense_layers": (1,)}, {"num_experts_per_tok": 1, "qk_norm": "none"}])
def test_products_at_a_flat_rate_take_the_models_flops(changes: dict[str, Any]) -> None:
    """Nothing of the model is left out and nothing counted twice: the count is that of MFU."""
    model = {**MODEL, **changes}
    if "dense_layers" in changes:
        model["mlp_only_layers"] = list(model.pop("dense_layers"))
    one = job(model=model)
    want_s = model_flops_per_token(one.sizes, attention_length=256) * one.tokens_per_step / 1e9
    plan = predict_time(one, hardware=flat_hardware(rate=1e9))
    assert computing_s(plan) == pytest.approx(want_s, rel=1e-6)
    assert plan.step_s == pytest.approx(want_s, rel=1e-6)
    assert mfu(one, plan.step_s, flat_hardware(rate=1e9)) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("ep", "strategy"),
    [(1, "gather_tokens"), (4, "gather_tokens"), (2, "gather_tokens"), (4, "all_to_all"), (1, "gather_weights")],
)
def test_a_group_shares_the_products(ep: int, strategy: str) -> None:
    """With an even routing four ranks do a quarter each; heads, experts, router and vocabulary all divide by four."""
    model = {**MODEL, "num_key_value_heads": 4}
    alone = predict_time(job(model=model), hardware=flat_hardware())
    shared = predict_time(job(model=model, tp=4, ep=ep, strategy=strategy), hardware=flat_hardware())
    assert computing_s(shared) == pytest.approx(computing_s(alone) / 4, rel=1e-6)


def test_repeated_work_is_paid_again() -> None:
    once = predict_time(job(), hardware=flat_hardware())
    twice = predict_time(job(accumulation=2), hardware=flat_hardware())
    again = predict_time(job(recompute=True), hardware=flat_hardware())
    assert computing_s(twice) == pytest.approx(2 * computing_s(once))
    assert again.experts_s == pytest.approx(once.experts_s * 4 / 3)
    assert again.head_s == once.head_s


def test_the_busiest_rank_decides_where_experts_are_whole() -> None:
    def experts_s(ep: int, rho: float) -> float:
        return predict_time(job(tp=2, ep=ep, rho=rho), hardware=flat_hardware()).experts_s

    assert experts_s(2, 1.5) == pytest.approx(1.5 * experts_s(2, 1.0))
    assert experts_s(1, 1.5) == experts_s(1, 1.0)


def test_static_rows_are_more_memory_not_more_products() -> None:
    slow_memory = flat_hardware(rate=1e30, pass_s=1e-6)
    times = {
        backend: predict_time(job(tp=4, ep=4, experts_backend=backend), hardware=slow_memory).experts_s
        for backend in ("loop", "grouped")
    }
    assert times["grouped"] > 2 * times["loop"]
    products = [
        predict_time(job(tp=4, experts_backend=backend), hardware=flat_hardware()).experts_s
        for backend in ("loop", "grouped")
    ]
    assert products[0] == pytest.approx(products[1])


def test_without_overlap_every_collective_is_waited_for() -> None:
    one = job(tp=2, dp=2, overlap=False)
    hardware = flat_hardware(rate=1e30, alpha_s=1e-3, bytes_per_s=1e6)
    steps = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "broadcast": 1}
    rows = planned_traffic(one)
    want_s = sum(r.num_calls * steps[r.op] * 1e-3 + r.sent_bytes / 1e6 for r in rows)
    plan = predict_time(one, hardware=hardware)
    assert plan.communication_s + plan.data_parallel_s == pytest.approx(want_s)
    assert plan.data_parallel_s > 0
    assert plan.hidden_s == 0


def test_overlap_hides_what_products_are_long_enough_for() -> None:
    quick, slow = (flat_hardware(rate=rate, bytes_per_s=1e8) for rate in (1e12, 1e8))
    big = job(tp=2, num_sequences=8, block_size=1024)
    assert big.num_chunks > 1
    apart = replace(big, wire=replace(WIRE, overlap=False))
    for hardware in (quick, slow):
        overlapped, plain = predict_time(big, hardware=hardware), predict_time(apart, hardware=hardware)
        assert overlapped.step_s < plain.step_s
        total_s = overlapped.communication_s + overlapped.hidden_s
        assert total_s == pytest.approx(plain.communication_s, rel=0.01)
    hidden = [predict_time(big, hardware=hardware) for hardware in (quick, slow)]
    shares = [plan.hidden_s / (plan.hidden_s + plan.communication_s) for plan in hidden]
    assert shares[0] < 0.1
    assert shares[1] > 0.6


def test_a_link_that_keeps_the_rank_busy_hides_nothing() -> None:
    plan = predict_time(job(tp=2), hardware=flat_hardware(rate=1e8, bytes_per_s=1e8, busy=1.0))
    assert plan.hidden_s == pytest.approx(0, abs=1e-9)


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
    assert ring_of("group", one, ranks_per_node=8) == Ring(4, 4)
    assert ring_of("group", one, ranks_per_node=2) == Ring(4, 2)
    assert ring_of("kv", one, ranks_per_node=8) == Ring(2, 2)
    assert ring_of("dp", one, ranks_per_node=8) == Ring(8, 2)
    assert ring_of("dp", one, ranks_per_node=4) == Ring(8, 1)


def test_a_ring_across_nodes_goes_at_its_slowest_parts_pace() -> None:
    inter = Link(alpha_s=0.0, bytes_per_s=1e8, busy=0.0)
    hardware = flat_hardware(bytes_per_s=3e8, inter=inter)
    assert call_seconds("all_gather", 3e8, ring=Ring(8, 8), hardware=hardware) == pytest.approx(1.0)
    assert call_seconds("all_gather", 3e8, ring=Ring(16, 1), hardware=hardware) == pytest.approx(3.0)
    assert call_seconds("all_gather", 3e8, ring=Ring(16, 2), hardware=hardware) == pytest.approx(1.5)
    assert call_seconds("all_gather", 3e8, ring=Ring(16, 8), hardware=hardware) == pytest.approx(1.0)
    exchanged_s = call_seconds("all_to_all", 15e8, ring=Ring(16, 8), hardware=hardware)
    assert exchanged_s == pytest.approx(8e8 / 1e8)  # 8 of 15 others are outside
    assert ring_bytes("all_gather", 16.0, size=16) == 15.0


def test_ranks_on_more_nodes_than_were_probed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hardware flat has no link between nodes, .*plan for at most 2 ranks"):
        predict_time(job(tp=4), hardware=flat_hardware(ranks_per_node=2))


def test_a_job_for_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hardware h100 is a cuda, but the job is for device cpu"):
        predict_time(job(), hardware=find_hardware("h100"))


def test_kernels_launched_one_by_one_are_a_wall_of_their_own() -> None:
    small = job(device="cuda", precision="bf16", experts_backend="grouped", tp=2)
    hardware = find_hardware("h100")
    graphed, eager = (predict_time(replace(small, cuda_graph=on), hardware=hardware) for on in (True, False))
    assert graphed.launch_s == 0
    assert eager.launch_s > 0
    assert eager.step_s >= num_launches(small) * hardware.launch_s
    assert num_launches(replace(small, experts_backend="loop")) > num_launches(small) > num_launches(small, fused=True)


def test_a_planned_job_is_graphed_where_the_run_would_be() -> None:
    """The rule is the trainer's: by default attention on a GPU reads documents on the host."""
    request = PlanRequest(
        model=MODEL,
        hardware=find_hardware("h100"),
        gpus=2,
        ranks_per_node=2,
        block_size=256,
        sequences_per_step=2,
        precision="bf16",
    )
    choices: dict[str, Any] = {"num_sequences": 2, "recompute": False, "regather": False, "overlap": True}
    found = {}
    for attention in ("sdpa", "flash_attention_2"):
        request.__dict__["attention"] = attention
        for ep, strategy, stage in (
            (1, "gather_tokens", 1),
            (1, "gather_tokens", 3),
            (2, "all_to_all", 1),
        ):
            arrangement = Arrangement(ParallelLayout(tp=2, ep=ep), strategy)
            found[attention, strategy, stage] = make_job(request, arrangement, zero_stage=stage, **choices).cuda_graph
    assert [key for key, graphed in found.items() if graphed] == [("flash_attention_2", "gather_tokens", 1)]


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
    alone, spread = (predict_time(job(dp=dp), hardware=memory).optimizer_s for dp in (1, 4))
    assert spread < alone
    every = [predict_time(job(dp=4, zero={"stage": s}, accumulation=4), hardware=memory).optimizer_s for s in (1, 2)]
    assert every[1] > every[0]


def test_strategies_pay_for_what_they_put_together() -> None:
    """Joined slices forward and backward and gradients in their order; rows looked up, weighted and added."""
    slow_memory = flat_hardware(rate=1e30, pass_s=1e-6)

    def elements(**changes: Any) -> float:
        """That a layer's experts read or write in passes, all of which cost the same here."""
        seconds = predict_time(job(**changes), hardware=slow_memory).experts_s
        return seconds / MODEL["num_hidden_layers"] / 1e-6 * 2**10

    # A rank on its own with as many tokens has the same rows and experts, and nothing to join.
    joined = elements(tp=2, strategy="gather_weights") - elements(num_sequences=1)
    assert joined == pytest.approx(3 * (3 * 8 * 96 * 64))
    # Of gathered tokens a rank has the same rows, each of which is looked up once.
    exchanged = elements(tp=2, ep=2, strategy="all_to_all") - elements(tp=2, ep=2)
    assert exchanged == pytest.approx(6 * (256 * 2 * 64))


def test_a_dense_layer_has_an_overlap_of_its_own() -> None:
    """Its products are as long as its transfers, whatever the experts beside it do."""
    model = {**MODEL, "mlp_only_layers": [1], "intermediate_size": 8192}
    apart = replace(WIRE, overlap=False)

    def exposed(rate: float, **changes: Any) -> float:
        one = job(tp=2, num_sequences=8, block_size=1024, model={**model, **changes})
        hardware = flat_hardware(rate=rate, bytes_per_s=1e8)
        return predict_time(one, hardware=hardware).hidden_s / (
            predict_time(replace(one, wire=apart), hardware=hardware).communication_s
        )

    assert exposed(1e9, intermediate_size=8192) > exposed(1e9, intermediate_size=8)


def test_a_group_across_nodes_keeps_a_rank_as_busy_as_the_network_does() -> None:
    inter = Link(alpha_s=0.0, bytes_per_s=1e8, busy=1.0)
    hardware = flat_hardware(rate=1e8, bytes_per_s=1e8, busy=0.0, inter=inter)
    inside, across = (predict_time(job(tp=2), hardware=hardware, ranks_per_node=n) for n in (2, 1))
    assert inside.hidden_s > 0
    assert across.hidden_s == pytest.approx(0, abs=1e-9)


def test_more_ranks_than_were_probed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"flat was measured as 1 rank\(s\) on a node, and 2 would .* probe --ranks 2"):
        predict_time(job(dp=2), hardware=flat_hardware(ranks_per_node=1), ranks_per_node=2)
    with pytest.raises(ValueError, match=r"ranks_per_node=0 must be at least 1"):
        predict_time(job(), hardware=flat_hardware(), ranks_per_node=0)
    alone = replace(flat_hardware(), intra=None)
    assert predict_time(job(), hardware=alone).communication_s == 0
    with pytest.raises(
        ValueError, match=r"flat has no link between the ranks of a node, .*`gather-moe probe --ranks N`"
    ):
        predict_time(job(tp=2), hardware=alone)


def test_a_sum_over_many_nodes_takes_the_cheaper_of_ring_and_tree() -> None:
    h100 = find_hardware("h100")
    assert h100.intra is not None
    assert h100.inter is not None
    ring = Ring(1024, 8)
    small_s = call_seconds("all_reduce", 1e3, ring=ring, hardware=h100)
    assert small_s == pytest.approx(2 * (7 * h100.intra.alpha_s + 7 * h100.inter.alpha_s), rel=0.01)
    large_s = call_seconds("all_reduce", 1e12, ring=ring, hardware=h100)
    assert large_s == pytest.approx(1e12 / 8 / h100.inter.bytes_per_s, rel=0.01)
    gloo = flat_hardware(alpha_s=1e-3, inter=Link(alpha_s=1e-2, bytes_per_s=1e9, busy=0.0))
    gloo_s = call_seconds("all_reduce", 0.0, ring=Ring(8, 2), hardware=gloo)
    assert gloo_s == pytest.approx(2 * (3 * 1e-2 + 4 * 1e-3))  # seven steps each way, three of them between nodes


def zero_plan(stage: int, *, precision: str = "bf16", accumulation: int = 2, **block: Any) -> TimePlan:
    one = job(
        model=LARGE,
        dp=16,
        zero={"stage": stage, **block},
        device="cuda",
        precision=precision,
        experts_backend="grouped",
        block_size=2048,
        accumulation=accumulation,
    )
    return predict_time(one, hardware=find_hardware("h100"))


# Its blocks have 100 million numbers, twice of what DeepSpeed fetches ahead.
LARGE = {**MODEL, "hidden_size": 1024, "moe_intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 32000}


@pytest.mark.parametrize(
    ("stage", "precision", "hides"),
    [
        (0, "fp32", False),
        (1, "fp32", True),
        (1, "bf16", False),
        (2, "fp32", True),
        (2, "bf16", True),
        (3, "bf16", True),
    ],
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
    hidden = {
        stage: zero_plan(stage, precision="fp32", accumulation=4, overlap_comm=True, reduce_bucket_size=10**7).hidden_s
        for stage in (1, 2)
    }
    assert hidden[2] == pytest.approx(4 * hidden[1])


def test_weights_of_stage_3_hide_only_as_far_as_they_are_fetched_ahead() -> None:
    """Nothing ahead hides nothing; everything ahead is one gather, which is waited for before the first part."""
    keys = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters")
    plans = {
        ahead: zero_plan(3, **dict(zip(keys, (ahead, 10**10), strict=True))) for ahead in (0, 10**7, 5 * 10**7, 10**9)
    }
    hidden = {ahead: plan.hidden_s / (plan.hidden_s + plan.data_parallel_s) for ahead, plan in plans.items()}
    assert hidden[0] == pytest.approx(0, abs=1e-9)
    assert hidden[10**9] == pytest.approx(0, abs=1e-9)
    assert 0 < hidden[10**7] < 0.5
    assert 0 < hidden[5 * 10**7] < 0.5


def test_what_is_assumed_of_zero_is_said() -> None:
    def said(stage: int, **block: Any) -> str:
        return " ".join(describe_overlap(job(dp=2, device="cuda", precision="bf16", zero={"stage": stage, **block})))

    assert "gathered ahead by 50,000,000 numbers (stage3_prefetch_bucket_size)" in said(3)
    assert said(3, overlap_comm=False) == said(0) == said(2) == "ZeRO's transfers are waited for in full"
    assert said(2, overlap_comm=True) == "ZeRO's sums of gradients travel beside the backward"
    assert not list(describe_overlap(job()))
