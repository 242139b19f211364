"""What a layer costs a device, counted: bytes, launches and waits stay within what a GPU can afford."""

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from modeling.decoder import GatherMoeDecoderLayer
from modeling.layers import RmsNorm
from recipe.dry_run.dry_run import count_kernels
from recipe.dry_run.fake_world import fake_world
from recipe.dry_run.kernels import KernelCount, KernelReport
from recipe.plan.compute_time import num_launches
from recipe.plan.flags import add_job_flags, add_model_flags, add_world_flags, read_job
from recipe.plan.job import Job


def job_of(words: str, *, num_chunks: int = 1) -> Job:
    """Of a group of eight, bf16, on H100, and sequences of 16,384 unless the words say more."""
    parser = argparse.ArgumentParser()
    for add in (add_model_flags, add_world_flags, add_job_flags):
        add(parser)
    flags = "--gpus 8 --tp 8 --micro_batch 1 --seq_len 16384 --config_overrides max_position_embeddings=2097152"
    job, _ = read_job(parser.parse_args([*flags.split(), *words.split()]))
    return replace(job, execution=replace(job.execution, overlap_chunks=num_chunks))


def count(words: str, num_chunks: int = 1) -> KernelReport:
    job = job_of(words, num_chunks=num_chunks)
    with fake_world(job.layout, num_key_value_heads=job.sizes.num_key_value_heads) as mesh:
        return count_kernels(job, mesh)


class Bound(NamedTuple):
    """What a case may take, forward and backward: GB of the experts' half, and launches of a layer."""

    experts_gb: tuple[float, float]
    launches: tuple[int, int]


GATHERED, BORROWED = "--strategy gather_tokens", "--strategy gather_weights"
# Ideally each tensor of rows that are there is read and written once; weights once for every product with them.
CASES = {
    f"--model qwen3-30b-a3b --ep 8 {GATHERED}": Bound((0.9, 2.2), (60, 90)),
    f"--model qwen3-30b-a3b --ep 1 {GATHERED}": Bound((3.2, 6.9), (60, 90)),
    f"--model qwen3-30b-a3b --ep 1 {BORROWED}": Bound((1.8, 6.2), (60, 90)),
    f"--model mixtral-8x7b --ep 8 {GATHERED}": Bound((1.5, 3.4), (60, 90)),
    f"--model mixtral-8x7b --ep 1 {GATHERED}": Bound((2.7, 5.5), (60, 90)),
    f"--model mixtral-8x7b --ep 1 {BORROWED}": Bound((3.9, 13.7), (60, 90)),
    # Norms of q and k over their whole width wait for each other's sums of squares.
    f"--model olmoe --ep 8 {GATHERED}": Bound((0.8, 1.9), (80, 110)),
    f"--model olmoe --ep 1 {GATHERED}": Bound((3.2, 6.9), (80, 110)),
    f"--model olmoe --ep 1 {BORROWED}": Bound((1.5, 4.6), (80, 110)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_layer_costs_what_its_rows_and_weights_do(case: str, alone: ProcessPoolExecutor) -> None:
    found = alone.submit(count, case).result(timeout=120)
    for phase, most_gb, most_launches in zip(("forward", "backward"), *CASES[case], strict=True):
        assert found.total(phase, part="experts").bytes <= most_gb * 1e9, phase
        assert found.total(phase).launches <= most_launches, phase
    assert found.host_waits == {}
    assert found.largest_rows_bytes <= 2**30


@pytest.mark.slow
@pytest.mark.parametrize("num_chunks", [1, 4])
@pytest.mark.parametrize("case", list(CASES)[:4])
def test_the_plan_knows_how_many_kernels_a_layer_launches(
    case: str, num_chunks: int, alone: ProcessPoolExecutor
) -> None:
    found = alone.submit(count, case, num_chunks).result(timeout=120)
    job = job_of(case, num_chunks=num_chunks)
    one_layer = replace(job, model={**job.model, "num_hidden_layers": 1}, accumulation=1)
    counted = sum(found.total(phase).launches for phase in ("forward", "backward"))
    assert num_launches(one_layer) == pytest.approx(counted, rel=0.15)


@pytest.mark.slow
def test_an_exchange_waits_for_counts_in_every_layer(alone: ProcessPoolExecutor) -> None:
    found = alone.submit(count, "--model qwen3-30b-a3b --ep 8 --strategy all_to_all").result(timeout=120)
    assert found.host_waits == {"read_row_splits": 48}


@pytest.mark.slow
def test_longer_sequences_take_no_larger_buffers_and_rows_in_proportion(alone: ProcessPoolExecutor) -> None:
    case = f"--model qwen3-30b-a3b --ep 8 {GATHERED} --seq_len"
    short, long = (alone.submit(count, f"{case} {length}").result(timeout=120) for length in (2**14, 2**20))
    assert long.largest_rows_bytes <= 2**30
    assert long.host_waits == {}
    for phase in ("forward", "backward"):
        ratio = long.total(phase, part="experts").bytes / short.total(phase, part="experts").bytes
        assert ratio < 80, phase  # of 64 times the tokens; weights' gradients of 32 groups are added up
        flops = long.total(phase, part="experts").flops / short.total(phase, part="experts").flops
        assert flops == pytest.approx(64, rel=0.01), phase


class Block(GatherMoeDecoderLayer):
    """A norm, a look-up and a product, as a block that is counted."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.norm = RmsNorm(8, eps=1e-6)
        self.weight = nn.Parameter(torch.ones(8, 8))

    def __call__(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return nn.Module.__call__(self, x, rows)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(x)[rows] @ self.weight


def test_operators_are_counted_by_hand() -> None:
    """Each number once, by phase and by the part that it belongs to, backward as forward."""
    block, x, rows = Block(), torch.ones(100, 8, requires_grad=True), torch.tensor([3, 5])
    with KernelCount(block, share_of_rows=1.0) as counted:
        out = block(x, rows).sum()
        out.backward()
        out.item()
    found = {row[:3]: row[3:] for row in counted.rows}
    numbers = 4 * 100 * 8
    assert found["forward", "norms", "rms_norm"] == (1, numbers + 32, numbers + 400, 0)
    # Two rows of what is looked up, by two numbers of eight bytes.
    assert found["forward", "other", "index"] == (1, 64 + 16, 64, 0)
    assert found["forward", "other", "mm"] == (1, 64 + 256, 64, 2 * 2 * 8 * 8)
    assert found["backward", "norms", "rms_norm_back"] == (1, 2 * numbers + 32 + 400, numbers + 32, 0)
    assert found["backward", "other", "mm"] == (2, 2 * 4 + 256 + 64, 64 + 256, 2 * 2 * 2 * 8 * 8)
    # The gradient of a sum is one number, however often it shows.
    assert counted.host_waits == {(False, "_local_scalar_dense"): 1}
    assert not block._forward_hooks
