"""What a logged number means: each token once, each group once, each MoE layer once."""

import math
import os
from pathlib import Path

import pytest
import torch

from recipe.metrics import (
    StepMeter,
    StepState,
    Totals,
    TrainingClock,
    combine_ranks,
    load_ratio,
    make_eval_record,
    make_step_record,
    moe_layer_mean,
    read_peak_memory_bytes,
)
from tests.test_flops import TINY

NO_LAYERS, NO_EXPERTS = torch.zeros(0), torch.zeros(0, 4)


def _meter_of(losses: list[float], tokens: list[int]) -> Totals:
    """The totals of a rank of a dense model whose micro-batches have these mean losses."""
    meter = StepMeter(num_moe_layers=0, num_experts=4)
    for loss, num_tokens in zip(losses, tokens, strict=True):
        meter.add(
            torch.tensor(loss * num_tokens),
            num_targets=num_tokens,
            num_tokens=num_tokens,
            squared_lengths=num_tokens**2,
            aux_losses=NO_LAYERS,
            z_losses=NO_LAYERS,
            expert_counts=NO_EXPERTS,
        )
    return meter.take(peak_memory_bytes=1)


def _state(**changes: object) -> StepState:
    values = {"step": 1, "lr": 0.1, "grad_norm": 2.0, "tokens": 5, "skipped_steps": 0, "elapsed_s": 0.5} | changes
    return StepState(**values)  # type: ignore[arg-type]


def _loss_of(ranks: list[Totals]) -> float | None:
    totals = combine_ranks(ranks, tp=1)
    return make_step_record(totals, state=_state(), sizes=TINY, peak_flops_per_s=1e9).loss


def test_r_log_01_loss_is_over_all_micro_batches_and_ranks() -> None:
    assert _loss_of([_meter_of([4, 2, 1, 1], [16] * 4), _meter_of([8, 8, 8, 8], [16] * 4)]) == 5.0


def test_r_log_01_loss_is_weighted_by_tokens() -> None:
    assert _loss_of([_meter_of([4, 1], [1, 3]), _meter_of([2], [4])]) == (4 + 3 + 8) / 8


def test_a_step_without_targets_has_no_loss() -> None:
    meter = StepMeter(num_moe_layers=0, num_experts=4)
    meter.add(
        torch.tensor(0.0),
        num_targets=0,
        num_tokens=4,
        squared_lengths=16,
        aux_losses=NO_LAYERS,
        z_losses=NO_LAYERS,
        expert_counts=NO_EXPERTS,
    )
    assert _loss_of([meter.take(peak_memory_bytes=1)]) is None


@pytest.mark.parametrize(("tp", "samples"), [(2, [5, 5]), (1, [5]), (1, [2, 3]), (2, [2, 2, 3, 3])])
def test_r_log_02_tokens_count_once_per_group(tp: int, samples: list[int]) -> None:
    totals = combine_ranks([_meter_of([1.0], [num_tokens]) for num_tokens in samples], tp=tp)
    record = make_step_record(totals, state=_state(elapsed_s=0.5), sizes=TINY, peak_flops_per_s=1e9)
    assert totals.num_tokens == 5
    assert record.tokens_per_s == 10.0


def test_flops_and_mfu_follow_from_tokens_per_second() -> None:
    totals = combine_ranks([_meter_of([1.0], [16])], tp=1)
    record = make_step_record(totals, state=_state(elapsed_s=2.0), sizes=TINY, peak_flops_per_s=1e8)
    assert record.model_flops_per_s == 127_872 * 16 / 2
    assert record.mfu == 127_872 * 16 / 2 / 1e8


def test_r_log_04_aux_loss_is_the_mean_over_moe_layers() -> None:
    """Four layers of which two are MoE; the mean is over two, and over micro-batches by their tokens."""
    meter = StepMeter(num_moe_layers=2, num_experts=2)
    for aux, num_tokens in ((1.0, 16), (3.0, 48)):
        meter.add(
            torch.tensor(1.0),
            num_targets=num_tokens,
            num_tokens=num_tokens,
            squared_lengths=num_tokens,
            aux_losses=torch.full((2,), aux),
            z_losses=torch.tensor([0.0, 2.0]),
            expert_counts=torch.tensor([[3, 1], [2, 2]]),
        )
    totals = combine_ranks([meter.take(peak_memory_bytes=1)], tp=1)
    record = make_step_record(totals, state=_state(), sizes=TINY, peak_flops_per_s=1e9)
    assert (record.aux_loss, record.z_loss, record.rho) == (2.5, 1.0, (1.5, 1.0))
    assert moe_layer_mean([1.0, 1.0]) == 1.0


def test_r_log_04_without_moe_layers_the_metrics_are_absent() -> None:
    totals = combine_ranks([_meter_of([1.0], [16])], tp=1)
    values = make_step_record(totals, state=_state(), sizes=TINY, peak_flops_per_s=1e9).as_dict()
    assert not {"aux_loss", "z_loss", "rho"} & set(values)
    assert moe_layer_mean([]) is None


def test_experts_are_counted_over_ranks_and_memory_is_the_highest() -> None:
    def rank(counts: tuple[float, ...], peak_memory_bytes: int) -> Totals:
        return Totals(
            loss_sum=1.0,
            num_targets=1,
            num_tokens=1,
            squared_lengths=1,
            aux_sums=(1.0,),
            z_sums=(1.0,),
            expert_counts=(counts,),
            peak_memory_bytes=peak_memory_bytes,
        )

    totals = combine_ranks([rank((4, 0), 5), rank((4, 0), 9), rank((0, 4), 6), rank((0, 4), 7)], tp=2)
    assert totals.expert_counts == ((4, 4),)
    assert totals.peak_memory_bytes == 9
    assert totals.aux_sums == (2.0,)


def test_the_meter_starts_again_after_it_was_read() -> None:
    meter = StepMeter(num_moe_layers=0, num_experts=4)
    with pytest.raises(ValueError, match=r"nothing was added since the last time"):
        meter.take(peak_memory_bytes=1)
    for loss in (3.0, 7.0):
        meter.add(
            torch.tensor(loss, requires_grad=True),
            num_targets=1,
            num_tokens=1,
            squared_lengths=1,
            aux_losses=NO_LAYERS,
            z_losses=NO_LAYERS,
            expert_counts=NO_EXPERTS,
        )
        assert meter.take(peak_memory_bytes=1).loss_sum == loss


def test_load_ratio() -> None:
    assert load_ratio([5, 5, 5, 5]) == 1.0
    assert load_ratio([0, 20, 0, 0]) == 4.0
    assert math.isnan(load_ratio([0, 0]))


def test_perplexity() -> None:
    record = make_eval_record(20.0, num_targets=10, step=7)
    assert record.as_dict() == {"step": 7, "eval_loss": 2.0, "perplexity": math.exp(2.0)}
    assert make_eval_record(1e6, num_targets=1, step=7).perplexity == math.inf
    assert make_eval_record(0.0, num_targets=0, step=7).perplexity is None


def test_the_clock_leaves_pauses_out() -> None:
    times_s = iter([0.0, 1.0, 11.0, 13.0, 14.5])
    clock = TrainingClock(lambda: next(times_s))
    with clock.paused():
        pass
    assert clock.lap() == 3.0
    assert clock.lap() == 1.5


def test_peak_memory_is_at_least_what_is_held_now() -> None:
    block = torch.ones(64 * 2**20)  # 256 MiB
    resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert block[0] == 1
    assert read_peak_memory_bytes("cpu") >= resident_bytes > 256 * 2**20


def test_peak_memory_on_a_gpu_is_what_torch_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    assert read_peak_memory_bytes("cuda") == 123
