"""The house: which file may import which, how long files are, and that importing them does nothing but define."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 600

# From the ground up, a floor a line; a file imports only from floors below its own.
MODEL = """
__init__ kernels noise spec
layout
cost execution mesh shard_table
comm config
operators
rows
experts_grouped experts_loop layers router
attention experts vocabulary
copies
auxiliary moe
decoder
model
init
"""
ROOMS = "shared launch settings data engine checkpoint hf train plan dry_run profile measure"
# A folder stands for the files in it.
FLOORS: list[list[str]] = [
    *([f"modeling/{name}.py" for name in floor.split()] for floor in MODEL.split("\n")),
    ["recipe/__init__.py"],
    *([f"recipe/{room}"] for room in ROOMS.split()),
    ["recipe/cli.py"],
    ["run_pretrain.py"],
]
STANDARD_LIBRARY_ONLY = [
    *("modeling/spec.py", "modeling/layout.py", "modeling/execution.py", "modeling/shard_table.py", "modeling/cost.py"),
]
WITHOUT_TORCH = [
    *("recipe/settings", "recipe/plan", "recipe/launch/hosts.py", "recipe/cli.py", "recipe/shared"),
]
IMPORTS_DEEPSPEED = {"recipe/engine/engine.py", "recipe/checkpoint/native.py"}
# Registers the Auto classes, so that code which travels with a checkpoint needs nothing else.
ACTS_AT_IMPORT = {"modeling/model.py"}


PROJECT = ("modeling", "recipe", "run_pretrain")


def sources() -> list[Path]:
    return [ROOT / "run_pretrain.py", *sorted(ROOT.glob("modeling/*.py")), *sorted(ROOT.glob("recipe/**/*.py"))]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def floor_of(name: str) -> int:
    for number, entries in enumerate(FLOORS):
        if any(name == entry or name.startswith(entry + "/") for entry in entries):
            return number
    raise AssertionError(f"{name} stands on no floor; add it to FLOORS")


@cache
def imported_by(path: Path) -> set[str]:
    """Modules that a file imports, inside functions too; names used for types only count as well."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            module = f"modeling.{node.module}" if node.level else node.module or ""
            # `from package import module` names one, too.
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def imported_files(path: Path) -> set[str]:
    files = {f"{module.replace('.', '/')}.py" for module in imported_by(path)}
    return {file for file in files if (ROOT / file).is_file()}


def third_party(path: Path) -> set[str]:
    """Packages that a file imports and that are not of the project."""
    return {module.split(".")[0] for module in imported_by(path)} - set(PROJECT)


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_a_file_imports_only_from_floors_below(path: Path) -> None:
    name = name_of(path)
    for imported in imported_files(path):
        same_folder = Path(imported).parent == path.relative_to(ROOT).parent and Path(imported).parts[0] == "recipe"
        assert floor_of(imported) < floor_of(name) or (same_folder and len(Path(name).parts) > 2), (name, imported)


def test_no_two_files_import_each_other_even_by_detour() -> None:
    imports = {name_of(path): imported_files(path) for path in sources()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"a circle: {' -> '.join((*trail, name))}"
        if name not in done:
            for imported in sorted(imports[name]):
                visit(imported, (*trail, name))
            done.add(name)

    for name in imports:
        visit(name, ())


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_a_file_says_its_idea_and_can_be_read_in_one_sitting(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < MAX_LINES
    assert lines[0].startswith('"""')
    assert len(lines[0]) > 20


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_importing_only_defines(path: Path) -> None:
    """At the top level: docstring, imports, definitions, constants, `if TYPE_CHECKING` and `if __name__`."""
    if name_of(path) in ACTS_AT_IMPORT:
        return
    for node in tree_of(path).body:
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), ast.unparse(node)
        elif isinstance(node, ast.If):
            assert ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"), ast.unparse(node)
        else:
            allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
            assert isinstance(node, allowed), ast.unparse(node)


def test_only_the_seam_imports_deepspeed() -> None:
    assert {name_of(path) for path in sources() if "deepspeed" in third_party(path)} == IMPORTS_DEEPSPEED


@pytest.mark.parametrize("path", sorted(ROOT.glob("modeling/*.py")), ids=name_of)
def test_the_model_knows_nothing_of_the_recipe_and_travels_flat(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            top = (node.module or "").split(".")[0]
            assert top not in ("recipe", "modeling", "deepspeed"), ast.unparse(node)
            if node.level:
                assert node.level == 1
                assert node.module is not None, "`from . import x` does not travel with a checkpoint"
                assert "." not in node.module


@pytest.mark.parametrize("name", STANDARD_LIBRARY_ONLY)
def test_what_the_planner_shares_uses_the_standard_library_only(name: str) -> None:
    assert third_party(ROOT / name) <= sys.stdlib_module_names


def test_settings_and_tools_load_without_torch() -> None:
    files = [
        f for entry in WITHOUT_TORCH for f in ([ROOT / entry] if entry.endswith(".py") else (ROOT / entry).glob("*.py"))
    ]
    modules = [name_of(f).removesuffix(".py").replace("/", ".") for f in files if f.name != "__init__.py"]
    code = f"import sys, {', '.join(modules)}; assert not {{'torch', 'deepspeed', 'transformers'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_top_level_is_fixed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    tops = {name.split("/")[0] for name in tracked}
    assert {top for top in tops if not top.startswith(".")} <= {
        *("pyproject.toml", "README.md", "recipe", "ds_configs", "modeling", "run_pretrain.py", "tests"),
        *("benchmarks", "docs", "examples", "CONTRIBUTING.md", "LICENSE", "CHANGELOG.md"),
    }
