"""JSON files are read strictly and replaced whole."""

import json
import math
import os
from pathlib import Path

import pytest

from recipe.shared.json_files import read_json_object, write_json


def test_a_file_is_replaced_whole_and_its_numbers_are_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"layout": (1, 2), "loss": math.inf, "rho": [math.nan, 1.0]})
    assert read_json_object(path) == {"layout": [1, 2], "loss": None, "rho": [None, 1.0]}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"layout": "new"})
    assert json.loads(path.read_text())["layout"] == [1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{"seed": 1, "seed": 2}', 'the key "seed" is given twice: 1 and 2'),
        (b"[1]", "holds a list; it must hold one JSON object"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe\xfa", "cannot be read: 'utf-8' codec"),
        (None, r"does not exist \(looked from"),
    ],
)
def test_a_file_is_read_strictly(content: bytes | None, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"args\.json:? {fault}"):
        read_json_object(path)
