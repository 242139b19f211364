"""Cross-entropy over a split vocabulary by chunks against plain torch."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from modeling import vocabulary as vocabulary_module
from modeling.comm import Chunks
from modeling.vocabulary import IGNORED, Vocabulary, vocab_parallel_losses
from tests.ranks import run_ranks

TOKENS, HIDDEN, VOCAB = 24, 16, 51


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D], the whole head [V, D], targets [T] with every fifth ignored."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[::5] = IGNORED
    targets[1], targets[2] = VOCAB - 1, 0
    targets[3], targets[4] = 25, 26  # the last row of the first half and the first row of the second
    return x, weight, targets


def plainly(x: Tensor, weight: Tensor, targets: Tensor, *, z_coef: float) -> dict[str, Tensor]:
    """All logits at once, and autograd."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = (x @ weight.t()).to(torch.promote_types(x.dtype, torch.float32))
    logits.retain_grad()
    nll = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    z = logits.logsumexp(-1).square()[targets != IGNORED].sum()
    (0.3 * (nll + z_coef * z)).backward()
    return {"nll": nll.detach(), "z": z.detach(), "x": x.grad, "weight": weight.grad, "logits": logits.grad}


def by_chunks(x: Tensor, weight: Tensor, targets: Tensor, *, z_coef: float) -> dict[str, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    vocabulary = Vocabulary(0, weight.shape[0], None)
    losses = vocab_parallel_losses(x, weight, targets, vocabulary=vocabulary, chunks=Chunks(len(x)), z_coef=z_coef)
    torch.testing.assert_close(losses.total.detach(), losses.nll + z_coef * losses.z)
    (0.3 * losses.total).backward()
    return {"nll": losses.nll, "z": losses.z, "x": x.grad, "weight": weight.grad}


@pytest.mark.parametrize("z_coef", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 5, 24, 1000])
def test_chunks_of_any_size_match_whole_logits(monkeypatch: pytest.MonkeyPatch, rows: int, z_coef: float) -> None:
    monkeypatch.setattr(vocabulary_module, "CHUNK_BYTES", rows * 4 * VOCAB)
    want = plainly(*batch(), z_coef=z_coef)
    got = by_chunks(*batch(), z_coef=z_coef)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("rows", [4, 1000])
def test_bf16_inputs_give_a_float32_loss(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(vocabulary_module, "CHUNK_BYTES", rows * 4 * VOCAB)
    x, weight, targets = batch(torch.bfloat16)
    got, want = by_chunks(x, weight, targets, z_coef=0.0), plainly(x, weight, targets, z_coef=0.0)
    assert got["nll"].dtype == got["z"].dtype == torch.float32
    assert got["x"].dtype == got["weight"].dtype == torch.bfloat16
    torch.testing.assert_close(got["nll"], want["nll"], rtol=1e-6, atol=0)
    for name in ("x", "weight"):
        scale = want[name].abs().max()
        assert (got[name] - want[name]).abs().max() < 2e-2 * scale, name


def test_the_weight_gradient_of_many_chunks_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running sum in bfloat16 would stop growing at 256 equal shares."""
    monkeypatch.setattr(vocabulary_module, "CHUNK_BYTES", 4 * 2)
    x = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16)
    got = by_chunks(x, weight, torch.zeros(1024, dtype=torch.int64), z_coef=0.0)
    torch.testing.assert_close(got["weight"].float().flatten(), torch.tensor([-512.0, 512.0]) * 0.3, rtol=1e-2, atol=0)


def _split(rank: int, world_size: int, z_coef: float, case: str, num_chunks: int) -> None:
    x, weight, targets = batch() if case == "many" else four_positions()
    rows = -(-weight.shape[0] // world_size)
    first = rank * rows
    num_real = max(0, min(weight.shape[0] - first, rows))
    local = torch.full((rows, x.shape[1]), 100.0, dtype=torch.float64)  # padding that must not be seen
    local[:num_real] = weight[first : first + num_real]
    mine = x.chunk(world_size)[rank].clone().requires_grad_()
    local.requires_grad_()
    vocabulary = Vocabulary(first, num_real, dist.group.WORLD)
    chunks = Chunks(len(mine), dist.group.WORLD, num_chunks, overlap=True)
    with pytest.MonkeyPatch.context() as patch:
        if case == "four":
            patch.setattr(vocabulary_module, "CHUNK_BYTES", 40)  # two tokens' logits at a time
        losses = vocab_parallel_losses(mine, local, targets, vocabulary=vocabulary, chunks=chunks, z_coef=z_coef)
    (0.3 * losses.total).backward()
    want = plainly(x.detach(), weight, targets, z_coef=z_coef)
    torch.testing.assert_close((losses.nll, losses.z), (want["nll"], want["z"]))
    torch.testing.assert_close(local.grad[:num_real], want["weight"][first : first + num_real])
    assert not local.grad[num_real:].any()
    torch.testing.assert_close(mine.grad, want["x"].chunk(world_size)[rank])
    targets_here = targets.chunk(world_size)[rank]
    assert not mine.grad[targets_here == IGNORED].any()
    assert mine.grad[targets_here != IGNORED].any(dim=1).all()


def four_positions() -> tuple[Tensor, Tensor, Tensor]:
    """Two targets in the first half of the vocabulary, one in the second, one ignored; an identity as head."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, torch.eye(8, dtype=torch.float64), torch.tensor([1, 3, 6, IGNORED])


@pytest.mark.parametrize("z_coef", [0.0, 0.1])
@pytest.mark.parametrize(("case", "num_chunks"), [("four", 1), ("four", 2), ("many", 1), ("many", 3)])
@pytest.mark.requirement("R-TP-03")
def test_gradients_of_a_split_vocabulary_are_right_on_every_rank(case: str, num_chunks: int, z_coef: float) -> None:
    run_ranks(_split, 2, z_coef, case, num_chunks)


@pytest.mark.slow
@pytest.mark.requirement("R-TP-03")
def test_also_where_the_last_rank_holds_mostly_padding() -> None:
    run_ranks(_split, 4, 0.1, "many", 2)


def test_evaluation_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_module, "_add_product", None)
    x, weight, targets = batch()
    weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        losses = vocab_parallel_losses(x, weight, targets, vocabulary=Vocabulary(0, VOCAB, None), chunks=Chunks(len(x)))
    torch.testing.assert_close(losses.nll, plainly(x, weight.detach(), targets, z_coef=0.0)["nll"])


PEAK = """
import resource, torch
from modeling.vocabulary import Vocabulary, vocab_parallel_losses
from modeling.comm import Chunks
torch.set_num_threads(1)
def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def step(tokens):
    x = torch.randn(tokens, 32, requires_grad=True)
    weight = torch.randn({vocab}, 32).mul_(0.1).requires_grad_()
    targets = torch.randint(0, {vocab}, (tokens,))
    vocabulary, chunks = Vocabulary(0, {vocab}, None), Chunks(tokens)
    vocab_parallel_losses(x, weight, targets, vocabulary=vocabulary, chunks=chunks).total.backward()
step(2)  # libraries and thread pools
before = peak_bytes()
step({tokens})
print(peak_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.requirement("R-LEN-03")
def test_peak_memory_of_the_loss_is_a_fraction_of_the_logits() -> None:
    tokens, vocab = 4096, 32000
    code = PEAK.format(tokens=tokens, vocab=vocab)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 0.25 * 4 * tokens * vocab
