"""`gather-moe plan`: what it prints, the file it writes, which a run takes, and its messages about bad input."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipe.cli import main
from recipe.plan.report import check_writable, how_to_start, write_config
from tests.ranks import run_ranks
from tests.training import train_on_ranks, write_inputs

ROOT = Path(__file__).parents[2]


def plan(*words: str) -> int:
    return main(["plan", *words])


ON_A100 = ("--model=olmoe", "--gpus=8", "--gpu=a100-80g", "--seq_len=4096")


def test_the_best_plan_comes_first_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*ON_A100, "--json", "--skew=1.5", "--against=tp=4,ep=4") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["request"]["tokens_per_batch"] == 8 * 4096
    assert found["request"]["skew"] == 1.5
    speeds = [row["tokens_per_s"] for row in found["plans"]]
    assert speeds == sorted(speeds, reverse=True)
    for row in found["plans"]:
        layout = row["layout"]
        assert layout["dp"] * layout["tp"] + row["idle_gpus"] == 8
        assert layout["ep"] * layout["etp"] == layout["tp"]
        assert sum(row["time"].values()) - row["time"]["hidden_s"] == pytest.approx(row["step_s"])
        parts = [value for value in row["memory"].values() if isinstance(value, int)]
        assert sum(parts) == row["memory_bytes"] <= found["request"]["room_bytes"]
    assert all(set(row) == {"layout", "reason"} for row in found["rejected"])
    assert found["sources"]["memory_bytes"]
    assert "tp=4 ep=4" in found["against"]
    assert found["why"].startswith("dp=")


def test_people_get_a_table_two_sentences_and_every_other_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*ON_A100, "--top=3", "--tokens_per_batch=65536", "-v") == 0
    text = capsys.readouterr().out
    for words in (
        *("6.92 B parameters, 1.28 B of them for a token", "8 x a100-80g, 8 per node", "why not tp=", "trains most"),
        *("2.0 GiB set aside for what is no tensor", "data sheets, and what others published", "all_reduce"),
        *("16 sequences of 4096 = 65,536 tokens", "memory of a rank, the best plan", "numbers of a100-80g"),
        *("memory at the fullest moment", "data parallel"),
    ):
        assert words in text
    ranks = [line.split()[0] for line in text.splitlines() if line.lstrip()[:1].isdigit() and " tp=" in line]
    assert ranks == ["1", "2", "3"]


def test_where_nothing_fits_each_size_of_group_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model=qwen3-235b-a22b", "--gpus=4", "--gpu=rtx-4090", "--seq_len=4096", "--against=tp=4,ep=3")
    assert plan(*words) == 1
    text = capsys.readouterr().out
    assert "no layout of 4 devices fits; the nearest of each size of group:" in text
    assert " per rank at the least (ZeRO-3, 1 at once, recomputed), " in text
    assert "tp=4 ep=3 cannot be: ep=3 does not divide tp=4" in text
    assert plan(*words, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["plans"], found["why"]) == ([], None)
    assert len(found["rejected"]) > 3
    assert "ep=3 does not divide tp=4" in found["against"]


def test_planning_a_thousand_devices_loads_no_torch() -> None:
    words = ["plan", "--model=qwen3-30b-a3b", "--gpus=1024", "--gpu=h100", "--seq_len=4096", "--json"]
    code = f"import sys; from recipe.cli import main; assert main({words!r}) == 0; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plans"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "a1000"}, "hardware 'a1000' is not known; choose one of a100-80g"),
        ({"gpus": 9}, "9 do not fill nodes of 8, the usual number for a100-80g; pass a --gpus_per_node of [1, 3"),
        ({"gpus": 9}, "or take 8 or 16 devices"),
        ({"gpus": 9, "gpus_per_node": 4}, "--gpus 9 do not fill nodes of --gpus_per_node 4; pass a --gpus_per_node of"),
        ({"against": "tp=16"}, "--against tp=16 is a group of more than the 8 devices of --gpus"),
        (
            {"tokens_per_batch": 5000},
            "5000 is no whole number of sequences of --seq_len 4096; the nearest that is: 4096",
        ),
        ({"seq_len": 8192}, "block_size=8192 is longer than max_position_embeddings=4096"),
        (
            {"config_overrides": "num_experts_per_tok=65"},
            "num_experts_per_tok=65 must lie between 1 and num_experts=64",
        ),
        (
            {"config_overrides": "num_experts=0,num_experts_per_tok=0"},
            "olmoe has no layer with experts (num_experts=0)",
        ),
        ({"model": "tests"}, "the model (--model tests) cannot be used"),
        ({"write": "nowhere/plan.json"}, "nowhere/plan.json cannot be written: No such file or directory"),
        ({"write": "tests"}, "tests cannot be written: Is a directory"),
    ],
)
def test_bad_input_is_one_clear_message(
    changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"model": "olmoe", "gpus": 8, "gpu": "a100-80g", "seq_len": 4096, **changes}
    assert plan(*(f"--{name}={value}" for name, value in words.items())) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_a_dense_model_is_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    assert plan(f"--model={tmp_path}", "--gpus=2", "--gpu=cpu") == 2
    assert "holds a 'llama'; configurations can be read of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--gpus=0", "argument --gpus/--ranks: 0 is too small; the least is 1"),
        ("--gpus=eight", "'eight' is not a whole number"),
        ("--seq_len=1", "1 is too small; the least is 2"),
        ("--skew=0.5", "0.5 is no ratio of the most to the mean; the least is 1"),
        ("--skew=much", "'much' is not a number"),
        ("--against=ep=4", "'ep=4' is not like tp=4,ep=4,strategy=gather_tokens"),
        ("--against=tp=4,strategy=fast", "strategy=fast is not one of gather_tokens, gather_weights, all_to_all"),
        ("--against=tp=4,strategy=auto", "strategy=auto is not one of gather_tokens"),
        ("--against=tp=4,tp=2", "'tp=4,tp=2' is not like tp=4,ep=4,strategy=gather_tokens, each of them once"),
        ("--against=tp=0", "0 is too small; the least is 1"),
        ("-v --json", "not allowed with argument"),  # what is for people and what is for programs
    ],
)
def test_a_flag_that_cannot_be_is_named(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(*ON_A100, *word.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu=h100 --attn_implementation=flash_attention_4", "its kernels are for compute capability 10.0"),
        ("--gpu=h100 --attn_implementation=flash_attention_3 --precision=fp32", "its kernels are for bf16, not fp32"),
        ("--gpu=cpu --attn_implementation=varlen", "its kernels are for GPUs"),
    ],
)
def test_a_kernel_that_no_run_could_take_is_not_planned(words: str, message: str, capsys: Any) -> None:
    assert plan("--model=demo", "--gpus=2", "--seq_len=512", *words.split()) == 2
    said = capsys.readouterr().err
    assert f"cannot be planned: {message}" in said
    assert "leave it out for what a run takes" in said


def test_a_plan_says_its_kernel_and_its_network(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--model=qwen3-30b-a3b", "--gpus=16", "--gpu=h100", "--seq_len=4096", "--top=1")
    assert plan(*words) == 0
    said = capsys.readouterr().out
    assert "kernel   flash_attention_3, which a run takes by itself where flash-attn-3 is installed" in said
    assert "between nodes: 400 Gbit/s InfiniBand per device, assumed; --network_gbits states another" in said
    file = tmp_path / "plan.json"
    assert plan(*words, "--attn_implementation=varlen", "--network_gbits=100", f"--write={file}") == 0
    said = capsys.readouterr().out
    assert "kernel   " not in said
    assert "between nodes: 100 Gbit/s per device, as stated" in said
    assert json.loads(file.read_text())["arguments"]["attn_implementation"] == "varlen"
    assert plan("--model=demo", "--gpus=4", "--gpus_per_node=2", "--gpu=cpu", "--seq_len=512") == 0
    assert "between nodes: 1 Gbit/s Ethernet, assumed" in capsys.readouterr().out


def test_an_interval_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*ON_A100, "--json", "--top=1") == 0
    (best,) = json.loads(capsys.readouterr().out)["plans"]
    low_s, high_s = best["step_s_interval"]
    assert low_s < best["step_s"] < high_s
    assert best["attention"] == "varlen"


def test_a_reader_that_has_enough_ends_it_quietly() -> None:
    words = [sys.executable, "-m", "recipe.cli", "plan", "--model=demo", "--gpus=2", "--gpu=h100", "--seq_len=512"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        assert program.stderr.read() == ""
        assert program.wait(timeout=60) == 141


def test_the_way_to_start_counts_the_ranks() -> None:
    for num_ranks, said in (
        (6, "start it: deepspeed --num_accelerators 6 run_pretrain.py --ds_config plan.json"),
        (16, "HOSTS being a file of lines, 2 like `worker slots=8`: deepspeed --hostfile HOSTS run_pretrain.py"),
        (20, "2 like `worker slots=8` and 1 like `worker slots=4`: "),
    ):
        assert said in how_to_start(Path("plan.json"), num_ranks=num_ranks, ranks_per_node=8)


def test_a_file_that_may_not_be_written_is_named_before_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match=r"plan.json cannot be written: Permission denied"):
        check_writable(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"cannot be written: Is a directory"):
        write_config(tmp_path, config={})


@pytest.mark.slow
def test_the_written_file_trains_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from run_pretrain import read_request

    flags = write_inputs(tmp_path)
    file = tmp_path / "plan.json"
    assert plan(f"--model={flags['config_name']}", "--gpus=2", "--gpu=cpu", "--seq_len=16", f"--write={file}") == 0
    assert f"deepspeed --num_accelerators 2 run_pretrain.py --ds_config {file}" in capsys.readouterr().out
    of_this_test = ("train_file", "cache_dir", "train_vocab_size", "output_dir")
    run = {"ds_config": file, "max_steps": 2, "hf_save": "never", **{name: flags[name] for name in of_this_test}}
    for results, _ in run_ranks(train_on_ranks, 2, run):
        assert results["steps"] == 2
    with pytest.raises(ValueError, match="--expect_world_size 2, but 1 ranks were started"):
        read_request([f"--{name}={value}" for name, value in run.items()])
