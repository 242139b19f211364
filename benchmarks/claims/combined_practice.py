"""Claims 39 to 48: the second article on placement, number formats, ratios, results and what it proposes."""

from dataclasses import replace
from math import sqrt

from claims import case
from claims.alternatives import weights_bytes
from claims.claim import (
    COUNT,
    IN_RANGE,
    LEFT_OPEN,
    NUMBERS,
    PERCENT,
    TFLOPS,
    TIMES,
    Claim,
    Value,
    Values,
    Verdict,
    best_inside,
    from_sources,
)
from claims.combined_layouts import RATES
from claims.exchange import gathered_s
from claims.machines import A100, H100, NVIDIA_A100, machines, peak_flops_per_s
from claims.roofline import layer_time
from modeling.cost import ID_BYTES, WEIGHT_BYTES
from recipe.train.placement import place_experts

SOCKETS = 2
INT32_AND_FLOAT32 = 4 + 4
SCALE_BLOCK = 128  # numbers of an 8-bit payload that share a float32 scale
WIDTHS = tuple(step / 4 for step in range(4, 17))  # 1 to 4 times
# GPUs and their EP in published configurations.
CONFIGURATIONS = ((1024, 64), (256, 32), (16, 16))
SWITCHING = 7.89  # the most published for parallelism that follows lengths
LONGEST = 262_144
# TFLOP/s per GPU of Qwen3-30B-A3B on 16 H100, and the share of the peak of Mixtral-8x22B on 128.
QWEN_RATE, MIXTRAL_SHARE = 299.4e12, 0.493


def _hot_together() -> Values:
    loads = [1 / (place + 1) for place in range(case.LAYER.num_experts)]
    placed = place_experts(loads, num_ranks=SOCKETS)
    return (
        Value("least possible rho of two sockets, experts by Zipf", TIMES, placed.rho, stated=placed.rho_now),
        Value("rho with the hot ones together", TIMES, placed.rho_now),
    )


def _eight_bit_weights() -> Values:
    token = case.WIDTH * case.ELEMENT_BYTES
    metadata = case.ACTIVE * INT32_AND_FLOAT32
    fewer = case.ACTIVE * (4 - 1)
    eight_bit = case.WIDTH * (1 + 4 / SCALE_BLOCK)
    return (
        Value(
            "saved of what is sent to the experts by 1-byte weights", PERCENT, fewer / (token + metadata), stated=0.30
        ),
        Value("ids and weights over tokens, 4 + 4 bytes", PERCENT, metadata / token),
        Value("the same as this project sends them", PERCENT, case.ACTIVE * (ID_BYTES + WEIGHT_BYTES) / token),
        Value("saved by tokens in 8 bits, sums in bf16", PERCENT, 1 - (eight_bit + token) / (2 * token)),
    )


def _root_law() -> Values:
    return tuple(Value(f"EP on {num:,} H100", COUNT, ep, stated=sqrt(num)) for num, ep in CONFIGURATIONS)


def _three_rates() -> Values:
    peak = peak_flops_per_s(A100)
    return (
        *(Value("of an A100", TFLOPS, 0.0, upto=peak, stated=rate, tolerance=0) for rate in RATES),
        *(Value(f"{rate / 1e12:.0f} TFLOP/s of an A100", PERCENT, rate / peak) for rate in RATES),
        Value("published: Qwen3-30B-A3B, 16 H100", PERCENT, QWEN_RATE / peak_flops_per_s(H100)),
        Value("published: Mixtral-8x22B, 128 H100", PERCENT, MIXTRAL_SHARE),
    )


def wire_per_compute(width: float) -> float:
    """Seconds of transfers over seconds of products at the peak, forward, for experts so many times as wide."""
    sizes = replace(case.LAYER, moe_intermediate_size=round(width * case.LAYER.moe_intermediate_size))
    products = case.layer_flops(sizes=sizes).experts * case.LENGTH / case.RANKS / peak_flops_per_s(A100)
    return gathered_s() / products


def _width() -> Values:
    return (
        Value(
            "width of the least transfer per product, 1 to 4 times",
            TIMES,
            min(WIDTHS, key=wire_per_compute),
            stated=1.5,
        ),
        *(
            Value(f"transfers over products at {width:g} times", TIMES, wire_per_compute(width))
            for width in (1.0, 1.5, 4.0)
        ),
    )


def _exposed_share() -> Values:
    """On the first article's machine, whose rates leave the wire less than those of an H100."""
    found = machines()
    shares = [layer_time(machine).wire_share for machine in (found.a100_peak, found.a100, found.h100_peak)]
    words = "of a step on A100, all hidden to none at its peak"
    return (
        *(Value(words, PERCENT, 0.0, upto=shares[0], stated=share) for share in (0.35, 0.18)),
        Value("none hidden, A100 at assumed rates", PERCENT, shares[1]),
        Value("none hidden, H100 at its peak", PERCENT, shares[2]),
    )


def _switching() -> Values:
    tokens = case.moe_traffic(LONGEST).wire_bytes("gather_tokens").payload
    saved_s = (tokens - weights_bytes(3)) / machines().a100.link_bytes_per_s
    serial_s = layer_time(machines().a100, length=LONGEST).serial_s
    return (
        Value("published, mixed lengths", TIMES, 1.0, upto=SWITCHING, stated=2.3),
        Value("this layer at 256K, weights instead of tokens gathered", TIMES, serial_s / (serial_s - saved_s)),
    )


def _no_values() -> Values:
    return ()


COMBINED_PRACTICE = (
    Claim(
        number=39,
        article=2,
        says="Hot experts belong on one NUMA socket",
        formula="max / mean of the sockets' loads",
        compute=_hot_together,
        rule=NUMBERS,
        why="That puts the load where it is heaviest already. Placement spreads it; only experts that tokens choose "
        "together are kept close, to save traffic.",
        sources=("deepseek-ai/EPLB, README",),
    ),
    Claim(
        number=40,
        article=2,
        says="Gating weights in 8 bits save 30 % of the communication",
        formula="k·3 / (H·b + k·8); tokens in 8 bits: 1 - (H·(1 + 4/128) + H·b) / (2·H·b)",
        compute=_eight_bit_weights,
        rule=NUMBERS,
        why="They are a fraction of a percent of what travels. The tokens themselves in 8 bits save a quarter; the "
        "router is better left in float32.",
        sources=(
            "deepseek-ai/DeepEP, README: dispatch in FP8, combine in BF16",
            "Megatron Core, MoE README: router in FP32",
        ),
    ),
    Claim(
        number=41,
        article=2,
        says="TP and EP grow as the square root of the number of GPUs",
        formula="sqrt(N) against published configurations",
        compute=_root_law,
        rule=NUMBERS,
        why="Published layouts keep TP at 1 or 2, whatever the number of GPUs, and EP is far from the root.",
        sources=(
            "Megatron Bridge, MoE hardware configurations, H100: DeepSeek-V3 TP=2 EP=64, Qwen3-235B-A22B TP=2 EP=32, "
            "Qwen3-30B-A3B TP=1 EP=16",
            "Megatron Bridge, performance recipes: 1,024, 256 and 16 GPUs",
        ),
    ),
    Claim(
        number=42,
        article=2,
        says="142, 168 and 155 TFLOP/s, more for a mixture of experts than for a dense model",
        formula="0 <= rate <= peak",
        compute=_three_rates,
        rule=LEFT_OPEN,
        why="No model, length or device goes with them. On A100 they are possible: near or above the best that is "
        "published for mixtures, whose layers are far wider.",
        sources=(
            NVIDIA_A100,
            "Megatron Bridge, performance summary: Qwen3-30B-A3B, 299.4 TFLOP/s",
            "MoE Parallel Folding, 2504.14960: Mixtral-8x22B, 49.3 %",
        ),
    ),
    Claim(
        number=43,
        article=2,
        says="Experts 1.5 times as wide are best",
        formula="(N-1)·b·P / (m·k·F·rate)",
        compute=_width,
        rule=best_inside(WIDTHS[0], WIDTHS[-1]),
        why="Transfers over products only fall with the width, so no width is best by that. Scaling laws favour "
        "narrower experts and more of them.",
        sources=("Scaling Laws for Fine-Grained Mixture of Experts, 2402.07871",),
    ),
    Claim(
        number=44,
        article=2,
        says="NCCL pipelines an all-gather with the matrix product behind it",
        formula="",
        compute=_no_values,
        rule=from_sources(Verdict.WRONG),
        why="NCCL moves data; overlapping with products is done above it, by asynchronous tensor parallelism in "
        "PyTorch, by Flux or by Transformer Engine's user buffers. Grouped calls and knowledge of the topology are "
        "NCCL's.",
        sources=("NCCL user guide", "Flux, 2406.06858", "Transformer Engine documentation, communication overlap"),
    ),
    Claim(
        number=45,
        article=2,
        says="Communication falls from 35 to 18 % of a step",
        formula="wire / (wire + products) of one layer",
        compute=_exposed_share,
        rule=IN_RANGE,
        why="No machine and no source are named. On A100 this layer's transfers take a quarter of a step if nothing "
        "hides them, so it could fall to 18 % but not from 35 %, which takes an H100 at its peak.",
    ),
    Claim(
        number=46,
        article=2,
        says="CUDA_DEVICE_MAX_CONNECTIONS=32 makes all-gathers 40 % faster",
        formula="",
        compute=_no_values,
        rule=from_sources(Verdict.WRONG),
        why="It sets the number of hardware work queues, not a bandwidth. Before Blackwell, Megatron-LM refuses TP > "
        "1 with anything but 1, so that transfers start in order, and allows 32 for overlapped all-to-alls.",
        sources=(
            "Megatron-LM, megatron/training/arguments.py, validate_args",
            "CUDA programming guide, environment variables",
        ),
    ),
    Claim(
        number=47,
        article=2,
        says="Switching parallelism by length makes 256K positions 2.3 times faster",
        formula="published range; serial time of a layer with tokens over that with weights gathered",
        compute=_switching,
        rule=LEFT_OPEN,
        why="Such gains are published for batches of mixed lengths. When every sequence has 256K positions there is "
        "nothing to switch between batches, and attention takes nearly all of the time.",
        sources=(
            "FlexSP, 2412.01523: up to 1.98x",
            "Flexible Context Parallelism, 2602.21788: 1.46x on average, 2.24x at most",
            "Megatron Core, dynamic context parallelism: up to 1.48x",
            "ByteScale, 2502.21231: up to 7.89x",
        ),
    ),
    Claim(
        number=48,
        article=2,
        says="Attention can be moved to a pool of CXL memory",
        formula="",
        compute=_no_values,
        rule=from_sources(Verdict.UNDERDETERMINED),
        why="What was measured is memory for offloaded states: 97 to 100 % of the throughput with DRAM alone, one "
        "GPU, 4K to 32K positions. Computation stays on the GPU.",
        sources=("2507.03305",),
    ),
)
