"""Claims 27 to 38: the second article on its hardware, on choosing TP or EP, and on what each sends."""

from collections.abc import Sequence
from math import sqrt

from claims import case
from claims.alternatives import threshold_tokens
from claims.claim import (
    COUNT,
    GIB,
    IN_RANGE,
    LEFT_OPEN,
    MB,
    MIB,
    NUMBERS,
    PERCENT,
    TIMES,
    YEAR,
    Claim,
    Rule,
    Value,
    Values,
    Verdict,
)
from claims.exchange import dispatch_bytes, exchanged_s, gathered_s
from claims.machines import (
    A100,
    A100_L2_BYTES,
    A100_MULTIPROCESSORS,
    A100_SHARED_BYTES,
    A100_USABLE_SHARED_BYTES,
    DEVICE_QUERY,
    NVIDIA_A100,
    RTX_4090,
    machines,
    peak_flops_per_s,
)
from claims.roofline import layer_time
from modeling.cost import tokens_where_weights_pay
from recipe.plan.traffic import ring_bytes

RATES = (142e12, 168e12, 155e12)  # FLOP/s per GPU, the article's table
SIZES = (2, 4, 8)
LENGTHS = (4096, 16_384, 262_144)


def _utilisation() -> Values:
    rtx, a100 = peak_flops_per_s(RTX_4090), peak_flops_per_s(A100)
    name = "possible share of an RTX 4090's peak, {:.0f} TFLOP/s"
    stated = [Value(name.format(rate / 1e12), PERCENT, 0.0, upto=1.0, stated=rate / rtx, tolerance=0) for rate in RATES]
    return (*stated, *(Value(f"{rate / 1e12:.0f} TFLOP/s of an A100", PERCENT, rate / a100) for rate in RATES))


def _year() -> Values:
    return (
        Value("Megatron-LM with pipelines beside tensor and data parallelism", YEAR, 2021, stated=2019, tolerance=0),
    )


def _threshold() -> Values:
    experts = case.LAYER.num_experts
    ours = tokens_where_weights_pay(case.LAYER) / experts
    return (
        Value(
            "tokens per expert where weights send less than tokens, F=4096, m=2",
            COUNT,
            threshold_tokens() / experts,
            stated=512,
        ),
        Value("the same for m=3", COUNT, ours),
        Value("m·F for which it is 512", COUNT, round(512 / 0.75)),
    )


def _expression() -> Values:
    def scores(length: float) -> float:
        return 2 * length**2

    return (
        Value("2·16,384² bytes", GIB, scores(case.LENGTH), stated=2.0 * GIB.size),
        Value("length for which it is 2.0", COUNT, sqrt(2.0 * GIB.size / 2)),
    )


def _on_chip() -> Values:
    shared = A100_MULTIPROCESSORS * A100_SHARED_BYTES
    return (
        Value("L1 and shared memory of all multiprocessors", MIB, shared, stated=2.0 * GIB.size),
        Value("of it usable as shared memory", MIB, A100_MULTIPROCESSORS * A100_USABLE_SHARED_BYTES),
        Value("L2", MIB, A100_L2_BYTES),
        Value("too large by", TIMES, round(2.0 * GIB.size / shared)),
    )


def _gathered_by_size() -> Values:
    whole = case.tokens_bytes()
    stated = (8.4e9, 33.6e9, 134e9)
    return (
        *(
            Value(f"sent by a rank at TP={size}", MB, case.gather_bytes(whole, ranks=size), stated=claim)
            for size, claim in zip(SIZES, stated, strict=True)
        ),
        *(Value(f"L·H·b·TP²/16 at TP={size}", MB, whole * size**2 / 16) for size in SIZES),
    )


def _speed_ups() -> Values:
    stated = (1.8, 3.2, 5.6)
    return (
        *(
            Value(f"at TP={size}", TIMES, 1.0, upto=size, stated=claim)
            for size, claim in zip(SIZES, stated, strict=True)
        ),
        *(Value(f"efficiency at TP={size}", PERCENT, claim / size) for size, claim in zip(SIZES, stated, strict=True)),
    )


def _best_by_length() -> Values:
    machine = machines().a100_peak

    def gpu_seconds(length: int, size: int) -> float:
        return layer_time(machine, length=length, ranks=size).serial_s * size

    return tuple(
        Value(
            f"TP of 2, 4, 8 with the least GPU time at L={length:,}",
            COUNT,
            min(SIZES, key=lambda size: gpu_seconds(length, size)),
        )
        for length in LENGTHS
    )


def _same_for_all(values: Sequence[Value]) -> Verdict:
    return Verdict.UNDERDETERMINED if len({value.computed for value in values}) == 1 else Verdict.PLAUSIBLE


ONE_BEST = Rule(
    "underdetermined if the same size is best at every length, which then decides nothing; else plausible",
    _same_for_all,
)


def _column_against_row() -> Values:
    gather, scatter = (ring_bytes(op, case.tokens_bytes(), size=case.RANKS) for op in ("all_gather", "reduce_scatter"))
    column, row = gather + scatter, scatter + gather  # forward and backward: either is the other's gradient
    return (
        Value("saved, forward and backward", PERCENT, 1 - column / row, stated=0.15),
        Value("sent by either", MB, column),
        Value("more, where o is split by columns and gathered", MB, gather),
    )


def _bytes_ratio(active: int) -> float:
    """Gathered over exchanged."""
    sizes = {"ranks": case.RANKS, "active": active, "experts": case.LAYER.num_experts}
    return dispatch_bytes("gather_tokens", **sizes) / dispatch_bytes("all_to_all", **sizes)


def _traffic_and_latency() -> Values:
    gathered, even, all_to_one = gathered_s(), exchanged_s(rho=1), exchanged_s(rho=case.RANKS)
    low, high = _bytes_ratio(case.RANKS), _bytes_ratio(1)
    shortest, longest = gathered / all_to_one, gathered / even
    return (
        Value("bytes, gathered / exchanged, k from 4 to 1", TIMES, low, upto=high, stated=4),
        Value("time, gathered / exchanged, k=2, any rho", TIMES, shortest, upto=longest, stated=0.6),
        Value("bytes, gathered / exchanged, k=2", TIMES, _bytes_ratio(case.ACTIVE)),
        Value("rho at which the time is 0.6 with nothing to wait for", TIMES, gathered / 0.6 / even),
    )


def _exchange_formula() -> Values:
    tokens = case.LENGTH // case.RANKS
    sent = case.forward_payload(case.moe_traffic(), strategy="all_to_all") / 2
    own = sent / case.sent_share(case.RANKS)
    return (
        Value(
            "rows of a rank's tokens, those for itself included", MB, own, stated=2 * tokens * case.WIDTH * case.ACTIVE
        ),
        Value("of them sent, one way", MB, sent),
        Value("there and back, busiest rank at rho=2", MB, 4 * sent),
    )


def _gather_formula() -> Values:
    tokens = case.LENGTH // case.RANKS
    sent = case.forward_payload(case.moe_traffic(), strategy="gather_tokens") / 2
    return (
        Value(
            "gathered, a rank's own included",
            MB,
            sent / case.sent_share(case.RANKS),
            stated=2 * tokens * case.WIDTH * case.RANKS,
        ),
        Value("of them sent; the sums' way home takes as much", MB, sent),
        Value("over all-to-all, EP/k", TIMES, case.RANKS / case.ACTIVE),
    )


COMBINED_LAYOUTS = (
    Claim(
        number=27,
        article=2,
        says="90 % utilisation on a cluster of RTX 4090, with 142, 168 and 155 TFLOP/s",
        formula="rate / dense bf16 peak",
        compute=_utilisation,
        rule=IN_RANGE,
        why="One of the rates is above the device's peak, and there is no NVLink between them.",
        sources=("NVIDIA Ada architecture paper, RTX 4090: 165.2 dense bf16 TFLOP/s",),
    ),
    Claim(
        number=28,
        article=2,
        says="Megatron-LM of 2019 had 3D parallelism",
        formula="year of publication",
        compute=_year,
        rule=NUMBERS,
        why="The paper of 2019 splits tensors, beside data parallelism. Pipelines joined them in the paper of 2021.",
        sources=("Megatron-LM, 1909.08053", "Efficient Large-Scale Language Model Training, 2104.04473"),
    ),
    Claim(
        number=29,
        article=2,
        says="More than 512 positions per expert call for TP, fewer for EP",
        formula="T*/E = 0.75·m·F",
        compute=_threshold,
        rule=NUMBERS,
        why="A rule needs the experts' width, and what is compared. Where tokens and weights send equally much the "
        "hidden width, the bytes per number and the rates cancel, but not F.",
    ),
    Claim(
        number=30,
        article=2,
        says="2·seq²/1024³ is about 2.0 GB for 16K positions",
        formula="2·L² bytes",
        compute=_expression,
        rule=NUMBERS,
        why="The expression, scores of one head, gives a quarter of it.",
    ),
    Claim(
        number=31,
        article=2,
        says="2.0 GB is what an A100's SRAM holds, beyond which memory is swapped",
        formula="108 x 192 KiB",
        compute=_on_chip,
        rule=NUMBERS,
        why="On-chip memory is a hundred times smaller, and nothing is swapped: kernels work on tiles.",
        sources=(NVIDIA_A100, DEVICE_QUERY),
    ),
    Claim(
        number=32,
        article=2,
        says="An all-gather moves 8.4, 33.6 and 134 GB at TP = 2, 4 and 8",
        formula="q·L·H·b",
        compute=_gathered_by_size,
        rule=NUMBERS,
        why="The digits are those of L·H·b times TP²/16, in megabytes. What a rank sends grows with (N-1)/N, not "
        "fourfold with every doubling.",
    ),
    Claim(
        number=33,
        article=2,
        says="Matrix products are 1.8, 3.2 and 5.6 times faster at TP = 2, 4 and 8",
        formula="1 <= speed-up <= TP",
        compute=_speed_ups,
        rule=LEFT_OPEN,
        why="Possible efficiencies, but neither sizes nor a measurement are given.",
    ),
    Claim(
        number=34,
        article=2,
        says="Each TP size has its own range of sequence lengths",
        formula="argmin over TP of TP x (serial time of a layer), A100 at its peak",
        compute=_best_by_length,
        rule=ONE_BEST,
        why="Per token and GPU products cost the same at every size and transfers cost more the larger it is, so the "
        "smallest size that fits wins at every length. What has to fit is a matter of memory, which the ranges do "
        "not mention.",
    ),
    Claim(
        number=35,
        article=2,
        says="Columns and all-gather save 15 % against rows and reduce-scatter, mostly in the backward",
        formula="q·L·H·b forward and q·L·H·b backward for either",
        compute=_column_against_row,
        rule=NUMBERS,
        why="They are a pair: the gradient of an all-gather is a reduce-scatter and the other way round. Splitting o "
        "by columns adds a gather.",
        sources=("Reducing Activation Recomputation, 2205.05198, section 4.2",),
    ),
    Claim(
        number=36,
        article=2,
        says="Gathering tokens instead of exchanging them: three times more traffic, 40 % less latency",
        formula="bytes EP/k; time N / (rho·k) by bandwidth alone",
        compute=_traffic_and_latency,
        rule=LEFT_OPEN,
        why="The traffic is that of k=1 on four ranks. With more bytes, less time takes a busiest rank with rho·k > "
        "N or a long wait for the host; neither is given.",
    ),
    Claim(
        number=37,
        article=2,
        says="All-to-all moves 2·tokens·hidden·k",
        formula="k·T/N·H·b",
        compute=_exchange_formula,
        rule=NUMBERS,
        why="As bytes of one way in bf16, rows that stay at home included: on the wire (N-1)/N of it, twice for both "
        "ways, and rho times as much for the busiest rank.",
    ),
    Claim(
        number=38,
        article=2,
        says="Gathering moves 2·tokens·hidden·EP",
        formula="T·H·b",
        compute=_gather_formula,
        rule=NUMBERS,
        why="As bytes that are there afterwards: (EP-1)/EP of it travel, and as much again brings the sums home.",
    ),
)
