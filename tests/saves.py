"""Small checkpoints that a test saves without a model, what lies in their folders, and log lines to compare."""

import json
from pathlib import Path
from typing import Any

from recipe.checkpoint.commit import Save, Saver, Writer
from recipe.checkpoint.files import Files
from recipe.shared.ranks import OneRank, Ranks


def save(root: Path, step: int, *, write: Writer | None = None, ranks: Ranks | None = None, **options: Any) -> Path:
    """Save a checkpoint of two files, hf/model.bin of 10,000 bytes and state.json, or of what `write` writes."""

    def two_files(folder: Path, files: Files) -> None:
        (folder / "hf").mkdir()
        (folder / "hf" / "model.bin").write_bytes(bytes([step % 256]) * 10_000)
        (folder / "state.json").write_text(json.dumps({"step": step}))

    what = Save(root=root, step=step, **{"keep": None, "details": {"step": step}} | options)
    Saver(ranks or OneRank()).save(what, write=write or two_files)
    return root / f"step-{step}"


def write_file(name: str) -> Writer:
    def write(folder: Path, files: Files) -> None:
        (folder / name).write_bytes(b"x")

    return write


def fail(folder: Path, files: Files) -> None:
    """A writer that cannot write."""
    raise RuntimeError("no")


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
