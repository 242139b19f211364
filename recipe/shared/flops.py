"""How many operations training a token takes, how many a device can do, and the share of them a run uses (MFU).

Model FLOPs of a token, forward and backward, where a multiplication and an addition count as two:

    6 x (weights of the matrix products the token passes through)  +  6 x layers x heads x head_dim x l

Only the top-k experts a token is sent to count, and the embedding, a look-up, does not. The last term is attention: of
the l tokens of its document a token sees l/2 on average, being causal, so the score and value products are half of
2 x 2 x heads x head_dim x l forward, and the backward pass costs twice the forward. A batch of documents of several
lengths has l = sum(length^2) / sum(length). Recomputed and padded work is not counted. Counting the full square
instead would double the last term.

MFU = model FLOPs per token x tokens per second / peak FLOPs per second of all devices together.
"""

import re
import time
from collections.abc import Iterable
from itertools import pairwise
from math import prod
from typing import NamedTuple

from modeling.spec import ModelSizes, layer_shapes, outer_shapes

# Dense bf16 with fp32 accumulation, as in NVIDIA's and AMD's data sheets and architecture papers (half of what those
# give "with sparsity"). What may follow a name is in SAME_DEVICE; the longest name wins.
BF16_PEAK_FLOPS_PER_S = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989.4e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H20": 148e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "AMD Instinct MI300X": 1307.4e12,
}
# Words behind a name that change nothing of the peak: memory and socket. Anything else, like "D", "Laptop GPU" or the
# "MIG 1g.10gb" of a part, is another device.
SAME_DEVICE = re.compile(r"([ -](\d+GB|HBM\d\w?|SXM\d?|PCIE|OAM|3E))*", re.IGNORECASE)


class ParameterCounts(NamedTuple):
    """Parameters of a model: all of them, and without the experts that a token is not sent to."""

    total: int
    active: int


class Peak(NamedTuple):
    """The most one device can do, and where the number is from."""

    flops_per_s: float
    source: str


def count_parameters(sizes: ModelSizes) -> ParameterCounts:
    """Count the parameters of the whole model, without biases, tied embeddings once."""
    outer = sum(prod(shape) for shape in outer_shapes(sizes).values())
    return ParameterCounts(
        total=outer + sum(_layer_weights(sizes, experts=sizes.num_experts)),
        active=outer + sum(_layer_weights(sizes, experts=sizes.num_experts_per_tok)),
    )


def model_flops_per_token(sizes: ModelSizes, *, attention_length: float) -> float:
    """Return training FLOPs; `attention_length` is l above, the block size where documents fill whole blocks."""
    head = sizes.vocab_size * sizes.hidden_size
    matrices = head + _layer_weights(sizes, experts=sizes.num_experts_per_tok).matrices
    attention = sizes.num_hidden_layers * sizes.num_attention_heads * sizes.head_dim * attention_length
    return 6 * matrices + 6 * attention


def sum_squared_lengths(document_starts: Iterable[Iterable[int]], *, block_size: int) -> int:
    """Sum length^2 over the documents of a micro-batch, given where they start in each of its sequences."""
    total = 0
    for sequence in document_starts:
        starts = [*sequence, block_size]
        total += sum((end - start) ** 2 for start, end in pairwise(starts))
    return total


def find_peak(device: str, *, precision: str) -> Peak:
    """Find the peak of this process's "cpu" or "cuda" device in "bf16" or "fp32": in the table, or else measured."""
    if device == "cuda" and precision == "bf16":
        import torch

        peak = table_peak(torch.cuda.get_device_name())
        if peak is not None:
            return peak
    return measure_peak(device, precision=precision)


def table_peak(device_name: str) -> Peak | None:
    """Look up the bf16 peak of a device with this name; None where the table has none, as for a part of a device."""
    names = [
        name
        for name in BF16_PEAK_FLOPS_PER_S
        if device_name.startswith(name) and SAME_DEVICE.fullmatch(device_name.removeprefix(name))
    ]
    if not names:
        return None
    name = max(names, key=len)
    return Peak(BF16_PEAK_FLOPS_PER_S[name], f"data sheet of {name}, dense bf16")


def measure_peak(device: str, *, precision: str, num_repeats: int = 5) -> Peak:
    """Measure the best of a few large square products on as many threads as torch uses now.

    Ranks that share a machine must measure at the same time, so that the sum of their results is what all of them
    together can do.
    """
    import torch

    size = 8192 if device == "cuda" else 1024
    matrix = torch.ones(size, size, dtype=torch.bfloat16 if precision == "bf16" else torch.float32, device=device)
    best_s = float("inf")
    for _ in range(num_repeats + 1):  # the first one also pays for starting threads and loading kernels
        start_s = time.perf_counter()
        matrix @ matrix
        if device == "cuda":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - start_s)
    return Peak(2 * size**3 / best_s, f"measured: {size}x{size} product in {precision} on {device}")


class _LayerWeights(NamedTuple):
    """Weights of all layers: those of matrix products, and those of norms."""

    matrices: int
    vectors: int


def _layer_weights(sizes: ModelSizes, *, experts: int) -> _LayerWeights:
    """Count the weights of all layers as if each had so many experts."""
    matrices = vectors = 0
    for is_dense, num_layers in ((True, len(sizes.dense_layers)), (False, sizes.num_moe_layers)):
        for name, shape in layer_shapes(sizes, is_dense=is_dense).items():
            counted = (experts, *shape[1:]) if name.startswith("mlp.experts.") else shape
            if len(shape) > 1:
                matrices += num_layers * prod(counted)
            else:
                vectors += num_layers * prod(counted)
    return _LayerWeights(matrices, vectors)
