"""A program that saves checkpoints until it is killed, for the tests that kill it; it never loads torch.

`loop ROOT` saves step after step and prints each when it is committed. `everywhere ROOT WHAT` forks one child for every
file-system call that a save makes, kills it with SIGKILL just before that call, checks that every checkpoint still
visible is complete, and prints what each death left.
"""

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from recipe.checkpoint.background import BackgroundSaver
from recipe.checkpoint.commit import Save, write_checkpoint
from recipe.checkpoint.files import Files
from recipe.checkpoint.find import Checkpoint, find_checkpoint, verify_checkpoint
from recipe.checkpoint.folders import list_checkpoints, tidy
from recipe.shared.ranks import OneRank

CHANGES = {"open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "shutil.rmtree"}


def save(root: Path, step: int, *, version: str, keep: int | None, background: bool = False) -> None:
    """A complete save; in the background with a file written ahead of it, one queued, and one that is renamed."""

    def write(folder: Path, files: Files) -> None:
        (folder / "a").write_text(f"{step} {version} a " * 200)
        files.write(folder / "part", lambda path: path.write_text(f"{step} {version} b " * 200))
        files.then(lambda ranks: (folder / "part").rename(folder / "b"))

    what = Save(root=root, step=step, keep=keep, details={"version": version})
    if not background:
        write_checkpoint(what, ranks=OneRank(), write=write)
        return
    saver = BackgroundSaver(OneRank(), background=OneRank())
    saver.save(what, write=write)
    saver.wait()


def recover(root: Path) -> Checkpoint:
    """What a restarted run does; the checkpoint's files must be those of the step and version it claims."""
    tidy(root)
    found = find_checkpoint(root, resume="auto", ranks=OneRank(), say=lambda line: None)
    assert found is not None, f"no checkpoint left in {root}"
    for name in ("a", "b"):
        text = (found.folder / name).read_text()
        assert text == f"{found.step} {found.details['version']} {name} " * 200, text[:80]
    return found


def loop(root: Path) -> None:
    tidy(root)
    found = find_checkpoint(root, resume="auto", ranks=OneRank(), say=lambda line: None)
    for step in itertools.count(1 if found is None else found.step):  # saves the step it found once more
        save(root, step, version="any", keep=2)
        print(step, flush=True)


def everywhere(root: Path, what: str) -> list[dict[str, Any]]:
    step = {"a new step": 3, "the same step": 2, "in the background": 3}[what]
    left = []
    for moment in itertools.count(1):
        folder = root / str(moment)
        save(folder, 1, version="old", keep=None)
        save(folder, 2, version="old", keep=None)
        died = _dies_before_call(moment, partial(save, folder, step, version="new", keep=1, background="back" in what))
        found = recover(folder)
        for _, visible in list_checkpoints(folder):
            verify_checkpoint(visible, ranks=OneRank())
        names = sorted(path.name for path in folder.iterdir())
        left.append({"version": found.details["version"], "names": names, "latest": (folder / "latest").exists()})
        if not died:
            return left
    raise AssertionError("unreachable")


def _dies_before_call(moment: int, action: Callable[[], None]) -> bool:
    """Run `action` in a child that is killed before its moment-th file-system call; whether it came to that."""
    child = os.fork()
    if child == 0:
        calls = itertools.count(1)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in CHANGES and next(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        action()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


if __name__ == "__main__":
    if sys.argv[1] == "loop":
        loop(Path(sys.argv[2]))
    else:
        print(json.dumps(everywhere(Path(sys.argv[2]), sys.argv[3])))
