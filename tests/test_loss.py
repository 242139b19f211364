"""Cross-entropy over a split vocabulary by chunks against plain torch, auxiliary losses against their formulas."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from modeling import loss as loss_module
from modeling.loss import IGNORED, Vocabulary, auxiliary_losses, vocab_parallel_losses
from modeling.router import RouterStatistics, route, router_statistics
from tests.ranks import run_ranks

TOKENS, HIDDEN, VOCAB = 21, 16, 51


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
    assert x.grad is not None
    assert weight.grad is not None
    assert logits.grad is not None
    return {"nll": nll.detach(), "z": z.detach(), "x": x.grad, "weight": weight.grad, "logits": logits.grad}


def by_chunks(x: Tensor, weight: Tensor, targets: Tensor, *, z_coef: float) -> dict[str, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    vocabulary = Vocabulary(0, weight.shape[0], None)
    losses = vocab_parallel_losses(x, weight, targets, vocabulary=vocabulary, z_coef=z_coef)
    torch.testing.assert_close(losses.total.detach(), losses.nll + z_coef * losses.z)
    (0.3 * losses.total).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return {"nll": losses.nll, "z": losses.z, "x": x.grad, "weight": weight.grad}


@pytest.mark.parametrize("z_coef", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 4, 21, 1000])
def test_chunks_of_any_size_match_whole_logits(monkeypatch: pytest.MonkeyPatch, rows: int, z_coef: float) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", rows * 4 * VOCAB)
    want = plainly(*batch(), z_coef=z_coef)
    got = by_chunks(*batch(), z_coef=z_coef)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("rows", [4, 1000])
def test_bf16_inputs_give_a_float32_loss(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", rows * 4 * VOCAB)
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
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 2)
    x = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16)
    got = by_chunks(x, weight, torch.zeros(1024, dtype=torch.int64), z_coef=0.0)
    torch.testing.assert_close(got["weight"].float().flatten(), torch.tensor([-512.0, 512.0]) * 0.3, rtol=1e-2, atol=0)


def _split(rank: int, world_size: int, z_coef: float, case: str) -> None:
    x, weight, targets = batch() if case == "many" else four_positions()
    rows = -(-weight.shape[0] // world_size)
    first = rank * rows
    num_real = max(0, min(weight.shape[0] - first, rows))
    local = torch.full((rows, x.shape[1]), 100.0, dtype=torch.float64)  # padding that must not be seen
    local[:num_real] = weight[first : first + num_real]
    x.requires_grad_()
    local.requires_grad_()
    vocabulary = Vocabulary(first, num_real, dist.group.WORLD)
    losses = vocab_parallel_losses(x, local, targets, vocabulary=vocabulary, z_coef=z_coef)
    (0.3 * losses.total).backward()
    want = plainly(x.detach(), weight, targets, z_coef=z_coef)
    torch.testing.assert_close((losses.nll, losses.z), (want["nll"], want["z"]))
    assert local.grad is not None
    torch.testing.assert_close(local.grad[:num_real], want["weight"][first : first + num_real])
    assert not local.grad[num_real:].any()
    assert x.grad is not None
    # This rank's part: the gradient that reaches x through this rank's columns of the logits.
    part = want["logits"][:, first : first + num_real] @ weight[first : first + num_real]
    torch.testing.assert_close(x.grad, part)
    total = x.grad.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, want["x"])
    assert not x.grad[targets == IGNORED].any()
    assert x.grad[targets != IGNORED].any(dim=1).all()


def four_positions() -> tuple[Tensor, Tensor, Tensor]:
    """Two targets in the first half of the vocabulary, one in the second, one ignored; an identity as head."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, torch.eye(8, dtype=torch.float64), torch.tensor([1, 3, 6, IGNORED])


@pytest.mark.parametrize("z_coef", [0.0, 0.1])
@pytest.mark.parametrize(("case", "world_size"), [("four", 2), ("many", 2)])
def test_r_tp_03_gradients_of_a_split_vocabulary_are_right_on_every_rank(
    case: str, world_size: int, z_coef: float
) -> None:
    run_ranks(_split, world_size, z_coef, case)


@pytest.mark.slow
def test_r_tp_03_also_where_the_last_rank_holds_mostly_padding() -> None:
    run_ranks(_split, 4, 0.1, "many")


def _nothing(rank: int, world_size: int) -> None:
    x, weight, targets = batch()
    rows = -(-VOCAB // world_size)
    local = F.pad(weight, (0, 0, 0, rows * world_size - VOCAB)).chunk(world_size)[rank].clone().requires_grad_()
    x.requires_grad_()
    vocabulary = Vocabulary(rank * rows, min(VOCAB - rank * rows, rows), dist.group.WORLD if world_size > 1 else None)
    losses = vocab_parallel_losses(x, local, torch.full_like(targets, IGNORED), vocabulary=vocabulary, z_coef=0.1)
    losses.total.backward()
    assert [loss.item() for loss in losses] == [0.0, 0.0, 0.0]
    assert x.grad is not None
    assert local.grad is not None
    assert not x.grad.any()
    assert not local.grad.any()


def test_r_loss_03_without_a_target_the_loss_and_every_gradient_are_zero() -> None:
    _nothing(0, 1)
    run_ranks(_nothing, 2)


def test_evaluation_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_chunk_gradient", None)
    x, weight, targets = batch()
    weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        losses = vocab_parallel_losses(x, weight, targets, vocabulary=Vocabulary(0, VOCAB, None))
    torch.testing.assert_close(losses.nll, plainly(x, weight.detach(), targets, z_coef=0.0)["nll"])


PEAK = """
import resource, torch
from modeling.loss import Vocabulary, vocab_parallel_losses
torch.set_num_threads(1)
def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def step(tokens):
    x = torch.randn(tokens, 32, requires_grad=True)
    weight = torch.randn({vocab}, 32).mul_(0.1).requires_grad_()
    targets = torch.randint(0, {vocab}, (tokens,))
    vocab_parallel_losses(x, weight, targets, vocabulary=Vocabulary(0, {vocab}, None)).total.backward()
step(2)  # libraries and thread pools
before = peak_bytes()
step({tokens})
print(peak_bytes() - before)
"""


@pytest.mark.slow
def test_r_len_03_peak_memory_of_the_loss_is_a_fraction_of_the_logits() -> None:
    tokens, vocab = 4096, 32000
    code = PEAK.format(tokens=tokens, vocab=vocab)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 0.25 * 4 * tokens * vocab


def statistics(logits: Tensor, *, num_active: int, mask: Tensor | None = None, num_sequences: int = 1) -> Any:
    routing = route(logits, num_active=num_active, renormalise=True, token_mask_t=mask)
    sequence = torch.arange(logits.shape[0]) // (logits.shape[0] // num_sequences)
    return router_statistics(routing, sequence_of_token_t=sequence, num_sequences=num_sequences, token_mask_t=mask)


def test_r_loss_08_layers_are_balanced_one_by_one() -> None:
    tokens = 16
    layers = []
    for expert in range(2):
        logits = torch.full((tokens, 2), -10.0)
        logits[:, expert] = 10.0
        layers.append(statistics(logits, num_active=1))
    losses = auxiliary_losses(layers, num_active=1, scope="sequence")
    torch.testing.assert_close(losses.balance_L / tokens, torch.tensor([2.0, 2.0]))


@pytest.mark.parametrize("height", [0.0, 3.0])
def test_r_loss_09_the_router_z_loss_is_the_mean_squared_log_sum_exp(height: float) -> None:
    tokens = 12
    mask = torch.arange(tokens) % 3 > 0
    for token_mask in (None, mask):
        layers = [statistics(torch.full((tokens, 4), height), num_active=2, mask=token_mask) for _ in range(3)]
        valid = tokens if token_mask is None else int(token_mask.sum())
        mean = (auxiliary_losses(layers, num_active=2, scope="sequence").z_L / valid).mean()
        assert mean.item() == pytest.approx((height + math.log(4)) ** 2, rel=1e-6)


def balance_by_hand(logits: Tensor, *, num_active: int) -> Tensor:
    """E * sum_i f_i * P_i of one layer and one scope, the choices of each token adding to `num_active`."""
    probs = logits.softmax(-1)
    chosen = torch.zeros_like(probs).scatter(1, probs.topk(num_active).indices, 1.0)
    return logits.shape[1] * (chosen.mean(0) * probs.mean(0)).sum()


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_balance_losses_are_weighted_by_valid_tokens(scope: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 6, generator=generator, dtype=torch.float64).requires_grad_()
    mask = torch.ones(24, dtype=torch.bool)
    mask[[3, 4, 5, 6, 20]] = False  # the first sequence of 8 is half padding
    layer = statistics(logits, num_active=2, mask=mask, num_sequences=3)
    got = auxiliary_losses([layer], num_active=2, scope=scope).balance_L[0]
    if scope == "micro_batch":
        want = balance_by_hand(logits[mask], num_active=2) * mask.sum()
    else:
        scopes = [logits[i : i + 8][mask[i : i + 8]] for i in (0, 8, 16)]
        want = torch.stack([balance_by_hand(part, num_active=2) * part.shape[0] for part in scopes]).sum()
    torch.testing.assert_close(got, want)
    (want_grad,) = torch.autograd.grad(want, logits)
    (grad,) = torch.autograd.grad(got, logits)
    torch.testing.assert_close(grad, want_grad)


def test_the_two_scopes_differ_and_only_sequences_add_up() -> None:
    logits = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    both = statistics(logits, num_active=2, num_sequences=2)
    halves = [statistics(half, num_active=2) for half in logits.chunk(2)]
    for scope, adds_up in (("sequence", True), ("micro_batch", False)):
        whole = auxiliary_losses([both], num_active=2, scope=scope).balance_L
        parts = [auxiliary_losses([half], num_active=2, scope=scope).balance_L for half in halves]
        assert torch.allclose(whole, parts[0] + parts[1]) == adds_up


def test_even_routing_has_the_least_balance_loss() -> None:
    statistic = RouterStatistics(torch.full((1, 4), 8.0), torch.full((1, 4), 4.0), torch.zeros(1))
    losses = auxiliary_losses([statistic], num_active=2, scope="sequence")
    assert losses.balance_L.item() == 16 * 2  # tokens times A: f adds to A


def test_a_sequence_of_padding_has_no_auxiliary_loss() -> None:
    layer = statistics(torch.randn(8, 4), num_active=2, mask=torch.zeros(8, dtype=torch.bool))
    losses = auxiliary_losses([layer], num_active=2, scope="sequence")
    assert (losses.balance_L.item(), losses.z_L.item()) == (0.0, 0.0)
