"""Settings every test shares: CPU, offline, few threads, and nothing left behind."""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

# Before torch, deepspeed or transformers are imported anywhere: they read these once.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("LOCAL_SIZE", None)

import pytest

from tests.launching import own_caches
from tests.ranks import end_pools, with_libraries
from tests.triton_kernels import interpreting

os.environ.update(own_caches())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("left_out", "markers whose tests run only where -m names them", type="args")
    parser.addoption("--requirement", metavar="ID", help="only the tests of one requirement, such as R-FT-02")


def _left_out(config: pytest.Config) -> list[str]:
    """Return the markers this call leaves out. An -m of the user's would replace one in addopts, hence not there."""
    return [marker for marker in config.getini("left_out") if marker not in config.getoption("markexpr")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(f"left out unless -m names them: {', '.join(_left_out(config)) or 'nothing'}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    markers, requirement = _left_out(config), config.getoption("--requirement")

    def is_wanted(item: pytest.Item) -> bool:
        ids = {name for marker in item.iter_markers("requirement") for name in marker.args}
        return not any(map(item.get_closest_marker, markers)) and (requirement is None or requirement in ids)

    dropped = [item for item in items if not is_wanted(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if is_wanted(item)]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an exported tiny model by its type, a key of CONFIGS; written once, not to be changed."""
    from tests.engine_runs import Case
    from tests.exports import run_export

    @functools.cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("exported") / name
        run_export(name, Case(), path)
        return path

    return folder


@pytest.fixture(scope="session")
def alone() -> Iterator[ProcessPoolExecutor]:
    """A process of its own, whose one group at a time is a fake one."""
    with ProcessPoolExecutor(1, mp_context=with_libraries()) as pool:
        yield pool


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process of its own, in which Triton interprets its kernels."""
    with interpreting() as call:
        yield call


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """No test may leave a rank running or a buffer in shared memory."""
    before = _shared_memory()
    yield
    end_pools()
    left = {name for name in _shared_memory() - before if name.startswith(("deepspeed", "torch_", "gather"))}
    assert not left, f"tests left these in /dev/shm: {sorted(left)}"
