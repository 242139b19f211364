"""Tests with some markers run only where they are asked for, also beside the user's own -m."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SAMPLE = """
import pytest

@pytest.mark.netns
def test_needs_namespaces(): pass

@pytest.mark.slow
def test_slow(): pass

def test_plain(): pass
"""


@pytest.mark.parametrize(
    ("words", "chosen", "line"),
    [
        ([], {"test_slow", "test_plain"}, "browser, netns, campaign"),
        (["-m", "not slow"], {"test_plain"}, "browser, netns, campaign"),
        (["-m", "netns"], {"test_needs_namespaces"}, "browser, campaign"),
    ],
)
def test_markers_are_left_out_unless_named(tmp_path: Path, words: list[str], chosen: set[str], line: str) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "tests.conftest", "--rootdir", str(ROOT)]
    command += ["-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", *words, str(tmp_path / "test_sample.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert {row.split("::")[1] for row in done.stdout.splitlines() if "::" in row} == chosen, done.stdout
    assert f"left out unless -m names them: {line}" in done.stdout
