"""What `gather-moe profile` cannot use gets one clear message: broken traces, mixed ones, flags that do not fit."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from recipe import cli
from recipe.profile import command
from recipe.profile.trace_file import read_trace
from recipe.profile.transfers import read_links
from tests.profile_traces import comms, event, gpu_events, kernel, write_gpu_traces, write_trace


def profile(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """The exit code, and the message or what was printed."""
    code = cli.main(["profile", *map(str, words)])
    said = capfd.readouterr()
    return code, (said.err if code else said.out).strip()


def refusal(capfd: pytest.CaptureFixture[str], *words: object, out: Path) -> str:
    code, said = profile(capfd, *words, "--out", out)
    assert code == 2
    assert "Traceback" not in said
    assert not (out / "profile.html").exists()
    return said


def test_traces_become_a_page_a_file_and_a_few_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    traces, out = write_gpu_traces(tmp_path / "traces"), tmp_path / "new" / "out"
    code, said = profile(capfd, traces, "--out", out, "--link_bytes_per_s", "40e6")
    assert code == 0
    assert said.startswith("a step takes 1.00 ms on the slowest of 2 ranks: work 400 µs, exposed transfers 250 µs")
    assert f"wrote {out / 'profile.html'}" in said
    code, printed = profile(capfd, traces / "trace-1.json.gz", traces / "trace-0.json.gz", "--out", out, "--json")
    assert json.loads(printed) == json.loads((out / "profile.json").read_text())
    assert json.loads(printed)["ranks"] == [0, 1]


def test_a_trace_that_is_broken_gets_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = gzip.compress(json.dumps({"traceEvents": gpu_events(0)}).encode())
    broken = {
        "empty.json": (b"", "is not a complete JSON file"),
        "cut.json.gz": (whole[:-200], "is cut off or damaged"),
        "flipped.json.gz": (whole[:60] + b"\0\0\0\0" + whole[64:], "is cut off or damaged"),
        "half.json": (b'{"traceEvents": [{"ph": "X", ', "is not a complete JSON file"),
        "binary.json": (b"\xff\xfe\x00", "is not a complete JSON file"),
        "list.json": (b"[1, 2]", "it has no list of traceEvents"),
        "other.json": (b'{"traceEvents": [1]}', "it has no list of traceEvents"),
        "nothing.json": (b'{"traceEvents": []}', "holds neither an operator nor a kernel"),
        "no_times.json": (b'{"traceEvents": [{"ph": "X", "name": "aten::mm", "cat": "cpu_op"}]}', "that can be read"),
        "words.json": (b'{"traceEvents": [{"ph": "X", "name": "a", "cat": "cpu_op", "ts": "soon"}]}', "can be read"),
        "group.json": (odd_call({"Group size": "x"}), "can be read: TypeError(\"'x' is no number"),
        "numel.json": (odd_call({"In msg nelems": [1]}), "can be read: TypeError('[1] is no number"),
        "number.json": (odd_call({"Sequence number": {}}, name="aten::mm", cat="cpu_op"), "can be read"),
        "rank.json": (b'{"distributedInfo": {"rank": "first"}, ' + odd_call({})[1:], "'first' is no number"),
        "nan.json": (b'{"traceEvents": [{"ph": "X", "name": "a", "cat": "cpu_op", "ts": NaN}]}', "can be read"),
    }
    for name, (content, message) in broken.items():
        (tmp_path / name).write_bytes(content)
        said = refusal(capfd, tmp_path / name, out=tmp_path / "out")
        assert f"{tmp_path / name} " in said
        assert message in said, (name, said)
    with pytest.raises(ValueError, match="cannot be read: "):
        read_trace(tmp_path)


def odd_call(odd: dict[str, Any], **fields: Any) -> bytes:
    """A trace of one collective that is strange somewhere."""
    call = kernel("ncclDevKernel_AllGather", 1, 0, 9, **comms("_allgather_base", given=1000, taken=2000) | odd)
    return json.dumps({"traceEvents": [call | fields, kernel("gemm", 2, 0, 9)]}).encode()


def test_what_was_written_beside_the_traces_is_not_read_as_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "foreign"
    for rank in range(2):
        write_trace(folder / f"host_{rank}.17.pt.trace.json.gz", gpu_events(rank))
    pages = []
    for _ in range(2):
        code, _ = profile(capfd, folder, "--out", folder)
        assert code == 0
        pages.append((folder / "profile.html").read_text())
    assert pages[0] == pages[1]
    named = write_trace(tmp_path / "other" / "profile.json", gpu_events(0))
    assert f"{named} is one of the traces and would be overwritten" in refusal(capfd, named.parent, out=named.parent)
    assert profile(capfd, named.parent, "--out", tmp_path / "out")[0] == 0


def test_places_without_traces_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "gone does not exist" in refusal(capfd, tmp_path / "gone", out=out)
    (tmp_path / "empty").mkdir()
    assert "empty holds no traces" in refusal(capfd, tmp_path / "empty", out=out)
    assert "name traces or a folder of them, or give the flags of a run behind --" in refusal(capfd, out=out)
    traces = write_gpu_traces(tmp_path / "traces")
    for more in (["--steps", 3], ["--num_ranks", 2]):
        said = refusal(capfd, traces, *more, out=out)
        assert f"{traces} is read as a trace, but --num_ranks, --steps and what stands behind -- are for a run" in said
    code, said = profile(capfd, "--out", out, traces, "--", "--config_name", "demo")
    assert (code, "keep one of both" in said) == (2, True)
    waits = write_trace(tmp_path / "waits.json", [event("c10d::allreduce_", "cpu_op", 0, 5)])
    assert "holds neither work nor transfers" in refusal(capfd, waits, out=out)


def test_traces_that_do_not_belong_together_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, first = tmp_path / "out", write_trace(tmp_path / "rank0.json", gpu_events(0))
    twin = write_trace(tmp_path / "copy_rank0.json", gpu_events(0))
    assert f"{first} and {twin} are both of rank 0" in refusal(capfd, first, twin, out=out)
    of_two = write_trace(tmp_path / "a.json", gpu_events(0), distributedInfo={"rank": 0, "world_size": 2})
    of_four = write_trace(tmp_path / "b.json", gpu_events(0), distributedInfo={"rank": 1, "world_size": 4})
    assert "are of runs with [2, 4] ranks" in refusal(capfd, of_two, of_four, out=out)
    on_cpu = write_trace(tmp_path / "rank1.json", [event("aten::mm", "cpu_op", 0, 5)])
    assert "some of the traces are of GPUs and some of CPUs" in refusal(capfd, first, on_cpu, out=out)
    later = [e | {"name": e["name"].replace("#7", "#8")} for e in gpu_events(1)]
    later_path = write_trace(tmp_path / "rank2.json", later)
    said = refusal(capfd, first, later_path, out=out)
    assert f"{first} is of steps [7] and {later_path} of steps [8]" in said


def test_links_are_known_or_given(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    traces, out = write_gpu_traces(tmp_path / "traces"), tmp_path / "out"
    assert "must be above 0" in refusal(capfd, traces, "--link_bytes_per_s", "-1", out=out)
    assert "hardware 'abacus' is not known" in refusal(capfd, traces, "--hardware", "abacus", out=out)
    both = refusal(capfd, traces, "--hardware", "h100", "--link_bytes_per_s", "1e9", out=out)
    assert "--hardware h100 and --link_bytes_per_s 1e+09 both name a link" in both
    links = read_links("h100", bytes_per_s=None)
    assert links.ranks_per_node == 8
    assert links.within is not None
    assert links.between is not None
    assert links.within > links.between


def test_a_run_is_made_a_short_one_that_keeps_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ds_config = tmp_path / "ds.json"
    block = {"config_name": "demo", "warmup_steps": 100, "output_dir": "runs/x", "save_steps": 2, "push_to_hub": True}
    ds_config.write_text(json.dumps({"arguments": block}))
    words = ["--ds_config", str(ds_config)]
    flags = command.run_flags(words, out=tmp_path, num_steps=3)
    assert flags[:2] == words
    assert {f"--output_dir={tmp_path / 'run'}", "--overwrite_output_dir=True", "--max_steps=5"} <= set(flags)
    assert {"--profile_steps=3", "--warmup_steps=5", "--save_strategy=no", "--max_eval_samples=0"} <= set(flags)
    said = capfd.readouterr().err
    assert (
        f'is {tmp_path / "run"}, not the runs/x in the "arguments" block of {ds_config}, which may hold a run' in said
    )
    own = ["--output_dir=mine", "--max_steps=50", "--profile_from_step=9", "--save_strategy=steps"]
    kept = command.run_flags([*words, *own], out=tmp_path, num_steps=2)
    assert "--warmup_steps=10" in kept
    assert not {"--overwrite_output_dir=True", "--max_steps=10", "--save_strategy=no"} & set(kept)
    assert capfd.readouterr().err == ""


def test_a_run_that_cannot_be_recorded_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, words = tmp_path / "out", ["--", "--config_name", "demo"]
    assert "--no_such_flag on the command line is unknown" in _refused_run(capfd, out, "--no_such_flag", "1")
    assert "--profile_steps is what --steps becomes" in _refused_run(capfd, out, "--profile_steps=3")
    monkeypatch.setattr(command, "SCRIPT", tmp_path / "gone.py")
    assert "gone.py is not there; start the run yourself with --profile_steps" in _refused_run(capfd, out)
    failing = tmp_path / "failing.py"
    failing.write_text("raise SystemExit(3)")
    monkeypatch.setattr(command, "SCRIPT", failing)
    assert "the run to be recorded ended with exit code 3" in _refused_run(capfd, out)
    writing = tmp_path / "writing.py"
    writing.write_text(
        "import pathlib, sys; pathlib.Path(sys.argv[0]).with_suffix('.txt').write_text(' '.join(sys.argv))"
    )
    monkeypatch.setattr(command, "SCRIPT", writing)
    write_gpu_traces(out / "run" / "profile")
    code, _ = profile(capfd, "--out", out, "--steps", 2, *words)
    assert code == 0
    assert "--profile_steps=2" in (tmp_path / "writing.txt").read_text()
    (tmp_path / "arguments.json").write_text(json.dumps({"config_name": "demo"}))
    code, _ = profile(capfd, "--out", out, "--", tmp_path / "arguments.json")
    assert code == 0
    assert "arguments.json --profile_steps=3" in (tmp_path / "writing.txt").read_text()


def _refused_run(capfd: pytest.CaptureFixture[str], out: Path, *flags: str) -> str:
    code, said = profile(capfd, "--out", out, "--", "--config_name", "demo", *flags)
    assert code == 2
    return said
