"""Cross-entropy over a split vocabulary by chunks, and losses over ranks and micro-batches, against plain torch."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from modeling import vocabulary as vocabulary_module
from modeling.comm import Chunks
from modeling.config import GatherMoeConfig
from modeling.vocabulary import IGNORED, Vocabulary, vocab_parallel_losses
from tests.engine_runs import (
    Case,
    accumulate,
    gradient_shards,
    join_shards,
    make_mesh,
    model_with,
    optimizer_for,
    slow,
    start_engine,
    train,
    weight_shards,
)
from tests.ranks import run_ranks
from tests.referee import Batch, Tensors, Training, assert_all_match, full_state, random_batch, referee_run, tiny_config
from tests.resolving import resolve

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


@pytest.mark.parametrize(
    ("world_size", "case", "num_chunks", "z_coef"),
    [
        *((2, *case, z_coef) for case in (("four", 1), ("four", 2), ("many", 1), ("many", 3)) for z_coef in (0.0, 0.1)),
        slow(4, "many", 2, 0.1),  # the last rank holds mostly padding
    ],
)
@pytest.mark.requirement("R-TP-03")
def test_gradients_of_a_split_vocabulary_are_right_on_every_rank(
    world_size: int, case: str, num_chunks: int, z_coef: float
) -> None:
    run_ranks(_split, world_size, z_coef, case, num_chunks)


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


def losses_of_two_and_one() -> tuple[GatherMoeConfig, Tensors, Batch]:
    """Two sequences: one target with a loss of exactly 2, and nine targets with a loss of exactly 1.

    Attention and experts write nothing, so that a token's logits are the head times its own embedding, which has a
    single channel.
    """
    config = tiny_config()
    state = full_state(config)
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "experts.down_proj", "embed_tokens.weight", "lm_head.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    for token, loss in ((0, 2.0), (1, 1.0)):
        state["model.embed_tokens.weight"][token, token] = 1.0
        normed = (1 / 32 + config.rms_norm_eps) ** -0.5
        probability = math.exp(-loss)
        logit = math.log(49 * probability / (1 - probability))  # against 49 logits of 0
        state["lm_head.weight"][token, token] = logit / normed
    ids = torch.tensor([[0] * 16, [1] * 16])
    labels = torch.full_like(ids, -100)
    labels[0, 1], labels[1, 1:10] = 0, 1
    return config, state, Batch(ids, labels)


CUTS = [
    Case(),
    Case(accumulation=2, stage=2),
    Case(dp=2, stage=1),
    Case(tp=2, ep=2, accumulation=2),
    slow(Case(dp=2, tp=2, ep=2, stage=3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CUTS, ids=str)
@pytest.mark.requirement("R-LOSS-01")
def test_every_target_weighs_the_same_however_the_batch_is_cut(case: Case) -> None:
    config, state, batch = losses_of_two_and_one()
    want = referee_run(config, state, batches=[batch])
    assert want.curves.losses == pytest.approx([1.1], abs=1e-5)
    got = train(config, state, case, batches=[batch])
    assert got.curves.losses == pytest.approx([1.1], abs=1e-5), "1.5 is the mean of means"
    assert_all_match(got.gradients, want.gradients)
    assert want.gradients["lm_head.weight"].abs().max() > 0.1


def without_a_language_model(config: GatherMoeConfig) -> Tensors:
    """A head of zeros passes no gradient on, so that all below it learns from the auxiliary losses alone."""
    state = full_state(config)
    state["lm_head.weight"].zero_()
    return state


@pytest.mark.parametrize(
    "case",
    [
        Case(stage=2),
        Case(tp=2, ep=2, stage=1),
        slow(Case(dp=2, accumulation=4, stage=2)),
        slow(Case(dp=2, tp=2, ep=2, accumulation=4, stage=2)),
    ],
    ids=str,
)
@pytest.mark.requirement("R-LOSS-02")
def test_the_routers_gradient_follows_the_coefficients_and_not_the_layout(case: Case) -> None:
    config = tiny_config()
    state, batches = without_a_language_model(config), [random_batch()]
    once, twice, without_z = (Training(balance_coef=0.1 * n, z_coef=z * n) for n, z in ((1, 0.01), (2, 0.01), (1, 0.0)))
    want = referee_run(config, state, batches=batches, training=once)
    unlike = referee_run(config, state, batches=batches, training=without_z)
    got, doubled = (train(config, state, case, batches=batches, training=training) for training in (once, twice))
    torch.testing.assert_close(got.curves.balance, want.curves.balance, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.curves.z, want.curves.z, atol=1e-5, rtol=0)
    assert_all_match(got.gradients, want.gradients, atol=1e-6)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert got.gradients[name].abs().max() > 1e-3
        assert torch.equal(doubled.gradients[name], 2 * got.gradients[name])
        assert not torch.allclose(unlike.gradients[name], want.gradients[name], atol=1e-5), "both losses have a part"


def _empty_step(
    rank: int, world_size: int, config: Any, state: Tensors, case: Case, chunk_bytes: int
) -> tuple[float, float, Tensors, Tensors]:
    training = Training(learning_rate=0.01, balance_coef=0.1, z_coef=0.01, max_grad_norm=1.0)
    batch = random_batch()
    batch.labels.fill_(-100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_module, "CHUNK_BYTES", chunk_bytes)
        engine = start_engine(config, state, case, training=training)
        sums = accumulate(engine, batch, case)
        gradients = gradient_shards(engine)
        norm = engine.update(learning_rate=training.learning_rate)
    return sums.nll.item(), norm, gradients, weight_shards(engine)


@pytest.mark.parametrize(
    ("case", "chunk_bytes"),
    [
        (Case(), 400),
        *(slow(Case(tp=2, ep=2, stage=stage), 2**24) for stage in (0, 1)),
        (Case(tp=2, ep=2, stage=2), 2**24),
        (Case(tp=2, ep=2, stage=3), 400),
        slow(Case(dp=2, accumulation=2, stage=2), 400),
    ],
    ids=str,
)
@pytest.mark.requirement("R-LOSS-03")
def test_a_batch_without_a_target_teaches_nothing(case: Case, chunk_bytes: int) -> None:
    config = tiny_config(logits_z_loss_coef=0.1)
    state = full_state(config)
    by_rank = run_ranks(_empty_step, case.num_ranks, config, state, case, chunk_bytes)
    assert [result[:2] for result in by_rank] == [(0.0, 0.0)] * len(by_rank)
    gradients, weights = (join_shards([r[part] for r in by_rank], config, case) for part in (2, 3))
    for name, gradient in gradients.items():
        assert not gradient.any(), name
        decay = 1 - 0.01 * 0.1 if gradient.dim() > 1 else 1.0  # AdamW's weight decay, on matrices only
        torch.testing.assert_close(weights[name], state[name] * decay, atol=1e-7, rtol=1e-6)


# Of a parameter in each micro-batch. A sum in bfloat16 would stay 1: 1 + 1/256 is rounded to it.
GRADIENTS = [1.0] + [1 / 256] * 63


def _sums_of_gradients(rank: int, world_size: int, engine_config: dict[str, Any]) -> list[float]:
    """The smallest and the largest sum of each parameter."""
    from recipe.engine.engine import Engine

    sizes = {"hidden_size": 8, "head_dim": 4, "num_attention_heads": 2, "moe_intermediate_size": 8}
    config = tiny_config(num_hidden_layers=1, **sizes)
    model = model_with(config, full_state(config), make_mesh(config, Case()))
    for parameter in model.parameters():
        given = iter(GRADIENTS)
        parameter.register_hook(lambda gradient, given=given: torch.full_like(gradient, next(given)))
    engine = Engine(model, ds_config=engine_config, optimizer=optimizer_for(model, Training(adam_eps=None)))
    batch = random_batch(num_sequences=len(GRADIENTS), block_size=2)
    accumulate(engine, batch, Case(accumulation=len(GRADIENTS)))
    return [f(g).item() for f in (torch.amin, torch.amax) for g in gradient_shards(engine).values()]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.requirement("R-LOSS-05")
def test_many_small_gradients_are_not_lost_beside_a_large_one(stage: int) -> None:
    settings = resolve(
        {"zero_optimization": {"stage": stage}, "bf16": {"enabled": stage > 0}, "parallel": {"tp": 1}},
        "--per_device_train_batch_size=1",
        f"--gradient_accumulation_steps={len(GRADIENTS)}",
        world=1,
    )
    if stage:
        assert settings.engine["data_types"]["grad_accum_dtype"] == "fp32"
        assert settings.engine["communication_data_type"] == "fp32"
        assert any("gradients are summed in float32" in note for note in settings.notes)
    [sums] = run_ranks(_sums_of_gradients, 1, settings.engine)
    assert sums == pytest.approx([sum(GRADIENTS)] * len(sums), abs=1e-3)
