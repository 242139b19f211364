"""The run of transformers' own tests: where they come from, what stands in for absent files, what a report comes to."""

import tarfile
from pathlib import Path
from typing import Any

import pytest
import transformers_suite


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """As a source distribution of version 9.1 lays it out."""
    folder = tmp_path / "transformers-9.1"
    for name, text in {
        "tests/test_modeling_common.py": "",
        "src/transformers/__init__.py": 'x = 1\n__version__ = "9.1"\n',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_source_is_a_folder_of_its_own_or_a_tar_file(source: Path, tmp_path: Path) -> None:
    assert transformers_suite.open_source(source, tmp_path / "unused") == source
    with tarfile.open(tmp_path / "source.tar.gz", "w:gz") as tar:
        tar.add(source, arcname=source.name)
    found = transformers_suite.open_source(tmp_path / "source.tar.gz", tmp_path / "unpacked")
    assert found == tmp_path / "unpacked" / source.name


def test_a_source_without_the_common_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tests/test_modeling_common.py; give a source distribution or a"):
        transformers_suite.open_source(tmp_path, tmp_path)


def test_only_what_is_absent_gets_a_stand_in_and_is_reported_as_left_out(source: Path, tmp_path: Path) -> None:
    (source / "tests" / "generation").mkdir()
    (source / "tests" / "generation" / "test_utils.py").write_text("real")
    left_out = transformers_suite.lay_out(source, tmp_path / "work", version="9.1")
    tests = tmp_path / "work" / "tests"
    assert (tests / "generation" / "test_utils.py").read_text() == "real"
    others = {name: absent for name, absent in transformers_suite.ABSENT.items() if name != "generation/test_utils.py"}
    assert left_out == [absent.left_out for absent in others.values()]
    assert {name: (tests / name).read_text() for name in others} == {n: a.stand_in for n, a in others.items()}
    assert (tests / "generation" / "__init__.py").is_file()
    assert not (source / "tests" / "test_gather_moe.py").exists()


def test_tests_of_another_version_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds transformers 9.1, but 5.24.0 is installed; tests and code must be"):
        transformers_suite.lay_out(source, tmp_path / "work", version="5.24.0")


def test_what_is_not_installed_is_named() -> None:
    transformers_suite.check_needed(["pytest"])
    with pytest.raises(ModuleNotFoundError, match=r"not installed: no_such_a, no_such_b; pip install no_such_a"):
        transformers_suite.check_needed(["no_such_a", "pytest", "no_such_b"])


def line(outcome: str, *, test: str = "test_a", reason: str = "", is_part: bool = False) -> dict[str, Any]:
    return {"test": f"tests/x.py::C::{test}", "outcome": outcome, "reason": reason, "is_part": is_part}


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        ([line("passed"), line("passed")], ("passed", "")),
        ([line("passed"), line("skipped", reason="slow")], ("skipped", "slow")),
        ([line("failed", reason="1 != 2", is_part=True), line("passed", is_part=True)], ("failed", "1 != 2")),
        ([line("skipped", is_part=True), line("passed", is_part=True), line("passed")], ("passed", "")),
        ([line("skipped", reason="no", is_part=True)] * 2 + [line("passed")], ("skipped", "no")),
        ([line("passed"), line("failed", reason="in teardown")], ("failed", "in teardown")),
    ],
)
def test_a_test_is_what_its_parts_come_to(lines: list[dict[str, Any]], want: tuple[str, str]) -> None:
    assert transformers_suite.judge(lines) == [transformers_suite.Result("C.test_a", *want, None)]


def test_only_unexplained_failures_make_the_run_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transformers_suite, "check_needed", lambda names: None)
    monkeypatch.setattr(transformers_suite, "lay_out", lambda source, folder, *, version: ["generation"])
    monkeypatch.setattr(transformers_suite, "open_source", lambda source, folder: source)
    monkeypatch.setattr(transformers_suite, "EXPLAINED", {"test_known*": "of no use here"})
    failures = [line("failed", test="test_known_case", reason="boom")]
    monkeypatch.setattr(transformers_suite, "run_tests", lambda folder, *, only, timeout_s: failures)
    assert transformers_suite.main(["--source", str(tmp_path)]) == 0
    failures.append(line("failed", test="test_new", reason="bang"))
    assert transformers_suite.main(["--source", str(tmp_path), "--json", str(tmp_path / "out.json")]) == 1
    out = capsys.readouterr().out
    assert "0 passed, 2 failed, 0 skipped\nleft out, not in this source: generation" in out
    assert "failed C.test_known_case\n    explained: of no use here" in out
    assert "failed C.test_new\n    UNEXPLAINED: bang" in out
    assert '"test": "C.test_new"' in (tmp_path / "out.json").read_text()


@pytest.mark.slow
def test_a_run_that_breaks_off_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_gather_moe.py").write_text("import no_such_module")
    with pytest.raises(RuntimeError, match=r"pytest ended with exit code 2; see its output above"):
        transformers_suite.run_tests(tmp_path, only="", timeout_s=60)
