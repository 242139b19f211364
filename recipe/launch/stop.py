"""Stopping when the machine is taken away, or at Ctrl-C: a signal to any rank ends training on all of them, alike.

Schedulers and launchers send SIGTERM before they kill, to one process or to many, a terminal SIGINT to all. A rank that
left at once would leave the others waiting in a collective, so the signal is only remembered, and the ranks ask each
other. A question begins with a step and is answered at its end, so that no rank waits for the answer. A second SIGINT
means it: the process ends where it is. Before training there is nothing to save, and no reason to wait.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

from recipe.launch.processes import ProcessId, is_alive
from recipe.shared.ranks import Ranks

T = TypeVar("T")

STOPPING = (signal.SIGTERM, signal.SIGINT)
INTERRUPTED = 128 + signal.SIGINT  # as a shell has it


class StopSignal:
    """Remembers SIGTERM and the first SIGINT, instead of ending this process, while the context lasts; for the main
    thread.

    The end of the process `command`, which started this one and does not pass signals on, counts as the signal, too.
    `agreed` is True once any rank had the signal when a question began; it never becomes False again.
    """

    def __init__(self, ranks: Ranks, *, command: ProcessId | None = None) -> None:
        self._ranks, self._command = ranks, command
        self._received, self._interrupts = False, 0
        self._previous: dict[int, Any] = {}
        self._answer: Callable[[], bool] | None = None  # to a question that is under way
        self.agreed = False

    def __enter__(self) -> "StopSignal":
        self._previous = {number: signal.signal(number, self._remember) for number in STOPPING}
        return self

    def watch(self) -> None:
        """Begin to ask, without waiting, whether any rank was told to stop. Collective, as is the next `ask`."""
        if self._answer is None and not self.agreed:
            orphaned = self._command is not None and not is_alive(self._command)
            self._answer = self._ranks.any_later(self._received or orphaned)

    def ask(self) -> bool:
        """Return whether any rank had been told to stop when the `watch` before began, or now where there was none."""
        self.watch()
        if self._answer is not None:
            self.agreed, self._answer = self._answer(), None
        return self.agreed

    def until(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items`, as many on every rank, until the ranks agree to stop. Collective at every item.

        The question goes on while an item is worked on, so a signal ends the items one later than it could.
        """
        for item in items:
            if self.ask():
                return
            self.watch()
            yield item
        self.ask()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            os._exit(INTERRUPTED)


class EarlyEnd:
    """While the context lasts, SIGTERM or SIGINT end this process at once, whatever it waits for; for the main thread.

    say  called with one line before that
    code  of the exit

    Python's own handlers run between two of its instructions, and not while a library waits for another rank; so a
    thread hears of the signal.
    """

    def __init__(self, say: Callable[[str], None], *, code: int) -> None:
        self._say, self._code = say, code
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "EarlyEnd":
        self._ears, mouth = socket.socketpair()
        mouth.setblocking(False)
        self._mouth, self._before = mouth, signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in STOPPING}
        threading.Thread(target=self._listen, name="early end", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before)
        self._mouth.close()  # which ends the thread

    def _listen(self) -> None:
        with self._ears:
            while heard := self._ears.recv(1):
                if heard[0] in STOPPING:
                    self._say(
                        f"told to stop by {signal.Signals(heard[0]).name} before the first step: nothing was saved"
                    )
                    os._exit(self._code)
