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
from typing import NamedTuple

from modeling.layout import ModelSizes

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
    norms = sizes.num_hidden_layers * (2 * sizes.hidden_size + _qk_norm_width(sizes)) + sizes.hidden_size
    embedding = 0 if sizes.tie_word_embeddings else sizes.vocab_size * sizes.hidden_size
    return ParameterCounts(
        total=norms + embedding + _matrix_weights(sizes, experts=sizes.num_experts),
        active=norms + embedding + _matrix_weights(sizes, experts=sizes.num_experts_per_tok),
    )


def model_flops_per_token(sizes: ModelSizes, *, attention_length: float) -> float:
    """Return training FLOPs; `attention_length` is l above, the block size where documents fill whole blocks."""
    attention = sizes.num_hidden_layers * sizes.num_attention_heads * sizes.head_dim * attention_length
    return 6 * _matrix_weights(sizes, experts=sizes.num_experts_per_tok) + 6 * attention


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


def _matrix_weights(sizes: ModelSizes, *, experts: int) -> int:
    """Count the weights that take part in a matrix product when each token visits this many experts."""
    query, key_value = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    attention = sizes.hidden_size * (2 * query + 2 * key_value)
    dense = 3 * sizes.hidden_size * sizes.intermediate_size
    router = sizes.hidden_size * sizes.num_experts
    moe = router + 3 * sizes.hidden_size * sizes.moe_intermediate_size * experts
    head = sizes.vocab_size * sizes.hidden_size
    layers = sizes.num_hidden_layers * attention + len(sizes.dense_layers) * dense + sizes.num_moe_layers * moe
    return layers + head


def _qk_norm_width(sizes: ModelSizes) -> int:
    """Count the weights of the query and key norms of a layer."""
    if sizes.qk_norm == "none":
        return 0
    if sizes.qk_norm == "head":
        return 2 * sizes.head_dim
    return (sizes.num_attention_heads + sizes.num_key_value_heads) * sizes.head_dim
