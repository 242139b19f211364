"""The least time of one layer, forward and backward: its products and transfers at given rates, in turn or at once."""

from typing import NamedTuple

from claims import case
from claims.claim import BILLION, COUNT, GB_PER_S, MILLION, MS, PERCENT, TFLOPS, TOKENS_PER_S, Unit
from claims.machines import (
    A100,
    NETWORK_BYTES_PER_S,
    Machine,
    machines,
    memory_bytes_per_s,
    peak_flops_per_s,
)
from claims.table import Column, Row, Table

# Attention and experts each gather and scatter; the backward gathers both inputs again.
FORWARD_TRANSFERS = 4
BACKWARD_TRANSFERS = 6
TRANSFER_S = 20e-6  # to start one
# Scores once more from queries and keys, then four products where the forward has two.
BACKWARD_ATTENTION = 5 / 2
NUM_LAYERS = 24
# What the first article reports for TP=4: one step, and tokens per second and GPU.
STEP_S = 0.290
RATE = 113_000
SEQUENCES_PER_REPLICA = 2


class LayerTime(NamedTuple):
    """Seconds of a rank for one micro-batch of one sequence."""

    forward_compute_s: float
    forward_wire_s: float
    backward_compute_s: float
    backward_wire_s: float

    @property
    def wire_s(self) -> float:
        return self.forward_wire_s + self.backward_wire_s

    @property
    def serial_s(self) -> float:
        return self.forward_compute_s + self.backward_compute_s + self.wire_s

    @property
    def overlapped_s(self) -> float:
        """Whatever is shorter is hidden."""
        return max(self.forward_compute_s, self.forward_wire_s) + max(self.backward_compute_s, self.backward_wire_s)

    @property
    def wire_share(self) -> float:
        return self.wire_s / self.serial_s


def layer_time(machine: Machine, *, length: int = case.LENGTH, ranks: int = case.RANKS) -> LayerTime:
    """Of the articles' layer over a group of `ranks`, without norms, permutations, loss and optimizer."""
    flops = case.layer_flops(length)
    products_s = (flops.products - flops.router) * length / ranks / machine.products_flops_per_s
    attention_s = flops.attention * length / ranks / machine.attention_flops_per_s
    transfer_s = case.gather_bytes(case.tokens_bytes(length), ranks=ranks) / machine.link_bytes_per_s + TRANSFER_S
    return LayerTime(
        forward_compute_s=products_s + attention_s,
        forward_wire_s=FORWARD_TRANSFERS * transfer_s,
        backward_compute_s=2 * products_s + BACKWARD_ATTENTION * attention_s,
        backward_wire_s=BACKWARD_TRANSFERS * transfer_s,
    )


def unfused_scores_s(*, ranks: int = case.RANKS) -> float:
    """Writing and reading scores and probabilities once each, which fused attention never does."""
    return 4 * case.scores_bytes(case.LENGTH, ranks=ranks) / memory_bytes_per_s(A100)


def gradients_s() -> float:
    """Of the sum over replicas of all layers' bf16 gradients, between nodes, nothing hidden."""
    parameters = NUM_LAYERS * rank_parameters()
    sent = case.all_reduce_bytes(parameters * case.ELEMENT_BYTES, ranks=case.REPLICAS)
    return sent / NETWORK_BYTES_PER_S


def rank_parameters() -> float:
    """Of one layer, what is split over the group: all but router and norms."""
    split = case.layer_flops(0)
    projections = (split.qkv + split.output) / 2
    return (projections + case.LAYER.num_experts * case.expert_parameters()) / case.RANKS


def roofline_rows() -> tuple[Row, ...]:
    rows: list[Row] = []
    for machine in machines():
        time = layer_time(machine)
        rows.append(
            {
                "machine": machine.name,
                "forward_compute": time.forward_compute_s,
                "forward_wire": time.forward_wire_s,
                "backward_compute": time.backward_compute_s,
                "backward_wire": time.backward_wire_s,
                "serial": time.serial_s,
                "overlapped": time.overlapped_s,
                "wire_share": time.wire_share,
                "tokens_serial": tokens_per_s(time.serial_s),
                "tokens_overlapped": tokens_per_s(time.overlapped_s),
            }
        )
    return tuple(rows)


def tokens_per_s(layer_s: float) -> float:
    """Of one GPU, in a model of `NUM_LAYERS` such layers."""
    return case.LENGTH / case.RANKS / (NUM_LAYERS * layer_s)


def judgement_rows() -> tuple[Row, ...]:
    """What the reported step would mean, as figures of one kind each."""
    peak, flops = peak_flops_per_s(A100), case.training_flops()
    layers = peak / (RATE * flops)
    step_layers = STEP_S / SEQUENCES_PER_REPLICA / layer_time(machines().a100).serial_s
    rate = SEQUENCES_PER_REPLICA * case.LENGTH / STEP_S / case.RANKS
    reached = rate * NUM_LAYERS * flops

    def row(key: str, what: str, value: float, unit: Unit, digits: int) -> Row:
        printed = f"{value / unit.size:,.{digits}f} {unit.name}".rstrip()
        return {"key": key, "what": what, "printed": printed, "value": value, "unit": unit.base}

    return (
        row("flops", "FLOPs of a token in a layer, forward and backward", flops, Unit("M", "FLOP", 1e6), 1),
        row(
            "layers_at_peak",
            "layers that 113K tokens/s per GPU leave room for at 100 % of A100's peak",
            layers,
            COUNT,
            1,
        ),
        row("layers_at_40", "the same at 40 % of the peak", 0.4 * layers, COUNT, 1),
        row(
            "parameters",
            "parameters of a model of so many layers at 100 %",
            layers * case.layer_parameters(),
            BILLION,
            2,
        ),
        row(
            "step_layers",
            "layers of 290 ms for two sequences per replica, at the assumed A100 rates, serial",
            step_layers,
            COUNT,
            1,
        ),
        row("rate", "tokens/s per GPU of 290 ms, two sequences per replica", rate, TOKENS_PER_S, 1),
        row("reached", f"FLOP/s per GPU of {NUM_LAYERS} layers at that rate", reached, TFLOPS, 0),
        row("mfu", "share of the peak", reached / peak, PERCENT, 0),
        row("model", f"parameters of {NUM_LAYERS} layers", NUM_LAYERS * case.layer_parameters(), BILLION, 2),
        row(
            "scores",
            "forward time of unfused attention's score traffic alone, one layer, A100",
            unfused_scores_s(),
            MS,
            1,
        ),
        row(
            "rank_parameters",
            f"parameters of a rank in {NUM_LAYERS} layers",
            NUM_LAYERS * rank_parameters(),
            MILLION,
            0,
        ),
        row(
            "gradients",
            f"their gradients' sum over {case.REPLICAS} replicas at {NETWORK_BYTES_PER_S / GB_PER_S.size:.0f} GB/s",
            gradients_s(),
            MS,
            0,
        ),
    )


ROOFLINE = Table(
    key="roofline",
    title="One layer's least time",
    intro=(
        "Products, attention's causal half and transfers of one layer for one sequence of 16,384 tokens over 4 GPUs, "
        "from FLOPs and bytes alone: four transfers of q·L·H·b forward, six backward, 20 us each to start; "
        "attention's backward is 2.5 times its forward, other products' twice. Norms, permutations, loss and "
        "optimizer are not counted. The rates beside the peaks are assumptions. The last two columns are tokens/s of "
        "a GPU in a model of 24 such layers."
    ),
    columns=(
        Column("machine", "machine"),
        Column("forward_compute", "forward, compute", MS, 2),
        Column("forward_wire", "wire", MS, 2),
        Column("backward_compute", "backward, compute", MS, 2),
        Column("backward_wire", "wire", MS, 2),
        Column("serial", "in turn", MS, 2),
        Column("overlapped", "wire hidden", MS, 2),
        Column("wire_share", "wire, share in turn", PERCENT, 0),
        Column("tokens_serial", "in turn", TOKENS_PER_S, 1),
        Column("tokens_overlapped", "wire hidden", TOKENS_PER_S, 1),
    ),
    rows=roofline_rows,
)
JUDGEMENT = Table(
    key="judgement",
    title="What 290 ms and 113K tokens/s per GPU would mean",
    intro="The first article's step and rate at TP=4, DP=4 against the layer above.",
    columns=(Column("what", "figure"), Column("printed", "value")),
    rows=judgement_rows,
    notes=(
        "As tokens per second of a whole replica the rate is one that a model of about 1.7 B parameters could reach; "
        "as tokens per second of a GPU, with 100 B parameters, it is out of reach by two orders of magnitude.",
    ),
)
