"""Steps of a real run are recorded and taken apart, and nothing of the recording is left behind."""

import gc
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from modeling.init import build_model
from modeling.mesh import one_rank_mesh
from recipe.plan.job import job_of
from recipe.plan.traffic import planned_traffic
from recipe.profile.summary import Summary, summarise
from recipe.profile.trace_file import find_traces, read_traces
from recipe.profile.transfers import Links
from recipe.settings.arguments import parse_arguments
from recipe.settings.model import read_model, sizes_of
from recipe.settings.resolve import WorldInfo, resolve_config
from recipe.settings.sources import load_deepspeed_json
from recipe.shared.errors import RanksFailedError
from recipe.shared.ranks import OneRank
from recipe.shared.scopes import Scope, ranks_name, read_ranks, read_scope, scope_name
from recipe.train import recording
from recipe.train.recording import StepRecorder, named_parts, tensor_bytes
from tests.profile_traces import take_apart
from tests.ranks import run_ranks
from tests.referee import tiny_config
from tests.training import Flags, read_metrics, train_on_ranks, write_ds_config, write_inputs


def test_names_of_scopes_and_of_ranks_can_be_read_again() -> None:
    for scope in (Scope("attention", 12), Scope("head"), Scope("optimizer")):
        assert read_scope(scope_name(scope)) == scope
    for ranks in ([0], [0, 1], [3, 7, 11], [0, 1, 5], [2, 1]):
        assert read_ranks(ranks_name(ranks)) == tuple(ranks)
    assert ranks_name(range(0, 1024, 8)) == "gather_moe_ranks/0:1017:8"
    assert read_scope("aten::mm") is None
    assert read_ranks("aten::mm") is None


def test_parts_have_names_while_they_are_recorded_and_are_as_before_afterwards() -> None:
    model = build_model(tiny_config(), mesh=one_rank_mesh(), seed=0)
    engine = SimpleNamespace(ds=SimpleNamespace(backward=lambda loss: loss.backward()), update=lambda: None)
    before = [dict(vars(module)) for module in model.modules()], dict(vars(engine)), dict(vars(engine.ds))
    ids = torch.zeros(1, 8, dtype=torch.long)
    with named_parts(model, engine), torch.profiler.profile() as profiler:
        engine.ds.backward(model(input_ids=ids, labels=ids).loss)
        engine.update()
    names = {event.name for event in profiler.events()}
    scopes = {scope for scope in map(read_scope, names) if scope is not None}
    kinds = ("norms", "attention", "experts", "router")
    layers = {Scope(kind, i) for i in range(model.config.num_hidden_layers) for kind in kinds}
    assert scopes == layers | {Scope(kind) for kind in ("embedding", "head", "gradients", "optimizer")}
    after = [dict(vars(module)) for module in model.modules()], dict(vars(engine)), dict(vars(engine.ds))
    assert [list(names) for names in after[0]] == [list(names) for names in before[0]]
    assert after[1:] == before[1:]


def test_bytes_of_tensors_count_a_storage_once() -> None:
    gc.collect()  # what earlier tests left must not go in between
    before = tensor_bytes()
    with FakeTensorMode():
        fake = torch.empty(1000)
    kept = [nn.Parameter(torch.empty(1000))]
    kept.append(kept[0].detach()[10:])  # type: ignore[arg-type]
    assert tensor_bytes() - before == 4000
    assert fake.nbytes == 4000


def recorder(
    *, steps: int, first: int | None, max_steps: int, after_step: int = 0, folder: Path | None = None
) -> tuple[StepRecorder, list[str]]:
    """One of a rank alone, and what it says."""
    schedule = SimpleNamespace(schedule=SimpleNamespace(max_steps=max_steps))
    arguments = SimpleNamespace(profile_steps=steps, profile_from_step=first)
    said: list[str] = []
    run: Any = SimpleNamespace(
        arguments=arguments,
        settings=schedule,
        say=said.append,
        ranks=OneRank(),
        folder=SimpleNamespace(path=folder),
        world=SimpleNamespace(device="cpu"),
    )
    return StepRecorder(run, SimpleNamespace(model=None), after_step=after_step), said  # type: ignore[arg-type]


def test_steps_that_a_run_does_not_take_cannot_be_recorded() -> None:
    recorder(steps=3, first=None, max_steps=5)
    recorder(steps=0, first=99, max_steps=5)
    with pytest.raises(
        ValueError, match=r"--profile_steps 3 would record steps 3 to 5, but this run has 4; raise --max"
    ):
        recorder(steps=3, first=None, max_steps=4)
    with pytest.raises(ValueError, match=r"--profile_steps 1 would record step 7, but .* --profile_from_step"):
        recorder(steps=1, first=7, max_steps=6)


@pytest.mark.parametrize(
    ("first", "after_step", "words"),
    [
        (None, 100, "nothing is recorded: --profile_steps is for steps 103 to 105 here, but the run goes on behind"),
        (10, 50, "nothing is recorded: --profile_steps is for steps 10 to 12 here, but the run goes on behind"),
        (10, 10, "nothing is recorded: "),
        (None, 97, "step 100 alone of steps 100 to 102 will be recorded: the run goes on behind step 97 and ends with"),
        (None, 96, "steps 99 to 100 alone of steps 99 to 101 will be recorded"),
        (None, 95, ""),
        (10, 9, ""),
    ],
)
def test_a_run_that_goes_on_records_what_is_left(first: int | None, after_step: int, words: str) -> None:
    _, said = recorder(steps=3, first=first, max_steps=100, after_step=after_step)
    assert len(said) == bool(words)
    assert "".join(said).startswith(words)


def record(steps: StepRecorder, *, of: range, kind: str = "") -> None:
    """Take these steps as the loop does; a run without a model has no parts to name."""
    with (
        patch.object(recording, "named_parts", lambda model, engine: nullcontext()),
        patch.object(StepRecorder, "_facts", lambda self: {"rank": 0}),
        steps,
    ):
        for step in of:
            steps.begin(step)
            torch.ones(8).exp()
            if kind:
                raise RuntimeError(kind)
            steps.end(step)


def test_a_run_that_ends_early_writes_what_there_is_and_one_that_fails_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    for name in ("rank-7.json.gz", ".rank-7.json.gz", "profile.html"):
        (folder / name).touch()
    steps, said = recorder(steps=4, first=2, max_steps=9, folder=tmp_path)
    record(steps, of=range(1, 4))
    [line] = said
    assert line.startswith("recorded steps 2 to 3, where the run stopped, of steps 2 to 5: gather-moe profile ")
    # Traces of an earlier run with more ranks would mix with these; a page of theirs is the user's.
    assert sorted(path.name for path in folder.iterdir()) == ["profile.html", "rank-0.json.gz"]
    assert take_apart(folder).steps == [2, 3]

    steps, said = recorder(steps=2, first=1, max_steps=9, folder=tmp_path / "failing")
    with pytest.raises(RuntimeError, match="out of memory"):
        record(steps, of=range(1, 3), kind="out of memory")
    assert said == []
    assert list((tmp_path / "failing" / "profile").iterdir()) == []


def test_what_cannot_be_deleted_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "profile" / "rank-0.json.gz").mkdir(parents=True)
    steps, _ = recorder(steps=1, first=1, max_steps=2, folder=tmp_path)
    with pytest.raises(RanksFailedError, match=r"rank-0\.json\.gz"):
        steps.begin(1)


def seconds_of(summary: Summary, **wanted: Any) -> float:
    """Of all ranks together."""
    rows = [row for row in summary.time if row.state == "work" and row.part is not None]
    return sum(sum(r.seconds) for r in rows if all(getattr(r.part, key) == value for key, value in wanted.items()))


@pytest.mark.slow
def test_recorded_steps_of_two_ranks(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": 2, "ep": 2})
    options = {"profile_steps": 2, "gradient_checkpointing": "true"}
    options |= {"save_strategy": "no", "save_steps": 2, "eval_steps": 2, "max_eval_samples": 0}
    results, said = run_ranks(train_on_ranks, 2, flags | options)[0]
    folder = tmp_path / "run" / "profile"
    assert f"recorded steps 3 to 4: gather-moe profile {folder} --out {folder}" in said
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json.gz", "rank-1.json.gz"]
    summary = summarise(read_traces(find_traces([folder])), links=Links())
    assert (results["checkpoint"], results["hf_folder"], results["evaluation"]) == (None, None, None)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not any("counts as moving" in note for note in summary.notes)
    assert (summary.steps, summary.ranks, summary.world_size, summary.device) == ([3, 4], [0, 1], 2, "cpu")
    for rank in range(2):
        step_s = sum(by_rank[rank] for by_rank in summary.step_seconds) / 2
        assert sum(row.seconds[rank] for row in summary.time) == pytest.approx(step_s)
    for layer in range(2):
        for kind in ("attention", "experts", "router", "norms"):
            for phase in ("forward", "backward", "recompute"):
                assert seconds_of(summary, kind=kind, layer=layer, phase=phase) > 0, (layer, kind, phase)
    for kind in ("head", "embedding", "gradients", "optimizer"):
        assert seconds_of(summary, kind=kind) > 0, kind
    assert all(line.whole and line.peak_bytes > 100_000 and len(line.points) > 20 for line in summary.memory)
    assert len(summary.memory) == 2
    assert_traffic_is_planned(summary, flags | options)

    run_ranks(train_on_ranks, 2, flags | {"output_dir": tmp_path / "plain", "gradient_checkpointing": "true"})
    assert not (tmp_path / "plain" / "profile").exists()
    ours, others = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "plain")
    assert [line["loss"] for line in ours.values()] == [line["loss"] for line in others.values()]


def assert_traffic_is_planned(summary: Summary, flags: Flags) -> None:
    """Bytes and calls of the model's collectives, by operation, are the planner's. The loop adds a flag: stop?"""
    arguments = parse_arguments([f"--{name}={value}" for name, value in flags.items()])
    model = read_model(arguments).kwargs
    ranks = WorldInfo(world_size=2, local_world_size=2, device="cpu", compute_capability=None)
    ds_config = load_deepspeed_json(arguments.ds_config)
    settings = resolve_config(arguments, deepspeed_json=ds_config, ranks=ranks, sizes=sizes_of(model))
    job = job_of(settings, model=model, recompute=True, device="cpu")
    planned, seen = planned_traffic(job), summary.transfers
    assert {row.route.among for row in seen} == {"2 ranks"}
    # On gloo the rows of a scatter travel as an exchange.
    for ops, flag_bytes in ((["all_gather"], 0), (["reduce_scatter", "all_to_all"], 0), (["all_reduce"], 8)):
        recorded, expected = [r for r in seen if r.route.op in ops], [r for r in planned if r.op in ops]
        assert sum(r.sent_bytes or 0 for r in recorded) == sum(r.sent_bytes for r in expected) + flag_bytes
        assert sum(r.num_calls for r in recorded) == sum(r.num_calls for r in expected) + (flag_bytes > 0)
