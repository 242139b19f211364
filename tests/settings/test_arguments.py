"""The command line, argument files and the "arguments" block become one typed `Arguments`, or one list of faults."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.settings.arguments import Arguments, parse_arguments
from recipe.settings.flags import flag_specs

MODEL_AND_PLACE = ["--config_name", "demo", "--output_dir", "run"]


def _parse(*words: str) -> Arguments:
    return parse_arguments([*MODEL_AND_PLACE, *words])


def _faults(*words: str) -> str:
    with pytest.raises(ValueError, match="these flags cannot be used") as caught:
        parse_arguments(list(words))
    return str(caught.value)


def test_flags_are_typed_and_remember_where_they_were_set() -> None:
    got = _parse("--learning_rate", "1e-4", "--bf16", "--gradient-checkpointing=no", "--report_to", "tensorboard")
    assert got.learning_rate == 1e-4
    assert got.bf16 is True
    assert got.gradient_checkpointing is False
    assert got.report_to == ("tensorboard",)
    assert got.given["learning_rate"] == "on the command line"
    assert "seed" not in got.given
    assert got.place("seed") == "by default"
    got = _parse("--max_steps", "-1", "--eos_token=", "--config_overrides", "num_experts=16,qk_norm=none")
    assert (got.max_steps, got.eos_token) == (-1, "")
    assert got.config_overrides == {"num_experts": 16, "qk_norm": "none"}
    assert _parse("--config_overrides", '{"mlp_only_layers": [0, 1]}').config_overrides == {"mlp_only_layers": [0, 1]}


def test_the_deepspeed_file_has_three_names_and_a_bare_deepspeed_flag_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text("{}")
    for words in (["--ds_config"], ["--deepspeed"], ["--deepspeed_config"], ["--deepspeed", "--deepspeed_config"]):
        assert _parse("--local_rank=1", *words, str(file)).ds_config == str(file)
    assert _parse("--deepspeed").ds_config is None


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_one_argument_file_may_stand_alone_behind_the_launchers_flag(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"args{suffix}"
    content = {"config_name": "demo", "output_dir": "run", "learning_rate": "1e-4", "report_to": ["tensorboard"]}
    file.write_text(json.dumps(content))  # JSON is YAML too
    got = parse_arguments(["--local_rank=0", str(file), "--seed", "7"])
    assert (got.learning_rate, got.seed, got.report_to) == (1e-4, 7, ("tensorboard",))
    assert got.given["learning_rate"] == f"in {file}"


def test_the_command_line_wins_over_the_file_and_that_over_the_block(tmp_path: Path) -> None:
    ds_config, file = tmp_path / "ds.json", tmp_path / "args.json"
    block = {"seed": 1, "max_steps": 1, "block_size": 16, "config_name": "demo", "output_dir": "run"}
    ds_config.write_text(json.dumps({"arguments": block}))
    file.write_text(json.dumps({"seed": 2, "max_steps": 2, "deepspeed": str(ds_config)}))
    got = parse_arguments([str(file), "--seed", "3"])
    assert (got.seed, got.max_steps, got.block_size) == (3, 2, 16)
    assert got.given["block_size"] == f'in the "arguments" block of {ds_config}'


@pytest.mark.requirement("R-CFG-01")
def test_misspelled_flags_are_named_with_the_nearest(tmp_path: Path) -> None:
    ds_config = tmp_path / "ds.json"
    ds_config.write_text('{"arguments": {"blok_size": 8}}')
    text = _faults(*MODEL_AND_PLACE, "--learnin_rate", "1", "--quux", "--ds_config", str(ds_config))
    assert "--learnin_rate on the command line is unknown; did you mean --learning_rate?" in text
    assert "--quux on the command line is unknown; --help lists all flags" in text
    assert f'--blok_size in the "arguments" block of {ds_config} is unknown; did you mean --block_size?' in text


def test_every_fault_is_in_one_message() -> None:
    words = "--seed --bf16 maybe --block_size 1 --hf_save often --adam_beta2 1.5 --fp16"
    data = "--validation_split_percentage 100 --train_vocab_size 256 --max_train_documents 0 --data_format chats"
    text = _faults(*words.split(), *data.split())
    assert "--validation_split_percentage on the command line: 100 is too large; the most is 99" in text
    assert "--train_vocab_size on the command line: 256 is too small; the least is 300" in text
    assert "--max_train_documents on the command line: 0 is too small; the least is 1" in text
    assert "--data_format on the command line: 'chats' is not one of auto, text, chat, prompt_completion" in text
    assert "--seed needs a value" in text
    assert "--bf16 on the command line: 'maybe' is neither true nor false" in text
    assert "--block_size on the command line: 1 is too small; the least is 2" in text
    assert "--hf_save on the command line: 'often' is not one of every, last, never" in text
    assert "--adam_beta2 on the command line: 1.5 is too large; the most is 1" in text
    assert "--fp16 on the command line is not available: float16 needs loss scaling" in text
    assert "no model is named; give --config_name" in text
    assert "no --output_dir is given" in text


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--seed", "1.5"], r"'1\.5' is not a whole number"),
        (["--learning_rate", "fast"], "'fast' is not a number"),
        (["--learning_rate", "nan"], "'nan' is not a finite number"),
        (["--config_overrides", "num_experts"], "'num_experts' is not key=value"),
        (["--config_overrides", "{oops"], "'{oops' is not a JSON object"),
        (["--seed", "1", "2"], "--seed takes one value, got 1 2"),
        (["--seed", "1", "--seed", "2"], "--seed is given twice on the command line"),
        (["--seed=1", "stray"], "'stray' belongs to no flag; an argument file must end in"),
        (["--seed=1", "a.json", "b.json"], "only one argument file can be read, got a.json, b.json"),
        (["--deepspeed", "a.json", "--ds_config", "b.json"], "two DeepSpeed files are given on the command line"),
        (["--ds_config"], "--ds_config needs a value"),
        (["--ds_config", "none.json"], r"none\.json does not exist \(looked from"),
        (["--model_name_or_path", "x"], "--model_name_or_path x and --config_name demo both name a model"),
        (["--report_to", "none", "tensorboard"], "--report_to none tensorboard names none together with others"),
        (["--report_to", "none tensorboard"], "'none tensorboard' is not one of none, tensorboard"),
        (["--run_name", "x"], "--run_name on the command line is not available: a run is known by its --output_dir"),
        (["--max_steps", "0"], "--max_steps 0 trains nothing"),
        (["--num_train_epochs", "0"], r"--num_train_epochs 0\.0 trains nothing"),
        (["--overwrite_output_dir", "--resume_from_checkpoint", "auto"], "--overwrite_output_dir deletes what"),
    ],
)
def test_faults_say_what_is_wrong(words: list[str], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        _parse(*words)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("args.json", b"{", "is not valid JSON"),
        ("args.json", b'{"seed": true}', "True is not a whole number"),
        ("args.json", b'{"text_column_name": 5}', "5 is not a text; put it in quotes"),
        ("args.json", b'{"report_to": [1]}', r"\[1\] is not a list of texts"),
        ("args.json", b'{"config_overrides": 3}', "3 is neither key=value,key=value nor a JSON object"),
        ("args.json", b'{"learning_rate": [1]}', r"\[1\] is not a number"),
        ("args.json", b'{"deepspeed": {"bf16": {}}}', "--deepspeed in .* must be the path of a JSON file"),
        ("args.yaml", b"a: [", "is not valid YAML"),
        ("args.yaml", b"- a", "must hold `flag: value` lines"),
        ("args.yaml", b"\xff\xfe\xfa", "cannot be read"),
        ("ds.json", b'{"arguments": []}', r'"arguments" in .* must be an object of flags and values, got \[\]'),
        ("ds.json", b'{"arguments": {"deepspeed": "b"}}', 'in the "arguments" block of .* would name another such'),
    ],
)
def test_files_are_read_strictly(name: str, content: bytes, fault: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=fault):
        _parse("--ds_config" if name == "ds.json" else "--local_rank=0", str(file))


def test_flags_that_exist_in_transformers_are_spelled_as_there() -> None:
    from dataclasses import fields

    from transformers import TrainingArguments

    ours_alone = {"ds_config", "check_replicas_steps", "router_aux_loss_coef", "router_z_loss_coef", "balance_scope"}
    ours_alone |= {"balance_bias_update_rate", "router_jitter_noise", "capacity_factor"}
    theirs = {field.name for field in fields(TrainingArguments)}
    shared = {"learning_rate", "warmup_steps", "max_grad_norm", "save_total_limit", "bf16", "adam_beta2", "eval_steps"}
    assert shared <= theirs & set(flag_specs())
    assert not ours_alone & theirs


def test_clashes_of_data_flags_are_left_to_the_data_options() -> None:
    got = _parse("--dataset_name", "x", "--train_file", "y.txt", "--streaming", "--report_to", "none")
    assert (got.dataset_name, got.train_file, got.streaming, got.report_to) == ("x", "y.txt", True, ("none",))


def test_help_lists_every_flag_by_group_without_loading_torch() -> None:
    code = "import sys; from recipe.settings.arguments import parse_arguments\ntry: parse_arguments(['--help'])\n"
    code += "except SystemExit as end: print('exit', end.code, 'torch' in sys.modules, 'deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.rstrip().endswith("exit 0 False False")
    assert "Optimizer and schedule:" in done.stdout
    missing = [name for name in flag_specs() if f"--{name}" not in done.stdout]
    assert not missing


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("evaluation_strategy", "is not available: use --eval_steps N"),
        ("logging_dir", "is not available: logs are in --output_dir"),
        ("save_safetensors", "is not available: weights are always saved as safetensors"),
        ("load_best_model_at_end", "is not available: a run ends with its last weights; --save_steps and"),
        ("label_smoothing_factor", "is not available: it means something to transformers' Trainer alone; leave it out"),
        ("eval_step", "is unknown; did you mean --eval_steps?"),
    ],
)
def test_a_flag_of_another_trainer_is_named_for_what_it_is(name: str, said: str) -> None:
    assert f"--{name} on the command line {said}" in _faults(f"--{name}", "1")


def test_no_flag_of_transformers_trainer_is_taken_for_a_slip() -> None:
    from transformers import TrainingArguments

    for field in dataclasses.fields(TrainingArguments):
        assert " is unknown" not in _faults(f"--{field.name}", "1")
