"""Waits for processes that were started together: until all have ended well, or one has not."""

import subprocess
from collections.abc import Sequence
from contextlib import suppress

POLL_S = 0.05


def wait_for_all(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """0, or the exit code of the first that fails, 1 where a signal ended it; the others are then still there."""
    waiting = list(processes)
    while waiting:
        for process in list(waiting):
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=POLL_S)
                waiting.remove(process)
                if code:
                    return code if code > 0 else 1
    return 0
