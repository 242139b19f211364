"""A hostfile is read as it is written or refused, and `gather-moe hosts` prints which rank runs where."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.cli import main
from recipe.launch.hosts import Host, read_hostfile

pytestmark = pytest.mark.requirement("R-LAUNCH-01")


def _hostfile(folder: Path, text: str) -> Path:
    path = folder / "hosts.txt"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"names no host; add lines like `worker-1 slots=8`"),
        ("# only a comment\n\n", r"names no host"),
        ("w1 slots=2x\n", r"line 1: 'w1 slots=2x' has slots=2x, which is not a whole number of at least 1"),
        ("w1 slots=0\n", r"line 1: 'w1 slots=0' has slots=0, which is not"),
        ("w1 slots=\n", r"line 1: 'w1 slots=' has slots=, which is not"),
        ("w0 slots=1\nw1\n", r"line 2: 'w1' has no slots=N"),
        ("w1 lots=2\n", r"line 1: .* has 'lots' where slots=N belongs; did you mean 'slots'\?"),
        ("w1 cores=2\n", r"line 1: .* has 'cores' where slots=N belongs"),
        ("w1 slots=2 slots=3\n", r"line 1: .* is not of the form NAME slots=N"),
        ("w1 2\n", r"line 1: 'w1 2' is not of the form NAME slots=N"),
        ("w1 slots=2\n\nw1 slots=4\n", r"line 3: 'w1' is already on line 1; give each host one line"),
        ("w1 slots=2\nme@W1 slots=2\n", r"line 2: 'me@W1' is already on line 1"),
        ("w1\nw2 slots=2\nw3 slots=x\n", r"line 1: (.|\n)*line 3: "),
    ],
)
def test_a_line_that_cannot_be_used_stops(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _hostfile(tmp_path, text)
    assert main(["hosts", str(path)]) == 2
    shown = capsys.readouterr()
    assert re.match(rf"gather-moe hosts: hostfile {path} cannot be used:\n(.|\n)*{message}", shown.err)
    assert shown.out == ""


def test_a_file_that_is_missing_or_no_text_stops(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.txt", tmp_path):
        with pytest.raises(ValueError, match=rf"hostfile {path} is not a file; give the path"):
            read_hostfile(path)
    (tmp_path / "hosts.txt").write_bytes(b"w\xff1 slots=2\n")
    with pytest.raises(ValueError, match=r"hosts\.txt is not UTF-8 text: .*0xff"):
        read_hostfile(tmp_path / "hosts.txt")


def test_comments_crlf_and_users_are_fine(tmp_path: Path) -> None:
    text = "# cluster\r\n\r\nw1 slots=2 # the first\r\n  user@10.0.0.1   slots=2\r\n"
    hostfile = read_hostfile(_hostfile(tmp_path, text))
    assert hostfile == ((Host("w1", 2), Host("user@10.0.0.1", 2)), ())


def test_uneven_hosts_are_mentioned(tmp_path: Path) -> None:
    assert read_hostfile(_hostfile(tmp_path, "w1 slots=2\nw2 slots=2\n")).notes == ()
    [note] = read_hostfile(_hostfile(tmp_path, "w1 slots=2\nw2 slots=4\n")).notes
    assert note.startswith("the hosts have different numbers of slots, which a training run refuses")


def test_the_command_prints_the_rank_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _hostfile(tmp_path, "\ufeffw1 slots=1\nuser@10.0.0.1 slots=2\n")
    assert main(["hosts", str(path)]) == 0
    shown = capsys.readouterr()
    assert [line.split() for line in shown.out.splitlines()[1:4]] == [
        ["0", "w1", "0", "0"],
        ["1", "user@10.0.0.1", "1", "0"],
        ["2", "user@10.0.0.1", "1", "1"],
    ]
    assert shown.out.endswith("3 ranks on 2 hosts; have the run check it: --expect_world_size 3\n")
    assert shown.err.startswith("note: the file starts with a byte-order mark, which the deepspeed launcher takes for")


def test_the_command_needs_no_torch() -> None:
    code = (
        "import sys, recipe.cli\ntry: recipe.cli.main(['--help'])\nexcept SystemExit: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "check a hostfile and print which rank runs where" in done.stdout
