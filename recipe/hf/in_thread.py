"""A call that takes as long as it takes, made in a thread, so that its rank goes on meeting the others meanwhile."""

import threading
from collections.abc import Callable, Generator
from typing import Any

POLL_S = 0.1


def in_steps(work: Callable[[], object]) -> Generator[None, None, None]:
    """Run `work` in a thread of its own, a step whenever it is not through yet; raises what it raises.

    Where the steps are given up, the thread ends with the process at the latest.
    """
    errors: list[BaseException] = []
    thread = threading.Thread(target=_run, args=(work, errors), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        yield
    if errors:
        raise errors[0]


def _run(work: Callable[[], Any], errors: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:
        errors.append(error)
