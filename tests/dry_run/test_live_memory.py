"""Living storages count once each, from birth to death: as the profiler's allocations, and on fake tensors too."""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from modeling.init import build_model
from modeling.mesh import one_rank_mesh
from recipe.dry_run.live_memory import LiveMemory
from tests.ranks import run_ranks
from tests.referee import mixed_config, tiny_config

KIB = 1024


def kib(number: int) -> torch.Tensor:
    return torch.zeros(number * KIB, dtype=torch.uint8)


def test_a_storage_counts_once_while_any_view_of_it_lives() -> None:
    with LiveMemory() as memory:
        x = kib(8)
        part = x[:KIB].view(2, -1)
        assert memory.alive_bytes == 8 * KIB
        del x
        assert memory.alive_bytes == 8 * KIB
        del part
        assert memory.alive_bytes == 0
    assert memory.peak_bytes == 8 * KIB


def test_the_peak_is_of_what_lives_at_once_since_the_restart() -> None:
    used, named, untouched = kib(1), kib(2), kib(4)
    with LiveMemory() as memory:
        used.add_(1)  # what was there before is seen when it is used or named
        memory.name([named, None], kind="weights")
        assert memory.bytes_at_peak() == {"weights": 2 * KIB, "activations": KIB}
        for _ in range(3):
            goes = kib(4)
            del goes
        both = [kib(2), kib(3)]
        assert memory.peak_bytes == 8 * KIB
        assert memory.bytes_at_peak() == {"weights": 2 * KIB, "activations": 6 * KIB}
        del both
        memory.restart()
        assert memory.peak_bytes == 3 * KIB
        after = kib(1)
    assert memory.peak_bytes == 4 * KIB
    assert after.numel() < untouched.numel()


def test_what_an_operator_writes_into_and_a_function_keeps_is_seen() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(torch.mul(x, 2, out=torch.empty(KIB)))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * ctx.saved_tensors[0]

    x = torch.zeros(KIB, requires_grad=True)
    with LiveMemory() as memory:
        y = Keeps.apply(x)
        assert memory.alive_bytes == 3 * 4 * KIB
        y.sum().backward()
        del y
        assert x.grad is not None
        assert memory.alive_bytes == 2 * 4 * KIB


def test_gradients_states_and_logits_are_told_apart() -> None:
    model = build_model(tiny_config(), mesh=one_rank_mesh(), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.arange(48).view(2, 24)
    with LiveMemory() as memory:
        memory.name(model.parameters(), kind="weights")
        memory.name_gradients(model.parameters())
        model(input_ids=ids, labels=ids, output_logits=False).loss.backward()
        logits_bytes = memory.bytes_at_peak()["logits"]
        optimizer.step()
        memory.name([x for state in optimizer.state.values() for x in state.values()], kind="optimizer")
        memory.restart()
        found = memory.bytes_at_peak()
    numbers = sum(p.numel() for p in model.parameters())
    assert found["weights"] == found["gradients"] == 4 * numbers
    assert 8 * numbers <= found["optimizer"] <= 8 * numbers + 4 * len(list(model.parameters()))
    assert logits_bytes == 0  # the peak is in the backward, when logits have gone


@pytest.mark.slow
def test_the_peak_is_the_profilers() -> None:
    config = mixed_config(hidden_size=128, moe_intermediate_size=128, vocab_size=512, max_position_embeddings=256)
    model = build_model(config, mesh=one_rank_mesh(), seed=0)
    ids = torch.randint(0, 512, (4, 256))

    def step() -> None:
        model(input_ids=ids, labels=ids, output_logits=False).loss.backward()
        model.zero_grad()

    step()
    gc.collect()
    memory = LiveMemory()
    with memory:
        memory.name([ids, *model.parameters()], kind="weights")
        memory.restart()
        before = memory.alive_bytes
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    assert memory.peak_bytes - before == pytest.approx(peak, rel=0.02)


def test_fake_tensors_have_the_peak_of_real_ones() -> None:
    peaks = []
    for mode in (FakeTensorMode(), nullcontext()):
        with mode, LiveMemory() as memory:
            net = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64))
            net(torch.zeros(128, 64)).square().sum().backward()
        peaks.append(memory.peak_bytes)
    assert peaks[0] == peaks[1] > 128 * 256 * 4


def _gathers(rank: int, world_size: int) -> dict[str, int]:
    from modeling.comm import all_gather_rows, reduce_scatter_rows

    x = torch.ones(KIB, 2)
    with LiveMemory() as memory:
        whole = all_gather_rows(x, dist.group.WORLD)
        part = reduce_scatter_rows(whole, dist.group.WORLD)
        memory.restart()
    assert part.shape == x.shape
    return memory.bytes_at_peak()


@pytest.mark.slow
def test_what_an_all_gather_brings_is_gathered() -> None:
    found = run_ranks(_gathers, 2)[0]
    assert found.pop("gathered") == 16 * KIB
    assert set(found) == {"activations"}  # x and the part; gloo may still hold what it sent
