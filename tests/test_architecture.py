"""docs/architecture.md is true: its lists of a step's files are what runs, every file it names is there, its picture
is what its script draws."""

import re
import runpy

import pytest

from tests.step_files import LISTS, PAGE, ROOT, listed_files, trace

MAX_FILES = 15


@pytest.mark.parametrize("kind", ["dense", "MoE"])
def test_the_files_of_a_step_are_those_that_run(kind: str) -> None:
    """On a difference, `python -m tests.step_files` writes the lists anew."""
    traced = trace(kind)
    for title, (part, of_kind) in LISTS.items():
        if of_kind == kind:
            assert sorted(listed_files(title)) == sorted(traced[part]), title


@pytest.mark.parametrize("title", [title for title, (part, _) in LISTS.items() if part == "step"])
def test_a_step_can_be_followed_in_few_files(title: str) -> None:
    assert len(listed_files(title)) <= MAX_FILES


def test_the_rooms_are_those_of_the_page_and_import_only_from_rooms_before() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|.*\| `(\w+\.py)` \|$", PAGE.read_text(), re.M)
    rooms = [room for room, _ in rows]
    assert sorted(rooms) == sorted(path.parent.name for path in ROOT.glob("recipe/*/__init__.py"))
    assert len(rooms) <= 12
    for room, first in rows:
        assert (ROOT / "recipe" / room / first).is_file()
        for path in ROOT.glob(f"recipe/{room}/*.py"):
            imported = re.findall(r"^\s*(?:from|import) recipe\.(\w+)", path.read_text(), re.M)
            assert set(imported) <= set(rooms[: rooms.index(room) + 1]), path


def test_every_file_of_the_model_is_in_the_table() -> None:
    rows = re.findall(r"^\| (`\w+\.py`(?:, `\w+\.py`)*) \| .* \|$", PAGE.read_text(), re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+\.py)`", row)]
    assert sorted(named) == sorted(path.name for path in ROOT.glob("modeling/*.py") if path.name != "__init__.py")


def test_the_picture_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_block.py"))["draw_block"]()
    assert (ROOT / "docs" / "block.svg").read_text() == drawn
    assert "block.svg" in PAGE.read_text()
