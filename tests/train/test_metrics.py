"""What a logged number means, and what a run says and leaves: each token once, one number in all places, no doubles."""

import importlib.util
import json
import math
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from modeling.auxiliary import TokenSums
from recipe.settings.arguments import parse_arguments
from recipe.settings.presets import PRESETS
from recipe.train.log import MetricsWriter, ProgressBar, describe_evaluation, describe_step
from recipe.train.metrics import (
    EvalRecord,
    StepMeter,
    StepRecord,
    Totals,
    TrainingClock,
    combine_ranks,
    load_ratio,
    make_eval_record,
    make_step_record,
    read_peak_memory_bytes,
)
from recipe.train.prepare import request_faults
from tests.ranks import run_ranks
from tests.resolving import TINY
from tests.training import Flags, read_metrics, train_on_ranks, write_inputs

NONE = torch.zeros(0)


def _sums(**changes: Any) -> TokenSums:
    """Those of a model without MoE layers, with changes."""
    values = {"nll": torch.tensor(1.0), "balance_L": NONE, "z_L": NONE, "entropy_L": NONE}
    values |= {"expert_counts": torch.zeros(0, 4), "dropped_L": NONE, "slowest_L": NONE, "bound_L": NONE}
    return TokenSums(**values | changes)


def _add(meter: StepMeter, sums: TokenSums, num_tokens: int, *, num_targets: int | None = None) -> None:
    num_targets = num_tokens if num_targets is None else num_targets
    meter.add(sums, num_targets=num_targets, num_tokens=num_tokens, squared_lengths=num_tokens**2)


def _meter_of(losses: list[float], tokens: list[int]) -> Totals:
    """The totals of a rank of a dense model whose micro-batches have these mean losses."""
    meter = StepMeter()
    for loss, num_tokens in zip(losses, tokens, strict=True):
        _add(meter, _sums(nll=torch.tensor(loss * num_tokens)), num_tokens)
    return meter.take(peak_memory_bytes=1)


def _record(ranks: list[Totals], *, tp: int = 1, elapsed_s: float = 0.5, peak_flops_per_s: float = 1e9) -> StepRecord:
    totals = combine_ranks(ranks, tp=tp)
    others: Any = {"step": 1, "lr": 0.1, "grad_norm": 2.0, "tokens": 5, "skipped_steps": 0, "sizes": TINY}
    return make_step_record(totals, elapsed_s=elapsed_s, peak_flops_per_s=peak_flops_per_s, **others)


@pytest.mark.parametrize(
    ("ranks", "loss"),
    [
        ([([4, 2, 1, 1], [16] * 4), ([8, 8, 8, 8], [16] * 4)], 5.0),
        ([([4, 1], [1, 3]), ([2], [4])], (4 + 3 + 8) / 8),
    ],
)
@pytest.mark.requirement("R-LOG-01")
def test_loss_is_over_all_micro_batches_and_ranks_weighted_by_tokens(ranks: Any, loss: float) -> None:
    assert _record([_meter_of(*rank) for rank in ranks]).loss == loss


@pytest.mark.parametrize(("tp", "samples"), [(2, [5, 5]), (1, [5]), (1, [2, 3]), (2, [2, 2, 3, 3])])
@pytest.mark.requirement("R-LOG-02")
def test_tokens_count_once_per_group(tp: int, samples: list[int]) -> None:
    ranks = [_meter_of([1.0], [num_tokens]) for num_tokens in samples]
    assert combine_ranks(ranks, tp=tp).num_tokens == 5
    assert _record(ranks, tp=tp, elapsed_s=0.5).tokens_per_s == 10.0


def test_flops_and_mfu_follow_from_tokens_per_second() -> None:
    record = _record([_meter_of([1.0], [16])], elapsed_s=2.0, peak_flops_per_s=1e8)
    assert record.model_flops_per_s == 127_872 * 16 / 2
    assert record.mfu == 127_872 * 16 / 2 / 1e8


@pytest.mark.requirement("R-LOG-04")
def test_aux_loss_is_the_mean_over_moe_layers() -> None:
    """Four layers of which two are MoE; the mean is over two, and over micro-batches by their tokens."""
    meter = StepMeter()
    for aux, num_tokens in ((1.0, 16), (3.0, 48)):
        sums = _sums(
            balance_L=torch.full((2,), aux * num_tokens),
            z_L=torch.tensor([0.0, 2.0]) * num_tokens,
            entropy_L=torch.tensor([0.5, 0.25]) * num_tokens,
            expert_counts=torch.tensor([[3, 1], [2, 2]]),
            dropped_L=torch.tensor([1.0, 0.0]),
            slowest_L=torch.tensor([6, 4]),
            bound_L=torch.tensor([3, 4]),
        )
        _add(meter, sums, num_tokens)
    record = _record([meter.take(peak_memory_bytes=1)])
    assert (record.aux_loss, record.z_loss, record.rho) == (2.5, 1.0, (1.5, 1.0))
    assert record.router_entropy == (0.5, 0.25)
    assert record.dropped == record.as_dict()["dropped"] == (0.25, 0.0)
    assert record.rank_rho == (2.0, 1.0)  # of the rows that were not dropped
    assert record.rank_rho_bound == (1.0, 1.0)


@pytest.mark.requirement("R-LOG-04")
def test_without_moe_layers_or_targets_the_metrics_are_absent() -> None:
    meter = StepMeter()
    _add(meter, _sums(nll=torch.tensor(0.0)), 4, num_targets=0)
    values = _record([meter.take(peak_memory_bytes=1)]).as_dict()
    assert not {"aux_loss", "z_loss", "rho", "dead_experts", "router_entropy", "rank_rho", "dropped"} & set(values)
    assert values["loss"] is None


def test_experts_are_counted_over_ranks_and_memory_is_the_highest() -> None:
    def rank(counts: tuple[float, ...], peak_memory_bytes: int) -> Totals:
        of_layers = {"aux_sums": (1.0,), "z_sums": (1.0,), "entropy_sums": (0.5,), "slowest": (6.0,)}
        dense = _meter_of([1.0], [1])
        return replace(dense, **of_layers, expert_counts=(counts,), peak_memory_bytes=peak_memory_bytes)

    ranks = [rank((4, 0), 5), rank((4, 0), 9), rank((0, 4), 6), rank((0, 4), 7)]
    totals = combine_ranks(ranks, tp=2)
    assert (totals.expert_counts, totals.slowest, totals.slowest_bound) == (((4, 4),), (12.0,), ())
    assert _record(ranks, tp=2).rank_rho == (1.5,)
    assert (totals.peak_memory_bytes, totals.aux_sums, totals.entropy_sums) == (9, (2.0,), (1.0,))


def test_an_expert_is_dead_that_no_rank_used_since_the_last_line() -> None:
    def rank(*steps: list[list[int]]) -> Totals:
        meter = StepMeter()
        for counts in steps:
            zeros = torch.zeros(2)
            _add(meter, _sums(balance_L=zeros, z_L=zeros, entropy_L=zeros, expert_counts=torch.tensor(counts)), 4)
        return meter.take(peak_memory_bytes=1)

    first = rank([[8, 0, 0, 0], [2, 2, 2, 2]], [[0, 8, 0, 0], [8, 0, 0, 0]])
    second = rank([[0, 8, 0, 0], [8, 0, 0, 0]], [[0, 0, 0, 8], [8, 0, 0, 0]])
    record = _record([first, second])
    assert record.dead_experts == record.as_dict()["dead_experts"] == (1, 0)


def test_a_half_finished_line_goes_on_under_new_numbers() -> None:
    """An expert that was used before it moved is not dead afterwards."""
    meter, zeros = StepMeter(), torch.zeros(1)
    meter.renumber_experts([[1, 0, 2]])  # nothing was counted yet
    for counts, numbers in (([[8, 0, 0]], [[2, 0, 1]]), ([[0, 0, 8]], [[0, 1, 2]])):
        _add(meter, _sums(balance_L=zeros, z_L=zeros, entropy_L=zeros, expert_counts=torch.tensor(counts)), 4)
        meter.renumber_experts(numbers)
    assert meter.take(peak_memory_bytes=1).expert_counts == ((0.0, 0.0, 16.0),)


def test_the_meter_starts_again_after_it_was_read() -> None:
    meter = StepMeter()
    with pytest.raises(ValueError, match=r"nothing was added since the last time"):
        meter.take(peak_memory_bytes=1)
    for loss in (3.0, 7.0):
        _add(meter, _sums(nll=torch.tensor(loss, requires_grad=True)), 1)
        assert meter.take(peak_memory_bytes=1).loss_sum == loss


def test_load_ratio() -> None:
    assert (load_ratio([5, 5, 5, 5]), load_ratio([0, 20, 0, 0])) == (1.0, 4.0)
    assert math.isnan(load_ratio([0, 0]))


def test_perplexity() -> None:
    record = make_eval_record(20.0, num_targets=10, step=7)
    assert record.as_dict() == {"step": 7, "eval_loss": 2.0, "perplexity": math.exp(2.0)}
    assert make_eval_record(1e6, num_targets=1, step=7).perplexity == math.inf
    assert make_eval_record(0.0, num_targets=0, step=7).perplexity is None


def test_the_clock_stands_in_a_pause() -> None:
    times_s = iter([0.0, 1.0, 11.0, 13.0, 14.5, 15.5])
    clock = TrainingClock(lambda: next(times_s))
    with clock.paused():
        assert clock.elapsed_s() == 1.0
    assert clock.lap() == 3.0
    assert clock.lap() == 1.5
    assert clock.elapsed_s() == 1.0


def test_peak_memory_is_at_least_what_is_held_now_and_on_a_gpu_what_torch_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = torch.ones(64 * 2**20)  # 256 MiB
    resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert block[0] == 1
    assert read_peak_memory_bytes("cpu") >= resident_bytes > 256 * 2**20
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    assert read_peak_memory_bytes("cuda") == 123


def _record_of(step: int, **changes: object) -> StepRecord:
    values: dict[str, object] = {"step": step, "loss": 5.0, "aux_loss": 1.0, "z_loss": 0.5, "grad_norm": 2.0, "lr": 0.1}
    values |= {"tokens": step * 10, "tokens_per_s": 1234.0, "model_flops_per_s": 1e9, "mfu": 0.25, "rho": (1.5, 1.25)}
    values |= {"dead_experts": (0, 3), "router_entropy": (1.75, 0.5), "skipped_steps": 0}
    values |= {"peak_memory_bytes": 3 * 2**30, "dropped": None, "rank_rho": None, "rank_rho_bound": None}
    return StepRecord(**(values | changes))  # type: ignore[arg-type]


def _lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _write(
    folder: Path, records: list[StepRecord | EvalRecord], *, after_step: int | None = None, tensorboard: bool = False
) -> list[str]:
    """Write the records, each of which is in the file as soon as it is written; what the writer says."""
    said: list[str] = []
    with closing(MetricsWriter(folder, after_step=after_step, tensorboard=tensorboard, say=said.append)) as writer:
        for record in records:
            writer.write(record)
            assert _lines(folder)[-1]["step"] == record.step
    return said


@pytest.mark.requirement("R-LOG-01")
def test_console_file_and_tracker_show_the_same_number(tmp_path: Path) -> None:
    record, evaluation = _record_of(1, loss=5.0), EvalRecord(step=1, eval_loss=2.0, perplexity=math.exp(2.0))
    broken = _record_of(2, loss=math.nan, rho=(math.inf, 1.0))
    _write(tmp_path, [record, evaluation, broken], tensorboard=True)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert describe_step(record) == (
        "loss 5.0000, 1,234 tokens/s, 3.00 GiB, rho 1.50, 3 dead experts, router entropy 0.50"
    )
    first, second, third = _lines(tmp_path)
    assert first["loss"] == 5.0
    assert second == {"step": 1, "eval_loss": 2.0, "perplexity": math.exp(2.0)}
    assert (third["loss"], third["rho"]) == (None, [None, 1.0]), "JSON has no word for what is not finite"
    shown = board.Scalars("loss")[0]
    assert (shown.step, shown.value) == (1, 5.0)
    assert board.Scalars("rho/moe_layer_1")[0].value == 1.25
    assert board.Scalars("dead_experts/moe_layer_1")[0].value == 3
    assert board.Scalars("router_entropy/moe_layer_0")[0].value == 1.75
    assert describe_step(_record_of(1, rho=None)) == "loss 5.0000, 1,234 tokens/s, 3.00 GiB"
    assert describe_step(_record_of(1, loss=None)).startswith("loss none")
    assert describe_evaluation(evaluation) == "step 1: eval loss 2.0000, perplexity 7.39"
    nothing = EvalRecord(step=7, eval_loss=None, perplexity=None)
    assert describe_evaluation(nothing) == "step 7: nothing to evaluate"


@pytest.mark.requirement("R-LOG-02")
def test_a_resumed_run_goes_on_from_the_step_it_resumes_and_a_fresh_one_anew(tmp_path: Path) -> None:
    """Tokens are counted on; what is run again is dropped, and a line that was cut short."""
    _write(tmp_path, [_record_of(step) for step in (1, 2, 3, 4)])
    said = _write(tmp_path, [_record_of(3, loss=1.0)], after_step=2)
    lines = [(line["step"], line["loss"], line["tokens"]) for line in _lines(tmp_path)]
    assert lines == [(1, 5.0, 10), (2, 5.0, 20), (3, 1.0, 30)]
    assert said == [f"{tmp_path}/metrics.jsonl: dropped 2 lines logged after step 2, which are run again"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    _write(tmp_path, [_record_of(4)], after_step=3)
    assert [line["step"] for line in _lines(tmp_path)] == [1, 2, 3, 4]
    _write(tmp_path, [_record_of(1)])
    assert [line["step"] for line in _lines(tmp_path)] == [1]


def test_a_file_that_is_not_ours_stops_the_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nhello\n{"step": 2}\n')
    fault = r"metrics\.jsonl line 2 is not a record of a run: 'hello'; move the file away"
    with pytest.raises(ValueError, match=fault):
        _write(tmp_path, [], after_step=1)


def test_tensorboard_that_is_not_installed_is_found_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--config_name=demo", "--train_file=stdlib", "--output_dir=run", "--report_to=tensorboard"]
    arguments = parse_arguments(words)
    assert request_faults(arguments, PRESETS["demo"]) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [fault] = request_faults(arguments, PRESETS["demo"])
    assert fault == "--report_to tensorboard needs the tensorboard package: pip install 'gather-moe[tensorboard]'"


@pytest.mark.parametrize("show", [True, False])
def test_the_bar_shows_step_loss_speed_and_memory_and_is_silent_on_other_ranks(
    show: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = ProgressBar(10, first_step=4, show=show)
    bar.advance()
    bar.show(_record_of(5))
    bar.say("step 5: saved")
    bar.close()
    shown = capsys.readouterr()
    if show:
        assert "5/10" in shown.err
        assert "loss 5.0000, 1,234 tokens/s, 3.00 GiB" in shown.err
        assert shown.out == "step 5: saved\n"
    else:
        assert shown == ("", "")


def train_without_targets(rank: int, world_size: int, flags: Flags) -> tuple[Any, list[str]]:
    """As if the data had masked every label."""
    from recipe.data.packing import Block, PackedBlocks

    read = PackedBlocks.__getitem__

    def read_masked(blocks: PackedBlocks, index: int) -> Block:
        block = read(blocks, index)
        block.labels[:] = -100
        return block

    with patch.object(PackedBlocks, "__getitem__", read_masked):
        return train_on_ranks(rank, world_size, flags)


@pytest.mark.requirement("R-LOSS-03")
def test_an_empty_step_is_counted_as_one_and_changes_nothing_but_weight_decay(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"max_steps": 2, "router_aux_loss_coef": 0.1}
    results, said = run_ranks(train_without_targets, 2, flags)[0]
    lines = read_metrics(tmp_path / "run")
    assert [lines[step]["loss"] for step in (1, 2)] == [None, None]
    assert [lines[step]["grad_norm"] for step in (1, 2)] == [0.0, 0.0]
    assert results["evaluation"]["eval_loss"] is None
    assert [line for line in said if "an empty step" in line] == [
        f"step {step}: an empty step, no token of its batch has a target" for step in (1, 2)
    ]


@pytest.mark.parametrize(
    ("step", "said"), [(7, "final eval loss 2.5000"), (5, "at step 5 eval loss 2.5000"), (None, "nothing was saved")]
)
def test_the_last_lines_say_whether_the_evaluation_is_final_and_that_nothing_was_saved(
    step: int | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipe.train.loop import TrainResults
    from run_pretrain import report

    evaluation = None if step is None else EvalRecord(step=step, eval_loss=2.5, perplexity=12.2)
    results = TrainResults(7, 700, None, evaluation, checkpoint=None, hf_folder=None, stopped=True)
    run: Any = SimpleNamespace(
        folder=SimpleNamespace(path=tmp_path), data=SimpleNamespace(report={"unigram_entropy_nats": 3.0})
    )
    report(results, SimpleNamespace(run=run))  # type: ignore[arg-type]
    shown = capsys.readouterr().out
    assert shown.startswith(said)
    assert shown.endswith("nothing was saved, as --save_strategy no asks\n")
    assert json.loads((tmp_path / "train_results.json").read_text())["checkpoint"] is None
