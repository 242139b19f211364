"""Scopes: names of what code sends and allocates for, entered where it does and read by whoever counts it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_SCOPE: ContextVar[str] = ContextVar("scope", default="other")


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name what runs inside, as a context manager or a decorator; the innermost scope counts.

    A microsecond around a whole collective, and nothing where a CUDA graph is replayed.
    """
    token = _SCOPE.set(name)
    try:
        yield
    finally:
        _SCOPE.reset(token)


def current_scope() -> str:
    """The innermost scope of the code that is running, "other" outside of any."""
    return _SCOPE.get()
