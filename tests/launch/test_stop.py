"""SIGTERM or Ctrl-C to any rank, at any time: all ranks save the same step, and the run can go on."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from recipe.launch.processes import identify
from recipe.launch.stop import StopSignal
from recipe.shared.ranks import OneRank, Ranks
from tests.engine_runs import slow
from tests.launching import ROOT
from tests.ranks import run_ranks
from tests.thread_ranks import on_threads
from tests.training import Flags, read_metrics, train_on_ranks, write_ds_config, write_inputs


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_signal_is_remembered_and_its_handler_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal(OneRank()) as stop:
        assert list(stop.until([1, 2])) == [1, 2]
        assert not stop.ask()
        os.kill(os.getpid(), number)
        assert not stop.agreed, "nothing changes between two questions"
        assert list(stop.until([1, 2])) == []
        assert stop.agreed
    assert signal.getsignal(number) is before


def run_code(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_second_interrupt_ends_the_process_where_it_is() -> None:
    done = run_code(
        "import os, signal, time\n"
        "from recipe.launch.stop import StopSignal\n"
        "from recipe.shared.ranks import OneRank\n"
        "with StopSignal(OneRank()):\n"
        "    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):\n"
        "        os.kill(os.getpid(), number)\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(50)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "still here\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_training_a_signal_ends_a_process_that_waits_in_a_library(number: signal.Signals) -> None:
    done = run_code(
        "import ctypes, os, signal, threading\n"
        "from recipe.launch.stop import EarlyEnd\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "with EarlyEnd(print, code=20):\n"
        "    pass\n"
        "assert signal.getsignal(signal.SIGINT) is before\n"
        "with EarlyEnd(lambda line: print(line, flush=True), code=20):\n"
        f"    threading.Timer(0.3, os.kill, (os.getpid(), {int(number)})).start()\n"
        "    while True:\n"
        "        ctypes.PyDLL(None).sleep(1)\n"  # holds Python's lock, as some libraries do
    )
    assert done.stdout == f"told to stop by {number.name} before the first step: nothing was saved\n"
    assert (done.returncode, done.stderr) == (20, "")


def test_the_end_of_the_command_that_started_a_rank_counts_as_the_signal() -> None:
    with subprocess.Popen(["sleep", "100"]) as command:
        stop = StopSignal(OneRank(), command=identify(command.pid))
        assert not stop.ask()
        command.kill()
    assert stop.ask()


def test_all_ranks_get_the_same_answer() -> None:
    def ask(ranks: Ranks) -> list[bool]:
        stop = StopSignal(ranks)
        answers = [stop.ask()]
        stop._received = ranks.rank == 1
        return [*answers, stop.ask(), stop.ask()]

    assert on_threads(3, ask) == [[False, True, True]] * 3


def test_a_question_holds_what_was_known_when_it_began() -> None:
    stop = StopSignal(OneRank())
    stop.watch()
    stop._received = True
    assert not stop.ask()
    stop.watch()
    assert stop.ask()


def test_items_end_one_after_the_signal_and_nobody_waits_for_an_answer() -> None:
    asked: list[str] = []

    class Listening(OneRank):
        def any_later(self, value: bool) -> Callable[[], bool]:
            asked.append("begun")
            return lambda: (asked.append("read"), value)[1]

    stop, got = StopSignal(Listening()), []
    for item in stop.until(range(9)):
        got.append((item, asked[-1]))
        stop._received = item == 1
    assert got == [(0, "begun"), (1, "begun"), (2, "begun")]
    assert stop.agreed
    assert asked.count("begun") == asked.count("read")


def train_until_told(
    rank: int, world_size: int, flags: Flags, *, moment: str, told: int
) -> tuple[Any, list[str], list[Any]]:
    """Train, and let rank `told` get the signal in its third step, in the evaluation or in the save after it."""
    from recipe.engine.engine import Engine
    from recipe.train import loop

    accumulate, evaluate, write = Engine.accumulate, Engine.evaluate, loop.save_native
    steps: list[Any] = []

    def signalled() -> None:
        if rank == told:
            os.kill(os.getpid(), signal.SIGTERM)

    def accumulating(self: Engine, micro_batches: Any, **kwargs: Any) -> Any:
        steps.append(len(steps) + 1)
        if moment == "a step" and len(steps) == 3:
            signalled()
        return accumulate(self, micro_batches, **kwargs)

    def evaluating(self: Engine, micro_batches: Iterable[Any]) -> Any:
        def batches() -> Any:
            for i, batch in enumerate(micro_batches):
                if i == 1 and moment == "an evaluation":
                    signalled()
                yield batch

        return evaluate(self, batches())

    def saving(*args: Any, **kwargs: Any) -> None:
        if moment == "a save":
            signalled()
        write(*args, **kwargs)

    with (
        patch.object(Engine, "accumulate", accumulating),
        patch.object(Engine, "evaluate", evaluating),
        patch.object(loop, "save_native", saving),
    ):
        results, said = train_on_ranks(rank, world_size, flags)
    return results, said, steps


@pytest.mark.parametrize(
    ("world_size", "tp", "moment"),
    [(2, 2, "a step"), slow(4, 2, "a step"), slow(2, 1, "an evaluation"), slow(2, 1, "a save")],
)
@pytest.mark.requirement("R-CKPT-11")
def test_sigterm_to_one_rank_stops_all_at_the_same_step(world_size: int, tp: int, moment: str, tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": tp})
    flags |= {"eval_steps": 0 if moment == "a step" else 3, "per_device_eval_batch_size": 1, "max_eval_samples": 6}
    flags |= {"save_steps": 3} if moment == "a save" else {}
    # The ranks ask from the beginning of a step to its end, so a signal within a step is heard in the next one.
    last = 4 if moment == "a step" else 3
    answers = run_ranks(train_until_told, world_size, flags, moment=moment, told=world_size - 1, timeout_s=60)
    assert [steps for _, _, steps in answers] == [list(range(1, last + 1))] * world_size
    results, said, _ = answers[0]
    assert results["stopped"]
    assert results["steps"] == last
    assert (results["evaluation"] is not None) == (moment == "a save"), "an evaluation that was cut short is no result"
    assert any(f"told to stop: saving step {last}" in line for line in said)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", f"step-{last}"]

    resumed, said = run_ranks(train_on_ranks, world_size, flags | {"resume_from_checkpoint": "auto"})[0]
    assert not resumed["stopped"]
    assert any("resuming from" in line and f"step-{last}" in line for line in said)
    straight = flags | {"output_dir": tmp_path / "straight"}
    run_ranks(train_on_ranks, world_size, straight)
    want, got = (read_metrics(folder) for folder in (tmp_path / "straight", tmp_path / "run"))
    assert [line["loss"] for line in got.values()] == [line["loss"] for line in want.values()]
    assert list(got) == [1, 2, 3, 4, 5, 6]
