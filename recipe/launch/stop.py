"""Stopping when the machine is taken away: SIGTERM to any rank ends training on all of them, at the same step.

Schedulers and launchers send SIGTERM before they kill, to one process or to many. A rank that left at once would leave
the others waiting in a collective, so the signal is only remembered, and the ranks ask each other. A question begins
with a step and is answered at its end, so that no rank waits for the answer.
"""

import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

from recipe.launch.processes import ProcessId, is_alive
from recipe.shared.ranks import Ranks

T = TypeVar("T")


class StopSignal:
    """Remembers SIGTERM, instead of ending this process, while the context lasts; for the main thread.

    The end of the process `command`, which started this one and does not pass signals on, counts as the signal, too.
    `agreed` is True once any rank had the signal when a question began; it never becomes False again.
    """

    def __init__(self, ranks: Ranks, *, command: ProcessId | None = None) -> None:
        self._ranks, self._command = ranks, command
        self._received = False
        self._previous: Any = None
        self._answer: Callable[[], bool] | None = None  # to a question that is under way
        self.agreed = False

    def __enter__(self) -> "StopSignal":
        self._previous = signal.signal(signal.SIGTERM, self._remember)
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
        signal.signal(signal.SIGTERM, self._previous)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = True
