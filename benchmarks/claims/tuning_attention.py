"""Claims 1 to 16: the first article on its machine, its attention's transfers and its score matrix."""

from fractions import Fraction

from claims import case
from claims.claim import (
    COUNT,
    GB,
    GB_PER_S,
    GIB,
    MIB,
    MS,
    NEEDED,
    NUMBERS,
    PERCENT,
    TIMES,
    TOO_EXACT,
    Claim,
    Value,
    Values,
)
from claims.machines import (
    A100,
    A100_BUS_BYTES_PER_S,
    A100_LINK_BYTES_PER_S,
    NCCL_TESTS,
    NVIDIA_A100,
    NVLINK_DOMAIN,
    memory_bytes_per_s,
    peak_flops_per_s,
)

PARAMETERS = 100e9
GATHER_S, SCORES_S, REDUCE_S = 45e-3, 120e-3, 38e-3  # the article's times for gathering q and k, q·k, and summing o
PEAK_GB = {2: 38, 4: 22, 8: 14}
LONGER = 2 * case.LENGTH


def _whole_model() -> Values:
    on_a_rank = PARAMETERS / case.RANKS
    weights = on_a_rank * case.ELEMENT_BYTES
    states = on_a_rank * 12 / case.REPLICAS
    return (
        Value("weights, bf16 gradients and ZeRO-1 states of a rank", GB, 2 * weights + states, stated=22e9),
        Value("weights of a rank", GB, weights),
        Value("float32 master weights and moments of a rank", GB, states),
        Value("layers of E=8, F=4096 that 100 B parameters take", COUNT, round(PARAMETERS / case.layer_parameters())),
    )


def _memory_rate() -> Values:
    return (Value("of an A100 80 GB", GB_PER_S, memory_bytes_per_s(A100), stated=2e12),)


def _full_mesh() -> Values:
    return (
        Value("each way, to all other GPUs together", GB_PER_S, A100_LINK_BYTES_PER_S, stated=600e9),
        Value("GPUs joined by NVLink", COUNT, NVLINK_DOMAIN, stated=16),
        Value("measured of that by large collectives", GB_PER_S, A100_BUS_BYTES_PER_S),
    )


def _projection() -> Values:
    return (
        Value("all of q", MIB, case.tokens_bytes(), stated=32 * MIB.size),
        Value("of it on a rank of TP=4", MIB, case.tokens_bytes() / case.RANKS),
    )


def _gather_sizes() -> Values:
    whole = case.tokens_bytes()
    return (
        Value("a rank's part", MIB, whole / case.RANKS, stated=32 * MIB.size),
        Value("received by a rank", MIB, case.gather_bytes(whole), stated=96 * MIB.size),
        Value("the result", MIB, whole, stated=128 * MIB.size),
    )


def _gather_time() -> Values:
    sent = case.gather_bytes(case.tokens_bytes())
    needed = sent / A100_BUS_BYTES_PER_S
    return (
        Value("at 200 GB/s", MS, needed, stated=GATHER_S),
        Value("longer than that", TIMES, round(GATHER_S / needed)),
        Value("rate of 96 MiB in the stated time", GB_PER_S, 96 * MIB.size / GATHER_S),
    )


def _scores_time() -> Values:
    written = case.scores_bytes(case.LENGTH, ranks=case.RANKS) / memory_bytes_per_s(A100)
    flops = case.layer_flops().attention * case.LENGTH / case.RANKS
    return (
        Value("one layer, writing the scores, which bounds it", MS, written, stated=SCORES_S),
        Value("longer than that", TIMES, round(SCORES_S / written)),
        Value("its causal products at the peak", MS, flops / peak_flops_per_s(A100)),
    )


def _reduce_time() -> Values:
    sent = case.all_reduce_bytes(case.tokens_bytes())
    needed = sent / A100_BUS_BYTES_PER_S
    return (
        Value("the tensor", MIB, case.tokens_bytes(), stated=32 * MIB.size),
        Value("sent by a rank", MIB, sent),
        Value("at 200 GB/s", MS, needed, stated=REDUCE_S),
        Value("longer than that", TIMES, round(REDUCE_S / needed)),
    )


def _wire_share() -> Values:
    both = GATHER_S + REDUCE_S
    return (
        Value("both transfers of all three times", PERCENT, both / (both + SCORES_S), stated=0.40),
        Value("the first of the first two", PERCENT, GATHER_S / (GATHER_S + SCORES_S)),
        Value("the first over the products", PERCENT, GATHER_S / SCORES_S),
        Value("without the gather, which attention does not need", PERCENT, REDUCE_S / (REDUCE_S + SCORES_S)),
    )


def _twice_as_long() -> Values:
    sent = [case.gather_bytes(case.tokens_bytes(length)) for length in (LONGER, case.LENGTH)]
    flops = [length * case.layer_flops(length).attention for length in (LONGER, case.LENGTH)]
    return (
        Value("bytes gathered", TIMES, sent[0] / sent[1], stated=2),
        Value("FLOPs of the scores", TIMES, flops[0] / flops[1], stated=4),
    )


def _wire_by_size() -> Values:
    whole = case.tokens_bytes()
    return tuple(
        Value(f"sent by a rank at TP={size}", MIB, case.gather_bytes(whole, ranks=size), stated=whole / size)
        for size in (2, 4, 8)
    )


def _scores() -> Values:
    scores = case.scores_bytes(case.LENGTH, ranks=case.RANKS)
    return (
        Value("scores of a rank", GIB, scores, stated=8 * GIB.size),
        Value("scores and probabilities", GIB, 2 * scores),
        Value("width of one of 64 heads", COUNT, case.LAYER.head_dim),
    )


def _longer_scores() -> Values:
    return (Value("scores of a rank at TP=4", GIB, case.scores_bytes(LONGER, ranks=4), stated=32 * GIB.size),)


def _wider_group() -> Values:
    return (
        Value("L=32,768, TP=8", GIB, case.scores_bytes(LONGER, ranks=8), stated=4 * GIB.size),
        Value("L=16,384, TP=8", GIB, case.scores_bytes(case.LENGTH, ranks=8)),
    )


def _kept_by_fused() -> Values:
    statistics = 4 * case.LENGTH * case.LAYER.num_attention_heads / case.RANKS
    scores = case.scores_bytes(case.LENGTH, ranks=case.RANKS)
    return (
        Value("kept by fused attention, a float32 per position and head", MIB, statistics, stated=scores),
        Value("activations of a layer, 34·L·H / N", MIB, 34 * case.LENGTH * case.WIDTH / case.RANKS),
    )


def _peaks() -> Values:
    """The line through the first two points, in 1/TP, at the third."""
    slope = Fraction(PEAK_GB[2] - PEAK_GB[4]) / (Fraction(1, 2) - Fraction(1, 4))
    rest = PEAK_GB[2] - slope / 2
    both = 2 * case.scores_bytes(case.LENGTH, ranks=1)
    return (
        Value(
            "TP=8, from TP=2 and TP=4 by a + b/TP",
            GB,
            float(rest + slope / 8) * 1e9,
            stated=PEAK_GB[8] * 1e9,
            tolerance=0,
        ),
        Value("a", GB, float(rest) * 1e9),
        Value("b", GB, float(slope) * 1e9),
        Value("scores and probabilities of all heads", GIB, both),
    )


TUNING_ATTENTION = (
    Claim(
        number=1,
        article=1,
        says="A model of 100 B parameters with H=1024 trains on 16 A100 with a peak of 22 GB",
        formula="P/N·(2 + 2) bytes + P/N·12/DP bytes, N = EP = 4, DP = 4; layers = P / parameters of one",
        compute=_whole_model,
        rule=NUMBERS,
        why="A rank holds a quarter of the experts, and that alone is more than twice the stated peak. At this width "
        "such a model would have more than a thousand layers.",
    ),
    Claim(
        number=2,
        article=1,
        says="An A100's memory delivers about 2 TB/s",
        formula="data sheet",
        compute=_memory_rate,
        rule=NUMBERS,
        why="As the data sheet has it.",
        sources=(NVIDIA_A100,),
    ),
    Claim(
        number=3,
        article=1,
        says="16 GPUs form a full mesh with 600 GB/s from card to card",
        formula="12 links x 25 GB/s each way",
        compute=_full_mesh,
        rule=NUMBERS,
        why="600 GB/s counts both directions of all links of a GPU. 16 GPUs are two NVLink domains of eight.",
        sources=(NVIDIA_A100, NCCL_TESTS),
    ),
    Claim(
        number=4,
        article=1,
        says="Each projection's output is 32 MB",
        formula="L·H·b",
        compute=_projection,
        rule=NUMBERS,
        why="That is the whole tensor; a rank that computes its own heads has a quarter of it.",
    ),
    Claim(
        number=5,
        article=1,
        says="In an all-gather each card sends 32 MB, receives 96 MB and ends with 128 MB",
        formula="part L·H·b/N; received q·L·H·b; result L·H·b",
        compute=_gather_sizes,
        rule=NUMBERS,
        why="The whole tensor is taken for a rank's part, so everything is four times too large; the article's own "
        "volume elsewhere, L·H/TP, is the right part.",
    ),
    Claim(
        number=6,
        article=1,
        says="Gathering q or k takes 45 ms",
        formula="q·L·H·b / rate",
        compute=_gather_time,
        rule=NUMBERS,
        why="The stated time means a hundredth of what NVLink delivers.",
        sources=(NCCL_TESTS,),
    ),
    Claim(
        number=7,
        article=1,
        says="The product of q and k takes 120 ms",
        formula="scores' bytes / memory bandwidth; 2·L²·H/N FLOPs / peak",
        compute=_scores_time,
        rule=NUMBERS,
        why="Even unfused, a layer is far quicker.",
        sources=(NVIDIA_A100,),
    ),
    Claim(
        number=8,
        article=1,
        says="The all-reduce of o, 32 MB, takes 38 ms",
        formula="2·q·L·H·b / rate",
        compute=_reduce_time,
        rule=NUMBERS,
        why="The size is right, the time is not. The factors by which this and the two times above are too long "
        "differ, so that no number of layers explains all three.",
        sources=(NCCL_TESTS,),
    ),
    Claim(
        number=9,
        article=1,
        says="Communication is about 40 % of these times",
        formula="(45 + 38) / (45 + 120 + 38)",
        compute=_wire_share,
        rule=NUMBERS,
        why="Right as the share of the times listed; other readings give less, and a layer without the gather much "
        "less.",
    ),
    Claim(
        number=10,
        article=1,
        says="Twice the length: twice the bytes gathered, four times the work of the scores",
        formula="L·H·b·q; 2·L²·H",
        compute=_twice_as_long,
        rule=NUMBERS,
        why="Linear in the one, quadratic in the other.",
    ),
    Claim(
        number=11,
        article=1,
        says="A larger TP sends less per collective, L·H/TP",
        formula="q·L·H·b",
        compute=_wire_by_size,
        rule=NUMBERS,
        why="A rank's own part shrinks, but what it sends and receives grows with TP towards the whole.",
    ),
    Claim(
        number=12,
        article=1,
        says="64 heads' scores of 16,384 positions take 8 GB per GPU at TP=4",
        formula="heads/TP·L²·b",
        compute=_scores,
        rule=NUMBERS,
        why="Per copy; stored with the probabilities it is twice that. At this width 64 heads are unusually narrow.",
    ),
    Claim(
        number=13,
        article=1,
        says="At 32,768 positions they take 32 GB",
        formula="heads/TP·L²·b",
        compute=_longer_scores,
        rule=NUMBERS,
        why="Four times the above, TP=4.",
    ),
    Claim(
        number=14,
        article=1,
        says="TP=8 brings 32,768 positions down to 4 GB",
        formula="heads/TP·L²·b",
        compute=_wider_group,
        rule=NUMBERS,
        why="Twice the ranks halve it. The stated number belongs to half the length.",
    ),
    Claim(
        number=15,
        article=1,
        says="TP must be large enough for the score matrix to fit on a card",
        formula="4·L·heads/TP bytes kept, against heads/TP·L²·b",
        compute=_kept_by_fused,
        rule=NEEDED,
        why="Fused attention never stores scores. What limits the length is activations, logits and the loss.",
        sources=("FlashAttention, 2205.14135", "Reducing Activation Recomputation, 2205.05198: 34·s·b·h/t per layer"),
    ),
    Claim(
        number=16,
        article=1,
        says="Peak memory of 38, 22 and 14 GB at TP = 2, 4 and 8",
        formula="a + b/TP",
        compute=_peaks,
        rule=TOO_EXACT,
        why="Measured peaks would not follow a constant and one term to the last digit, and that term is the size of "
        "both score matrices.",
    ),
)
