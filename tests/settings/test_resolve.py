"""Flags and DeepSpeed JSON resolve into one configuration, or into one list of everything that is wrong."""

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from recipe.settings.arguments import parse_arguments
from recipe.settings.model import read_model, sizes_of
from recipe.settings.resolve import WorldInfo, resolve_config
from recipe.settings.sources import load_deepspeed_json
from recipe.settings.training import learning_rate_at
from tests.resolving import TINY, faults_of, resolve

FOLDER = Path(__file__).parents[2] / "ds_configs"

# The file that users of transformers' Trainer know.
ALL_AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
    | dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"), "auto"),
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def test_without_a_file_the_defaults_hold() -> None:
    got = resolve(None, "--max_steps=10")
    assert str(got.layout) == "dp=1 tp=4 ep=4 etp=1"
    assert (got.zero_stage, got.precision, got.num_sequences, got.accumulation) == (2, "fp32", 8, 1)
    assert got.engine == {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 8584},  # 34,336 weights over four ranks
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    json.dumps(asdict(got))  # it is written next to the run


@pytest.mark.parametrize(
    ("flags", "stage", "size"),
    [([], 1, 8584), ([], 2, 8584), ([], 3, 8584), ([], 0, None), (["--bf16"], 1, None), (["--bf16"], 2, 8584)],
)
def test_a_bucket_holds_no_more_than_a_ranks_share_of_the_weights(
    flags: list[str], stage: int, size: int | None
) -> None:
    """Only where DeepSpeed reserves room for all of it, and nothing is said."""
    got = resolve({"zero_optimization": {"stage": stage}}, *flags)
    assert got.engine["zero_optimization"].get("reduce_bucket_size") == size
    assert any('"zero_optimization.reduce_bucket_size" became 8584: ' in note for note in got.notes) == (
        size is not None
    )
    said = resolve({"zero_optimization": {"stage": stage, "reduce_bucket_size": 10**9}}, *flags)
    assert said.engine["zero_optimization"]["reduce_bucket_size"] == 10**9
    large = replace(TINY, vocab_size=10**8)
    assert "reduce_bucket_size" not in resolve({"zero_optimization": {"stage": stage}}, *flags, sizes=large).engine


def test_bf16_sums_gradients_in_fp32() -> None:
    engine = resolve(None, "--bf16").engine
    assert engine["bf16"] == {"enabled": True}
    assert engine["data_types"] == {"grad_accum_dtype": "fp32"}
    assert engine["communication_data_type"] == "fp32"


def test_our_blocks_and_merged_blocks_do_not_reach_deepspeed_and_the_input_stays_as_it_was() -> None:
    given = {**copy.deepcopy(ALL_AUTO), "parallel": {"tp": 2}, "arguments": {}, "compile": {"enabled": False}}
    before = copy.deepcopy(given)
    engine = resolve(given, "--max_steps=10").engine
    assert given == before
    assert not {"parallel", "arguments", "optimizer", "scheduler", "compile"} & set(engine)
    assert engine["steps_per_print"] == 2000
    assert engine["zero_optimization"]["overlap_comm"] is True


@pytest.mark.requirement("R-CFG-01")
def test_a_misspelled_key_stops_the_run_and_an_opt_out_passes_it_on() -> None:
    config = {"gradient_cliping": 0.25, "zero_optimization": {"stge": 1}, "parallel": {"strateggy": "x"}, "amp": {}}
    text = faults_of(config)
    assert 'unknown key "gradient_cliping"; did you mean "gradient_clipping"?; --allow_unknown_ds_keys' in text
    assert 'unknown key "zero_optimization.stge"; did you mean "stage"?' in text
    assert 'unknown key "parallel.strateggy"; did you mean "strategy"?' in text
    assert '"amp" was removed from DeepSpeed' in text
    got = resolve({"gradient_cliping": 0.25}, "--allow_unknown_ds_keys")
    assert got.engine["gradient_cliping"] == 0.25
    assert any("gradient_cliping" in note for note in got.notes)
    for block in ("parallel", "optimizer", "scheduler"):  # never passed on, so nobody would read it
        assert f'unknown key "{block}.qqq"' in faults_of({block: {"qqq": 1}}, "--allow_unknown_ds_keys")


@pytest.mark.requirement("R-CFG-02")
def test_every_auto_is_resolved_from_our_settings_and_deepspeed_takes_them() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    flags = ["--bf16", "--learning_rate=1e-3", "--adam_beta2=0.95", "--weight_decay=0.1", "--warmup_steps=5"]
    got = resolve(ALL_AUTO, *flags, "--max_steps=50", "--gradient_accumulation_steps=3", "--max_grad_norm=0.5")
    assert '"auto"' not in json.dumps(got.engine)
    assert got.engine["bf16"]["enabled"] is True
    assert got.engine["fp16"] == {"enabled": False}
    assert got.engine["gradient_clipping"] == 0.5
    assert got.engine["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 1024,
        "stage3_prefetch_bucket_size": 921,
        "stage3_param_persistence_threshold": 320,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert asdict(got.optimizer) == {
        "learning_rate": 1e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
    }
    assert (got.schedule.kind, got.schedule.warmup_steps, got.schedule.max_steps) == ("linear", 5, 50)
    assert '"bf16.enabled": "auto" became true (--bf16 on the command line)' in got.notes
    assert '"optimizer.params.eps": "auto" became 1e-08 (the default of --adam_epsilon)' in got.notes
    read = DeepSpeedConfig(resolve(ALL_AUTO, *flags, "--max_steps=50", world=1).engine)
    assert (read.bfloat16_config.enabled, read.zero_config.stage, read.train_batch_size) == (True, 3, 8)


@pytest.mark.requirement("R-CFG-02")
def test_an_auto_that_nobody_can_resolve_is_refused_by_name() -> None:
    text = faults_of({"steps_per_print": "auto", "zero_optimization": {"overlap_comm": "auto"}})
    assert '"steps_per_print" is "auto"' in text
    assert '"zero_optimization.overlap_comm" is "auto"' in text


@pytest.mark.parametrize("size", ["5e8", "500", 0.5, -1, True, [1]])
def test_a_size_that_is_no_whole_number_is_refused_by_name(size: Any) -> None:
    text = faults_of({"zero_optimization": {"reduce_bucket_size": size, "sub_group_size": 1e9}})
    assert f'"zero_optimization.reduce_bucket_size": {size!r} must be a whole number' in text
    assert "sub_group_size" not in text


@pytest.mark.requirement("R-CFG-04")
def test_the_learning_rate_is_the_same_for_every_dp_and_accumulation() -> None:
    series = []
    for dp in (1, 4):
        for accumulation in (1, 4):
            flags = ["--warmup_steps=10", "--max_steps=100", "--learning_rate=1e-3"]
            flags += [f"--gradient_accumulation_steps={accumulation}"]
            got = resolve({"parallel": {"tp": 1}}, *flags, world=dp)
            assert (got.layout.dp, got.accumulation) == (dp, accumulation)
            steps = range(1, 101)
            peak = got.optimizer.learning_rate
            series.append([learning_rate_at(step, schedule=got.schedule, peak=peak) for step in steps])
    assert all(rates == series[0] for rates in series)
    assert series[0].index(max(series[0])) + 1 == 10
    assert series[0][9] == 1e-3
    assert series[0][99] == 0.0
    assert series[0][98] > 0.0


@pytest.mark.requirement("R-CFG-07")
def test_every_conflict_names_both_values_and_both_places(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    content = {
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7, "warmup_max_lr": 3e-4}},
    }
    file.write_text(json.dumps(content))
    flags = ["--learning_rate=5e-5", "--warmup_steps=3", "--max_grad_norm=1", "--bf16", "--adam_beta2=0.95"]
    text = faults_of(content, *flags, "--lr_scheduler_type=cosine", f"--ds_config={file}")
    line = "  - --{} on the command line is {}, but {} in " + str(file) + " is {};"
    for flag, ours, key, theirs in [
        ("learning_rate", "5e-05", '"optimizer.params.lr"', "0.0001"),
        ("learning_rate", "5e-05", '"scheduler.params.warmup_max_lr"', "0.0003"),
        ("warmup_steps", "3.0", '"scheduler.params.warmup_num_steps"', "7.0"),
        ("max_grad_norm", "1.0", '"gradient_clipping"', "0.5"),
        ("bf16", "True", '"bf16.enabled"', "False"),
        ("adam_beta2", "0.95", '"optimizer.params.betas"[1]', "0.99"),
        ("lr_scheduler_type", "cosine", '"scheduler.type": "WarmupDecayLR"', "linear"),
    ]:
        assert line.format(flag, ours, key, theirs) in text


@pytest.mark.requirement("R-CFG-07")
def test_equal_values_are_accepted_and_the_file_overrides_defaults() -> None:
    config = {"gradient_clipping": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}}
    assert resolve(config, "--learning_rate=0.0001", "--max_grad_norm=1.0").optimizer.learning_rate == 1e-4
    assert resolve(config).optimizer.betas == (0.9, 0.95)
    assert resolve({"bf16": {"enabled": True}}).precision == "bf16"
    text = faults_of({"bf16": {"enabled": True}, "fp16": {"enabled": True}})
    assert 'bf16 and fp16 are both on; "fp16.enabled": True in the DeepSpeed configuration cannot be used' in text


def test_faults_and_notes_found_elsewhere_join_the_others() -> None:
    elsewhere = {"extra_faults": ["streaming=True needs a dataset_name"], "extra_notes": ["the loss is ours"]}
    text = faults_of({"gradient_cliping": 1}, "--warmup_steps=3.5", **elsewhere)
    lines = text.splitlines()[1:]
    assert len(lines) == 3
    for fault in ("unknown key", "warmup_steps=3.5 is neither", "  - streaming=True needs a dataset_name"):
        assert sum(fault in line for line in lines) == 1
    assert "streaming=True" in faults_of({"bf16": True}, **elsewhere)  # nothing but shapes is looked at there
    assert "streaming=True" in faults_of(None, extra_faults=elsewhere["extra_faults"])
    assert resolve(None, extra_notes=["the loss is ours"]).notes[0] == "the loss is ours"


def test_values_of_the_arguments_block_conflict_like_flags_but_lose_to_them(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"arguments": {"learning_rate": 1e-3}, "optimizer": {"params": {"lr": 1e-4}}}))
    content = load_deepspeed_json(str(file))
    assert f'--learning_rate in the "arguments" block of {file} is 0.001, but' in faults_of(
        content, f"--ds_config={file}"
    )
    assert resolve(content, f"--ds_config={file}", "--learning_rate=1e-4").optimizer.learning_rate == 1e-4


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_the_files_users_start_from_resolve_and_deepspeed_takes_them(path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    alone = path.name == "cpu_demo.json"
    model = [] if alone else ["--config_name=qwen3-30b-a3b", "--output_dir=run"]
    arguments = parse_arguments(["--local_rank=0", "--ds_config", str(path), *model])
    assert arguments.config_name is not None
    two_nodes = path.name in ("bf16_2node.json", "long_context.json")
    for world_size in (1, 2) if alone else (16,) if two_nodes else (8,):
        got = resolve_config(
            arguments,
            deepspeed_json=load_deepspeed_json(arguments.ds_config),
            ranks=WorldInfo(world_size=world_size, local_world_size=min(world_size, 8)),
            sizes=sizes_of(read_model(arguments).kwargs),
        )
        assert got.layout.world_size == world_size
        assert got.layout.dp == {"bf16_2node.json": 16, "bf16_8gpu.json": 2, "long_context.json": 2}.get(path.name, 1)
        assert got.engine["train_batch_size"] == got.sequences_per_step
        # Here DeepSpeed is one rank of its own.
        engine = got.engine | {"train_batch_size": got.sequences_per_step // got.layout.dp}
        assert DeepSpeedConfig(engine).gradient_clipping == got.optimizer.max_grad_norm
